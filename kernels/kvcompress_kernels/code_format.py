"""Byte layout of coded pages: rows of transform codes in the cells of a slab.

A *group* is one or several consecutive KV heads of a layer that share one transform. A token of a
group is one *row*: its key and its value, each ``group_size * D`` numbers, become ``r`` transform
channels with ``b`` bits each, and a few scales. Channels are sorted by width, so that the codes
of one width lie together (a *class*). A cell (`kvcompress_kernels.formats`) of ``cell_bytes``
holds ``R`` rows, a multiple of 8:

    | scales [S, R] float16 | key planes | value rows |

    key planes    for each width b of `WIDTHS`, for each channel of it: R codes, R * b / 8 bytes.
                  Channel by channel, since logits are summed over channels for many tokens at once.
    value rows    for each token: for each width b of `WIDTHS`: the codes of its n_b channels,
                  ceil(n_b * b / 8) bytes. Token by token, since values are summed over tokens.

A run of ``n`` codes of ``b`` bits takes ``s = ceil(n * b / 8)`` bytes; byte ``i`` holds the codes
``i, i + s, i + 2 s, ...`` from its lowest bits up. A vector of bytes, shifted and masked, is then
a vector of codes in order, for each of the ``8 / b`` shifts.

The scales are those that the channels need, in this order: of the key's channels of up to 4 bits
(their root mean square), of the key's 8-bit channels (their largest magnitude), the same two of the
value, and the bias that is added to the row's logits, if rows carry one.

A code is the index of a level. Up to 4 bits the levels are the Lloyd-Max levels of a standard
normal variable (J. Max, Quantizing for minimum distortion, 1960), rounded to bfloat16 so that every
kernel can hold them exactly; at 8 bits they are the whole numbers -128 to 127. What they stand for
is ``scale of the row * multiplier of the channel * level``, and all multipliers are part of the
decoding matrices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcompress_kernels.formats import SlabGeometry

WIDTHS = (8, 4, 2, 1)
"""Bits of a code, in the order in which classes are stored; a channel without bits is dropped."""

ROW_STEP = 8
"""Rows of a cell come in multiples of this, so that every plane is made of whole bytes."""

SCALE_DTYPE = torch.float16
SMALLEST_SCALE = 2.0**-14
"""Scales are kept above this (the smallest normal float16) and below float16's largest number."""

Counts = tuple[int, int, int, int]
"""Channels by width, in the order of `WIDTHS`."""


@functools.cache
def levels(width: int) -> torch.Tensor:
    """Levels of a class, ascending: float32 ``[2 ** width]``."""
    if width == 8:
        return torch.arange(-128, 128, dtype=torch.float32)
    return _lloyd_max(2**width).bfloat16().float()


@functools.cache
def thresholds(width: int) -> torch.Tensor:
    """Where one level gives way to the next: float32 ``[2 ** width - 1]``, midpoints."""
    table = levels(width)
    return (table[1:] + table[:-1]) / 2


def _lloyd_max(count: int) -> torch.Tensor:
    """Levels with the least mean squared error for a standard normal variable, float64."""
    found = torch.linspace(-2.0, 2.0, count, dtype=torch.float64)
    infinity = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(5000):
        edges = torch.cat([-infinity, (found[1:] + found[:-1]) / 2, infinity])
        mass = torch.special.ndtr(edges).diff()
        density = torch.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        found = -density.diff() / mass
    return (found - found.flip(0)) / 2


def run_bytes(num_codes: int, width: int) -> int:
    """Bytes of a run of codes."""
    return -(-num_codes * width // 8)


@dataclass(frozen=True)
class RowLayout:
    """Sizes of the rows of one group.

    Args:
        key_counts: key channels by width.
        value_counts: value channels by width.
        has_bias: whether a row carries a bias.
    """

    key_counts: Counts
    value_counts: Counts
    has_bias: bool = False

    @property
    def num_scales(self) -> int:
        """Scales of a row, the bias among them (``S``)."""
        return sum(1 for _ in self.scales())

    def scales(self) -> Iterator[str]:
        """Names of the scales in the order in which they are stored."""
        for name, counts in (("key", self.key_counts), ("value", self.value_counts)):
            if any(counts[1:]):
                yield f"{name}_rms"
            if counts[0]:
                yield f"{name}_max"
        if self.has_bias:
            yield "bias"

    @property
    def key_bits(self) -> int:
        return sum(n * b for n, b in zip(self.key_counts, WIDTHS, strict=True))

    @property
    def value_bytes(self) -> int:
        """Bytes of one value row."""
        return sum(run_bytes(n, b) for n, b in zip(self.value_counts, WIDTHS, strict=True))

    @property
    def row_bits(self) -> int:
        """Bits of a row, scales and the padding of its value included."""
        scale_bits = 8 * SCALE_DTYPE.itemsize * self.num_scales
        return scale_bits + self.key_bits + 8 * self.value_bytes

    def rows_per_cell(self, cell_bytes: int) -> int:
        """Rows that fit a cell (``R``), a multiple of `ROW_STEP`.

        Raises:
            ValueError: not even `ROW_STEP` of them do.
        """
        rows = 8 * cell_bytes // (self.row_bits * ROW_STEP) * ROW_STEP if self.row_bits else 0
        if rows == 0:
            raise ValueError(
                f"rows of {self.row_bits} bits: {ROW_STEP} of them must fit a cell of {cell_bytes} "
                "bytes, and rows of 0 bits are no code"
            )
        return rows

    def key_offset(self, rows: int) -> int:
        """Byte in a cell at which the key planes begin."""
        return self.num_scales * rows * SCALE_DTYPE.itemsize

    def value_offset(self, rows: int) -> int:
        """Byte in a cell at which the value rows begin."""
        return self.key_offset(rows) + rows * self.key_bits // 8


def pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Pack runs of codes: uint8 ``[..., n] -> [..., run_bytes(n, width)]``."""
    per_byte = 8 // width
    stride = run_bytes(codes.shape[-1], width)
    padded = torch.nn.functional.pad(codes, (0, stride * per_byte - codes.shape[-1]))
    parts = padded.unflatten(-1, (per_byte, stride)).to(torch.int32)
    shifts = torch.arange(per_byte, dtype=torch.int32)[:, None] * width
    return (parts << shifts).sum(-2).to(torch.uint8)


def unpack(packed: torch.Tensor, num_codes: int, width: int) -> torch.Tensor:
    """The inverse of `pack`: uint8 ``[..., n]``."""
    per_byte = 8 // width
    shifts = torch.arange(per_byte, dtype=torch.int32)[:, None] * width
    parts = (packed[..., None, :].to(torch.int32) >> shifts) & (2**width - 1)
    return parts.flatten(-2)[..., :num_codes].to(torch.uint8)


@dataclass(frozen=True)
class Codes:
    """Coded rows of one group, not yet packed.

    Args:
        keys: uint8 ``[m, r_k]``, indices of levels, channels in the order of the layout.
        values: uint8 ``[m, r_v]``.
        scales: float16 ``[S, m]``, in the order of `RowLayout.scales`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.keys.shape[0]


def write_cell(cell: torch.Tensor, codes: Codes, layout: RowLayout) -> None:
    """Write up to ``R`` rows into one cell.

    Args:
        cell: uint8 ``[cell_bytes]``, contiguous, written; the bits of rows past the end become 0.
        codes: ``m <= R`` rows.
    """
    rows = layout.rows_per_cell(cell.numel())
    missing = rows - codes.num_rows
    assert missing >= 0, (codes.num_rows, rows)
    scales = torch.nn.functional.pad(codes.scales, (0, missing)).contiguous()
    keys = torch.nn.functional.pad(codes.keys, (0, 0, 0, missing))
    values = torch.nn.functional.pad(codes.values, (0, 0, 0, missing))
    parts = [scales.view(torch.uint8).flatten()]
    for part, width in zip(keys.split(list(layout.key_counts), 1), WIDTHS, strict=True):
        parts.append(pack(part.T, width).flatten())
    split = zip(values.split(list(layout.value_counts), 1), WIDTHS, strict=True)
    parts.append(torch.cat([pack(part, width) for part, width in split], 1).flatten())
    content = torch.cat(parts)
    cell[: content.numel()] = content


def read_cell(cell: torch.Tensor, num_rows: int, layout: RowLayout) -> Codes:
    """Read back what `write_cell` wrote, copies."""
    rows = layout.rows_per_cell(cell.numel())
    start, stop = layout.key_offset(rows), layout.value_offset(rows)
    scales = cell[:start].clone().view(SCALE_DTYPE).view(layout.num_scales, rows)
    keys, values = [], []
    offset = start
    for count, width in zip(layout.key_counts, WIDTHS, strict=True):
        size = count * run_bytes(rows, width)
        planes = cell[offset : offset + size].view(count, run_bytes(rows, width))
        keys.append(unpack(planes, rows, width).T)
        offset += size
    assert offset == stop
    table = cell[stop : stop + rows * layout.value_bytes].view(rows, layout.value_bytes)
    offset = 0
    for count, width in zip(layout.value_counts, WIDTHS, strict=True):
        size = run_bytes(count, width)
        values.append(unpack(table[:, offset : offset + size], count, width))
        offset += size
    return Codes(
        torch.cat(keys, 1)[:num_rows], torch.cat(values, 1)[:num_rows], scales[:, :num_rows]
    )


def _cells(kv_cache: torch.Tensor, slab: torch.Tensor, first_cell: int) -> Iterator[torch.Tensor]:
    """Cells of a slab from ``first_cell`` on, as views of bytes."""
    num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    geometry = SlabGeometry(num_layers, num_kv_heads, block_size)
    for cell in itertools.count(first_cell):
        index, layer, head = geometry.locate(cell)
        yield kv_cache[layer, int(slab[index]), head].view(-1).view(torch.uint8)


def write_rows(
    kv_cache: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
    codes: Codes,
    layout: RowLayout,
) -> None:
    """Write the coded rows of one group into consecutive cells of a slab.

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``, written.
        slab: int ``[c]``, block ids.
        first_cell: cell of the first row.
        codes: ``m`` rows.
    """
    cells = _cells(kv_cache, slab, first_cell)
    start = 0
    while start < codes.num_rows:
        cell = next(cells)
        stop = start + layout.rows_per_cell(cell.numel())
        part = Codes(codes.keys[start:stop], codes.values[start:stop], codes.scales[:, start:stop])
        write_cell(cell, part, layout)
        start = stop


def read_rows(
    kv_cache: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
    num_rows: int,
    layout: RowLayout,
) -> Codes:
    """Read back what `write_rows` wrote, copies."""
    cells = _cells(kv_cache, slab, first_cell)
    keys = [torch.empty(0, sum(layout.key_counts), dtype=torch.uint8)]
    values = [torch.empty(0, sum(layout.value_counts), dtype=torch.uint8)]
    scales = [torch.empty(layout.num_scales, 0, dtype=SCALE_DTYPE)]
    while num_rows > 0:
        cell = next(cells)
        count = min(num_rows, layout.rows_per_cell(cell.numel()))
        part = read_cell(cell, count, layout)
        keys.append(part.keys)
        values.append(part.values)
        scales.append(part.scales)
        num_rows -= count
    return Codes(torch.cat(keys), torch.cat(values), torch.cat(scales, 1))


def gpu_rows(pool: torch.Tensor) -> torch.Tensor:
    """Copy a GPU pool ``[2, L, B, H, N, D]`` into cells ``[L, B, H, N, 2 * D]``, the bytes of each
    in the order in which rows are written there: the key of a slot, its value, the next slot."""
    return pool.movedim(0, 4).flatten(4).clone(memory_format=torch.contiguous_format)


def copy_gpu_rows(cells: torch.Tensor, pool: torch.Tensor) -> None:
    """Copy what `gpu_rows` made back into a GPU pool."""
    pool.copy_(cells.unflatten(4, (2, -1)).movedim(4, 0))


@dataclass(frozen=True)
class SideCodec:
    """Transform and coder of the keys or the values of one group.

    With ``x`` the concatenated heads of a token, ``[group_size * D]``:
    ``z = (x - mean) @ encode`` are the channels, scaled so that their levels are those of
    `levels` up to the scales of the row; ``x' = mean + (scale * level) @ decode``.

    Args:
        counts: channels by width.
        mean: float32 ``[group_size * D]``.
        encode: float32 ``[group_size * D, r]``, channels in class order.
        decode: float32 ``[r, group_size * D]``.
    """

    counts: Counts
    mean: torch.Tensor
    encode: torch.Tensor
    decode: torch.Tensor

    @property
    def num_channels(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class GroupCodec:
    """All that it takes to code the rows of one group and to attend to them."""

    keys: SideCodec
    values: SideCodec
    has_bias: bool = False

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.keys.counts, self.values.counts, self.has_bias)
