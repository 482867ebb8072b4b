"""Deals out bits: which channel is coded with how many, and how many rows go into a cell.

A cell holds a multiple of 8 rows, so bits come in steps: a row may be as long as its share of the
cell. The cells that a token takes are fixed by the wanted bits; they are dealt out among the groups
of a rank where they lower the distortion most, and every row is then filled to the brim. Pure
functions of the distortion tables, in numpy, equal on every process.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcompress_kernels.code_format import ROW_STEP, SCALE_DTYPE, WIDTHS, RowLayout

CHOICES = (0, 1, 2, 4, 8)
"""Widths of a channel, ascending; 0: it is dropped."""

_SCALE_BITS = 8 * SCALE_DTYPE.itemsize


@dataclass(frozen=True)
class GroupWidths:
    """Widths of the channels of one group.

    Args:
        keys: int64 ``[n]``, items of `CHOICES`.
        values: int64 ``[n]``.
        rows: rows in a cell.
    """

    keys: np.ndarray
    values: np.ndarray
    rows: int

    def layout(self, has_bias: bool = False) -> RowLayout:
        return RowLayout(_counts(self.keys), _counts(self.values), has_bias)

    @property
    def bits(self) -> float:
        """Mean bits of an index."""
        return float(np.concatenate([self.keys, self.values]).mean())


def _counts(widths: np.ndarray) -> tuple[int, int, int, int]:
    eight, four, two, one = (int((widths == width).sum()) for width in WIDTHS)
    return eight, four, two, one


@dataclass(frozen=True)
class _Steps:
    """Raises of single channels along the lower convex hull of their distortion, best first.

    Args:
        channel: int64 ``[s]``, key channels first.
        before: int64 ``[s]``, width before the raise.
        after: int64 ``[s]``.
        gain: float64 ``[s]``, distortion taken away.
    """

    channel: np.ndarray
    before: np.ndarray
    after: np.ndarray
    gain: np.ndarray


def _hull(distortion: np.ndarray) -> list[tuple[int, int]]:
    """Index pairs of neighbours on the lower convex hull of one channel's distortion over
    `CHOICES`, as far as it falls."""
    best = [0]
    while best[-1] < len(CHOICES) - 1:
        here = best[-1]
        slopes = [
            (distortion[here] - distortion[there]) / (CHOICES[there] - CHOICES[here])
            for there in range(here + 1, len(CHOICES))
        ]
        steepest = max(slopes)
        if steepest <= 0:
            break
        # the last of equals: the longest edge
        best.append(here + 1 + max(i for i, slope in enumerate(slopes) if slope == steepest))
    return list(itertools.pairwise(best))


def _steps(distortion: np.ndarray) -> _Steps:
    """All raises of the channels ``distortion [c, 5]``."""
    found = [
        (channel, CHOICES[low], CHOICES[high], table[low] - table[high])
        for channel, table in enumerate(distortion.tolist())
        for low, high in _hull(np.asarray(table))
    ]
    channel, before, after = (np.array([f[i] for f in found], dtype=np.int64) for i in range(3))
    gain = np.array([f[3] for f in found], dtype=np.float64)
    # equal slopes: lower channels and lower widths first, so that a channel's raises stay in order
    order = np.lexsort((before, channel, -gain / (after - before)))
    return _Steps(channel[order], before[order], after[order], gain[order])


class _Group:
    """One group and its raises.

    Args:
        keys: float64 ``[n, 5]``, distortion of each key channel at each of `CHOICES`.
        values: float64 ``[n, 5]``.
        has_bias: whether rows carry a bias.
    """

    def __init__(self, keys: np.ndarray, values: np.ndarray, has_bias: bool) -> None:
        self._num_keys = len(keys)
        self._num_channels = len(keys) + len(values)
        self._has_bias = has_bias
        self._table = np.concatenate([keys, values])
        self._steps = _steps(self._table)
        steps = self._steps
        is_key = steps.channel < self._num_keys
        counts = np.zeros((2, len(WIDTHS), len(steps.gain) + 1), dtype=np.int64)
        for side, member in enumerate((is_key, ~is_key)):
            for index, width in enumerate(WIDTHS):
                change = member * ((steps.after == width).astype(int) - (steps.before == width))
                counts[side, index, 1:] = np.cumsum(change)
        widths = np.array(WIDTHS)[:, None]
        low = (counts[:, 1:].sum(1) > 0).sum(0)
        high = (counts[:, 0] > 0).sum(0)
        self._row_bits = (
            _SCALE_BITS * (low + high + has_bias)
            + (counts[0] * widths).sum(0)
            + 8 * (-(-counts[1] * widths // 8)).sum(0)
        )
        self._distortion = self._table[:, 0].sum() - np.concatenate([[0.0], np.cumsum(steps.gain)])

    def _prefix(self, row_bits: int) -> int:
        """Most raises that a row of so many bits has room for."""
        fits = np.flatnonzero(self._row_bits <= row_bits)
        return int(fits[-1]) if len(fits) else 0

    def distortion(self, row_bits: int) -> float:
        """Least distortion in rows of so many bits, to a few bits."""
        return float(self._distortion[self._prefix(row_bits)])

    def widths(self, rows: int, cell_bytes: int) -> GroupWidths:
        """Widths that fill the rows of a cell."""
        room = 8 * cell_bytes // rows
        count = self._prefix(room)
        widths = np.zeros(self._num_channels, dtype=np.int64)
        steps = self._steps
        for step in range(count):
            widths[steps.channel[step]] = steps.after[step]
        # smaller raises further down the list fill what is left
        for step in range(count, len(steps.gain)):
            channel = steps.channel[step]
            if widths[channel] != steps.before[step]:
                continue
            widths[channel] = steps.after[step]
            if self._layout(widths).row_bits > room:
                widths[channel] = steps.before[step]
        layout = self._layout(widths)
        assert layout.row_bits * rows <= 8 * cell_bytes, (layout, rows)
        return GroupWidths(widths[: self._num_keys], widths[self._num_keys :], rows)

    def _layout(self, widths: np.ndarray) -> RowLayout:
        return RowLayout(
            _counts(widths[: self._num_keys]), _counts(widths[self._num_keys :]), self._has_bias
        )


def allocate(
    keys: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    bits: float,
    cell_bytes: int,
    has_bias: bool = False,
) -> list[GroupWidths]:
    """Widths of all channels of all groups.

    The rows of the groups take on average no more of a cell than rows of ``bits`` per number with
    four scales would.

    Args:
        keys: for each group float ``[n, 5]``, what each key channel costs at each of `CHOICES`; in
            one unit for all groups.
        values: the same of the values.
        bits: wanted mean bits of an index, above 0.
        cell_bytes: of a cell.
        has_bias: whether rows carry a bias.

    Raises:
        ValueError: a cell holds no 8 rows of so many bits.
    """
    groups = [_Group(k, v, has_bias) for k, v in zip(keys, values, strict=True)]
    wanted = [
        bits * (len(k) + len(v)) + _SCALE_BITS * (4 + has_bias)
        for k, v in zip(keys, values, strict=True)
    ]
    room = sum(wanted) / (8 * cell_bytes)
    if max(wanted) * ROW_STEP > 8 * cell_bytes:
        raise ValueError(
            f"{bits:g} bits make rows of {max(wanted):.0f} bits, and {ROW_STEP} of them do not fit "
            f"a cell of {cell_bytes} bytes; lower bits, or raise the block size"
        )
    ladders = [_ladder(group, cell_bytes, min(wanted)) for group in groups]
    places = [0] * len(groups)
    used = sum(1 / ladder[0][0] for ladder in ladders)
    queue: list[tuple[float, int]] = []

    def push(index: int) -> None:
        ladder, place = ladders[index], places[index]
        if place + 1 < len(ladder):
            (rows, now), (fewer, then) = ladder[place], ladder[place + 1]
            heapq.heappush(queue, (-(now - then) / (1 / fewer - 1 / rows), index))

    for index in range(len(groups)):
        push(index)
    while queue:
        _, index = heapq.heappop(queue)
        ladder, place = ladders[index], places[index]
        more = 1 / ladder[place + 1][0] - 1 / ladder[place][0]
        if used + more <= room * (1 + 1e-12):
            used += more
            places[index] += 1
            push(index)
    return [
        group.widths(ladder[place][0], cell_bytes)
        for group, ladder, place in zip(groups, ladders, places, strict=True)
    ]


def _ladder(group: _Group, cell_bytes: int, wanted: float) -> list[tuple[int, float]]:
    """Rows per cell, falling, and the distortion at each: the lower convex hull over the share of
    a cell that a row takes. The first has at most a quarter of the wanted bits."""
    most = int(8 * cell_bytes / max(wanted / 4, 2 * _SCALE_BITS)) // ROW_STEP * ROW_STEP
    points = [
        (rows, group.distortion(8 * cell_bytes // rows)) for rows in range(most, 0, -ROW_STEP)
    ]
    hull: list[tuple[int, float]] = []
    for point in points:
        while len(hull) >= 2 and not _bends(hull[-2], hull[-1], point):
            hull.pop()
        if not hull or point[1] < hull[-1][1]:
            hull.append(point)
    return hull


def _bends(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Whether ``b`` lies below the line from ``a`` to ``c``, over the share of a cell."""
    x, y, z = 1 / a[0], 1 / b[0], 1 / c[0]
    return (a[1] - b[1]) * (z - y) > (b[1] - c[1]) * (y - x)
