"""`cluster_merge` for GPUs: assign clusters, place their entries by prefix sums, merge and write.

    assign   one program per (chunk, head, layer): the greedy scan of `reference.assign`
    place    prefix sums (torch) over tokens give the entries, over heads and layers the cells
    merge    one program per 16 tokens, head and layer: means of the clusters that start there

Cosines are screened in float32; what that cannot decide is decided in float64, in the order of the
reference, so that the clusters are those of the reference to the bit. Nothing is read back between
the launches: `cluster_merge_layers` compresses all layers of a prompt without waiting for the
device.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcompress_kernels.cluster_merge.reference import MERGE_ALL
from kvcompress_kernels.triton_cells import (
    load_rows,
    slots_of_blocks,
    slots_of_cells,
    store_rows,
)

MAX_CHUNK = 128
"""Longest chunk that one program holds."""

MERGE_TOKENS = 16
"""Tokens of one program of the merge kernel."""


@triton.jit
def _similar_exactly(
    key_ptr,
    offsets,
    seed_offset,
    undecided,
    threshold,
    HEAD_SIZE: tl.constexpr,
    MAX_LENGTH: tl.constexpr,
):
    """cos > threshold for the tokens ``undecided``, in float64 and in the order of ``d``."""
    dot = tl.zeros([MAX_LENGTH], tl.float64)
    square = tl.zeros([MAX_LENGTH], tl.float64)
    seed_square = tl.zeros([MAX_LENGTH], tl.float64)
    for d in range(HEAD_SIZE):
        key = tl.load(key_ptr + offsets + d, mask=undecided, other=0.0).to(tl.float64)
        seed = tl.load(key_ptr + seed_offset + d).to(tl.float64)
        dot += key * seed
        square += key * key
        seed_square += seed * seed
    return dot > threshold * tl.sqrt(square * seed_square)


@triton.jit(do_not_specialize=["first_layer", "num_tokens"])
def assign_kernel(
    key_ptr,
    source_ptr,
    chunk_start_ptr,
    chunk_length_ptr,
    threshold_ptr,
    owner_ptr,
    span_ptr,
    counts_ptr,
    first_layer,
    num_tokens,
    CACHE_STRIDES,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_LENGTH: tl.constexpr,
    EVERYTHING: tl.constexpr,
    COUNT_ONLY: tl.constexpr,
):
    """Grid (chunks, KV heads, layers).

    Writes for each token its seed (``owner``) and, for seeds, the distance to the last member of
    their cluster (``span``, -1 for other tokens), or adds the number of clusters to ``counts``.
    """
    head = tl.program_id(1)
    layer = tl.program_id(2)
    start = tl.load(chunk_start_ptr + tl.program_id(0))
    length = tl.load(chunk_length_ptr + tl.program_id(0))
    threshold = tl.load(threshold_ptr)

    index = tl.arange(0, MAX_LENGTH)
    inside = index < length
    offsets = slots_of_blocks(
        start,
        start + index,
        inside,
        source_ptr,
        first_layer + layer,
        head,
        CACHE_STRIDES,
        BLOCK_SIZE,
        False,
    )
    keys = load_rows(key_ptr, offsets, inside, HEAD_SIZE, BLOCK_D).to(tl.float32)
    squares = tl.sum(keys * keys, axis=1)
    # outside this range float32 may over- or underflow; NaN sends the pair to float64
    trusted = (squares > 1e-20) & (squares < 1e20)
    norms = tl.where(trusted, tl.sqrt(squares), float("nan"))
    # float32 rounding of the product, of both norms and of the comparison, in units of |a| * |b|:
    # at most (2 * D + 16) * 2^-24
    guard = (2 * HEAD_SIZE + 64) * 5.9604644775390625e-08
    screen = threshold.to(tl.float32)

    place = (layer * tl.num_programs(1) + head).to(tl.int64)
    free = inside
    owner = index
    span = tl.where(inside, 0, -1)
    clusters = 0
    for seed in range(0, length):
        is_seed = index == seed
        if tl.max((free & is_seed).to(tl.int32), axis=0) > 0:
            clusters += 1
            later = free & (index > seed)
            if EVERYTHING:
                joins = later
            else:
                seed_offset = tl.sum(tl.where(is_seed, offsets, 0), axis=0)
                dimension = tl.arange(0, BLOCK_D)
                seed_key = tl.load(
                    key_ptr + seed_offset + dimension, mask=dimension < HEAD_SIZE, other=0.0
                )
                dots = tl.sum(keys * seed_key.to(tl.float32)[None, :], axis=1)
                bounds = norms * tl.sum(tl.where(is_seed, norms, 0.0), axis=0)
                above = dots > bounds * (screen + guard)
                # comparisons with NaN fail: not decided
                undecided = later & ~(above | (dots < bounds * (screen - guard)))
                joins = later & above
                if tl.max(undecided.to(tl.int32), axis=0) > 0:
                    joins |= undecided & _similar_exactly(
                        key_ptr, offsets, seed_offset, undecided, threshold, HEAD_SIZE, MAX_LENGTH
                    )
            owner = tl.where(joins, seed, owner)
            last = tl.max(tl.where(joins, index, seed), axis=0)
            span = tl.where(is_seed, last - seed, tl.where(joins, -1, span))
            free = free & ~joins
    if COUNT_ONLY:
        tl.atomic_add(counts_ptr + place, clusters)
    else:
        at = place * num_tokens + start + index
        tl.store(owner_ptr + at, start + owner, mask=inside)
        tl.store(span_ptr + at, span, mask=inside)


@triton.jit(do_not_specialize=["first_layer", "num_tokens", "num_cells"])
def merge_kernel(
    key_ptr,
    value_ptr,
    bias_ptr,
    source_ptr,
    slab_ptr,
    owner_ptr,
    span_ptr,
    entry_ptr,
    first_cell_ptr,
    next_cell_ptr,
    log_ptr,
    first_layer,
    num_tokens,
    num_cells,
    CACHE_STRIDES,
    BIAS_STRIDES,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (ceil(tokens / TOKENS), KV heads, layers): write the entries of the seeds among them."""
    if tl.load(next_cell_ptr) > num_cells:
        return
    head = tl.program_id(1)
    layer = tl.program_id(2)
    place = (layer * NUM_KV_HEADS + head).to(tl.int64)
    base = place * num_tokens

    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    span = tl.load(span_ptr + base + token, mask=token < num_tokens, other=-1)
    seeds = span >= 0
    offsets = slots_of_blocks(
        0,
        token,
        seeds,
        source_ptr,
        first_layer + layer,
        head,
        CACHE_STRIDES,
        BLOCK_SIZE,
        False,
    )
    own_keys = load_rows(key_ptr, offsets, seeds, HEAD_SIZE, BLOCK_D)
    own_values = load_rows(value_ptr, offsets, seeds, HEAD_SIZE, BLOCK_D)
    keys = own_keys.to(tl.float32)
    values = own_values.to(tl.float32)
    size = tl.where(seeds, 1, 0)
    # every seed adds its members in token order
    for distance in range(1, tl.max(span, axis=0) + 1):
        other = token + distance
        owner = tl.load(owner_ptr + base + other, mask=distance <= span, other=-1)
        members = owner == token
        offsets = slots_of_blocks(
            0,
            other,
            members,
            source_ptr,
            first_layer + layer,
            head,
            CACHE_STRIDES,
            BLOCK_SIZE,
            False,
        )
        more_keys = load_rows(key_ptr, offsets, members, HEAD_SIZE, BLOCK_D).to(tl.float32)
        more_values = load_rows(value_ptr, offsets, members, HEAD_SIZE, BLOCK_D).to(tl.float32)
        # selected, because adding 0 would turn -0 into 0
        keys = tl.where(members[:, None], keys + more_keys, keys)
        values = tl.where(members[:, None], values + more_values, values)
        size += members.to(tl.int32)

    divisor = tl.maximum(size, 1).to(tl.float32)[:, None] + tl.zeros([TOKENS, BLOCK_D], tl.float32)
    dtype = key_ptr.dtype.element_ty
    merged = (size > 1)[:, None]
    # tokens alone in their cluster are copied bit by bit
    keys = tl.where(merged, tl.div_rn(keys, divisor).to(dtype), own_keys)
    values = tl.where(merged, tl.div_rn(values, divisor).to(dtype), own_values)

    entry = tl.load(entry_ptr + base + token, mask=seeds, other=0)
    target, bias_target = slots_of_cells(
        tl.load(first_cell_ptr + place),
        0,
        entry,
        seeds,
        slab_ptr,
        CACHE_STRIDES,
        BIAS_STRIDES,
        NUM_LAYERS,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        False,
    )
    store_rows(key_ptr, target, keys, seeds, HEAD_SIZE, BLOCK_D)
    store_rows(value_ptr, target, values, seeds, HEAD_SIZE, BLOCK_D)
    tl.store(bias_ptr + bias_target, tl.load(log_ptr + size), mask=seeds)


@dataclass(frozen=True)
class Chunks:
    """Where the chunks of a prompt lie, on the device; see `find_chunks`.

    Args:
        starts: int32 ``[chunks]``, first tokens.
        lengths: int32 ``[chunks]``.
        longest: the greatest length, or a greater one that the kernel is compiled for.
        num_tokens: ``G``.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    longest: int
    num_tokens: int


def find_chunks(
    chunk_ids: torch.Tensor, device: torch.device, stride: int = 1, longest: int = 0
) -> Chunks:
    """Chunks whose number is a multiple of ``stride``.

    Args:
        chunk_ids: int32 ``[G]``, as in `api.cluster_merge`; on the CPU, or this waits for the
            device.
        longest: what the kernel is to be compiled for at least.

    Raises:
        ValueError: a chunk is longer than `MAX_CHUNK`.
    """
    ids, lengths = torch.unique_consecutive(chunk_ids.cpu(), return_counts=True)
    starts = torch.cumsum(lengths, 0) - lengths
    chosen = (ids >= 0) & (ids % stride == 0)
    starts, lengths = starts[chosen].int(), lengths[chosen].int()
    longest = max(longest, int(lengths.max()) if lengths.numel() else 0)
    if longest > MAX_CHUNK:
        raise ValueError(
            f"chunk_ids: expected chunks of at most {MAX_CHUNK} tokens with impl='triton', got one "
            f"of {longest}; cut them shorter"
        )
    return Chunks(starts.to(device), lengths.to(device), longest, chunk_ids.numel())


@functools.cache
def _logarithms(device: torch.device) -> torch.Tensor:
    """float32 ``[MAX_CHUNK + 1]``: ``log s`` by cluster size, rounded once from float64."""
    logs = [0.0, *(math.log(size) for size in range(1, MAX_CHUNK + 1))]
    return torch.tensor(logs, dtype=torch.float32, device=device)


def _assign(
    kv_cache: torch.Tensor,
    layers: range,
    source: torch.Tensor,
    chunks: Chunks,
    threshold: float,
    owner: torch.Tensor,
    span: torch.Tensor,
    counts: torch.Tensor,
    count_only: bool,
) -> None:
    _, _, _, num_kv_heads, block_size, head_size = kv_cache.shape
    if chunks.starts.numel() == 0 or len(layers) == 0:
        return
    block_d = max(16, triton.next_power_of_2(head_size))
    max_length = max(16, triton.next_power_of_2(chunks.longest))
    assign_kernel[(chunks.starts.numel(), num_kv_heads, len(layers))](
        kv_cache[0],
        source,
        chunks.starts,
        chunks.lengths,
        # a tensor, because Triton would round a Python number to float32
        torch.full((1,), threshold, dtype=torch.float64, device=kv_cache.device),
        owner,
        span,
        counts,
        layers.start,
        chunks.num_tokens,
        kv_cache.stride()[1:5],
        BLOCK_SIZE=block_size,
        HEAD_SIZE=head_size,
        BLOCK_D=block_d,
        MAX_LENGTH=max_length,
        EVERYTHING=threshold <= MERGE_ALL,
        COUNT_ONLY=count_only,
        num_warps=assign_warps(max_length, block_d),
    )


def assign_warps(max_length: int, block_d: int) -> int:
    """Warps of `assign_kernel`: at most 64 elements of the keys in the registers of a thread."""
    return max(1, min(16, max_length * block_d // 2048))


def cluster_merge_layers(
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    layers: range,
    source: torch.Tensor,
    slab: torch.Tensor,
    chunks: Chunks,
    threshold: float,
    first_cell: int,
    num_cells: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compress some layers of a prompt into its slab, without waiting for the device.

    The segments follow one another from ``first_cell`` on, heads of a layer first. If they would
    pass ``num_cells``, nothing is written for any layer. Arguments are not checked; those that are
    not described here are those of `api.cluster_merge`.

    Args:
        kv_cache: ``[2, L, B, H, N, D]``.
        layers: consecutive indices into ``L``.
        chunks: what `find_chunks` makes of the chunk ids.

    Returns:
        ``num_entries`` and ``first_cell``, int32 ``[len(layers), H]``, and the cell after the last
        one, int32 ``[]``; all on the device.
    """
    _, num_layers, _, num_kv_heads, block_size, head_size = kv_cache.shape
    num_tokens = chunks.num_tokens
    shape = (len(layers), num_kv_heads)
    device = kv_cache.device
    # tokens outside of chunks are clusters of their own, which no other token belongs to
    owner = torch.full((*shape, num_tokens), -1, dtype=torch.int32, device=device)
    span = torch.zeros((*shape, num_tokens), dtype=torch.int32, device=device)
    _assign(kv_cache, layers, source, chunks, threshold, owner, span, owner, count_only=False)

    seeds = span >= 0
    entry = torch.cumsum(seeds, 2, dtype=torch.int32)
    num_entries = seeds.sum(2, dtype=torch.int32)
    entry -= 1
    cells = (num_entries + (block_size - 1)) // block_size
    ends = torch.cumsum(cells.flatten(), 0, dtype=torch.int32) + first_cell
    first_cells = ends.view(shape) - cells
    next_cell = ends[-1] if len(layers) else torch.tensor(first_cell, dtype=torch.int32)
    if num_tokens and len(layers):
        merge_kernel[(triton.cdiv(num_tokens, MERGE_TOKENS), num_kv_heads, len(layers))](
            kv_cache[0],
            kv_cache[1],
            bias,
            source,
            slab,
            owner,
            span,
            entry,
            first_cells,
            next_cell,
            _logarithms(device),
            layers.start,
            num_tokens,
            num_cells,
            kv_cache.stride()[1:5],
            bias.stride()[:3],
            NUM_LAYERS=num_layers,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=block_size,
            HEAD_SIZE=head_size,
            BLOCK_D=max(16, triton.next_power_of_2(head_size)),
            TOKENS=MERGE_TOKENS,
            num_warps=4,
        )
    return num_entries, first_cells, next_cell


def cluster_merge(
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    layer: int,
    source: torch.Tensor,
    slab: torch.Tensor,
    chunk_ids: torch.Tensor,
    threshold: float,
    first_cell: int,
    num_cells: int,
) -> tuple[torch.Tensor, int]:
    """See `api.cluster_merge`; waits for the device, to return a number."""
    chunks = find_chunks(chunk_ids, kv_cache.device)
    num_entries, _, next_cell = cluster_merge_layers(
        kv_cache,
        bias,
        range(layer, layer + 1),
        source,
        slab,
        chunks,
        threshold,
        first_cell,
        num_cells,
    )
    return num_entries[0], int(next_cell)


def cluster_count(
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    chunk_ids: torch.Tensor,
    threshold: float,
    stride: int,
    longest: int = 0,
) -> torch.Tensor:
    """See `api.cluster_count`, and `find_chunks`."""
    _, num_layers, _, num_kv_heads, _, _ = kv_cache.shape
    counts = torch.zeros((num_layers, num_kv_heads), dtype=torch.int32, device=kv_cache.device)
    chunks = find_chunks(chunk_ids, kv_cache.device, stride, longest)
    layers = range(num_layers)
    _assign(kv_cache, layers, source, chunks, threshold, counts, counts, counts, count_only=True)
    return counts
