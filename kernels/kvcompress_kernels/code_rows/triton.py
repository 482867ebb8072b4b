"""`code_rows` for GPUs: scales of the rows, key planes and value rows, straight into the cells.

    scales   one program per 16 rows: root mean square and largest magnitude, float64 sums
    keys     one program per cell and up to 32 channels of one width
    values   one program per 16 rows of a cell and up to 32 bytes of one width

A cell's bytes are the key of its first slot, the value of it, the next slot, and so on; strides are
arbitrary. Scales, divisions and thresholds are those of the reference, so that the bytes are too.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcompress_kernels import code_format
from kvcompress_kernels.code_format import WIDTHS, Counts, GroupCodec, RowLayout, run_bytes
from kvcompress_kernels.formats import gpu_gather_prompt
from kvcompress_kernels.triton_cells import base_of_cell, bytes_of_cell

ROWS = 16
"""Rows of one program."""

TILE = 32
"""Channels, or bytes of a value, of one program."""

_SMALLEST = tl.constexpr(code_format.SMALLEST_SCALE)
_LARGEST = tl.constexpr(65504.0)
# added to a float32 of up to 2^22 and taken away, it leaves the nearest integer, halves to even
_ROUND = tl.constexpr(12582912.0)
_TILE_ROWS = 8192


@triton.jit
def _scales_of(z_ptr, row, row_mask, stride, num_wide, num_channels, CHUNK: tl.constexpr):
    """Root mean square of the narrow channels and largest magnitude of the wide ones, over 128."""
    total = tl.zeros_like(row).to(tl.float64)
    largest = tl.zeros_like(row).to(tl.float32)
    for first in range(0, num_channels, CHUNK):
        channel = first + tl.arange(0, CHUNK)
        mask = row_mask[:, None] & (channel < num_channels)[None, :]
        z = tl.load(z_ptr + row[:, None] * stride + channel[None, :], mask=mask, other=0.0)
        wide = (channel < num_wide)[None, :]
        narrow = tl.where(wide, 0.0, z).to(tl.float64)
        total += tl.sum(narrow * narrow, axis=1)
        largest = tl.maximum(largest, tl.max(tl.where(wide, tl.abs(z), 0.0), axis=1))
    mean = total / tl.maximum(num_channels - num_wide, 1).to(tl.float64)
    return tl.sqrt(mean).to(tl.float32), largest / 128.0


@triton.jit
def _store_scale(
    scale, index, row, row_mask, base, inside, cache_ptr, scales_ptr, num_rows, rows_per_cell,
    CACHE_STRIDES, HALF: tl.constexpr,
):  # fmt: skip
    """A plane of scales, in the scratch memory and in the cells; nothing for an index below 0."""
    if index >= 0:
        tl.store(scales_ptr + index * num_rows + row, scale, mask=row_mask & (row < num_rows))
        # two bytes lie together, whatever the strides are
        at = bytes_of_cell(
            (index * rows_per_cell + inside) * 2, CACHE_STRIDES[0], CACHE_STRIDES[4], HALF
        )
        tl.store(cache_ptr + (base + at) // 2, scale, mask=row_mask)


@triton.jit(do_not_specialize=["num_rows", "rows_per_cell", "first_cell"])
def scales_kernel(
    z_keys_ptr,
    z_values_ptr,
    bias_ptr,
    numbers_ptr,
    slab_ptr,
    cache_ptr,
    scales_ptr,
    num_rows,
    rows_per_cell,
    first_cell,
    key_stride,
    value_stride,
    CACHE_STRIDES,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (tiles of a cell's rows, cells): scales of the rows, 0 past the end.

    ``cache_ptr`` is to float16; ``CACHE_STRIDES`` are in bytes.
    """
    inside = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cell = tl.program_id(1)
    row = (cell * rows_per_cell + inside).to(tl.int64)
    in_cell = inside < rows_per_cell
    row_mask = in_cell & (row < num_rows)
    base = base_of_cell(first_cell + cell, slab_ptr, CACHE_STRIDES[1:4], NUM_LAYERS, NUM_KV_HEADS)
    zero = tl.zeros([ROWS], tl.float32)
    for side in tl.static_range(2):
        z_ptr = z_keys_ptr if side == 0 else z_values_ptr
        stride = key_stride if side == 0 else value_stride
        num_wide = tl.load(numbers_ptr + side * 4)
        num_channels = tl.load(numbers_ptr + side * 4 + 1)
        rms, largest = _scales_of(z_ptr, row, row_mask, stride, num_wide, num_channels, CHUNK)
        for kind in tl.static_range(2):
            found = rms if kind == 0 else largest
            found = tl.minimum(tl.maximum(found, _SMALLEST), _LARGEST)
            scale = tl.where(row_mask, found, zero).to(tl.float16)
            index = tl.load(numbers_ptr + side * 4 + 2 + kind)
            _store_scale(
                scale, index, row, in_cell, base, inside, cache_ptr, scales_ptr, num_rows,
                rows_per_cell, CACHE_STRIDES, HALF,
            )  # fmt: skip
    index = tl.load(numbers_ptr + 8)
    bias = zero.to(tl.float16)
    if index >= 0:
        bias = tl.load(bias_ptr + row, mask=row_mask, other=0.0).to(tl.float16)
    _store_scale(
        bias, index, row, in_cell, base, inside, cache_ptr, scales_ptr, num_rows, rows_per_cell,
        CACHE_STRIDES, HALF,
    )  # fmt: skip


@triton.jit
def _codes_of(z, scale, width, threshold_ptr):
    """Codes of one width, int32; ``z`` and ``scale`` of one shape."""
    x = tl.div_rn(z, scale)
    if width == 8:
        level = (x + _ROUND) - _ROUND
        codes = tl.minimum(tl.maximum(level, -128.0), 127.0).to(tl.int32) + 128
    else:
        codes = tl.zeros_like(z).to(tl.int32)
        # those of the widths 4, 2 and 1 follow one another
        first = tl.where(width == 4, 0, tl.where(width == 2, 15, 18))
        for index in range((1 << width) - 1):
            codes += (x > tl.load(threshold_ptr + first + index)).to(tl.int32)
    return codes


@triton.jit(do_not_specialize=["num_rows", "rows_per_cell", "first_cell"])
def keys_kernel(
    z_ptr,
    tiles_ptr,
    threshold_ptr,
    scales_ptr,
    slab_ptr,
    cache_ptr,
    num_rows,
    rows_per_cell,
    first_cell,
    z_stride,
    CACHE_STRIDES,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (tiles of channels, cells): planes of up to TILE channels of one width."""
    numbers = tiles_ptr + tl.program_id(0) * 5
    width, offset, first_channel = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    num_channels, scale_index = tl.load(numbers + 3), tl.load(numbers + 4)
    cell = tl.program_id(1)
    base = base_of_cell(first_cell + cell, slab_ptr, CACHE_STRIDES[1:4], NUM_LAYERS, NUM_KV_HEADS)
    run = rows_per_cell * width // 8
    channel = tl.arange(0, TILE)
    channel_mask = channel < num_channels
    for first in range(0, run, ROWS):
        byte = first + tl.arange(0, ROWS)
        packed = tl.zeros([ROWS, TILE], tl.int32)
        for part in range(8 // width):
            inside = byte + part * run
            row = (cell * rows_per_cell + inside).to(tl.int64)
            row_mask = (byte < run) & (inside < rows_per_cell) & (row < num_rows)
            mask = row_mask[:, None] & channel_mask[None, :]
            at = row[:, None] * z_stride + (first_channel + channel)[None, :]
            z = tl.load(z_ptr + at, mask=mask, other=0.0)
            scale = tl.load(scales_ptr + scale_index * num_rows + row, mask=row_mask, other=1.0)
            scale = scale.to(tl.float32)[:, None] + tl.zeros([ROWS, TILE], tl.float32)
            codes = _codes_of(z, scale, width, threshold_ptr)
            packed |= tl.where(mask, codes, 0) << (part * width)
        at = bytes_of_cell(
            offset + channel[None, :] * run + byte[:, None],
            CACHE_STRIDES[0],
            CACHE_STRIDES[4],
            HALF,
        )
        mask = (byte < run)[:, None] & channel_mask[None, :]
        tl.store(cache_ptr + base + at, packed.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "rows_per_cell", "first_cell", "value_bytes"])
def values_kernel(
    z_ptr,
    tiles_ptr,
    threshold_ptr,
    scales_ptr,
    slab_ptr,
    cache_ptr,
    num_rows,
    rows_per_cell,
    first_cell,
    value_bytes,
    z_stride,
    CACHE_STRIDES,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (tiles of bytes * tiles of a cell's rows, cells): up to TILE bytes of ROWS values."""
    num_row_tiles = tl.cdiv(rows_per_cell, ROWS)
    numbers = tiles_ptr + tl.program_id(0) // num_row_tiles * 7
    width, offset, first_channel = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    num_bytes, scale_index = tl.load(numbers + 3), tl.load(numbers + 4)
    run, end_channel = tl.load(numbers + 5), tl.load(numbers + 6)
    cell = tl.program_id(1)
    base = base_of_cell(first_cell + cell, slab_ptr, CACHE_STRIDES[1:4], NUM_LAYERS, NUM_KV_HEADS)
    inside = tl.program_id(0) % num_row_tiles * ROWS + tl.arange(0, ROWS)
    row = (cell * rows_per_cell + inside).to(tl.int64)
    row_mask = (inside < rows_per_cell) & (row < num_rows)
    byte = tl.arange(0, TILE)
    scale = tl.load(scales_ptr + scale_index * num_rows + row, mask=row_mask, other=1.0)
    scale = scale.to(tl.float32)[:, None] + tl.zeros([ROWS, TILE], tl.float32)
    packed = tl.zeros([ROWS, TILE], tl.int32)
    for part in range(8 // width):
        channel = first_channel + part * run + byte
        mask = row_mask[:, None] & ((byte < num_bytes) & (channel < end_channel))[None, :]
        z = tl.load(z_ptr + row[:, None] * z_stride + channel[None, :], mask=mask, other=0.0)
        codes = _codes_of(z, scale, width, threshold_ptr)
        packed |= tl.where(mask, codes, 0) << (part * width)
    at = bytes_of_cell(
        offset + inside[:, None] * value_bytes + byte[None, :],
        CACHE_STRIDES[0],
        CACHE_STRIDES[4],
        HALF,
    )
    mask = (inside < rows_per_cell)[:, None] & (byte < num_bytes)[None, :]
    tl.store(cache_ptr + base + at, packed.to(tl.uint8), mask=mask)


@dataclass(frozen=True)
class LayoutTables:
    """A layout of rows in cells of one size, as the kernels take it.

    Args:
        numbers: int32 ``[9]``: wide channels, all channels, and the indices of the scales of the
            narrow and of the wide ones (-1 where there are none), of keys and of values; then that
            of the bias.
        key_tiles: int32 ``[tiles, 5]``: width, first byte in the cell, first channel, channels,
            index of the scale.
        value_tiles: int32 ``[tiles, 7]``: width, first byte in the cell, first channel, bytes,
            index of the scale, bytes of the run, channel after the last one of the width.
        thresholds: float32 ``[19]``, of the widths 4, 2 and 1.
        rows: rows of a cell.
    """

    numbers: torch.Tensor
    key_tiles: torch.Tensor
    value_tiles: torch.Tensor
    thresholds: torch.Tensor
    rows: int


def scale_indices(layout: RowLayout) -> tuple[list[int], list[int], int]:
    """Places of the scales of narrow and wide channels, of keys, of values; and of the bias."""
    place = {name: index for index, name in enumerate(layout.scales())}
    sides = [
        [place.get(f"{name}_rms", -1), place.get(f"{name}_max", -1)] for name in ("key", "value")
    ]
    return sides[0], sides[1], place.get("bias", -1)


@functools.lru_cache(maxsize=4096)
def layout_tables(layout: RowLayout, cell_bytes: int, device: torch.device) -> LayoutTables:
    """Tables of a layout on a device; made once."""
    rows = layout.rows_per_cell(cell_bytes)
    key_scales, value_scales, bias = scale_indices(layout)
    numbers: list[int] = []
    for counts, scales in ((layout.key_counts, key_scales), (layout.value_counts, value_scales)):
        numbers += [counts[0], sum(counts), *scales]
    key_tiles = _key_tiles(layout.key_counts, layout.key_offset(rows), rows, key_scales)
    value_tiles = _value_tiles(layout.value_counts, layout.value_offset(rows), value_scales)
    thresholds = torch.cat([code_format.thresholds(width) for width in WIDTHS if width <= 4])

    def table(content: list[list[int]], width: int) -> torch.Tensor:
        return torch.tensor(content, dtype=torch.int32).reshape(-1, width).to(device)

    return LayoutTables(
        torch.tensor([*numbers, bias], dtype=torch.int32, device=device),
        table(key_tiles, 5),
        table(value_tiles, 7),
        thresholds.to(device),
        rows,
    )


def _key_tiles(counts: Counts, offset: int, rows: int, scales: list[int]) -> list[list[int]]:
    tiles, channel = [], 0
    for count, width in zip(counts, WIDTHS, strict=True):
        for first in range(0, count, TILE):
            size = min(TILE, count - first)
            tiles.append([width, offset, channel + first, size, scales[width == 8]])
            offset += size * run_bytes(rows, width)
        channel += count
    return tiles


def _value_tiles(counts: Counts, offset: int, scales: list[int]) -> list[list[int]]:
    tiles, channel = [], 0
    for count, width in zip(counts, WIDTHS, strict=True):
        run = run_bytes(count, width)
        for first in range(0, run, TILE):
            size, end = min(TILE, run - first), channel + count
            scale = scales[width == 8]
            tiles.append([width, offset + first, channel + first, size, scale, run, end])
        offset += run
        channel += count
    return tiles


def byte_strides(kv_cache: torch.Tensor) -> tuple[int, ...]:
    """Strides in bytes of key and value, layer, block, head and slot."""
    return tuple(stride * kv_cache.element_size() for stride in kv_cache.stride()[:5])


def cell_bytes_of(kv_cache: torch.Tensor) -> int:
    """Bytes of a cell of a GPU pool."""
    return 2 * kv_cache.shape[4] * kv_cache.shape[5] * kv_cache.element_size()


def code_rows(
    z_keys: torch.Tensor,
    z_values: torch.Tensor,
    bias: torch.Tensor | None,
    layout: RowLayout,
    kv_cache: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
) -> int:
    """See `api.code_rows`; arguments are not checked, and nothing waits for the device."""
    _, num_layers, _, num_kv_heads, _, head_size = kv_cache.shape
    tables = layout_tables(layout, cell_bytes_of(kv_cache), kv_cache.device)
    num_rows, rows = z_keys.shape[0], tables.rows
    num_cells = triton.cdiv(num_rows, rows)
    if num_rows == 0:
        return first_cell
    scales = torch.empty(
        (max(layout.num_scales, 1), num_rows), dtype=torch.float16, device=kv_cache.device
    )
    cache = kv_cache.view(torch.uint8)
    strides = byte_strides(kv_cache)
    sizes = {
        "NUM_LAYERS": num_layers,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": head_size * kv_cache.element_size(),
        "ROWS": ROWS,
        "num_warps": 4,
    }
    row_tiles = triton.cdiv(rows, ROWS)
    scales_kernel[(row_tiles, num_cells)](
        z_keys,
        z_values,
        scales if bias is None else bias,
        tables.numbers,
        slab,
        kv_cache.view(torch.float16),
        scales,
        num_rows,
        rows,
        first_cell,
        z_keys.stride(0),
        z_values.stride(0),
        strides,
        CHUNK=64,
        **sizes,
    )
    common = (tables.thresholds, scales, slab, cache, num_rows, rows, first_cell)
    if tables.key_tiles.numel():
        keys_kernel[(len(tables.key_tiles), num_cells)](
            z_keys, tables.key_tiles, *common, z_keys.stride(0), strides, TILE=TILE, **sizes
        )
    if tables.value_tiles.numel():
        values_kernel[(len(tables.value_tiles) * row_tiles, num_cells)](
            z_values,
            tables.value_tiles,
            *common,
            layout.value_bytes,
            z_values.stride(0),
            strides,
            TILE=TILE,
            **sizes,
        )
    return first_cell + num_cells


@dataclass(frozen=True)
class EncodeMatrices:
    """What turns keys and values of one group into channels, on the device: float32 matrices
    ``[group_size * D, r]``, and what the means add, ``[r]``."""

    keys: torch.Tensor
    values: torch.Tensor
    key_offset: torch.Tensor
    value_offset: torch.Tensor

    @classmethod
    def of(cls, codec: GroupCodec, device: torch.device) -> EncodeMatrices:
        sides = (codec.keys, codec.values)
        offsets = [-(side.mean @ side.encode) for side in sides]
        return cls(*(t.to(device) for t in (*(side.encode for side in sides), *offsets)))

    def transform(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Channels of ``[group_size, m, D]``."""
        flat_keys, flat_values = (x.transpose(0, 1).flatten(1).float() for x in (keys, values))
        return (
            torch.addmm(self.key_offset, flat_keys, self.keys),
            torch.addmm(self.value_offset, flat_values, self.values),
        )


def encode_prompt(
    kv_cache: torch.Tensor,
    layer: int,
    source: torch.Tensor,
    first_head: int,
    codec: GroupCodec,
    slab: torch.Tensor,
    first_cell: int,
    *,
    start: int = 0,
    stop: int | None = None,
    bias: torch.Tensor | None = None,
    matrices: EncodeMatrices | None = None,
) -> int:
    """See `api.encode_prompt`; ``matrices`` saves the copy of the codec to the device."""
    block_size, head_size = kv_cache.shape[4:]
    stop = source.numel() * block_size if stop is None else stop
    heads = slice(first_head, first_head + codec.keys.mean.numel() // head_size)
    matrices = EncodeMatrices.of(codec, kv_cache.device) if matrices is None else matrices
    rows = codec.layout.rows_per_cell(cell_bytes_of(kv_cache))
    tile = triton.cdiv(_TILE_ROWS, rows) * rows
    for begin in range(start, stop, tile):
        end = min(begin + tile, stop)
        first_block = begin // block_size
        blocks = source[first_block : triton.cdiv(end, block_size)]
        inside = slice(begin - first_block * block_size, end - first_block * block_size)
        keys, values = gpu_gather_prompt(kv_cache, layer, blocks)
        first_cell = code_rows(
            *matrices.transform(keys[heads, inside], values[heads, inside]),
            None if bias is None else bias[begin - start : end - start].float().contiguous(),
            codec.layout,
            kv_cache,
            slab,
            first_cell,
        )
    return first_cell
