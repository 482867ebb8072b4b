"""`coded_attention` for GPUs: the query meets codes, the output leaves the space of the codes once.

    fold     one program per query and head: the query times the decoding matrix of the keys
    attend   one program per (query, lanes of a group, part of the rows): unpacks the codes of a
             tile of rows, their logits, and their weighted values, still in the space of the codes
    unfold   one program per query and head: adds the parts up, and multiplies them by the decoding
             matrix of the values

Coded rows are visible to every query, so the queries of a row are independent of one another. A
query of a row is a *unit*: unit ``k * max_query_len + t`` is query ``t`` of ``rows[k]``. The query
heads of the KV heads of a group are *lanes*, which share the codes of a row.

Widths, counts and offsets differ by layer and group. They are read from tables on the device, so
that all layers have the same compiled kernel, and a captured launch reads memory that stays where
it is. A tile of keys has channels of one width; a value has a table of its channels.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcompress_kernels import code_format
from kvcompress_kernels.code_format import WIDTHS, GroupCodec, RowLayout, run_bytes
from kvcompress_kernels.code_rows.triton import byte_strides, cell_bytes_of, scale_indices
from kvcompress_kernels.triton_cells import base_of_cell, bytes_of_cell

KEY_TILE = 32
"""Channels of a tile of keys, all of one width."""

CHUNK = 32
"""Channels that folding and unfolding take at once."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_NUM_NUMBERS = tl.constexpr(9)
_MIN_TILES = tl.constexpr(4)


@triton.jit
def _find_unit(rows_ptr, query_start_ptr, unit, max_query_len):
    """Row of a unit, its query among those of the batch, and whether there is such a query."""
    row = tl.load(rows_ptr + unit // max_query_len)
    token = unit % max_query_len
    start = tl.load(query_start_ptr + row)
    return row, (start + token).to(tl.int64), token < tl.load(query_start_ptr + row + 1) - start


@triton.jit(do_not_specialize=["max_query_len"])
def fold_kernel(
    query_ptr,
    fold_ptr,
    mean_ptr,
    folded_ptr,
    shift_ptr,
    query_start_ptr,
    rows_ptr,
    max_query_len,
    QUERY_STRIDES,
    RATIO: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (units, query heads): float32 ``folded[unit, head]``, and in ``shift`` its largest
    magnitude and the product with the mean key."""
    unit, head = tl.program_id(0), tl.program_id(1)
    _, query_at, exists = _find_unit(rows_ptr, query_start_ptr, unit, max_query_len)
    if not exists:
        return
    dimension = tl.arange(0, BLOCK_D)
    mask = dimension < HEAD_SIZE
    at = query_at * QUERY_STRIDES[0] + head * QUERY_STRIDES[1]
    query = tl.load(query_ptr + at + dimension, mask=mask, other=0.0).to(tl.float32)
    kv_head = head // RATIO
    mean = tl.load(mean_ptr + kv_head * HEAD_SIZE + dimension, mask=mask, other=0.0)
    place = unit.to(tl.int64) * NUM_HEADS + head
    largest = tl.full([], 0.0, tl.float32)
    for first in range(0, KEY_WIDTH, CHUNK):
        channel = first + tl.arange(0, CHUNK)
        matrix = tl.load(
            fold_ptr
            + (kv_head * HEAD_SIZE + dimension).to(tl.int64)[:, None] * KEY_WIDTH
            + channel[None, :],
            mask=mask[:, None],
            other=0.0,
        )
        folded = tl.sum(query[:, None] * matrix.to(tl.float32), axis=0)
        tl.store(folded_ptr + place * KEY_WIDTH + channel, folded)
        largest = tl.maximum(largest, tl.max(tl.abs(folded), axis=0))
    tl.store(shift_ptr + place * 2, tl.where(largest > 0.0, largest, 1.0))
    tl.store(shift_ptr + place * 2 + 1, tl.sum(query * mean, axis=0))


@triton.jit
def _scale_of_rows(
    scale_ptr, index, base, inside, mask, rows_per_cell, BYTE_STRIDES, HALF: tl.constexpr
):
    """A plane of scales, float32 ``[n]``; 0 where masked, or where the layout has none."""
    scale = tl.zeros_like(inside).to(tl.float32)
    if index >= 0:
        at = bytes_of_cell(
            (index * rows_per_cell + inside) * 2, BYTE_STRIDES[0], BYTE_STRIDES[4], HALF
        )
        scale = tl.load(scale_ptr + (base + at) // 2, mask=mask, other=0.0).to(tl.float32)
    return scale


@triton.jit
def _logits(
    folded,
    key_tiles_ptr,
    levels_ptr,
    cache_ptr,
    num_tiles,
    base,
    inside,
    mask,
    rows_per_cell,
    narrow_scale,
    wide_scale,
    lane_mask,
    inverse,
    BYTE_STRIDES,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Products ``[BLOCK_M, TILE]`` of folded queries and rows, in units of the queries' largest."""
    logits = tl.zeros([BLOCK_M, TILE], tl.float32)
    channel = tl.arange(0, KEY_TILE)
    for tile in range(num_tiles):
        numbers = key_tiles_ptr + tile * 3
        width, offset, count = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
        run = rows_per_cell * width // 8
        byte = offset + channel[:, None] * run + (inside % run)[None, :]
        at = bytes_of_cell(byte, BYTE_STRIDES[0], BYTE_STRIDES[4], HALF)
        codes = tl.load(
            cache_ptr + base + at, mask=(channel < count)[:, None] & mask[None, :], other=0
        ).to(tl.int32)
        codes = (codes >> (inside // run * width)[None, :]) & ((1 << width) - 1)
        if width == 8:
            level = (codes - 128).to(tl.float32)
            scale = wide_scale
        else:
            first = tl.where(width == 4, 0, tl.where(width == 2, 16, 20))
            level = tl.load(levels_ptr + first + codes)
            scale = narrow_scale
        query = tl.load(
            folded[:, None] + (tile * KEY_TILE + channel)[None, :],
            mask=lane_mask[:, None],
            other=0.0,
        )
        query = (query * inverse[:, None]).to(DTYPE)
        product = tl.dot(query, level.to(DTYPE), input_precision="ieee")
        logits += product * scale[None, :]
    return logits


@triton.jit(do_not_specialize=["layer", "max_query_len", "table_stride"])
def attend_kernel(
    folded_ptr,
    shift_ptr,
    cache_ptr,
    scale_ptr,
    numbers_ptr,
    key_tiles_ptr,
    value_channels_ptr,
    levels_ptr,
    partial_ptr,
    stats_ptr,
    block_table_ptr,
    query_start_ptr,
    rows_ptr,
    slot_of_block_ptr,
    first_cell_ptr,
    num_rows_ptr,
    scale,
    layer,
    max_query_len,
    table_stride,
    BYTE_STRIDES,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    HALF: tl.constexpr,
    KEY_TILES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Grid (units * tiles of lanes, groups, splits): one part of the rows of one group.

    ``cache_ptr`` is to the bytes of the pool and ``scale_ptr`` to float16 of the same memory.
    """
    LANES: tl.constexpr = NUM_KV_HEADS // NUM_GROUPS * RATIO
    LANE_TILES: tl.constexpr = (LANES + BLOCK_M - 1) // BLOCK_M
    unit = tl.program_id(0) // LANE_TILES
    group = tl.program_id(1)
    split = tl.program_id(2)
    row, _, exists = _find_unit(rows_ptr, query_start_ptr, unit, max_query_len)
    if not exists:
        return
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    slot = tl.load(slot_of_block_ptr + tl.load(table_ptr))
    place = (slot.to(tl.int64) * NUM_LAYERS + layer) * NUM_GROUPS + group
    # slot 0 stands for rows without state, whatever its tables hold
    num_rows = tl.where(slot > 0, tl.load(num_rows_ptr + place), 0)
    first_cell = tl.load(first_cell_ptr + place)

    numbers = numbers_ptr + group * _NUM_NUMBERS
    rows_per_cell, num_tiles = tl.load(numbers), tl.load(numbers + 1)
    value_offset, value_bytes = tl.load(numbers + 2), tl.load(numbers + 3)
    key_rms, key_max = tl.load(numbers + 4), tl.load(numbers + 5)
    value_rms, value_max = tl.load(numbers + 6), tl.load(numbers + 7)
    bias_index = tl.load(numbers + 8)

    channel = tl.arange(0, VALUE_WIDTH)
    channels = value_channels_ptr + (group * VALUE_WIDTH + channel) * 3
    value_byte, value_shift = tl.load(channels), tl.load(channels + 1)
    value_code_width = tl.load(channels + 2)
    value_mask = (1 << value_code_width) - 1
    value_first = tl.where(value_code_width == 4, 0, tl.where(value_code_width == 2, 16, 20))
    is_wide, is_used = value_code_width == 8, value_code_width > 0

    lane = tl.program_id(0) % LANE_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    lane_mask = lane < LANES
    lane_at = unit.to(tl.int64) * (NUM_KV_HEADS * RATIO) + group * LANES + lane
    largest = tl.load(shift_ptr + lane_at * 2, mask=lane_mask, other=1.0)
    mean_logit = tl.load(shift_ptr + lane_at * 2 + 1, mask=lane_mask, other=0.0)
    folded = folded_ptr + lane_at * (KEY_TILES * KEY_TILE)

    accumulator = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    maximum = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # no tile is in two cells
    tiles_per_cell = tl.cdiv(rows_per_cell, TILE)
    all_tiles = num_rows // rows_per_cell * tiles_per_cell
    all_tiles += tl.cdiv(num_rows % rows_per_cell, TILE)
    tiles_per_split = tl.maximum(tl.cdiv(all_tiles, NUM_SPLITS), _MIN_TILES)
    begin = split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, all_tiles)
    for tile in range(begin, end):
        cell = tile // tiles_per_cell
        base = base_of_cell(
            first_cell + cell, table_ptr, BYTE_STRIDES[1:4], NUM_LAYERS, NUM_KV_HEADS
        )
        inside = tile % tiles_per_cell * TILE + tl.arange(0, TILE)
        mask = (inside < rows_per_cell) & (cell * rows_per_cell + inside < num_rows)
        logits = _logits(
            folded,
            key_tiles_ptr + group * (KEY_TILES * 3),
            levels_ptr,
            cache_ptr,
            num_tiles,
            base,
            inside,
            mask,
            rows_per_cell,
            _scale_of_rows(
                scale_ptr, key_rms, base, inside, mask, rows_per_cell, BYTE_STRIDES, HALF
            ),
            _scale_of_rows(
                scale_ptr, key_max, base, inside, mask, rows_per_cell, BYTE_STRIDES, HALF
            ),
            lane_mask,
            1.0 / largest,
            BYTE_STRIDES,
            HALF,
            BLOCK_M,
            TILE,
            KEY_TILE,
            DTYPE,
        )
        bias = _scale_of_rows(
            scale_ptr, bias_index, base, inside, mask, rows_per_cell, BYTE_STRIDES, HALF
        )
        logits = (logits * largest[:, None] + mean_logit[:, None]) * scale + bias[None, :]
        logits = tl.where(mask[None, :], logits * _LOG2_E, float("-inf"))

        at = bytes_of_cell(
            value_offset + inside[:, None] * value_bytes + value_byte[None, :],
            BYTE_STRIDES[0],
            BYTE_STRIDES[4],
            HALF,
        )
        both = mask[:, None] & is_used[None, :]
        codes = tl.load(cache_ptr + base + at, mask=both, other=0).to(tl.int32)
        codes = (codes >> value_shift[None, :]) & value_mask[None, :]
        level = tl.load(
            levels_ptr + value_first[None, :] + codes, mask=both & ~is_wide[None, :], other=0.0
        )
        level = tl.where(is_wide[None, :], (codes - 128).to(tl.float32), level)
        narrow = _scale_of_rows(
            scale_ptr, value_rms, base, inside, mask, rows_per_cell, BYTE_STRIDES, HALF
        )
        wide = _scale_of_rows(
            scale_ptr, value_max, base, inside, mask, rows_per_cell, BYTE_STRIDES, HALF
        )
        values = level * tl.where(is_wide[None, :], wide[:, None], narrow[:, None])

        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        correction = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(logits - new_maximum[:, None])
        total = total * correction + tl.sum(weights, axis=1)
        accumulator = accumulator * correction[:, None]
        accumulator = tl.dot(
            weights.to(DTYPE), values.to(DTYPE), accumulator, input_precision="ieee"
        )
        maximum = new_maximum

    part = lane_at * NUM_SPLITS + split
    tl.store(stats_ptr + part * 2, maximum, mask=lane_mask)
    tl.store(stats_ptr + part * 2 + 1, total, mask=lane_mask)
    if begin < end:
        target = partial_ptr + part[:, None] * VALUE_WIDTH + channel[None, :]
        tl.store(target, accumulator, mask=lane_mask[:, None])


@triton.jit(do_not_specialize=["max_query_len"])
def unfold_kernel(
    output_ptr,
    log_sum_ptr,
    unfold_ptr,
    mean_ptr,
    partial_ptr,
    stats_ptr,
    query_start_ptr,
    rows_ptr,
    max_query_len,
    OUTPUT_STRIDES,
    LOG_SUM_STRIDES,
    RATIO: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (units, query heads): output and log-sum of one query of one head."""
    unit, head = tl.program_id(0), tl.program_id(1)
    _, query_at, exists = _find_unit(rows_ptr, query_start_ptr, unit, max_query_len)
    if not exists:
        return
    kv_head = head // RATIO
    first_part = (unit.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS
    split = tl.arange(0, BLOCK_SPLITS)
    part = first_part + split
    split_mask = split < NUM_SPLITS
    maxima = tl.load(stats_ptr + part * 2, mask=split_mask, other=_LOWEST)
    totals = tl.load(stats_ptr + part * 2 + 1, mask=split_mask, other=0.0)
    maximum = tl.max(maxima, axis=0)
    weights = tl.exp2(maxima - maximum)
    total = tl.sum(totals * weights, axis=0)
    weights = weights / tl.where(total > 0.0, total, 1.0)

    dimension = tl.arange(0, BLOCK_D)
    mask = dimension < HEAD_SIZE
    output = tl.load(mean_ptr + kv_head * HEAD_SIZE + dimension, mask=mask, other=0.0)
    for first in range(0, VALUE_WIDTH, CHUNK):
        channel = first + tl.arange(0, CHUNK)
        # what an empty split left in `partial` is not its own
        latent = tl.load(
            partial_ptr + part[:, None] * VALUE_WIDTH + channel[None, :],
            mask=(totals > 0.0)[:, None] & split_mask[:, None],
            other=0.0,
        )
        latent = tl.sum(latent * weights[:, None], axis=0)
        matrix = tl.load(
            unfold_ptr
            + (kv_head * VALUE_WIDTH + channel).to(tl.int64)[:, None] * HEAD_SIZE
            + dimension[None, :],
            mask=mask[None, :],
            other=0.0,
        )
        output += tl.sum(latent[:, None] * matrix.to(tl.float32), axis=0)
    output = tl.where(total > 0.0, output, 0.0)
    target = output_ptr + query_at * OUTPUT_STRIDES[0] + head * OUTPUT_STRIDES[1] + dimension
    tl.store(target, output, mask=mask)
    log_sum = (maximum + tl.log2(tl.where(total > 0.0, total, 1.0))) * _LN_2
    log_sum = tl.where(total > 0.0, log_sum, float("-inf"))
    at = log_sum_ptr + query_at * LOG_SUM_STRIDES[0] + head * LOG_SUM_STRIDES[1]
    tl.store(at, log_sum)


@dataclass(frozen=True)
class DeviceCodecs:
    """Codecs of one layer on a device, in the form in which the kernels read them.

    Args:
        numbers: int32 ``[groups, 9]``: rows of a cell, tiles of keys, byte at which the values
            begin, bytes of a value, and the indices of the scales (-1 where there are none).
        key_tiles: int32 ``[groups, tiles, 3]``: width, first byte in the cell, channels.
        value_channels: int32 ``[groups, value_width, 3]``: byte in the value, shift, width; the
            width is 0 past the last channel.
        levels: float32 ``[22]``, of the widths 4, 2 and 1.
        fold: ``[H, D, tiles * KEY_TILE]`` in the dtype of the pool.
        unfold: ``[H, value_width, D]``, likewise.
        means: float32 ``[2, H, D]``, of keys and of values.
    """

    numbers: torch.Tensor
    key_tiles: torch.Tensor
    value_channels: torch.Tensor
    levels: torch.Tensor
    fold: torch.Tensor
    unfold: torch.Tensor
    means: torch.Tensor

    @property
    def num_groups(self) -> int:
        return self.numbers.shape[0]

    @property
    def num_key_tiles(self) -> int:
        return self.key_tiles.shape[1]

    @property
    def value_width(self) -> int:
        return self.value_channels.shape[1]


def sizes_of(layouts: Sequence[RowLayout]) -> tuple[int, int]:
    """Tiles of keys and width of values that hold every one of some layouts."""
    tiles = max(sum(triton.cdiv(n, KEY_TILE) for n in layout.key_counts) for layout in layouts)
    channels = max(sum(layout.value_counts) for layout in layouts)
    return max(tiles, 1), max(CHUNK, triton.next_power_of_2(channels))


def prepare(
    groups: Sequence[GroupCodec],
    num_kv_heads: int,
    kv_cache: torch.Tensor,
    sizes: tuple[int, int] | None = None,
) -> DeviceCodecs:
    """Bring the codecs of a layer to the device of a GPU pool.

    Args:
        groups: of the layer.
        num_kv_heads: ``H``.
        kv_cache: ``[2, L, B, H, N, D]``.
        sizes: what `sizes_of` says of all layers, so that they have one compiled kernel; of this
            layer by default.
    """
    key_tiles, value_width = sizes or sizes_of([group.layout for group in groups])
    cell_bytes = cell_bytes_of(kv_cache)
    numbers, tiles, channels, fold, unfold, means = [], [], [], [], [], []
    group_size = num_kv_heads // len(groups)
    for codec in groups:
        layout = codec.layout
        rows = layout.rows_per_cell(cell_bytes)
        own_tiles, positions = _key_tiles(layout, rows)
        key_scales, value_scales, bias = scale_indices(layout)
        numbers.append(
            [
                *(rows, len(own_tiles), layout.value_offset(rows), layout.value_bytes),
                *(*key_scales, *value_scales, bias),
            ]
        )
        tiles.append(own_tiles + [[1, 0, 0]] * (key_tiles - len(own_tiles)))
        own_channels = _value_channels(layout)
        channels.append(own_channels + [[0, 0, 0]] * (value_width - len(own_channels)))
        folded = torch.zeros(key_tiles * KEY_TILE, codec.keys.decode.shape[1])
        folded[positions] = codec.keys.decode.float()
        fold += [head.T for head in folded.chunk(group_size, dim=1)]
        unfolded = torch.zeros(value_width, codec.values.decode.shape[1])
        unfolded[: len(own_channels)] = codec.values.decode.float()
        unfold += list(unfolded.chunk(group_size, dim=1))
        means.append(torch.stack([codec.keys.mean, codec.values.mean]).float())

    def table(content: Sequence[object]) -> torch.Tensor:
        return torch.tensor(content, dtype=torch.int32, device=kv_cache.device)

    levels = torch.cat([code_format.levels(width) for width in WIDTHS if width <= 4])
    return DeviceCodecs(
        table(numbers),
        table(tiles),
        table(channels),
        levels.to(kv_cache.device),
        torch.stack(fold).to(kv_cache.device, kv_cache.dtype).contiguous(),
        torch.stack(unfold).to(kv_cache.device, kv_cache.dtype).contiguous(),
        torch.cat(means, 1).to(kv_cache.device).contiguous(),
    )


def _key_tiles(layout: RowLayout, rows: int) -> tuple[list[list[int]], torch.Tensor]:
    """Tiles of the channels of the keys, and where in them each channel is."""
    tiles: list[list[int]] = []
    positions: list[int] = []
    offset = layout.key_offset(rows)
    for count, width in zip(layout.key_counts, WIDTHS, strict=True):
        for first in range(0, count, KEY_TILE):
            size = min(KEY_TILE, count - first)
            positions += range(len(tiles) * KEY_TILE, len(tiles) * KEY_TILE + size)
            tiles.append([width, offset, size])
            offset += size * run_bytes(rows, width)
    return tiles, torch.tensor(positions, dtype=torch.long)


def _value_channels(layout: RowLayout) -> list[list[int]]:
    channels, offset = [], 0
    for count, width in zip(layout.value_counts, WIDTHS, strict=True):
        run = run_bytes(count, width)
        channels += [[offset + i % run, i // run * width, width] for i in range(count)]
        offset += run
    return channels


@dataclass(frozen=True)
class Tiling:
    """Sizes of the attention kernel.

    Args:
        block_m: lanes of a program.
        tile: rows of a tile.
        num_warps: warps of a program.
        max_registers: registers of a thread; without it ptxas takes fewer than it needs, and
            spills, where that lets one more program run on a multiprocessor.
    """

    block_m: int
    tile: int
    num_warps: int
    max_registers: int | None = None


def choose_tiling(num_lanes: int, value_width: int) -> Tiling:
    """Tiling by the lanes of a group and the width of its values."""
    block_m = max(16, min(32, triton.next_power_of_2(num_lanes)))
    # every code has an address of its own: with 32 rows registers spill. The compiler gives a
    # program as many as let a round number of programs run, so that the warps decide as well.
    if value_width > 128:
        return Tiling(block_m, 16, 8)
    if value_width > 64:
        return Tiling(block_m, 16, 2 if block_m == 16 else 4)
    return Tiling(block_m, 16, 4, max_registers=168)


DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def coded_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    slot_of_block: torch.Tensor,
    first_cell: torch.Tensor,
    num_rows: torch.Tensor,
    codecs: DeviceCodecs,
    scale: float,
    *,
    max_query_len: int,
    num_splits: int,
) -> None:
    """See `api.coded_attention`; arguments are not checked, and nothing waits for the device."""
    num_heads, head_size = query.shape[1:]
    _, num_layers, _, num_kv_heads, _, _ = kv_cache.shape
    num_units = rows.numel() * max_query_len
    if num_units == 0 or query.shape[0] == 0:
        return
    ratio, device = num_heads // num_kv_heads, kv_cache.device
    lanes = num_kv_heads // codecs.num_groups * ratio
    tiling = choose_tiling(lanes, codecs.value_width)
    key_width = codecs.num_key_tiles * KEY_TILE

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    folded, shift = scratch(num_units, num_heads, key_width), scratch(num_units, num_heads, 2)
    partial = scratch(num_units, num_heads, num_splits, codecs.value_width)
    stats = scratch(num_units, num_heads, num_splits, 2)
    units = (query_start_loc, rows)
    heads = {
        "RATIO": ratio,
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_size)),
        "CHUNK": CHUNK,
        "num_warps": 4,
    }
    fold_kernel[(num_units, num_heads)](
        query,
        codecs.fold,
        codecs.means[0],
        folded,
        shift,
        *units,
        max_query_len,
        query.stride()[:2],
        KEY_WIDTH=key_width,
        **heads,
    )
    attend_kernel[(num_units * triton.cdiv(lanes, tiling.block_m), codecs.num_groups, num_splits)](
        folded,
        shift,
        kv_cache.view(torch.uint8),
        kv_cache.view(torch.float16),
        codecs.numbers,
        codecs.key_tiles,
        codecs.value_channels,
        codecs.levels,
        partial,
        stats,
        block_table,
        *units,
        slot_of_block,
        first_cell,
        num_rows,
        scale,
        layer,
        max_query_len,
        block_table.stride(0),
        byte_strides(kv_cache),
        NUM_LAYERS=num_layers,
        NUM_KV_HEADS=num_kv_heads,
        NUM_GROUPS=codecs.num_groups,
        RATIO=ratio,
        HALF=head_size * kv_cache.element_size(),
        KEY_TILES=codecs.num_key_tiles,
        VALUE_WIDTH=codecs.value_width,
        BLOCK_M=tiling.block_m,
        TILE=tiling.tile,
        KEY_TILE=KEY_TILE,
        NUM_SPLITS=num_splits,
        DTYPE=DTYPES[kv_cache.dtype],
        num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers,
    )
    unfold_kernel[(num_units, num_heads)](
        output,
        log_sum,
        codecs.unfold,
        codecs.means[1],
        partial,
        stats,
        *units,
        max_query_len,
        output.stride()[:2],
        log_sum.stride(),
        VALUE_WIDTH=codecs.value_width,
        NUM_SPLITS=num_splits,
        BLOCK_SPLITS=max(2, triton.next_power_of_2(num_splits)),
        **heads,
    )
