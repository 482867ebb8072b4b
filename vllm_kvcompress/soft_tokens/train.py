"""Training of soft tokens: their attention to a prompt is to be that of the response.

The model is frozen and the prompt's cache is given, so that a step is a forward and a backward pass
of the soft tokens alone. Everything that is random is a function of the seed and the step, so that
a training that goes on from its checkpoint ends as if it had never stopped, and several processes
as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vllm_kvcompress.soft_tokens import losses, processes
from vllm_kvcompress.soft_tokens.frozen import FrozenModel
from vllm_kvcompress.soft_tokens.losses import Scored
from vllm_kvcompress.soft_tokens.model import (
    FINAL_TEMPERATURE,
    DynamicTokens,
    SoftTokens,
    diversity_loss,
)
from vllm_kvcompress.soft_tokens.settings import Optimization
from vllm_kvcompress.soft_tokens.store import Samples

VALIDATION_KEEP = 0.25
_LIBRARY = "library"
_LEAST_SIZE = 1e-3


@dataclass(frozen=True)
class Phase:
    """A part of a training with an optimizer and a schedule of its own.

    Args:
        name: for the record.
        epochs: passes over the prompts.
        frozen: parameters that stay as they are.
    """

    name: str
    epochs: int
    frozen: tuple[str, ...] = ()


def phases_of(tokens: SoftTokens, settings: Optimization) -> list[Phase]:
    """One phase for static tokens, two for dynamic ones: the library stands in the second."""
    phases = [Phase("all", settings.epochs)]
    if isinstance(tokens, DynamicTokens) and settings.selector_epochs:
        phases.append(Phase("selector", settings.selector_epochs, (_LIBRARY, "offset")))
    return phases


@dataclass
class History:
    """What a training went through.

    Args:
        steps: of each step its number, loss, learning rate and temperature.
        epochs: of each epoch its phase, number, mean loss (None before the first), and loss and hit
            rate on validation.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)


class _Batch(nn.Module):
    """Soft tokens of several prompts in one call, as DistributedDataParallel wants it."""

    def __init__(self, tokens: SoftTokens) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(
        self, embeddings: Sequence[torch.Tensor], seeds: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made = []
        for own, seed in zip(embeddings, seeds, strict=True):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                made.append(self.tokens(own))
        diversity = torch.zeros((), device=made[0].device)
        if isinstance(self.tokens, DynamicTokens) and self.tokens.library.requires_grad:
            diversity = diversity_loss(self.tokens.library)
        return torch.stack(made), diversity


class Trainer:
    """One training of soft tokens.

    Args:
        model: frozen.
        tokens: to be trained, in place.
        samples: to learn from, the same for all processes.
        validation: to check with.
        settings: how.
        scored: tokens of a prompt that the loss is about.
        checkpoint: file that is written after each epoch, or None.
    """

    def __init__(
        self,
        model: FrozenModel,
        tokens: SoftTokens,
        samples: Samples,
        validation: Samples,
        settings: Optimization,
        scored: Scored,
        checkpoint: Path | None = None,
    ) -> None:
        self._model, self._tokens = model, tokens.to(model.device)
        self._samples, self._validation = samples, validation
        self._settings, self._scored = settings, scored
        self._checkpoint = checkpoint
        self._on_step: Callable[[], Any] = lambda: None
        self._on_epoch: Callable[[dict[str, Any]], Any] = dict
        self.history = History()
        self._phases = phases_of(tokens, settings)
        self._sizes = {name: _size(value) for name, value in tokens.named_parameters()}
        self._steps_per_epoch = len(samples) // settings.batch_size
        if self._steps_per_epoch == 0:
            raise ValueError(
                f"{len(samples)} prompts do not make a batch of {settings.batch_size}; collect "
                "more, or lower the batch size"
            )

    @property
    def num_steps(self) -> int:
        """Of the whole training."""
        return sum(phase.epochs for phase in self._phases) * self._steps_per_epoch

    def run(
        self,
        resume: bool = False,
        on_step: Callable[[], Any] = lambda: None,
        on_epoch: Callable[[dict[str, Any]], Any] = dict,
    ) -> History:
        """Train to the end.

        Args:
            resume: go on from the checkpoint, where there is one.
            on_step: called after each step.
            on_epoch: called after each epoch with its entry in the history.

        Raises:
            ValueError: the checkpoint is of another training.
        """
        self._on_step, self._on_epoch = on_step, on_epoch
        state = self._load() if resume else None
        for _ in self.history.steps:
            on_step()
        done_phases = 0 if state is None else state["phase"]
        for number, phase in enumerate(self._phases):
            if number >= done_phases:
                self._run_phase(number, phase, state if number == done_phases else None)
        self._tokens.eval()
        return self.history

    def _run_phase(self, number: int, phase: Phase, state: dict[str, Any] | None) -> None:
        for name, value in self._tokens.named_parameters():
            value.requires_grad_(name not in phase.frozen)
        batch: nn.Module = _Batch(self._tokens)
        if processes.count() > 1:
            batch = DistributedDataParallel(batch)
        total = phase.epochs * self._steps_per_epoch
        optimizer = self._optimizer()
        first_epoch = 0
        if state is not None:
            optimizer.load_state_dict(state["optimizer"])
            first_epoch = state["epoch"]
        elif number == 0:
            self._note("untrained", 0, None)
        for epoch in range(first_epoch, phase.epochs):
            start = epoch * self._steps_per_epoch
            order = self._order(number, epoch)
            found = [
                self._step(batch, optimizer, order, step, (start + step) / total)
                for step in range(self._steps_per_epoch)
            ]
            self._note(phase.name, epoch + 1, sum(found) / len(found))
            self._save(number, epoch + 1, optimizer)

    def _note(self, phase: str, epoch: int, loss: float | None) -> None:
        """Validate, and remember the outcome of an epoch."""
        held_out, hits = self.validate()
        found = {"loss": loss, "validation_loss": held_out, "hit_rate": hits}
        self.history.epochs.append({"phase": phase, "epoch": epoch, **found})
        self._on_epoch(self.history.epochs[-1])

    def _optimizer(self) -> torch.optim.Optimizer:
        """AdamW with a rate for each parameter that is relative to its size at the start."""
        groups = [
            {"params": [value], "base": self._settings.learning_rate * self._sizes[name]}
            for name, value in self._tokens.named_parameters()
            if value.requires_grad
        ]
        return torch.optim.AdamW(groups, lr=0.0, weight_decay=self._settings.weight_decay)

    def _order(self, phase: int, epoch: int) -> list[int]:
        """Samples of an epoch in the order in which they are taken."""
        generator = torch.Generator().manual_seed(_mix(self._settings.seed, phase, epoch))
        return torch.randperm(len(self._samples), generator=generator).tolist()

    def _step(
        self,
        batch: nn.Module,
        optimizer: torch.optim.Optimizer,
        order: Sequence[int],
        step: int,
        progress: float,
    ) -> float:
        """One step; the mean loss over the batch of all processes."""
        settings = self._settings
        factor = _schedule(progress, settings.warmup)
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * factor
        self._tokens.train()
        temperature = _annealed(settings.first_temperature, self._progress())
        if isinstance(self._tokens, DynamicTokens):
            self._tokens.temperature = temperature
        start = step * settings.batch_size
        own = order[start : start + settings.batch_size][processes.rank() :: processes.count()]
        found = [self._samples[index] for index in own]
        taken = len(self.history.steps)
        seeds = [_mix(settings.seed, taken, index) for index in own]
        vectors, diversity = batch([self._model.embed(s.token_ids) for s in found], seeds)
        caches = [s.cache.to(self._model.device) for s in found]
        parts = [
            self._loss(s.gold.to(self._model.device), attention)
            for s, attention in zip(found, self._model.probe(vectors, caches), strict=True)
        ]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        (loss + settings.diversity * diversity).backward()
        optimizer.step()
        (mean,) = processes.total([float(loss.detach()) / processes.count()], self._model.device)
        self.history.steps.append(
            {
                "step": taken + 1,
                "loss": mean,
                "diversity": float(diversity.detach()),
                "rate": factor * settings.learning_rate,
                "temperature": temperature,
            }
        )
        self._on_step()
        return mean

    def _progress(self) -> float:
        """Share of the whole training that is done."""
        return len(self.history.steps) / self.num_steps

    def _loss(self, gold: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        compare = losses.squared_error if self._settings.loss == "mse" else losses.divergence
        return compare(self._scored.part(gold), self._scored.part(found))

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Divergence and hit rate at a quarter of the tokens, mean over the validation prompts."""
        self._tokens.eval()
        sums = [0.0, 0.0, 0.0]
        for index in range(processes.rank(), len(self._validation), processes.count()):
            sample = self._validation[index]
            vectors = self._tokens(self._model.embed(sample.token_ids))[None]
            (found,) = self._model.probe(vectors, [sample.cache.to(self._model.device)])
            found = self._scored.part(found)
            gold = self._scored.part(sample.gold.to(self._model.device))
            sums[0] += float(losses.divergence(gold, found))
            sums[1] += float(losses.hit_rate(found, gold, VALIDATION_KEEP).mean())
            sums[2] += 1
        loss, hits, number = processes.total(sums, self._model.device)
        return loss / number, hits / number

    def _save(self, phase: int, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if self._checkpoint is None or processes.rank() > 0:
            return
        scratch = self._checkpoint.with_name(f".{self._checkpoint.name}")
        torch.save(
            {
                "settings": asdict(self._settings),
                "samples": len(self._samples),
                "phase": phase,
                "epoch": epoch,
                "tokens": self._tokens.state_dict(),
                "sizes": self._sizes,
                "optimizer": optimizer.state_dict(),
                "history": asdict(self.history),
            },
            scratch,
        )
        scratch.replace(self._checkpoint)

    def _load(self) -> dict[str, Any] | None:
        if self._checkpoint is None or not self._checkpoint.is_file():
            return None
        state = torch.load(self._checkpoint, weights_only=True, map_location=self._model.device)
        if state["settings"] != asdict(self._settings) or state["samples"] != len(self._samples):
            raise ValueError(
                f"{self._checkpoint} is of a training with other settings or prompts; train "
                "without --resume, or to another folder"
            )
        self._tokens.load_state_dict(state["tokens"])
        self._sizes = state["sizes"]
        self.history = History(**state["history"])
        return state


def _size(value: torch.Tensor) -> float:
    """Root mean square, with a floor for what starts at 0."""
    return max(float(value.detach().square().mean().sqrt()), _LEAST_SIZE)


def _mix(*numbers: int) -> int:
    """One seed of several numbers."""
    seed = 17
    for number in numbers:
        seed = (seed * 1_000_003 + number) % (1 << 62)
    return seed


def _schedule(progress: float, warmup: float) -> float:
    """Share of the highest learning rate: a linear rise, then a cosine to 0."""
    if progress < warmup:
        return (progress + warmup / 10) / (1.1 * warmup)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def _annealed(first: float, progress: float) -> float:
    """Temperature that falls exponentially to `FINAL_TEMPERATURE`."""
    return first * (FINAL_TEMPERATURE / first) ** progress
