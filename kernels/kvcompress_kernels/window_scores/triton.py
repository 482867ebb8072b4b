"""`window_scores` for GPUs: one pass for the sums of the softmax, one for the attention itself.

    sums    one program per (part of the tokens, lanes, head, layer): maximum and sum of the
            exponentials, as in FlashAttention (arXiv 2205.14135); torch adds the parts up
    mass    one program per (tile of tokens, head, layer): adds the weights of all lanes

The queries of the query heads that share a KV head are *lanes* of one matrix. No logit is stored,
nothing is added atomically, and nothing is read back between the launches.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcompress_kernels.triton_cells import load_rows, slots_of_blocks

_LOG2_E = tl.constexpr(1.4426950408889634)
# finite, so that a part in which nothing is visible has a sum of 0 and not NaN
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_PART_TOKENS = 2048
_MAX_PARTS = 16


@triton.jit
def _weights_of(
    query,
    key_ptr,
    table_ptr,
    first_key,
    position,
    num_tokens,
    scale,
    layer,
    head,
    CACHE_STRIDES,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Logits ``[lanes, TILE]`` in base 2; -inf where a lane does not see a token."""
    key_position = first_key + tl.arange(0, TILE)
    key_mask = key_position < num_tokens
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
    logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * _LOG2_E)
    visible = key_mask[None, :] & (key_position[None, :] <= position[:, None])
    return tl.where(visible, logits, float("-inf"))


@triton.jit(do_not_specialize=["num_tokens", "first_position", "num_queries"])
def sums_kernel(
    query_ptr,
    key_ptr,
    table_ptr,
    stats_ptr,
    num_tokens,
    first_position,
    num_queries,
    scale,
    CACHE_STRIDES,
    RATIO: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (parts, tiles of lanes * KV heads, layers): maximum and sum of a part of the tokens."""
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1) % NUM_KV_HEADS
    layer = tl.program_id(2)
    num_lanes = RATIO * num_queries
    lane = tl.program_id(1) // NUM_KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    lane_mask = lane < num_lanes
    position = first_position + lane % num_queries
    row = (layer * NUM_KV_HEADS + head).to(tl.int64) * num_lanes + lane
    query = load_rows(query_ptr, row * HEAD_SIZE, lane_mask, HEAD_SIZE, BLOCK_D)

    maximum = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    num_tiles = tl.cdiv(num_tokens, TILE)
    tiles_per_part = tl.cdiv(num_tiles, num_parts)
    for tile in range(part * tiles_per_part, tl.minimum((part + 1) * tiles_per_part, num_tiles)):
        logits = _weights_of(
            query,
            key_ptr,
            table_ptr,
            tile * TILE,
            position,
            num_tokens,
            scale,
            layer,
            head,
            CACHE_STRIDES,
            BLOCK_SIZE,
            HEAD_SIZE,
            BLOCK_D,
            TILE,
        )
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_maximum[:, None])
        total = total * tl.exp2(maximum - new_maximum) + tl.sum(weights, axis=1)
        maximum = new_maximum
    place = (row * num_parts + part) * 2
    tl.store(stats_ptr + place, maximum, mask=lane_mask)
    tl.store(stats_ptr + place + 1, total, mask=lane_mask)


@triton.jit(do_not_specialize=["num_tokens", "num_scored", "first_position", "num_queries"])
def mass_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    log_sum_ptr,
    mass_ptr,
    score_ptr,
    num_tokens,
    num_scored,
    first_position,
    num_queries,
    scale,
    CACHE_STRIDES,
    RATIO: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (tiles of scored tokens, KV heads, layers): attention, and attention times the norm."""
    first_key = tl.program_id(0) * TILE
    head = tl.program_id(1)
    layer = tl.program_id(2)
    num_lanes = RATIO * num_queries
    place = (layer * NUM_KV_HEADS + head).to(tl.int64)

    mass = tl.zeros([TILE], tl.float32)
    for first_lane in range(0, num_lanes, BLOCK_M):
        lane = first_lane + tl.arange(0, BLOCK_M)
        lane_mask = lane < num_lanes
        row = place * num_lanes + lane
        query = load_rows(query_ptr, row * HEAD_SIZE, lane_mask, HEAD_SIZE, BLOCK_D)
        logits = _weights_of(
            query,
            key_ptr,
            table_ptr,
            first_key,
            first_position + lane % num_queries,
            num_tokens,
            scale,
            layer,
            head,
            CACHE_STRIDES,
            BLOCK_SIZE,
            HEAD_SIZE,
            BLOCK_D,
            TILE,
        )
        # a lane past the end has no weight
        log_sum = tl.load(log_sum_ptr + row, mask=lane_mask, other=float("inf"))
        mass += tl.sum(tl.exp2(logits - log_sum[:, None]), axis=0)

    token = first_key + tl.arange(0, TILE)
    mask = token < num_scored
    offsets = slots_of_blocks(
        first_key,
        token,
        mask,
        table_ptr,
        layer,
        head,
        CACHE_STRIDES,
        BLOCK_SIZE,
        BLOCK_SIZE % TILE == 0,
    )
    values = load_rows(value_ptr, offsets, mask, HEAD_SIZE, BLOCK_D).to(tl.float32)
    norms = tl.sqrt_rn(tl.sum(values * values, axis=1))
    target = place * num_scored + token
    tl.store(mass_ptr + target, mass, mask=mask)
    tl.store(score_ptr + target, mass * norms, mask=mask)


def choose_tiling(head_size: int, num_lanes: int) -> tuple[int, int]:
    """Lanes and tokens of a tile."""
    tile = 32 if triton.next_power_of_2(head_size) > 128 else 64
    return max(16, min(64, triton.next_power_of_2(num_lanes))), tile


def window_scores(
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    tail: torch.Tensor,
    num_tokens: int,
    queries: torch.Tensor,
    first_position: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `api.window_scores`; arguments are not checked, and nothing waits for the device."""
    _, num_layers, _, num_kv_heads, block_size, head_size = kv_cache.shape
    num_heads, num_queries = queries.shape[1:3]
    ratio = num_heads // num_kv_heads
    num_scored = source.numel() * block_size
    device = kv_cache.device
    mass = torch.empty((num_layers, num_kv_heads, num_scored), dtype=torch.float32, device=device)
    scores = torch.empty_like(mass)
    if mass.numel() == 0:
        return mass, scores
    block_m, tile = choose_tiling(head_size, ratio * num_queries)
    num_parts = min(_MAX_PARTS, triton.cdiv(num_tokens, _PART_TOKENS))
    shape = (num_layers, num_kv_heads, ratio * num_queries, num_parts, 2)
    stats = torch.empty(shape, dtype=torch.float32, device=device)
    table = torch.cat([source, tail])
    sizes = {
        "RATIO": ratio,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_SIZE": head_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_size)),
        "BLOCK_M": block_m,
        "TILE": tile,
        "num_warps": 4,
    }
    lane_tiles = triton.cdiv(ratio * num_queries, block_m)
    sums_kernel[(num_parts, lane_tiles * num_kv_heads, num_layers)](
        queries,
        kv_cache[0],
        table,
        stats,
        num_tokens,
        first_position,
        num_queries,
        scale,
        kv_cache.stride()[1:5],
        **sizes,
    )
    maximum = stats[..., 0].amax(-1, keepdim=True)
    total = (stats[..., 1] * torch.exp2(stats[..., 0] - maximum)).sum(-1)
    mass_kernel[(triton.cdiv(num_scored, tile), num_kv_heads, num_layers)](
        queries,
        kv_cache[0],
        kv_cache[1],
        table,
        maximum[..., 0] + total.log2(),
        mass,
        scores,
        num_tokens,
        num_scored,
        first_position,
        num_queries,
        scale,
        kv_cache.stride()[1:5],
        **sizes,
    )
    return mass, scores
