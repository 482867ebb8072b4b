"""Plots of a run, as SVG text to put into a page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from kvcompress_serving.evaluation.results import HEADLINES, SCORES, Direction, Line


def require() -> None:
    """Fail early where plots cannot be made.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError(
            "the HTML report needs matplotlib: pip install 'vllm-kvcompress[bench]', or leave out "
            "--html"
        ) from None


def headline(lines: Sequence[Line]) -> str | None:
    """The score that a table is plotted by."""
    return next((name for name in HEADLINES if all(name in line.scores for line in lines)), None)


def quality_against_memory(lines: Sequence[Line], title: str) -> str:
    """One table: its headline score with confidence intervals over the share of bytes kept.

    Args:
        lines: of one task and group.
        title: above the plot.

    Returns:
        an ``<svg>`` element.
    """
    from matplotlib.figure import Figure

    name = headline(lines)
    assert name is not None
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        score = line.scores[name]
        error = [[score.mean - score.low], [score.high - score.mean]]
        axes.errorbar(
            [100 * line.bytes_ratio], [score.mean], yerr=error, fmt="o", capsize=3, label=line.row
        )
    axes.set_title(title)
    axes.set_xlabel("bytes kept, % of the raw cache")
    better = "lower" if SCORES[name].direction is Direction.LOWER else "higher"
    axes.set_ylabel(f"{SCORES[name].title} ({better} is better)")
    axes.set_xlim(0, 105)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _svg(figure)


def _svg(figure: Any) -> str:
    """The figure as an element without declaration, date or addresses."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "vllm-kvcompress"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
