"""How soft tokens are trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vllm_kvcompress.soft_tokens.collect import RESPONSE_SOURCES, Responses
from vllm_kvcompress.soft_tokens.model import HIDDEN_WIDTH, KINDS, SELECTION_WIDTH, Kind
from vllm_kvcompress.soft_tokens.prompts import Lengths

Loss = Literal["cross_entropy", "mse"]
LOSSES: tuple[Loss, ...] = ("cross_entropy", "mse")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Optimization:
    """One training.

    Args:
        epochs: with everything learned.
        selector_epochs: after that, with the library frozen; dynamic tokens only.
        batch_size: prompts of a step, over all processes.
        learning_rate: highest, as a share of the root mean square that a parameter starts with; it
            rises over the first ``warmup`` of the steps of a phase and falls to 0 by a cosine.
        warmup: share of the steps.
        weight_decay: of AdamW.
        first_temperature: of the choice from the library; it falls to `model.FINAL_TEMPERATURE`.
        diversity: weight of `model.diversity_loss`.
        loss: "cross_entropy", or "mse" times the squared number of tokens, the published one.
        seed: of the order of prompts, the start and the noise.
    """

    epochs: int = 4
    selector_epochs: int = 1
    batch_size: int = 4
    learning_rate: float = 0.1
    warmup: float = 0.05
    weight_decay: float = 0.0
    first_temperature: float = 1.0
    diversity: float = 1e-4
    loss: Loss = "cross_entropy"
    seed: int = 0


@dataclass(frozen=True)
class Settings:
    """All of it.

    Args:
        kinds: soft tokens to train, in this order.
        num_tokens: ``k``.
        num_rows: ``M``, rows of the library.
        selection_width: ``r``, see `model.DynamicTokens`.
        hidden_width: of the selector.
        mix_start: share of an embedding's length that the mix of dynamic tokens starts with.
        pieces: of text, for training and validation.
        validation: share of the pieces that is held out.
        lengths: of prompts and responses.
        responses: how prompts are answered.
        optimization: how tokens learn.
        num_sink_tokens: first tokens of a prompt, kept in any case and left out of the loss.
        window: recent tokens, likewise.
        dtype: of the model.
        cache_dtype: of stored keys and values.
        store: whether what is collected is kept on disk; else it is computed at every step.
        default: kind that is served unless a user asks for the other; None is the one with the
            higher hit rate on the prompts that were held out.
    """

    kinds: tuple[Kind, ...] = KINDS
    num_tokens: int = 32
    num_rows: int = 512
    selection_width: int = SELECTION_WIDTH
    hidden_width: int = HIDDEN_WIDTH
    mix_start: float = 0.1
    pieces: int = 120
    validation: float = 0.1
    lengths: Lengths = field(default_factory=Lengths)
    responses: Responses = field(default_factory=Responses)
    optimization: Optimization = field(default_factory=Optimization)
    num_sink_tokens: int = 4
    window: int = 64
    dtype: str = "float32"
    cache_dtype: str = "bfloat16"
    store: bool = True
    default: Kind | None = None

    @property
    def num_validation(self) -> int:
        """Pieces that are held out, the last ones."""
        return max(int(self.pieces * self.validation), 1)

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    def collection(self) -> dict[str, Any]:
        """What decides what is collected, beside model and pieces."""
        return {"responses": asdict(self.responses), "cache_dtype": self.cache_dtype}

    def problems(self, num_processes: int) -> list[str]:
        """What is wrong with them, in words."""
        found = []
        counts = {
            "k": self.num_tokens,
            "rows": self.num_rows,
            "selection width": self.selection_width,
            "hidden width": self.hidden_width,
            "epochs": self.optimization.epochs,
            "batch size": self.optimization.batch_size,
            "responses": self.responses.per_prompt,
            "response tokens": self.lengths.response,
            "cuts": self.lengths.cuts,
        }
        found += [
            f"{name} = {value}: expected at least 1" for name, value in counts.items() if value < 1
        ]
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            found.append(f"kinds = {self.kinds!r}: expected some of {', '.join(KINDS)}")
        if self.default is not None and self.default not in self.kinds:
            found.append(f"default = {self.default!r}: expected one of {', '.join(self.kinds)}")
        if self.optimization.loss not in LOSSES:
            found.append(f"loss = {self.optimization.loss!r}: expected one of {', '.join(LOSSES)}")
        if self.responses.source not in RESPONSE_SOURCES:
            found.append(
                f"responses = {self.responses.source!r}: expected one of "
                f"{', '.join(RESPONSE_SOURCES)}"
            )
        for name in ("dtype", "cache_dtype"):
            if getattr(self, name) not in DTYPES:
                found.append(
                    f"{name} = {getattr(self, name)!r}: expected one of {', '.join(DTYPES)}"
                )
        fewest = 2 * (self.window + self.num_sink_tokens)
        if not fewest <= self.lengths.shortest <= self.lengths.longest:
            found.append(
                f"lengths from {self.lengths.shortest} to {self.lengths.longest}: expected "
                f"ascending ones of at least {fewest}, twice the window and the first tokens"
            )
        if not 0 < self.validation < 1 or self.pieces - self.num_validation < 1:
            found.append(
                f"{self.pieces} pieces, a share of {self.validation:g} for validation: expected "
                "at least one piece to learn from and one to check with"
            )
        if self.optimization.batch_size % num_processes:
            found.append(
                f"batch size = {self.optimization.batch_size}: expected a multiple of the "
                f"{num_processes} processes"
            )
        return found
