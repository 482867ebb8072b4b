"""A readable report of a calibration: what was found, how bits are spent, and whether it holds.

``report.md`` with three plots, next to the artifact. Losses are measured on rows that the
calibration did not use.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcompress_kernels.code_rows import reference
from vllm_kvcompress.artifacts import Artifact
from vllm_kvcompress.calibration.allocation import CHOICES, GroupWidths
from vllm_kvcompress.calibration.codec import Calibration, SideTables, Transforms
from vllm_kvcompress.calibration.published import published_groups
from vllm_kvcompress.calibration.statistics import Statistics

REPORT_FILE = "report.md"
_BITS = (2.0, 2.5, 3.0, 4.0)
_BLOCK_SIZE = 32
_SIDES = ("keys", "values")


def require_plots() -> None:
    """Check that plots can be drawn.

    Raises:
        ValueError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "the report's plots need matplotlib; install it with: pip install "
            "'vllm-kvcompress[calibration]', or leave them out with --no-plots"
        )


@dataclass(frozen=True)
class Check:
    """Loss of both sides of each layer at one size.

    Args:
        bits: that were asked for.
        index_bits: mean bits of an index.
        true_bits: mean bits of a number, scales and the round-up of rows to cells included.
        predicted: float64 ``[L, 2]``, keys and values, from the tables.
        measured: float64 ``[L, 2]``, on rows that calibration has not seen.
        widths: of the channels, ``[L][groups]``.
    """

    bits: float
    index_bits: float
    true_bits: float
    predicted: np.ndarray
    measured: np.ndarray
    widths: list[list[GroupWidths]]


def check(
    transforms: Transforms, calibration: Calibration, held_out: Statistics, bits: float
) -> Check:
    """Compare the losses that the tables state with those of other rows."""
    head_size = calibration.head_size
    cell_bytes = _BLOCK_SIZE * 2 * head_size * 2
    layers = range(calibration.num_layers)
    groups = range(calibration.num_kv_heads // transforms.group_size)
    widths = transforms.widths(layers, groups, bits, cell_bytes)
    predicted, measured = np.zeros((len(layers), 2)), np.zeros((len(layers), 2))
    width = transforms.group_size * head_size
    for layer in layers:
        for group in groups:
            part = slice(group * width, (group + 1) * width)
            for side, name in enumerate(_SIDES):
                tables: SideTables = getattr(transforms, name)
                own = getattr(widths[layer][group], name)
                costs = tables.costs(layer, group)
                place = np.searchsorted(CHOICES, own)
                predicted[layer, side] += costs[np.arange(len(own)), place].sum()
                codec = tables.codec(layer, group, own)
                rows = getattr(held_out, name)[layer][:, part].float()
                z = (rows - codec.mean) @ codec.encode
                codes, scales = reference.quantize(z, codec)
                decoded = reference.dequantize(codes, scales, codec) @ codec.decode
                error = (rows - codec.mean - decoded).double() @ tables.encoder(layer, group)
                weight = tables.weight[layer, group].double()
                measured[layer, side] += float((error.square().mean(0) * weight).sum())
    flat = [group for layer in widths for group in layer]
    true_bits = float(np.mean([8 * cell_bytes / (g.rows * 2 * width) for g in flat]))
    index_bits = float(np.mean([g.bits for g in flat]))
    return Check(bits, index_bits, true_bits, predicted, measured, widths)


def write(
    folder: Path,
    artifact: Artifact,
    calibration: Calibration,
    held_out: Statistics,
    *,
    plots: bool,
) -> None:
    """Write ``report.md`` and, with ``plots``, its pictures.

    Args:
        folder: to write to.
        artifact: that is described.
        calibration: its content.
        held_out: rows that it was not made from.
    """
    lines = [
        f"# Calibration, preset `{calibration.preset}`",
        "",
        f"Model: {calibration.num_layers} layers, {calibration.num_heads} query heads, "
        f"{calibration.num_kv_heads} KV heads of {calibration.head_size}. Weights "
        f"`{artifact.model.weights[:16]}`. Artifact `{artifact.digest[:16]}`, version "
        f"{artifact.version}.",
        "",
        "| setting | value |",
        "| --- | --- |",
    ]
    lines += [
        f"| {name} | {value} |"
        for name, value in sorted(artifact.settings.items())
        if name != "texts"
    ]
    lines += ["", "| text | share | sha256 |", "| --- | --- | --- |"]
    lines += [
        f"| {text['name']} | {text['share']} | `{text['sha256'][:16]}` |"
        for text in artifact.settings.get("texts", [])
    ]
    if calibration.preset == "paper":
        lines += ["", *_published(calibration)]
    else:
        for size, transforms in sorted(calibration.transforms.items()):
            checks = [check(transforms, calibration, held_out, bits) for bits in _BITS]
            lines += ["", f"## Groups of {size} KV heads", "", *_table(checks)]
            if plots:
                for name in _plots(folder, size, transforms, checks):
                    lines += ["", f"![{name}]({name})"]
    (folder / REPORT_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _published(calibration: Calibration) -> list[str]:
    lines = ["| group | bits | bits with scales |", "| --- | --- | --- |"]
    for size, transforms in sorted(calibration.transforms.items()):
        groups = range(calibration.num_kv_heads // size)
        for bits in _BITS:
            found = published_groups(transforms, range(calibration.num_layers), groups, bits)
            rows = [g.keys.row_bits + g.values.row_bits for layer in found for g in layer]
            true_bits = np.mean(rows) / (2 * size * calibration.head_size)
            lines.append(f"| {size} | {bits:g} | {true_bits:.3f} |")
    return lines


def _table(checks: list[Check]) -> list[str]:
    """One line for each size."""
    lines = [
        "Loss: expected squared change of the log probabilities per token, predicted by the "
        "tables and measured on rows that calibration did not use. Cells of a bfloat16 cache with "
        f"{_BLOCK_SIZE} slots.",
        "",
        "| bits | index bits | with scales and round-up | keys / values | predicted | measured "
        "| measured / predicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for item in checks:
        flat = [group for layer in item.widths for group in layer]
        own = [np.mean([getattr(g, side).mean() for g in flat]) for side in _SIDES]
        predicted, measured = item.predicted.sum(), item.measured.sum()
        lines.append(
            f"| {item.bits:g} | {item.index_bits:.2f} | {item.true_bits:.2f} | {own[0]:.2f} / "
            f"{own[1]:.2f} | {predicted:.3g} | {measured:.3g} | {measured / predicted:.2f} |"
        )
    return lines


def _plots(folder: Path, size: int, transforms: Transforms, checks: list[Check]) -> list[str]:
    """Draw spectra, bits, and predicted against measured losses; names of the files."""
    from matplotlib.backends.backend_agg import (  # type: ignore[import-not-found]
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    def save(figure: Any, name: str) -> str:
        FigureCanvasAgg(figure)
        figure.tight_layout()
        # no date and no version inside: the same calibration gives the same file
        figure.savefig(folder / name, dpi=100, metadata={"Software": None})
        return name

    names = []
    figure = Figure((10, 4))
    for axis, side in zip(figure.subplots(1, 2, sharey=True), _SIDES, strict=True):
        weight = getattr(transforms, side).weight
        for layer in range(len(weight)):
            spectrum = weight[layer].flatten().sort(descending=True).values
            color = (layer / max(len(weight) - 1, 1), 0.2, 0.6)
            axis.semilogy(spectrum.numpy(), color=color, linewidth=0.7)
        axis.set_title(f"{side}: cost of losing a channel, one line per layer")
        axis.set_xlabel("channel")
    names.append(save(figure, f"spectra_group{size}.png"))

    chosen = checks[min(1, len(checks) - 1)]
    figure = Figure((10, 6))
    for row, side in zip(figure.subplots(2, 1, sharex=True), _SIDES, strict=True):
        layers = range(len(chosen.widths))
        bottom = np.zeros(len(chosen.widths))
        for width in CHOICES:
            share = np.array(
                [
                    np.mean([(getattr(g, side) == width).mean() for g in groups])
                    for groups in chosen.widths
                ]
            )
            row.bar(layers, share, bottom=bottom, label=f"{width} bits")
            bottom += share
        row.set_title(f"{side}: share of channels by width at {chosen.bits:g} bits")
        row.legend(loc="right", fontsize="small")
    row.set_xlabel("layer")
    names.append(save(figure, f"bits_group{size}.png"))

    figure = Figure((5, 5))
    axis = figure.subplots()
    for item in checks:
        axis.loglog(
            item.predicted.flatten(), item.measured.flatten(), ".", label=f"{item.bits:g} bits"
        )
    both = torch.tensor([item.predicted.min() for item in checks]).min(), checks[0].predicted.max()
    axis.loglog(both, both, color="gray", linewidth=0.7)
    axis.set_xlabel("predicted loss of a layer's keys or values")
    axis.set_ylabel("measured on other rows")
    axis.legend()
    names.append(save(figure, f"losses_group{size}.png"))
    return names
