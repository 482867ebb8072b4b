"""A readable report of a training: ``report.md`` with a plot, next to the artifact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvcompress.artifacts import Artifact
from vllm_kvcompress.soft_tokens.model import Kind
from vllm_kvcompress.soft_tokens.train import VALIDATION_KEEP, History

REPORT_FILE = "report.md"
PLOT_FILE = "losses.png"


def write(
    folder: Path, artifact: Artifact, histories: Mapping[Kind, History], *, plots: bool
) -> None:
    """Write ``report.md`` and, with ``plots``, its picture.

    Args:
        folder: to write to.
        artifact: that is described.
        histories: of its trainings.
    """
    settings = artifact.settings
    model = artifact.model
    lines = [
        "# Soft tokens",
        "",
        f"Model: {model.config['num_hidden_layers']} layers, hidden size "
        f"{model.config['hidden_size']}. Weights `{model.weights[:16]}`. Artifact "
        f"`{artifact.digest[:16]}`, version {artifact.version}. Default: "
        f"{settings['default']} tokens.",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in _flat(settings["training"])),
        "",
        "| text | share | sha256 |",
        "| --- | --- | --- |",
        *(
            f"| {text['name']} | {text['share']} | `{text['sha256'][:16]}` |"
            for text in settings["texts"]
        ),
        "",
        "Loss: KL divergence in nats of the soft tokens' attention from that of the response, mean "
        "over layers and KV heads. Hit rate: share of the "
        f"{VALIDATION_KEEP:.0%} of a prompt's tokens that the response attends to most which are "
        "among those that the soft tokens attend to most; on prompts that were held out. The first "
        "tokens and the recent window of a prompt count in neither.",
    ]
    for kind, history in histories.items():
        lines += [
            "",
            f"## {kind}",
            "",
            "| phase | epoch | loss | held-out loss | hit rate |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {row['phase']} | {row['epoch']} | {_loss(row)} | "
                f"{row['validation_loss']:.4f} | {row['hit_rate']:.4f} |"
                for row in history.epochs
            ),
        ]
    if plots:
        _plot(folder / PLOT_FILE, histories)
        lines += ["", f"![{PLOT_FILE}]({PLOT_FILE})"]
    (folder / REPORT_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _loss(row: Mapping[str, Any]) -> str:
    return "" if row["loss"] is None else f"{row['loss']:.4f}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Settings and those within them, by dotted names."""
    found: list[tuple[str, Any]] = []
    for name, value in sorted(settings.items()):
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, value))
    return found


def _plot(path: Path, histories: Mapping[Kind, History]) -> None:
    """Losses of steps and epochs, and hit rates."""
    from matplotlib.backends.backend_agg import (  # type: ignore[import-not-found]
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    figure = Figure((10, 4))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for index, (kind, history) in enumerate(histories.items()):
        color = f"C{index}"
        steps = [row["step"] for row in history.steps]
        left.plot(steps, [row["loss"] for row in history.steps], color=color, alpha=0.3)
        per_epoch = len(steps) / (len(history.epochs) - 1)
        ends = [per_epoch * number for number in range(len(history.epochs))]
        held_out = [row["validation_loss"] for row in history.epochs]
        left.plot(ends, held_out, "o-", color=color, label=f"{kind}, held out")
        right.plot(ends, [row["hit_rate"] for row in history.epochs], "o-", label=kind)
    left.set_title("loss")
    right.set_title(f"hit rate at {VALIDATION_KEEP:.0%}, held out")
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.legend()
    figure.tight_layout()
    # no date and no version inside: the same training gives the same file
    figure.savefig(path, dpi=100, metadata={"Software": None})
