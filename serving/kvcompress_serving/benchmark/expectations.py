"""Runs that would mislead: compression that silently did, or did not, happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from kvcompress_serving.benchmark.results import Measurement
from kvcompress_serving.benchmark.rows import Row


class Expected(StrEnum):
    """What a run has to show.

    ``required``: each row with a method compressed at least one request of every load, and no
    compression failed. ``forbidden``: nothing was compressed. ``any``: neither.
    """

    REQUIRED = "required"
    FORBIDDEN = "forbidden"
    ANY = "any"


def check_rows(expected: Expected, rows: Sequence[Row]) -> None:
    """Refuse an expectation that no run could meet.

    Raises:
        ValueError: compression is required and no row compresses.
    """
    if expected is Expected.REQUIRED and not any(row.compresses for row in rows):
        raise ValueError(
            "--expect-compression required, but no row has a method that compresses; give --row"
        )


def check(
    expected: Expected, rows: Mapping[str, Row], measurements: Sequence[Measurement]
) -> list[str]:
    """What contradicts the expectation, a sentence each.

    Stock vLLM and method ``none`` must never compress, whatever is expected.
    """
    problems = []
    for m in measurements:
        row = rows[m.row]
        compressed = m.values["compressed"]
        where = f"{m.row}, {m.group}, {m.label}, round {m.round + 1}"
        if compressed and not row.compresses:
            problems.append(
                f"{where}: {compressed:.0f} requests compressed by a row without method"
            )
        elif compressed and expected is Expected.FORBIDDEN:
            problems.append(f"{where}: {compressed:.0f} requests compressed, none expected")
        elif not compressed and row.compresses and expected is Expected.REQUIRED:
            problems.append(f"{where}: nothing compressed ({_reasons(m.left_alone)})")
        if m.failed and expected is Expected.REQUIRED:
            problems.append(f"{where}: compressions failed ({_reasons(m.failed)})")
    return problems


def _reasons(counts: Mapping[str, float]) -> str:
    shown = ", ".join(f"{reason} {count:.0f}" for reason, count in counts.items())
    return shown or "no reason was counted"
