"""A run as Markdown and as tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvcompress_serving.benchmark.plan import Mode
from kvcompress_serving.benchmark.results import METRICS, Line, Run, summarize
from kvcompress_serving.benchmark.rows import STOCK

_COLUMNS = {
    Mode.THROUGHPUT: (
        *("output_tokens_per_s", "ttft_ms", "tpot_ms", "peak_running", "preemptions"),
        *("cache_mib", "compressed", "kept_percent", "compress_ms", "compress_percent"),
    ),
    Mode.LATENCY: (
        *("ttft_ms", "ttft_p99_ms", "tpot_ms", "tpot_p99_ms", "itl_ms", "output_tokens_per_s"),
        *("cache_mib", "blocks", "compressed", "kept_percent", "compress_ms", "compress_percent"),
    ),
    Mode.MEMORY: (
        *("pool_tokens", "peak_running", "mean_running", "preemptions", "cache_full_mib"),
        *("cache_mib", "blocks", "compressed", "kept_percent", "seconds", "resident_mib"),
    ),
    Mode.ABLATION: (
        *("compressed", "kept_percent", "cache_mib", "output_tokens_per_s", "ttft_ms", "tpot_ms"),
        *("peak_running", "compress_ms", "compress_percent"),
    ),
    Mode.OFFLINE: (
        *("output_tokens_per_s", "total_tokens_per_s", "seconds", "compressed", "kept_percent"),
        *("compress_ms", "resident_mib"),
    ),
}
_READING = (
    "Median over the rounds with the lowest and highest in brackets. In parentheses the factor by "
    "which a number is better than stock vLLM's in the same round, below 1 it is worse; ≈ where "
    "the rounds do not agree that it differs, or where one round cannot tell. TTFT: time to first "
    "token; TPOT: time per output token after it; ITL: time between two tokens; medians over "
    "requests, or 99th percentile. *Cache/request* is what the prompt blocks of a request take "
    "after compression, mean over all requests, compressed or not; *at once* the requests that the "
    "server ran at a time."
)
_ALONE = "Requests that were not compressed, all rounds"


@dataclass(frozen=True)
class Table:
    """A table ready to be written: heading, headings of columns, cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def cell(line: Line, metric: str) -> str:
    """A median, its range, and the factor against stock."""
    if metric not in line.values:
        return ""
    digits, value = METRICS[metric].digits, line.values[metric]
    shown = f"{value.median:,.{digits}f}"
    low, high = (f"{x:,.{digits}f}" for x in (value.low, value.high))
    if low != high:
        shown += f" [{low}, {high}]"
    if metric in line.gains:
        sign = "" if line.beyond_noise(metric) else "≈"
        shown += f" ({sign}{line.gains[metric].median:.2f}×)"
    return shown


def tables(run: Run) -> list[Table]:
    """For each group of loads a table, and one of the requests that were not compressed."""
    lines = summarize(run.measurements)
    made = []
    for group in dict.fromkeys(line.group for line in lines):
        members = [line for line in lines if line.group == group]
        present = [
            name
            for name in _COLUMNS[Mode(run.mode)]
            if any(line.values.get(name) is not None for line in members)
        ]
        several = len({line.label for line in members}) > 1
        columns = (*(("load",) if several else ()), "row", *(METRICS[n].title for n in present))
        rows = [
            (*((line.label,) if several else ()), line.row, *(cell(line, n) for n in present))
            for line in members
        ]
        title = group if several else f"{group}, {members[0].label}"
        made.append(Table(title, columns, rows))
    alone = [line for line in lines if line.row != STOCK and (line.left_alone or line.failed)]
    if alone:
        rows = [
            (line.group, line.label, line.row, _counts(line.left_alone), _counts(line.failed))
            for line in alone
        ]
        columns = ("table", "load", "row", "left alone", "failed")
        made.append(Table(_ALONE, columns, rows))
    return made


def by_quantity(run: Run) -> list[Table]:
    """The same for a narrow place: a table for each load, a line for each quantity."""
    lines = summarize(run.measurements)
    made = []
    for group, label in dict.fromkeys((line.group, line.label) for line in lines):
        members = [line for line in lines if (line.group, line.label) == (group, label)]
        rows = [
            (METRICS[name].title, *(cell(line, name) for line in members))
            for name in _COLUMNS[Mode(run.mode)]
            if any(name in line.values for line in members)
        ]
        columns = ("", *(line.row for line in members))
        made.append(Table(f"{group}, {label}", columns, rows))
    return made + [table for table in tables(run) if table.title == _ALONE]


def _counts(counts: dict[str, float]) -> str:
    return ", ".join(f"{reason} {count:.0f}" for reason, count in counts.items())


def facts(run: Run) -> list[tuple[str, str]]:
    """Provenance as short lines."""
    items = dict(run.provenance)
    shown = {
        "date": items.get("date"),
        "model": (items.get("model") or {}).get("name"),
        "commit": items.get("commit"),
        "machine": ", ".join(f"{k} {v}" for k, v in (items.get("machine") or {}).items()),
        "machine of each round": items.get("machines"),
        "load average of the machine, start and end": items.get("load_average"),
        "versions": ", ".join(f"{k} {v}" for k, v in (items.get("versions") or {}).items()),
        "prompts": json.dumps(items.get("prompts")),
        "rounds": run.rounds,
        "seed": items.get("seed"),
        "flags": json.dumps(items.get("flags")),
    }
    return [(key, str(value)) for key, value in shown.items() if value is not None]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")


def _markdown_table(table: Table) -> str:
    lines = [
        f"| {' | '.join(map(_escape, table.columns))} |",
        f"|{'---|' * len(table.columns)}",
        *(f"| {' | '.join(map(_escape, row))} |" for row in table.rows),
    ]
    return f"## {table.title}\n\n" + "\n".join(lines) + "\n"


def markdown(run: Run, plots: Sequence[str] = ()) -> str:
    """The run as Markdown.

    Args:
        run: the run.
        plots: paths of pictures, relative to where the text will be.
    """
    parts = [f"# Benchmark: {run.mode}\n", _READING + "\n"]
    if run.problems:
        parts.append("**This run failed:**\n")
        parts += [f"- {problem}" for problem in run.problems] + [""]
    parts += [f"![{path}]({path})\n" for path in plots]
    parts += [_markdown_table(table) for table in tables(run)]
    parts.append("## Rows and provenance\n")
    parts += [f"- `{name}`: `{json.dumps(row)}`" for name, row in run.rows.items()]
    parts += [f"- {key}: {value}" for key, value in facts(run)]
    return "\n".join(parts) + "\n"
