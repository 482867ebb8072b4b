"""Share of entries that each layer and head keeps, as a heat map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcompress_serving.plots.membership import Compressed

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # type: ignore[import-not-found]


def draw(compressed: Compressed, model: str) -> Figure:
    """A cell for each layer and KV head, its share written in where there is room.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "the heat map needs matplotlib: pip install 'vllm-kvcompress[bench]'"
        ) from None
    kept = 100 * compressed.kept.T  # [H, L]
    num_heads, num_layers = kept.shape
    figure = Figure(
        figsize=(max(6.4, 0.34 * num_layers + 2.2), max(2.6, 0.34 * num_heads + 2.0)),
        layout="constrained",
    )
    axes = figure.subplots()
    image = axes.imshow(kept, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    figure.colorbar(image, ax=axes, label="entries kept, %")
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_xticks(range(0, num_layers, 1 + num_layers // 40))
    axes.set_yticks(range(num_heads))
    settings = ", ".join(f"{k}={v}" for k, v in compressed.settings.items() if k != "method")
    method = compressed.method + (f" ({settings})" if settings else "")
    axes.set_title(
        f"{method} on {model}: {kept.mean():.1f} % of {compressed.gap_end:,} compressed tokens\n"
        f"(lowest head {kept.min():.0f} %, highest {kept.max():.0f} %)",
        fontsize="medium",
    )
    if kept.size <= 400:
        for head, row in enumerate(kept):
            for layer, share in enumerate(row):
                colour = "black" if share > 60 else "white"
                text = f"{share:.0f}"
                axes.text(layer, head, text, color=colour, ha="center", va="center", fontsize=6)
    return figure


def save(compressed: Compressed, model: str, path: Path) -> None:
    """Draw it and write PNG, SVG or what else the file's ending says."""
    figure = draw(compressed, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
