"""Plots of a run that can be read without the text beside them, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress_serving.benchmark.plan import Mode
from kvcompress_serving.benchmark.results import METRICS, Line, Run, summarize
from kvcompress_serving.benchmark.rows import NONE, STOCK

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found]
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

# Okabe and Ito: told apart by colour-blind readers too
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6D00", "#5B3A8C")
_MARKERS = "osD^vP*X"
_PANEL = (5.6, 3.4)
_TITLES = {
    Mode.THROUGHPUT: "Throughput as the load rises",
    Mode.LATENCY: "Latency at a fixed number of requests",
    Mode.MEMORY: "Requests that fit the same KV-cache pool",
    Mode.ABLATION: "Settings: speed against cache that is kept",
    Mode.OFFLINE: "Offline throughput",
}
_PANELS = {
    Mode.THROUGHPUT: ("output_tokens_per_s", "peak_running"),
    Mode.LATENCY: ("ttft_ms", "tpot_ms"),
    Mode.MEMORY: ("peak_running", "cache_mib"),
    Mode.ABLATION: ("tpot_ms", "ttft_ms"),
    Mode.OFFLINE: ("output_tokens_per_s",),
}
_AXES = {
    "output_tokens_per_s": "output tokens per second (higher is better)",
    "peak_running": "requests running at once, peak",
    "ttft_ms": "time to first token, ms (lower is better)",
    "tpot_ms": "time per output token, ms (lower is better)",
    "cache_mib": "KV cache per request, MiB (lower is better)",
}


def require() -> None:
    """Fail early where plots cannot be made.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError(
            "plots need matplotlib: pip install 'vllm-kvcompress[bench]', or give --no-plots"
        ) from None


def save(run: Run, folder: Path, stem: str) -> list[Path]:
    """Draw a run and write ``STEM.png`` and ``STEM.svg``.

    Returns:
        what was written.
    """
    import matplotlib as mpl

    figure = draw(run)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context({"svg.hashsalt": "vllm-kvcompress"}):
        for ending, more in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            path = folder / f"{stem}.{ending}"
            figure.savefig(path, format=ending, **more)
            written.append(path)
    return written


def draw(run: Run) -> Figure:
    """One figure: a column for each table, a panel below the other for each quantity."""
    from matplotlib.figure import Figure

    mode = Mode(run.mode)
    lines = summarize(run.measurements)
    groups = list(dict.fromkeys(line.group for line in lines))
    names = [n for n in _PANELS[mode] if any(n in line.values for line in lines)]
    style = _styles(lines)
    panel: Callable[..., None] = {
        Mode.THROUGHPUT: _curves,
        Mode.MEMORY: _bars_by_load,
        Mode.ABLATION: _scatter,
    }.get(mode, _bars)
    width, height = _PANEL
    bars = len({line.row for line in lines}) if panel is _bars else 0
    size = (width * len(groups), (height + max(0, bars - 6) * 0.3) * len(names) + 1.1)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(names), len(groups), squeeze=False)
    for column, group in enumerate(groups):
        members = [line for line in lines if line.group == group]
        for place, name in enumerate(names):
            axes = grid[place][column]
            panel(axes, members, name, style)
            if place == 0:
                axes.set_title(_wrapped(group), fontsize="medium")
    for cells in grid:
        _share_scale(cells, horizontal=panel is _bars)
    if panel is not _bars:  # whose bars have their names beside them
        named = dict(zip(*reversed(grid[0][0].get_legend_handles_labels()), strict=True))
        columns = min(len(named), 2 * len(groups))
        where = {"loc": "outside lower center", "ncols": columns, "fontsize": "small"}
        figure.legend(list(named.values()), list(named), **where)
    figure.suptitle(f"{_TITLES[mode]}\n", fontweight="bold")
    figure.text(0.5, 0.985, f"\n{_subtitle(run)}", ha="center", va="top", fontsize="small")
    return figure


def _styles(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    styles: dict[str, dict[str, Any]] = {
        STOCK: {"color": "#333333", "marker": "s"},
        NONE: {"color": "#999999", "marker": "d", "linestyle": "--"},
    }
    others = [row for row in dict.fromkeys(line.row for line in lines) if row not in styles]
    for place, row in enumerate(others):
        colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
        styles[row] = {"color": colour, "marker": marker}
    return styles


def _shown(row: str) -> str:
    return {STOCK: "stock vLLM", NONE: "plugin, nothing compressed"}.get(row, row)


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 52)


def _subtitle(run: Run) -> str:
    origin = run.provenance
    machine = origin.get("machine") or {}
    device = machine.get("cpu") or machine.get("system") or "unknown machine"
    parts = [
        (origin.get("model") or {}).get("name") or "unknown model",
        f"{device}, {machine.get('cores', '?')} cores",
        str(origin.get("date", ""))[:10],
    ]
    if run.rounds > 1:
        parts.append(f"median of {run.rounds} rounds, whiskers: lowest and highest")
    else:
        parts.append("one round, noise unknown")
    return " · ".join(part for part in parts if part)


def _error(lines: Sequence[Line], name: str) -> list[list[float]]:
    values = [line.values[name] for line in lines]
    return [[v.median - v.low for v in values], [v.high - v.median for v in values]]


def _curves(axes: Axes, lines: Sequence[Line], name: str, style: dict[str, Any]) -> None:
    for row in dict.fromkeys(line.row for line in lines):
        own = [line for line in lines if line.row == row and name in line.values]
        axes.errorbar(
            [line.x for line in own],
            [line.values[name].median for line in own],
            yerr=_error(own, name),
            capsize=3,
            label=_shown(row),
            **style[row],
        )
    ticks = sorted({line.x for line in lines})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel("clients, each with one request open")
    _finish(axes, name)


def _bars(axes: Axes, lines: Sequence[Line], name: str, style: dict[str, Any]) -> None:
    own = [line for line in lines if name in line.values]
    places = range(len(own))
    several = len({line.label for line in own}) > 1
    labels = [_shown(line.row) + (f", {line.label}" if several else "") for line in own]
    axes.barh(
        places,
        [line.values[name].median for line in own],
        xerr=_error(own, name),
        capsize=3,
        color=[style[line.row]["color"] for line in own],
    )
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    digits = METRICS[name].digits
    for place, line in zip(places, own, strict=True):
        value = line.values[name]
        axes.text(value.high, place, f"  {value.median:,.{digits}f}", va="center", fontsize="small")
    axes.set_xlabel(_AXES[name], fontsize="small")
    axes.set_xlim(0, 1.2 * max(line.values[name].high for line in own))
    axes.grid(axis="x", alpha=0.3)


def _bars_by_load(axes: Axes, lines: Sequence[Line], name: str, style: dict[str, Any]) -> None:
    rows = list(dict.fromkeys(line.row for line in lines))
    labels = list(dict.fromkeys(line.label for line in lines))
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        own = [line for line in lines if line.row == row and name in line.values]
        places = [labels.index(line.label) + (number - (len(rows) - 1) / 2) * width for line in own]
        drawn = axes.bar(
            places,
            [line.values[name].median for line in own],
            width,
            yerr=_error(own, name),
            capsize=2,
            color=style[row]["color"],
            label=_shown(row),
        )
        texts = [f"{line.values[name].median:,.{METRICS[name].digits}f}" for line in own]
        axes.bar_label(drawn, texts, fontsize="x-small", padding=2)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("length of each prompt")
    _finish(axes, name)
    axes.set_ylim(0, 1.12 * max(line.values[name].high for line in lines if name in line.values))
    axes.grid(axis="x", visible=False)


def _scatter(axes: Axes, lines: Sequence[Line], name: str, style: dict[str, Any]) -> None:
    for line in lines:
        if name not in line.values or "cache_mib" not in line.values:
            continue
        x = line.values["cache_mib"].median
        axes.errorbar(
            [x],
            [line.values[name].median],
            yerr=_error([line], name),
            capsize=3,
            label=_shown(line.row),
            **style[line.row] | {"linestyle": "none"},
        )
    axes.set_xlabel(_AXES["cache_mib"])
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    _finish(axes, name)


def _finish(axes: Axes, name: str) -> None:
    axes.set_ylabel(_AXES[name])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _share_scale(cells: Sequence[Axes], *, horizontal: bool) -> None:
    """One scale for the panels of a quantity: they stand side by side to be compared."""
    get, put = ("get_xlim", "set_xlim") if horizontal else ("get_ylim", "set_ylim")
    top = max(getattr(axes, get)()[1] for axes in cells)
    for axes in cells:
        getattr(axes, put)(0, top)
