"""The whole procedure: texts, what is collected of them, trainings, the artifact and its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_kvcompress.artifacts import ModelIdentity, identify, model_folder
from vllm_kvcompress.calibration.report import require_plots
from vllm_kvcompress.calibration.run import cache_shape, progress_columns
from vllm_kvcompress.calibration.texts import Source, encoder
from vllm_kvcompress.soft_tokens import processes, report
from vllm_kvcompress.soft_tokens.artifact import ARTIFACT_FILE, save_soft_tokens
from vllm_kvcompress.soft_tokens.collect import FreshSamples, collect
from vllm_kvcompress.soft_tokens.frozen import FrozenModel
from vllm_kvcompress.soft_tokens.losses import Scored
from vllm_kvcompress.soft_tokens.model import DynamicTokens, Kind, SoftTokens, StaticTokens
from vllm_kvcompress.soft_tokens.prompts import Piece, make_pieces
from vllm_kvcompress.soft_tokens.settings import Settings
from vllm_kvcompress.soft_tokens.store import (
    Samples,
    StoredSamples,
    cache_bytes,
    collection_digest,
)
from vllm_kvcompress.soft_tokens.train import History, Trainer

SAMPLES_FOLDER = "samples"
HISTORY_FILE = "history.json"


def train(
    model: str,
    out: Path,
    sources: Sequence[Source],
    settings: Settings,
    *,
    device: str = "cpu",
    console: Console | None = None,
    resume: bool = False,
    plots: bool = True,
) -> Path:
    """Train soft tokens for a model and write the artifact and its report to a folder.

    Under ``torchrun`` every process takes its share of the prompts; ``out`` is then a folder that
    all of them see. What was collected is used again by every later call with the same texts,
    model and lengths.

    Args:
        model: folder, or name of a model in the Hugging Face cache.
        out: folder to write to, made if it is missing.
        sources: text.
        settings: how.
        device: "cpu" or "cuda".
        console: for progress; None is quiet.
        resume: go on from the checkpoints in ``out``.
        plots: whether the report has plots; they need matplotlib.

    Returns:
        The artifact's file.

    Raises:
        ValueError: the model, the text or the settings do not allow it; all reasons.
    """
    folder = model_folder(model)
    identity = identify(folder)
    if plots:
        require_plots()
    with processes.started(device) as own_device:
        if problems := settings.problems(processes.count()):
            raise ValueError("cannot train: " + "; ".join(problems))
        dtype = getattr(torch, settings.dtype)
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        frozen = FrozenModel(network.to(own_device))
        pieces = _pieces(frozen, AutoTokenizer.from_pretrained(folder), sources, settings)
        leading = processes.rank() == 0
        with _Bars(console if leading else None) as bars:
            samples, validation = _samples(frozen, identity, pieces, settings, out, bars)
            found: dict[Kind, SoftTokens] = {}
            histories: dict[Kind, History] = {}
            for kind in settings.kinds:
                tokens = start_tokens(kind, frozen, pieces, settings, found.get("static"))
                trainer = Trainer(
                    frozen,
                    tokens,
                    samples,
                    validation,
                    settings.optimization,
                    Scored(settings.num_sink_tokens, settings.window),
                    out / f"checkpoint-{kind}.pt",
                )
                on_step = bars.add(f"{kind} tokens", trainer.num_steps)
                histories[kind] = trainer.run(resume, on_step, bars.show)
                found[kind] = tokens
        if leading:
            _write(out, identity, found, histories, settings, sources, plots)
        processes.wait()
    return out / ARTIFACT_FILE


def _pieces(
    frozen: FrozenModel, tokenizer: Any, sources: Sequence[Source], settings: Settings
) -> list[Piece]:
    cache_shape(frozen.network.config)  # refuses models without full attention
    return make_pieces(
        sources,
        encoder(tokenizer),
        settings.pieces,
        settings.lengths,
        settings.responses.source == "text",
        settings.optimization.seed,
    )


def _samples(
    frozen: FrozenModel,
    identity: ModelIdentity,
    pieces: Sequence[Piece],
    settings: Settings,
    out: Path,
    bars: _Bars,
) -> tuple[Samples, Samples]:
    """Prompts to learn from and to check with, collected or to be computed when needed."""
    border = len(pieces) - settings.num_validation
    parts = (range(border), range(border, len(pieces)))
    cache_dtype = getattr(torch, settings.cache_dtype)
    if not settings.store:
        found = [
            FreshSamples(frozen, part, pieces, settings.responses, cache_dtype) for part in parts
        ]
        return found[0], found[1]
    shape = cache_shape(frozen.network.config)
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * cache_dtype.itemsize
    name = f"prompts collected ({cache_bytes(pieces, per_token) / 1e9:.1f} GB)"
    folder = out / SAMPLES_FOLDER / collection_digest(identity, pieces, settings.collection())
    own = range(len(pieces))[processes.rank() :: processes.count()]
    on_piece = bars.add(name, len(own))
    collect(frozen, pieces, own, settings.responses, folder, cache_dtype, on_piece)
    processes.wait()
    return StoredSamples(folder, parts[0], pieces), StoredSamples(folder, parts[1], pieces)


def start_tokens(
    kind: Kind,
    frozen: FrozenModel,
    pieces: Sequence[Piece],
    settings: Settings,
    static: SoftTokens | None = None,
) -> SoftTokens:
    """Soft tokens before training.

    Static ones start as embeddings of tokens that are drawn from the texts. Of the dynamic ones the
    first half starts as the echo of the prompt's last tokens, the other as static ones, the trained
    ones where there are any; the rows of the library are orthogonal, and their mix starts small.

    Args:
        kind: which.
        frozen: the model.
        pieces: texts.
        settings: sizes and seed.
        static: trained static tokens.
    """
    generator = torch.Generator().manual_seed(settings.optimization.seed)
    border = len(pieces) - settings.num_validation
    ids = torch.cat([torch.tensor(piece.token_ids) for piece in pieces[:border]])
    drawn = ids[torch.randint(len(ids), (settings.num_tokens,), generator=generator)]
    embeddings = frozen.embed(drawn).float().cpu()
    if kind == "static":
        return StaticTokens(embeddings)
    start = static.tokens.detach().cpu() if isinstance(static, StaticTokens) else embeddings
    is_echo = torch.arange(settings.num_tokens) < settings.num_tokens // 2
    # the length of an embedding, as rows of the library have length 1
    length = float(embeddings.norm(dim=-1).mean())
    with torch.random.fork_rng():
        torch.manual_seed(settings.optimization.seed)
        return DynamicTokens(
            torch.nn.init.orthogonal_(torch.empty(settings.num_rows, start.shape[1])),
            start * ~is_echo[:, None],
            is_echo.float(),
            length * settings.mix_start,
            settings.selection_width,
            settings.hidden_width,
        )


def _write(
    out: Path,
    identity: ModelIdentity,
    found: dict[Kind, SoftTokens],
    histories: dict[Kind, History],
    settings: Settings,
    sources: Sequence[Source],
    plots: bool,
) -> None:
    """The artifact, its report, and the losses."""
    best = max(found, key=lambda kind: histories[kind].epochs[-1]["hit_rate"])
    record = {
        "training": settings.record(),
        "hit_rate": {kind: histories[kind].epochs[-1]["hit_rate"] for kind in found},
        "texts": [source.record() for source in sources],
    }
    default = settings.default or best
    artifact = save_soft_tokens(out / ARTIFACT_FILE, identity, found, default, record)
    text = json.dumps({kind: asdict(history) for kind, history in histories.items()})
    (out / HISTORY_FILE).write_text(text, encoding="utf-8")
    report.write(out, artifact, histories, plots=plots)


class _Bars:
    """Progress bars by name; quiet without a console."""

    def __init__(self, console: Console | None) -> None:
        self._bars: dict[str, Any] = {}
        self._console = console or Console(quiet=True)
        self._progress = Progress(*progress_columns(), console=self._console)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, row: Mapping[str, Any]) -> None:
        """A line about an epoch."""
        self._console.print(
            f"{row['phase']} {row['epoch']}: held-out loss {row['validation_loss']:.4f}, hit rate "
            f"{row['hit_rate']:.4f}",
            highlight=False,
        )

    def add(self, name: str, total: int) -> Callable[[], None]:
        """A bar, and the function that moves it on."""
        task = self._progress.add_task(name, total=total)
        return lambda: self._progress.advance(task)
