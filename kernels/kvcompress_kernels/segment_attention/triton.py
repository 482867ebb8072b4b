"""`segment_attention` for GPUs: split over the keys, then a reduction.

The queries of one row and the query heads that share a KV head are *lanes* of one matrix: lane
``v`` of a (row, KV head) is query ``v // ratio``, head ``v % ratio`` of the heads that share it.
One program takes up to ``BLOCK_M`` lanes and one of up to ``NUM_SPLITS`` equal parts of their keys,
which are the tiles of the segment followed by the tiles of the raw tail:

    tiles      s0  s1  s2  s3' | t0  t1  t2'          ' = partly filled
    split      0---0---1---1---|-2---2---3

The parts are weighed and added by a second kernel (FlashDecoding; the running maximum and sum are
those of FlashAttention, arXiv 2205.14135). Launch grids depend on shapes and on numbers that the
caller gives, never on the contents of a tensor: a CUDA graph may replay the launches after the
tables have changed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcompress_kernels.triton_cells import (
    describe,
    is_interpreted,
    load_rows,
    slots_of_blocks,
    slots_of_cells,
)

MAX_RATIO = 16
MAX_SPLITS = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# a split writes and reads back as many bytes as a few keys have; below this many tiles it shows
_MIN_TILES = tl.constexpr(4)
_LOG2_E = tl.constexpr(1.4426950408889634)
# finite, so that a tile that is masked throughout yields 0 and not NaN
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@dataclass(frozen=True)
class Workspace:
    """Partial results of the splits; made once by `allocate_workspace`, reused by every call.

    Its ``num_splits`` is part of the result: sums are added in another order with another number.

    Args:
        partial: float32 ``[max_tokens, num_heads, num_splits, D]``, sums weighed by
            ``exp2(logit - maximum)``.
        stats: float32 ``[max_tokens, num_heads, num_splits, 2]``, maximum and denominator.
    """

    partial: torch.Tensor
    stats: torch.Tensor

    @property
    def max_tokens(self) -> int:
        return self.partial.shape[0]

    @property
    def num_splits(self) -> int:
        return self.partial.shape[2]


def choose_num_splits(num_rows: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Splits that give every multiprocessor about four programs; a power of two up to 128.

    Four hide the latency of one another's loads, and even out segments of different lengths.
    """
    wanted = 4 * num_multiprocessors / max(1, num_rows * num_kv_heads)
    splits = 1
    while splits < wanted and splits < MAX_SPLITS:
        splits *= 2
    return splits


def allocate_workspace(
    max_tokens: int, num_heads: int, head_size: int, num_splits: int, device: torch.device | str
) -> Workspace:
    """Memory for batches of up to ``max_tokens`` queries (of decode rows: the rows).

    Args:
        num_splits: 1 to `MAX_SPLITS`; see `choose_num_splits`.

    Raises:
        ValueError: ``num_splits`` is out of range.
    """
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits: expected 1 to {MAX_SPLITS}, got {num_splits}")
    shape = (max_tokens, num_heads, num_splits)
    return Workspace(
        torch.empty((*shape, head_size), dtype=torch.float32, device=device),
        torch.empty((*shape, 2), dtype=torch.float32, device=device),
    )


@dataclass(frozen=True)
class Tiling:
    """Sizes of the attention kernel for one kind of call.

    Args:
        block_m: lanes of a program.
        tile: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight, the one in use included.
        max_registers: registers of a thread; without it ptxas takes fewer than it needs, and
            spills, where that lets one more program run on a multiprocessor.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def choose_tiling(head_size: int, num_lanes: int, num_splits: int) -> Tiling:
    """Tiling by head size, by the lanes of one (row, KV head) and by the parts of their keys."""
    wide = triton.next_power_of_2(head_size) > 128
    if num_lanes <= 16:
        # with three stages and wide heads a few registers spill on sm_80, in one part with two
        if wide:
            return Tiling(16, 32, 4, 2, max_registers=255 if num_splits == 1 else None)
        return Tiling(16, 64, 4, 3)
    return Tiling(64, 32 if wide else 64, num_warps=8, num_stages=3)


def reduce_chunk(num_splits: int) -> int:
    """Splits that the reduction adds up at once."""
    return min(16, int(triton.next_power_of_2(num_splits)))


@triton.jit
def _softmax_update(accumulator, maximum, total, logits, values):
    """One step of the online softmax in base 2; values hold 0 where logits are -inf."""
    new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
    correction = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(logits - new_maximum[:, None])
    total = total * correction + tl.sum(weights, axis=1)
    accumulator = accumulator * correction[:, None]
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision="ieee")
    return accumulator, new_maximum, total


@triton.jit(do_not_specialize=["layer", "query_tiles"])
def attend_kernel(
    query_ptr,
    output_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    partial_ptr,
    stats_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    rows_ptr,
    slot_of_block_ptr,
    gap_end_ptr,
    first_cell_ptr,
    num_entries_ptr,
    partial_output_ptr,
    partial_log_sum_ptr,
    scale,
    layer,
    query_tiles,
    table_stride,
    QUERY_STRIDES,
    OUTPUT_STRIDES,
    CACHE_STRIDES,
    BIAS_STRIDES,
    PARTIAL_STRIDES,
    LOG_SUM_STRIDES,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_PARTIAL: tl.constexpr,
):
    """Grid (rows * query_tiles, KV heads, NUM_SPLITS); writes output if NUM_SPLITS is 1."""
    row = tl.load(rows_ptr + tl.program_id(0) // query_tiles)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first_lane = tl.program_id(0) % query_tiles * BLOCK_M
    query_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - query_start
    if first_lane >= query_len * RATIO:
        return

    seq_len = tl.load(seq_lens_ptr + row)
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    slot = tl.load(slot_of_block_ptr + tl.load(table_ptr)).to(tl.int64)
    place = (slot * NUM_LAYERS + layer) * NUM_KV_HEADS + head
    # slot 0 stands for rows without state, whatever its tables hold
    num_entries = tl.where(slot > 0, tl.load(num_entries_ptr + place), 0)
    first_cell = tl.load(first_cell_ptr + place)
    gap_end = tl.where(slot > 0, tl.load(gap_end_ptr + slot), 0)

    lane = first_lane + tl.arange(0, BLOCK_M)
    token = lane // RATIO
    query_head = head * RATIO + lane % RATIO
    lane_mask = token < query_len
    position = seq_len - query_len + token
    query_at = (query_start + token).to(tl.int64)
    query_offset = query_at * QUERY_STRIDES[0] + query_head.to(tl.int64) * QUERY_STRIDES[1]
    query = load_rows(query_ptr, query_offset, lane_mask, HEAD_SIZE, BLOCK_D)

    last_token = tl.minimum((first_lane + BLOCK_M - 1) // RATIO, query_len - 1)
    tail_end = seq_len - query_len + last_token + 1
    segment_tiles = tl.cdiv(num_entries, TILE)
    num_tiles = segment_tiles + tl.cdiv(tl.maximum(tail_end - gap_end, 0), TILE)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), _MIN_TILES)
    # known when compiled, for it is a register less where registers are short
    begin = 0 if NUM_SPLITS == 1 else split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, num_tiles)

    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    maximum = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    scale = scale * _LOG2_E
    dimension = tl.arange(0, BLOCK_D)
    store_mask = lane_mask[:, None] & (dimension < HEAD_SIZE)[None, :]
    if HAS_PARTIAL:  # noqa: SIM102 - known when the kernel is compiled, the other is not
        # the first part goes on from a softmax over other keys
        if split == 0:
            log_sum_at = query_at * LOG_SUM_STRIDES[0] + query_head * LOG_SUM_STRIDES[1]
            log_sum = tl.load(partial_log_sum_ptr + log_sum_at, mask=lane_mask, other=float("-inf"))
            goes_on = log_sum > float("-inf")
            partial_at = query_at * PARTIAL_STRIDES[0] + query_head * PARTIAL_STRIDES[1]
            accumulator = tl.load(
                partial_output_ptr + partial_at[:, None] + dimension[None, :],
                mask=store_mask & goes_on[:, None],
                other=0.0,
            )
            maximum = tl.where(goes_on, log_sum * _LOG2_E, _LOWEST)
            total = goes_on.to(tl.float32)

    # entries: in cells of the slab, with a bias, visible to every lane
    for tile in range(begin, tl.minimum(end, segment_tiles)):
        entries = tile * TILE + tl.arange(0, TILE)
        entry_mask = entries < num_entries
        offsets, bias_offsets = slots_of_cells(
            first_cell,
            tile * TILE,
            entries,
            entry_mask,
            table_ptr,
            CACHE_STRIDES,
            BIAS_STRIDES,
            NUM_LAYERS,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            BLOCK_SIZE % TILE == 0,
        )
        keys = load_rows(key_ptr, offsets, entry_mask, HEAD_SIZE, BLOCK_D)
        values = load_rows(value_ptr, offsets, entry_mask, HEAD_SIZE, BLOCK_D)
        bias = tl.load(bias_ptr + bias_offsets, mask=entry_mask, other=float("-inf"))
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        logits += bias[None, :] * _LOG2_E
        accumulator, maximum, total = _softmax_update(accumulator, maximum, total, logits, values)

    # raw tail: in blocks of the row from the end of the gap on, causal
    for tile in range(tl.maximum(begin, segment_tiles), end):
        first_key = gap_end + (tile - segment_tiles) * TILE
        key_position = first_key + tl.arange(0, TILE)
        key_mask = key_position < tail_end
        offsets = slots_of_blocks(
            first_key,
            key_position,
            key_mask,
            table_ptr,
            layer,
            head,
            CACHE_STRIDES,
            BLOCK_SIZE,
            BLOCK_SIZE % TILE == 0,
        )
        keys = load_rows(key_ptr, offsets, key_mask, HEAD_SIZE, BLOCK_D)
        values = load_rows(value_ptr, offsets, key_mask, HEAD_SIZE, BLOCK_D)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        visible = key_position[None, :] <= position[:, None]
        logits = tl.where(visible, logits, float("-inf"))
        accumulator, maximum, total = _softmax_update(accumulator, maximum, total, logits, values)

    if NUM_SPLITS == 1:
        # a lane that sees no key yields 0
        accumulator = accumulator / tl.where(total > 0.0, total, 1.0)[:, None]
        output_offset = query_at * OUTPUT_STRIDES[0]
        output_offset += query_head.to(tl.int64) * OUTPUT_STRIDES[1]
        target = output_ptr + output_offset[:, None] + dimension[None, :]
        tl.store(target, accumulator.to(output_ptr.dtype.element_ty), mask=store_mask)
    else:
        part = (query_at * (NUM_KV_HEADS * RATIO) + query_head) * NUM_SPLITS + split
        tl.store(stats_ptr + part * 2, maximum, mask=lane_mask)
        tl.store(stats_ptr + part * 2 + 1, total, mask=lane_mask)
        if (begin < end) | (HAS_PARTIAL & (split == 0)):
            target = partial_ptr + part[:, None] * HEAD_SIZE + dimension[None, :]
            tl.store(target, accumulator, mask=store_mask)


@triton.jit(do_not_specialize=["max_query_len"])
def reduce_kernel(
    output_ptr,
    partial_ptr,
    stats_ptr,
    query_start_ptr,
    rows_ptr,
    max_query_len,
    OUTPUT_STRIDES,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (rows * max_query_len, heads): add up the splits of one query of one head."""
    row = tl.load(rows_ptr + tl.program_id(0) // max_query_len)
    token = tl.program_id(0) % max_query_len
    head = tl.program_id(1)
    query_start = tl.load(query_start_ptr + row)
    if token >= tl.load(query_start_ptr + row + 1) - query_start:
        return
    query_at = (query_start + token).to(tl.int64)
    first_part = (query_at * NUM_HEADS + head) * NUM_SPLITS

    dimension = tl.arange(0, BLOCK_D)
    accumulator = tl.zeros([BLOCK_D], tl.float32)
    maximum = tl.full([], _LOWEST, tl.float32)
    total = tl.zeros([], tl.float32)
    for first in range(0, NUM_SPLITS, CHUNK):
        split = first + tl.arange(0, CHUNK)
        split_mask = split < NUM_SPLITS
        part = first_part + split
        maxima = tl.load(stats_ptr + part * 2, mask=split_mask, other=_LOWEST)
        totals = tl.load(stats_ptr + part * 2 + 1, mask=split_mask, other=0.0)
        # what an empty split left in `partial` is not its own
        rows = tl.load(
            partial_ptr + part[:, None] * HEAD_SIZE + dimension[None, :],
            mask=(totals > 0.0)[:, None] & (dimension < HEAD_SIZE)[None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        correction = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(maxima - new_maximum)
        total = total * correction + tl.sum(totals * weights, axis=0)
        accumulator = accumulator * correction + tl.sum(rows * weights[:, None], axis=0)
        maximum = new_maximum
    accumulator = accumulator / tl.where(total > 0.0, total, 1.0)
    target = output_ptr + query_at * OUTPUT_STRIDES[0] + head * OUTPUT_STRIDES[1] + dimension
    tl.store(target, accumulator.to(output_ptr.dtype.element_ty), mask=dimension < HEAD_SIZE)


def segment_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    slot_of_block: torch.Tensor,
    gap_end: torch.Tensor,
    first_cell: torch.Tensor,
    num_entries: torch.Tensor,
    scale: float,
    *,
    max_query_len: int | None = None,
    workspace: Workspace | None = None,
    partial_output: torch.Tensor | None = None,
    partial_log_sum: torch.Tensor | None = None,
) -> None:
    """Arguments as in `api.segment_attention`, whose docstring says what differs from the CPU."""
    _check(
        query,
        output,
        kv_cache,
        bias,
        layer,
        block_table,
        seq_lens,
        query_start_loc,
        rows,
        slot_of_block,
        gap_end,
        first_cell,
        num_entries,
        max_query_len,
        workspace,
        partial_output,
        partial_log_sum,
    )
    num_tokens, num_heads, head_size = query.shape
    num_rows = rows.numel()
    if num_rows == 0 or num_tokens == 0:
        return
    _, num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    ratio = num_heads // num_kv_heads
    query_len = num_tokens if max_query_len is None else max_query_len
    split = workspace is not None and num_tokens <= workspace.max_tokens
    num_splits = workspace.num_splits if workspace is not None and split else 1
    tiling = choose_tiling(head_size, query_len * ratio, num_splits)
    query_tiles = triton.cdiv(query_len * ratio, tiling.block_m)
    # not read where the keys are not split
    partial = workspace.partial if workspace is not None else bias
    stats = workspace.stats if workspace is not None else bias
    block_d = max(16, triton.next_power_of_2(head_size))
    # not read where there is nothing to go on from
    first_output = partial if partial_output is None else partial_output
    first_log_sum = stats if partial_log_sum is None else partial_log_sum
    attend_kernel[(num_rows * query_tiles, num_kv_heads, num_splits)](
        query,
        output,
        kv_cache[0],
        kv_cache[1],
        bias,
        partial,
        stats,
        block_table,
        seq_lens,
        query_start_loc,
        rows,
        slot_of_block,
        gap_end,
        first_cell,
        num_entries,
        first_output,
        first_log_sum,
        scale,
        layer,
        query_tiles,
        block_table.stride(0),
        query.stride()[:2],
        output.stride()[:2],
        kv_cache.stride()[1:5],
        bias.stride()[:3],
        first_output.stride()[:2],
        first_log_sum.stride()[:2],
        NUM_LAYERS=num_layers,
        NUM_KV_HEADS=num_kv_heads,
        RATIO=ratio,
        BLOCK_SIZE=block_size,
        HEAD_SIZE=head_size,
        BLOCK_D=block_d,
        BLOCK_M=tiling.block_m,
        TILE=tiling.tile,
        NUM_SPLITS=num_splits,
        HAS_PARTIAL=partial_output is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
    )
    if num_splits > 1:
        reduce_kernel[(num_rows * query_len, num_heads)](
            output,
            partial,
            stats,
            query_start_loc,
            rows,
            query_len,
            output.stride()[:2],
            NUM_HEADS=num_heads,
            HEAD_SIZE=head_size,
            BLOCK_D=block_d,
            NUM_SPLITS=num_splits,
            CHUNK=reduce_chunk(num_splits),
            num_warps=4,
        )


def _check(
    query: torch.Tensor,
    output: torch.Tensor,
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    slot_of_block: torch.Tensor,
    gap_end: torch.Tensor,
    first_cell: torch.Tensor,
    num_entries: torch.Tensor,
    max_query_len: int | None,
    workspace: Workspace | None,
    partial_output: torch.Tensor | None,
    partial_log_sum: torch.Tensor | None,
) -> None:
    """Raise one ValueError with everything that can be told without reading a tensor."""
    if kv_cache.dim() != 6 or kv_cache.shape[0] != 2 or query.dim() != 3:
        raise ValueError(
            "kv_cache, query: expected [2, num_layers, num_blocks, num_kv_heads, block_size, "
            "head_size] (formats.gpu_pool makes it of vLLM's cache) and [num_tokens, num_heads, "
            f"head_size], got {list(kv_cache.shape)} and {list(query.shape)}"
        )
    faults = []
    _, num_layers, num_blocks, num_kv_heads, block_size, head_size = kv_cache.shape
    num_tokens, num_heads, _ = query.shape
    num_rows, num_slots = seq_lens.numel(), gap_end.numel()
    if query.dtype not in _DTYPES or query.dtype != kv_cache.dtype or query.dtype != output.dtype:
        faults.append(
            "query, output, kv_cache: expected one dtype of bfloat16, float16 and float32, got "
            f"{query.dtype}, {output.dtype} and {kv_cache.dtype}"
        )
    if head_size % 16 or not 16 <= head_size <= 256:
        faults.append(f"head_size: expected a multiple of 16 up to 256, got {head_size}")
    if block_size % 16 or block_size < 16:
        faults.append(f"block_size: expected a multiple of 16, got {block_size}")
    if num_heads % num_kv_heads or not 1 <= num_heads // num_kv_heads <= MAX_RATIO:
        faults.append(
            f"query: expected num_heads 1 to {MAX_RATIO} times num_kv_heads = {num_kv_heads}, got "
            f"{num_heads}"
        )
    if not 0 <= layer < num_layers:
        faults.append(f"layer: expected 0 <= layer < {num_layers}, got {layer}")
    shapes = {
        "query": (query, "[num_tokens, num_heads, head_size]", (num_tokens, num_heads, head_size)),
        "output": (
            output,
            "[num_tokens, num_heads, head_size]",
            (num_tokens, num_heads, head_size),
        ),
        "bias": (
            bias,
            "[num_blocks, num_layers, num_kv_heads, block_size]",
            (num_blocks, num_layers, num_kv_heads, block_size),
        ),
        "block_table": (
            block_table,
            "[num_rows, max_blocks]",
            (num_rows, block_table.shape[-1] if block_table.dim() else 1),
        ),
        "seq_lens": (seq_lens, "[num_rows]", (num_rows,)),
        "query_start_loc": (query_start_loc, "[num_rows + 1]", (num_rows + 1,)),
        "rows": (rows, "[K]", (rows.numel(),)),
        "slot_of_block": (slot_of_block, "[num_blocks]", (num_blocks,)),
        "gap_end": (gap_end, "[num_slots]", (num_slots,)),
        "first_cell": (
            first_cell,
            "[num_slots, num_layers, num_kv_heads]",
            (num_slots, num_layers, num_kv_heads),
        ),
        "num_entries": (
            num_entries,
            "[num_slots, num_layers, num_kv_heads]",
            (num_slots, num_layers, num_kv_heads),
        ),
    }
    if (partial_output is None) != (partial_log_sum is None):
        faults.append("partial_output, partial_log_sum: expected both or neither, got one")
    if partial_output is not None and partial_log_sum is not None:
        symbol = "[num_tokens, num_heads, head_size]"
        shapes["partial_output"] = (partial_output, symbol, (num_tokens, num_heads, head_size))
        symbol = "[num_tokens, num_heads]"
        shapes["partial_log_sum"] = (partial_log_sum, symbol, (num_tokens, num_heads))
        if not partial_output.dtype == partial_log_sum.dtype == torch.float32:
            faults.append(
                "partial_output, partial_log_sum: expected float32, got "
                f"{partial_output.dtype} and {partial_log_sum.dtype}"
            )
    for name, (tensor, symbol, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            faults.append(f"{name}: expected {symbol} = {list(shape)}, got {list(tensor.shape)}")
        elif tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            faults.append(f"{name}: expected the last dimension contiguous, got {describe(tensor)}")
        if tensor.device != kv_cache.device:
            faults.append(f"{name}: expected on {kv_cache.device}, got it on {tensor.device}")
    for name in ("block_table", "seq_lens", "query_start_loc", "rows", "slot_of_block", "gap_end"):
        if shapes[name][0].dtype != torch.int32:
            faults.append(f"{name}: expected int32, got {shapes[name][0].dtype}")
    for name in ("first_cell", "num_entries"):
        if shapes[name][0].dtype != torch.int32 or not shapes[name][0].is_contiguous():
            faults.append(f"{name}: expected contiguous int32, got {describe(shapes[name][0])}")
    if bias.dtype != torch.float32:
        faults.append(f"bias: expected float32, got {bias.dtype}")
    if kv_cache.stride(5) != 1 or kv_cache[0].stride() != kv_cache[1].stride():
        faults.append(f"kv_cache: expected the last dimension contiguous, got {describe(kv_cache)}")
    if max_query_len is not None and max_query_len < 1:
        faults.append(f"max_query_len: expected at least 1, got {max_query_len}")
    if workspace is not None and (
        workspace.partial.shape[1:] != (num_heads, workspace.num_splits, head_size)
        or workspace.partial.device != kv_cache.device
    ):
        faults.append(
            "workspace: expected one that allocate_workspace made for num_heads, head_size = "
            f"{num_heads}, {head_size} on {kv_cache.device}, got partial "
            f"{list(workspace.partial.shape)} on {workspace.partial.device}"
        )
    if not (kv_cache.is_cuda or is_interpreted(attend_kernel)):
        faults.append(
            f"kv_cache: expected on a CUDA device, got it on {kv_cache.device}; impl='cpu' "
            "computes there"
        )
    if faults:
        raise ValueError("; ".join(faults))
