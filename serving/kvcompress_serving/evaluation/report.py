"""A run as Markdown and as one HTML page that needs nothing else; two runs compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcompress_serving.evaluation import plots
from kvcompress_serving.evaluation.results import SCORES, Line, Measurement, Run, summarize
from kvcompress_serving.evaluation.statistics import CONFIDENCE, Estimate, paired

_SIZE_COLUMNS = ("row", "prompts", "bytes kept", "blocks held", "entries")
_READING = (
    f"Means over prompts with {CONFIDENCE:.0%} bootstrap intervals. *Bytes kept* counts the cells "
    "of the slab with their bias, filled or not, and the raw window, per byte of the uncompressed "
    "cache; *blocks held* the same in whole blocks; *entries* kept entries and raw tokens per "
    "prompt token. Prompts that a method would not compress are *left alone*: the full cache "
    "stands in for them."
)


@dataclass(frozen=True)
class Table:
    """A table ready to be written.

    Args:
        title: heading.
        columns: headings.
        rows: cells.
        svg: plot beside it, or nothing.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    svg: str = ""


def shown(name: str, estimate: Estimate, *, signed: bool = False) -> str:
    """A number with its interval."""
    sign, digits = ("+" if signed else ""), SCORES[name].digits
    mean, low, high = (
        f"{x:{sign}.{digits}f}" for x in (estimate.mean, estimate.low, estimate.high)
    )
    return mean if low == high else f"{mean} [{low}, {high}]"


def _score_names(lines: Sequence[Line]) -> list[str]:
    return [name for name in SCORES if any(name in line.scores for line in lines)]


def _groups(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.task, line.group), []).append(line)
    return groups


def tables(run: Run, *, reference: str | None = None, with_plots: bool = False) -> list[Table]:
    """For each task and group the scores, and their paired differences to one row.

    Args:
        run: the run.
        reference: row that the others are compared with; the full cache by default.
        with_plots: draw each table as well.

    Raises:
        ValueError: there is no such row.
    """
    if reference is not None and reference not in run.rows:
        raise ValueError(f"no row '{reference}' in this run; it has {', '.join(run.rows)}")
    made = []
    lines = summarize(run.measurements, reference, seed=run.provenance.get("seed", 0))
    for (task, group), members in _groups(lines).items():
        names = _score_names(members)
        title = f"{task}: {group}"
        svg = ""
        if with_plots and plots.headline(members):
            svg = plots.quality_against_memory(members, title)
        rows = []
        for line in members:
            count = f"{line.count}"
            if line.bypassed:
                count += f" ({line.bypassed} left alone)"
            sizes = (f"{x:.1%}" for x in (line.bytes_ratio, line.blocks_ratio, line.kept))
            rows.append((line.row, count, *sizes, *(shown(n, line.scores[n]) for n in names)))
        made.append(Table(title, (*_SIZE_COLUMNS, *(SCORES[n].title for n in names)), rows, svg))
        # against the full cache, a divergence to it says nothing new
        if reference is None:
            names = [n for n in names if not SCORES[n].relative]
        base = reference or members[0].row
        if compared := [line for line in members if line.against]:
            made.append(
                Table(
                    f"{title}, difference to {base}",
                    ("row", *(SCORES[n].title for n in names)),
                    [
                        (line.row, *(shown(n, line.against[n], signed=True) for n in names))
                        for line in compared
                    ],
                )
            )
    return made


def _escape(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|")


def _markdown_table(table: Table) -> str:
    lines = [
        f"| {' | '.join(map(_escape, table.columns))} |",
        f"|{'---|' * len(table.columns)}",
        *(f"| {' | '.join(map(_escape, row))} |" for row in table.rows),
    ]
    return f"## {table.title}\n\n" + "\n".join(lines) + "\n"


def _facts(run: Run) -> list[tuple[str, str]]:
    """Provenance as short lines."""
    facts = run.provenance
    model = facts.get("model") or {}
    machine = facts.get("machine") or {}
    items = {
        "date": facts.get("date"),
        "model": model.get("name") or facts.get("served_model"),
        "commit": facts.get("commit"),
        "machine": ", ".join(f"{k} {v}" for k, v in machine.items()),
        "versions": ", ".join(f"{k} {v}" for k, v in (facts.get("versions") or {}).items()),
        "seed": facts.get("seed"),
        "flags": json.dumps(facts.get("flags")),
    }
    return [(key, str(value)) for key, value in items.items() if value is not None]


def markdown(run: Run, reference: str | None = None) -> str:
    """The run as Markdown; see `tables`."""
    parts = ["# Evaluation\n", _READING + "\n"]
    parts += [_markdown_table(table) for table in tables(run, reference=reference)]
    parts.append("## Rows and provenance\n")
    parts += [f"- `{name}`: `{json.dumps(settings)}`" for name, settings in run.rows.items()]
    parts += [f"- {key}: {value}" for key, value in _facts(run)]
    return "\n".join(parts) + "\n"


def html(run: Run, reference: str | None = None) -> str:
    """The run as one page with its plots inside; see `tables`.

    Raises:
        ValueError: matplotlib is missing.
    """
    from jinja2 import Environment, PackageLoader

    plots.require()
    loader = PackageLoader("kvcompress_serving.evaluation", ".")
    template = Environment(loader=loader, autoescape=True).get_template("report.html.jinja")
    return template.render(
        tables=tables(run, reference=reference, with_plots=True),
        reading=_READING.replace("*", ""),
        rows={name: json.dumps(settings) for name, settings in run.rows.items()},
        facts=_facts(run),
    )


@dataclass(frozen=True)
class Difference:
    """One row of two runs.

    Args:
        task: see `results.Measurement`.
        group: see `results.Measurement`.
        row: its name in both runs.
        count: prompts that both measured.
        bytes_ratio: of both runs.
        scores: second run minus first, prompt by prompt.
    """

    task: str
    group: str
    row: str
    count: int
    bytes_ratio: tuple[float, float]
    scores: dict[str, Estimate]


def compare(first: Run, second: Run, *, seed: int = 0) -> list[Difference]:
    """Paired differences of all rows that two runs share, over the prompts that they share.

    Raises:
        ValueError: they share no prompt and row.
    """

    def by_key(run: Run) -> dict[tuple[str, str, str], dict[str, Measurement]]:
        keyed: dict[tuple[str, str, str], dict[str, Measurement]] = {}
        for m in run.measurements:
            keyed.setdefault((m.task, m.group, m.row), {})[m.prompt] = m
        return keyed

    a, b = by_key(first), by_key(second)
    differences = []
    for key in a:
        prompts = [prompt for prompt in a[key] if prompt in b.get(key, {})]
        if not prompts:
            continue
        pairs = [(a[key][prompt], b[key][prompt]) for prompt in prompts]
        names = [n for n in SCORES if all(n in x.scores and n in y.scores for x, y in pairs)]
        differences.append(
            Difference(
                *key,
                count=len(pairs),
                bytes_ratio=(
                    sum(x.bytes_ratio for x, _ in pairs) / len(pairs),
                    sum(y.bytes_ratio for _, y in pairs) / len(pairs),
                ),
                scores={
                    n: paired(
                        [y.scores[n] for _, y in pairs], [x.scores[n] for x, _ in pairs], seed=seed
                    )
                    for n in names
                },
            )
        )
    if not differences:
        raise ValueError(
            "the two runs share no row that was measured on the same prompts; use equal texts, "
            "tasks, lengths, seed and tokenizer, and equal names of rows"
        )
    return differences


def comparison(first: Run, second: Run, *, seed: int = 0) -> list[Table]:
    """`compare` as tables, after one of what differs in how the runs were made."""
    made = []
    if changed := _changed(first.provenance, second.provenance):
        made.append(Table("How the runs differ", ("what", "first", "second"), changed))
    groups: dict[tuple[str, str], list[Difference]] = {}
    for difference in compare(first, second, seed=seed):
        groups.setdefault((difference.task, difference.group), []).append(difference)
    for (task, group), members in groups.items():
        names = [n for n in SCORES if any(n in d.scores for d in members)]
        rows = [
            (
                d.row,
                f"{d.count}",
                f"{d.bytes_ratio[0]:.1%} -> {d.bytes_ratio[1]:.1%}",
                *(shown(n, d.scores[n], signed=True) if n in d.scores else "" for n in names),
            )
            for d in members
        ]
        columns = ("row", "prompts", "bytes kept", *(SCORES[n].title for n in names))
        made.append(Table(f"{task}: {group}, second minus first", columns, rows))
    return made


def comparison_markdown(first: Run, second: Run) -> str:
    """Two runs compared, as Markdown."""
    return "\n".join(["# Comparison\n", *map(_markdown_table, comparison(first, second))])


def _changed(a: Any, b: Any, path: str = "") -> list[tuple[str, ...]]:
    """Leaves that differ, the date left out."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            item
            for key in dict.fromkeys([*a, *b])
            if f"{path}{key}" != "date"
            for item in _changed(a.get(key), b.get(key), f"{path}{key}.")
        ]
    return [] if a == b else [(path.rstrip("."), str(a), str(b))]
