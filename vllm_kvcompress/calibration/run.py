"""The whole calibration of a model: text, statistics, transforms, the artifact and its report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_kvcompress.artifacts import ModelIdentity, identify, model_folder
from vllm_kvcompress.calibration import parts, report
from vllm_kvcompress.calibration.build import ROUNDS, build, output_moments
from vllm_kvcompress.calibration.codec import (
    ARTIFACT_FILE,
    KEY_SPACES,
    PRESETS,
    Calibration,
    Transforms,
)
from vllm_kvcompress.calibration.rope import Rotation
from vllm_kvcompress.calibration.statistics import CacheShape, Statistics, offsets
from vllm_kvcompress.calibration.texts import Chunk, Source, cut, encoder

STATISTICS_FILE = "statistics.safetensors"
_LONGEST = 8192
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "wo")


@dataclass(frozen=True)
class Settings:
    """How a model is calibrated.

    Args:
        bits: mean bits of an index at which losses are measured; served bits may differ.
        preset: "best", or "paper" for the published recipe, which can be evaluated only.
        key_space: "post_rope", keys as the cache has them; "pre_rope" can be evaluated only.
        group_sizes: KV heads of a group, one transform for each size; empty: 1 and as many as
            the default, `default_group_size`.
        num_tokens: tokens that are looked at.
        chunk_tokens: tokens of a chunk; the model sees chunks one by one.
        num_sink_tokens: first tokens of a chunk that are left out.
        window: recent tokens that are raw when served.
        seed: of the tokens that are drawn from the model.
    """

    bits: float = 2.5
    preset: str = "best"
    key_space: str = "post_rope"
    group_sizes: tuple[int, ...] = ()
    num_tokens: int = 20_480
    chunk_tokens: int = 512
    num_sink_tokens: int = 4
    window: int = 64
    seed: int = 0

    def problems(self, num_kv_heads: int) -> list[str]:
        """What is wrong with them for a model, in words."""
        found = []
        if not 0.5 <= self.bits <= 8:
            found.append(f"bits = {self.bits:g}: expected a number from 0.5 to 8")
        if self.preset not in PRESETS:
            found.append(f"preset = {self.preset!r}: expected one of {', '.join(PRESETS)}")
        if self.key_space not in KEY_SPACES:
            found.append(f"key_space = {self.key_space!r}: expected one of {', '.join(KEY_SPACES)}")
        if self.chunk_tokens < 2 * (self.window + self.num_sink_tokens):
            found.append(
                f"chunk_tokens = {self.chunk_tokens}: expected at least twice the window and the "
                f"first tokens, {2 * (self.window + self.num_sink_tokens)}"
            )
        elif self.num_tokens < 2 * self.chunk_tokens:
            found.append(f"num_tokens = {self.num_tokens}: expected at least two chunks")
        found += [
            f"group size {size}: expected a divisor of the model's {num_kv_heads} KV heads"
            for size in self.group_sizes
            if size < 1 or num_kv_heads % size
        ]
        return found


def default_group_size(shape: CacheShape) -> int:
    """Most KV heads, up to 512 numbers, that divide the heads of a layer evenly."""
    sizes = [s for s in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % s == 0]
    return max(s for s in sizes if s == 1 or s * shape.head_size <= 512)


def cache_shape(config: Any) -> CacheShape:
    """Of a transformers configuration.

    Raises:
        ValueError: not all layers have full attention.
    """
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"layers of kind {', '.join(sorted(kinds))}: only full attention is coded")
    heads = config.num_attention_heads
    return CacheShape(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def calibrate(
    model: str,
    out: Path,
    sources: Sequence[Source],
    settings: Settings,
    *,
    console: Console | None = None,
    plots: bool = True,
    ray_workers: int = 0,
) -> Path:
    """Calibrate a model and write the artifact, its report and the statistics to a folder.

    The statistics are saved on the way: the same call after an interruption goes on where it was,
    and another ``bits``, ``preset`` or group size after a finished one needs no pass over the
    model.

    Args:
        model: folder, or name of a model in the Hugging Face cache.
        out: folder to write to, made if it is missing.
        sources: text.
        settings: how.
        console: for progress; None is quiet.
        plots: whether the report has plots; they need matplotlib.
        ray_workers: processes of the connected Ray cluster that share the pass over the text, each
            with a copy of the model; 0: this process alone.

    Returns:
        The artifact's file.

    Raises:
        ValueError: the model, the text or the settings do not allow it; all reasons.
    """
    folder = model_folder(model)
    identity = identify(folder)
    if plots:
        report.require_plots()
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shape = cache_shape(network.config)
    if problems := settings.problems(shape.num_kv_heads):
        raise ValueError("cannot calibrate: " + "; ".join(problems))
    chunks = cut(
        sources,
        encoder(AutoTokenizer.from_pretrained(folder)),
        settings.num_tokens // settings.chunk_tokens,
        settings.chunk_tokens,
    )
    out.mkdir(parents=True, exist_ok=True)
    with _progress(console) as progress:
        statistics, held_out = collect(
            network,
            shape,
            chunks,
            settings,
            identity,
            out / STATISTICS_FILE,
            progress,
            folder=folder,
            ray_workers=ray_workers,
        )
        group_sizes = settings.group_sizes or tuple(sorted({1, default_group_size(shape)}))
        outputs = output_moments(output_weights(network, shape), shape)
        task = None
        if progress is not None:
            task = progress.add_task("transforms", total=ROUNDS * len(group_sizes))
        transforms: dict[int, Transforms] = {
            size: build(
                statistics,
                shape,
                outputs,
                group_size=size,
                bits=settings.bits,
                preset=settings.preset,
                progress=lambda: None if progress is None else progress.advance(task),
            )
            for size in group_sizes
        }
    calibration = Calibration(
        shape.num_layers,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size,
        settings.preset,
        max(group_sizes),
        transforms,
        settings.key_space,
    )
    artifact = calibration.artifact(identity, _record(settings, sources))
    artifact.save(out / ARTIFACT_FILE)
    report.write(out, artifact, calibration, held_out, plots=plots)
    return out / ARTIFACT_FILE


def collect(
    network: Any,
    shape: CacheShape,
    chunks: Sequence[Chunk],
    settings: Settings,
    identity: ModelIdentity,
    checkpoint: Path,
    progress: Progress | None = None,
    *,
    folder: Path | None = None,
    ray_workers: int = 0,
) -> tuple[Statistics, Statistics]:
    """Statistics of all chunks but every eighth, and of those, which are held out to check with.

    Args:
        checkpoint: file that is written every few chunks, and read first if it belongs to the same
            text, model and settings.
        folder: of the model, for workers of Ray.
        ray_workers: processes of the connected Ray cluster that share the work; 0: this one alone.
    """
    rotation = (
        Rotation.of_config(network.config.to_dict()) if settings.key_space == "pre_rope" else None
    )
    longest = min(int(network.config.get_text_config().max_position_embeddings), _LONGEST)
    starts = offsets(len(chunks), settings.chunk_tokens, longest)
    work = parts.Work(
        shape=shape,
        token_ids=[chunk.token_ids for chunk in chunks],
        starts=starts,
        seed=settings.seed,
        num_sink_tokens=settings.num_sink_tokens,
        window=settings.window,
        rotation=rotation,
    )
    digest = hashlib.sha256(
        json.dumps(
            [
                asdict(identity),
                [chunk.token_ids for chunk in chunks],
                starts,
                settings.num_sink_tokens,
                settings.window,
                settings.seed,
                settings.key_space,
            ],
            sort_keys=True,
        ).encode()
    ).hexdigest()
    files = (checkpoint, checkpoint.with_name("held_out." + checkpoint.name))
    done, sums = 0, [Statistics.empty(shape) for _ in files]
    saved = [_saved(file, digest) for file in files]
    counts = [int(item.num_chunks) if item else 0 for item in saved]
    # both files are of the same moment, or what they hold is not used
    if all(saved) and counts[1] == sum(counts) // parts.PART_CHUNKS:
        done, sums = sum(counts), [item for item in saved if item]
    task = progress.add_task("statistics", total=len(chunks), completed=done) if progress else None

    def on_chunk() -> None:
        if progress is not None and task is not None:
            progress.advance(task)

    if ray_workers:
        assert folder is not None
        pairs = parts.over_ray(work, folder, ray_workers, done, on_chunk)
    else:
        pairs = parts.here(work, network, done, on_chunk)
    for pair in pairs:
        for total, item, file in zip(sums, pair, files, strict=True):
            total.add(item)
            total.save(file, {"digest": digest})
    return sums[0], sums[1]


def _saved(file: Path, digest: str) -> Statistics | None:
    """What was saved for the same calibration, if there is something."""
    try:
        statistics, metadata = Statistics.load(file)
    except (SafetensorError, OSError):  # none yet, or cut off
        return None
    return statistics if metadata.get("digest") == digest else None


def output_weights(network: Any, shape: CacheShape) -> list[torch.Tensor]:
    """Weights of the output projections, one for each layer, ``[hidden, num_heads * D]``.

    Raises:
        ValueError: they are not to be found.
    """
    found = {}
    for module in network.modules():
        layer = getattr(module, "layer_idx", None)
        projection = next((c for n, c in module.named_children() if n in _OUTPUT_NAMES), None)
        if layer is not None and projection is not None:
            found[layer] = projection.weight.detach()
    width = shape.num_heads * shape.head_size
    weights = [found[layer] for layer in sorted(found)]
    if len(weights) != shape.num_layers or any(w.shape[-1] != width for w in weights):
        raise ValueError(
            f"the output projections of attention ({', '.join(_OUTPUT_NAMES)}) are not to be found "
            f"in {type(network).__name__}: calibration does not know this architecture"
        )
    return weights


def _record(settings: Settings, sources: Sequence[Source]) -> dict[str, Any]:
    """What an artifact remembers of how it was made."""
    elsewhere = ("preset", "group_sizes", "key_space")
    return {
        **{k: v for k, v in asdict(settings).items() if k not in elsewhere},
        "texts": [source.record() for source in sources],
    }


def progress_columns() -> tuple[ProgressColumn, ...]:
    """Columns of a bar whose steps take seconds."""
    return (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


def _progress(console: Console | None) -> Any:
    return nullcontext(None) if console is None else Progress(*progress_columns(), console=console)
