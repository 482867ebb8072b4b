"""`select_merge` for GPUs: route dropped tokens, place the kept ones by prefix sums, merge.

    route    one program per 16 tokens of a bucket, head and layer: which kept token takes each of
             them in, and with what weight
    place    prefix sums (torch) over tokens give the entries, over heads and layers the cells
    merge    one program per 16 tokens, head and layer: writes those of them that are kept

Routing is decided in float64, in the order of the reference, and so are the gates; sums run in
token order. Nothing is read back between the launches: `select_merge_layers` compresses all layers
of a prompt without waiting for the device.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcompress_kernels.select_merge.reference import MIN_MASS
from kvcompress_kernels.triton_cells import (
    load_rows,
    slots_of_blocks,
    slots_of_cells,
    store_rows,
)

ROUTE_TOKENS = 16
"""Tokens of one program of the route kernel."""

CANDIDATES = 32
"""Kept tokens that they are compared with at once."""

MERGE_TOKENS = 16
"""Tokens of one program of the merge kernel."""

_MIN_MASS = tl.constexpr(MIN_MASS)


@triton.jit
def _products(row_dot, rows, others):
    """Row by row, in float64: ``[n]``."""
    return row_dot + tl.sum(rows.to(tl.float64) * others.to(tl.float64), axis=1)


@triton.jit(do_not_specialize=["first_layer", "num_tokens", "bucket", "tiles_per_bucket"])
def route_kernel(
    key_ptr,
    value_ptr,
    source_ptr,
    kept_ptr,
    mass_ptr,
    target_ptr,
    weight_ptr,
    first_layer,
    num_tokens,
    bucket,
    tiles_per_bucket,
    CACHE_STRIDES,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Grid (buckets * tiles_per_bucket, KV heads, layers).

    Writes for each token the kept one that takes it in (``target``, -1 for kept tokens and those
    that go nowhere) and gate times mass (``weight``).
    """
    head = tl.program_id(1)
    layer = tl.program_id(2)
    base = (layer * tl.num_programs(1) + head).to(tl.int64) * num_tokens
    begin = tl.program_id(0) // tiles_per_bucket * bucket
    end = tl.minimum(begin + bucket, num_tokens)
    token = begin + tl.program_id(0) % tiles_per_bucket * TOKENS + tl.arange(0, TOKENS)
    inside = token < end
    kept = tl.load(kept_ptr + base + token, mask=inside, other=1) != 0
    dropped = inside & ~kept
    offsets = slots_of_blocks(
        0,
        token,
        inside,
        source_ptr,
        first_layer + layer,
        head,
        CACHE_STRIDES,
        BLOCK_SIZE,
        False,
    )

    best = tl.full([TOKENS], float("-inf"), tl.float64)
    target = tl.full([TOKENS], -1, tl.int32)
    num_dropped = tl.sum(dropped.to(tl.int32), axis=0)
    # a tile of kept tokens has nothing to route
    last = tl.where(num_dropped > 0, end, begin)
    for first in range(begin, last, CANDIDATES):
        other = first + tl.arange(0, CANDIDATES)
        allowed = (tl.load(kept_ptr + base + other, mask=other < end, other=0) != 0) & (other < end)
        places = slots_of_blocks(
            0,
            other,
            allowed,
            source_ptr,
            first_layer + layer,
            head,
            CACHE_STRIDES,
            BLOCK_SIZE,
            False,
        )
        dots = tl.zeros([TOKENS, CANDIDATES], tl.float64)
        squares = tl.zeros([CANDIDATES], tl.float64)
        for d in range(HEAD_SIZE):
            column = tl.load(key_ptr + offsets + d, mask=dropped, other=0.0).to(tl.float64)
            row = tl.load(key_ptr + places + d, mask=allowed, other=0.0).to(tl.float64)
            dots += column[:, None] * row[None, :]
            squares += row * row
        similar = dots / tl.sqrt(squares)[None, :]
        # comparisons with NaN fail: such a pair is not similar
        usable = allowed[None, :] & (similar > float("-inf"))
        similar = tl.where(usable, similar, float("-inf"))
        largest = tl.max(similar, axis=1)
        index = tl.where(usable & (similar == largest[:, None]), other[None, :], 2147483647)
        lowest = tl.min(index, axis=1)
        better = largest > best
        target = tl.where(better, lowest, target)
        best = tl.where(better, largest, best)

    routed = dropped & (target >= 0)
    into = slots_of_blocks(
        0,
        target,
        routed,
        source_ptr,
        first_layer + layer,
        head,
        CACHE_STRIDES,
        BLOCK_SIZE,
        False,
    )
    own = load_rows(value_ptr, offsets, routed, HEAD_SIZE, BLOCK_D)
    partner = load_rows(value_ptr, into, routed, HEAD_SIZE, BLOCK_D)
    zero = tl.zeros([TOKENS], tl.float64)
    norms = tl.sqrt(_products(zero, own, own)) * tl.sqrt(_products(zero, partner, partner))
    gate = _products(zero, own, partner) / norms
    moved = routed & (gate > 0.0)
    mass = tl.load(mass_ptr + base + token, mask=inside, other=0.0)
    weight = gate * tl.maximum(mass, _MIN_MASS).to(tl.float64)
    tl.store(target_ptr + base + token, tl.where(moved, target, -1), mask=inside)
    tl.store(weight_ptr + base + token, tl.where(moved, weight, 0.0).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["first_layer", "num_tokens", "bucket", "num_cells"])
def merge_kernel(
    key_ptr,
    value_ptr,
    bias_ptr,
    source_ptr,
    slab_ptr,
    kept_ptr,
    mass_ptr,
    target_ptr,
    weight_ptr,
    entry_ptr,
    first_cell_ptr,
    next_cell_ptr,
    alpha,
    first_layer,
    num_tokens,
    bucket,
    num_cells,
    CACHE_STRIDES,
    BIAS_STRIDES,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Grid (ceil(tokens / TOKENS), KV heads, layers): write the kept ones among them."""
    if tl.load(next_cell_ptr) > num_cells:
        return
    head = tl.program_id(1)
    layer = tl.program_id(2)
    place = (layer * NUM_KV_HEADS + head).to(tl.int64)
    base = place * num_tokens
    first_token = tl.program_id(0) * TOKENS
    token = first_token + tl.arange(0, TOKENS)
    kept = tl.load(kept_ptr + base + token, mask=token < num_tokens, other=0) != 0
    offsets = slots_of_blocks(
        0,
        token,
        kept,
        source_ptr,
        first_layer + layer,
        head,
        CACHE_STRIDES,
        BLOCK_SIZE,
        False,
    )
    keys = load_rows(key_ptr, offsets, kept, HEAD_SIZE, BLOCK_D)
    values = load_rows(value_ptr, offsets, kept, HEAD_SIZE, BLOCK_D)
    entry_bias = tl.zeros([TOKENS], tl.float32)
    if MERGE:
        mass = tl.load(mass_ptr + base + token, mask=kept, other=1.0)
        mass = tl.maximum(mass, _MIN_MASS)
        sums = values.to(tl.float32) * mass[:, None]
        added = tl.zeros([TOKENS], tl.float32)
        dimension = tl.arange(0, BLOCK_D)
        last_token = tl.minimum(first_token + TOKENS, num_tokens) - 1
        end = tl.minimum((last_token // bucket + 1) * bucket, num_tokens)
        # every kept token adds what was routed to it in token order
        for other in range(first_token // bucket * bucket, end):
            target = tl.load(target_ptr + base + other)
            if (target >= first_token) & (target <= last_token):
                weight = tl.load(weight_ptr + base + other)
                block = tl.load(source_ptr + other // BLOCK_SIZE).to(tl.int64)
                at = (
                    tl.cast(first_layer + layer, tl.int64) * CACHE_STRIDES[0]
                    + block * CACHE_STRIDES[1]
                    + tl.cast(head, tl.int64) * CACHE_STRIDES[2]
                    + tl.cast(other % BLOCK_SIZE, tl.int64) * CACHE_STRIDES[3]
                )
                row = tl.load(value_ptr + at + dimension, mask=dimension < HEAD_SIZE, other=0.0)
                into = token == target
                sums = tl.where(into[:, None], sums + weight * row.to(tl.float32)[None, :], sums)
                added = tl.where(into, added + weight, added)
        merged = added > 0.0
        total = (mass + added)[:, None] + tl.zeros([TOKENS, BLOCK_D], tl.float32)
        # what takes nothing over is copied bit by bit
        mean = tl.div_rn(sums, total).to(value_ptr.dtype.element_ty)
        values = tl.where(merged[:, None], mean, values)
        ratio = 1.0 + added.to(tl.float64) / mass.to(tl.float64)
        entry_bias = tl.where(merged, alpha * tl.log(ratio), 0.0).to(tl.float32)

    entry = tl.load(entry_ptr + base + token, mask=kept, other=0)
    goal, bias_goal = slots_of_cells(
        tl.load(first_cell_ptr + place),
        0,
        entry,
        kept,
        slab_ptr,
        CACHE_STRIDES,
        BIAS_STRIDES,
        NUM_LAYERS,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        False,
    )
    store_rows(key_ptr, goal, keys, kept, HEAD_SIZE, BLOCK_D)
    store_rows(value_ptr, goal, values, kept, HEAD_SIZE, BLOCK_D)
    tl.store(bias_ptr + bias_goal, entry_bias, mask=kept)


def select_merge_layers(
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    layers: range,
    source: torch.Tensor,
    slab: torch.Tensor,
    kept: torch.Tensor,
    mass: torch.Tensor,
    bucket: int,
    alpha: float,
    first_cell: int,
    num_cells: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write the kept tokens of some layers into a slab, without waiting for the device.

    The segments follow one another from ``first_cell`` on, heads of a layer first. If they would
    pass ``num_cells``, nothing is written for any layer. Arguments are not checked; those that are
    not described here are those of `api.select_merge`.

    Args:
        kv_cache: ``[2, L, B, H, N, D]``.
        layers: consecutive indices into ``L``.
        kept: bool ``[len(layers), H, G]``, contiguous.
        mass: float32 ``[len(layers), H, G]``, contiguous.

    Returns:
        ``num_entries``, ``num_merged`` and ``first_cell``, int32 ``[len(layers), H]``, and the cell
        after the last one, int32 ``[]``; all on the device.
    """
    _, num_layers, _, num_kv_heads, block_size, head_size = kv_cache.shape
    shape, num_tokens = kept.shape[:2], kept.shape[2]
    entry = torch.cumsum(kept, 2, dtype=torch.int32)
    num_entries = kept.sum(2, dtype=torch.int32)
    entry -= 1
    cells = (num_entries + (block_size - 1)) // block_size
    ends = torch.cumsum(cells.flatten(), 0, dtype=torch.int32) + first_cell
    first_cells = ends.view(shape) - cells
    num_merged = torch.zeros_like(num_entries)
    if num_tokens == 0 or len(layers) == 0:
        end = torch.full((), first_cell, dtype=torch.int32, device=kept.device)
        return num_entries, num_merged, first_cells, end
    next_cell = ends[-1]
    sizes = {
        "BLOCK_SIZE": block_size,
        "HEAD_SIZE": head_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_size)),
    }
    strides = kv_cache.stride()[1:5]
    target = weight = mass  # not read where nothing is merged
    if bucket:
        target = torch.empty(kept.shape, dtype=torch.int32, device=kept.device)
        weight = torch.empty_like(mass)
        tiles_per_bucket = triton.cdiv(min(bucket, num_tokens), ROUTE_TOKENS)
        num_buckets = triton.cdiv(num_tokens, bucket)
        route_kernel[(num_buckets * tiles_per_bucket, num_kv_heads, len(layers))](
            kv_cache[0],
            kv_cache[1],
            source,
            kept.view(torch.uint8),
            mass,
            target,
            weight,
            layers.start,
            num_tokens,
            bucket,
            tiles_per_bucket,
            strides,
            **sizes,
            TOKENS=ROUTE_TOKENS,
            CANDIDATES=CANDIDATES,
            num_warps=2,
        )
        moved = (target >= 0).sum(2, dtype=torch.int32)
        num_merged = torch.where(next_cell > num_cells, num_merged, moved)
    merge_kernel[(triton.cdiv(num_tokens, MERGE_TOKENS), num_kv_heads, len(layers))](
        kv_cache[0],
        kv_cache[1],
        bias,
        source,
        slab,
        kept.view(torch.uint8),
        mass,
        target,
        weight,
        entry,
        first_cells,
        next_cell,
        alpha,
        layers.start,
        num_tokens,
        max(bucket, 1),
        num_cells,
        strides,
        bias.stride()[:3],
        NUM_LAYERS=num_layers,
        NUM_KV_HEADS=num_kv_heads,
        **sizes,
        TOKENS=MERGE_TOKENS,
        MERGE=bucket > 0,
        num_warps=4,
    )
    return num_entries, num_merged, first_cells, next_cell


def select_merge(
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    layer: int,
    source: torch.Tensor,
    slab: torch.Tensor,
    kept: torch.Tensor,
    mass: torch.Tensor,
    bucket: int,
    alpha: float,
    first_cell: int,
    num_cells: int,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """See `api.select_merge`; waits for the device, to return a number."""
    num_entries, num_merged, _, next_cell = select_merge_layers(
        kv_cache,
        bias,
        range(layer, layer + 1),
        source,
        slab,
        kept[None],
        mass[None],
        bucket,
        alpha,
        first_cell,
        num_cells,
    )
    return num_entries[0], num_merged[0], int(next_cell)
