"""Plain torch form of `cluster_merge`; defines the result. Cosines are decided in float64.

Shape letters: ``H`` KV heads, ``G`` tokens, ``D`` head size, ``m`` entries of one head.
"""

from __future__ import annotations

import math

import torch

from kvcompress_kernels import formats
from kvcompress_kernels.formats import SlabGeometry

MERGE_ALL = -1.0
"""Threshold at which every chunk becomes one cluster, whatever its keys."""


def _chunks_by_length(chunk_ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """``length -> int64 [number of chunks, length]``, the token indices of those chunks."""
    tokens = torch.arange(chunk_ids.numel())[chunk_ids >= 0]
    _, lengths = torch.unique_consecutive(chunk_ids[tokens], return_counts=True)
    starts = tokens[torch.cumsum(lengths, 0) - lengths]
    return {
        length: starts[lengths == length, None] + torch.arange(length)
        for length in lengths.unique().tolist()
    }


def _similar(keys: torch.Tensor, threshold: float) -> torch.Tensor:
    """Whether ``cos(k_i, k_j) > threshold``, for all pairs of a chunk.

    Products of two numbers of the cache's dtypes are exact in float64, and they are added in the
    order of ``d``, so the answer is the same wherever it is computed. A key of norm zero, an
    infinity and a NaN are similar to nothing.

    Args:
        keys: ``[..., l, D]``.

    Returns:
        bool ``[..., l, l]``.
    """
    if threshold <= MERGE_ALL:
        return torch.ones((*keys.shape[:-1], keys.shape[-2]), dtype=torch.bool)
    keys = keys.double()
    squares = _sum_in_order(keys * keys)
    norms = torch.sqrt(squares[..., :, None] * squares[..., None, :])
    dots = keys @ keys.mT
    # a matrix product adds in an order of its own, which matters to pairs this close only
    close = ((dots - threshold * norms).abs() <= 1e-9 * norms) & (norms > 0)
    *chunk, first, second = close.nonzero(as_tuple=True)
    dots[close] = _sum_in_order(keys[(*chunk, first)] * keys[(*chunk, second)])
    return dots > threshold * norms


def _sum_in_order(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, one after another."""
    total = torch.zeros(terms.shape[:-1], dtype=terms.dtype)
    for term in terms.unbind(-1):
        total += term
    return total


def assign(
    keys: torch.Tensor, chunk_ids: torch.Tensor, threshold: float, stride: int = 1
) -> torch.Tensor:
    """Greedy seed clustering inside every chunk.

    A chunk is scanned in token order; a token that is still free becomes a seed, and every later
    free token of the chunk whose key is more similar to the seed's than ``threshold`` joins it.

    Args:
        keys: ``[H, G, D]``.
        chunk_ids: int ``[G]``, negative for tokens that are kept as they are.
        threshold: cosine similarity; `MERGE_ALL` merges every chunk whole.
        stride: look at the chunks whose number is a multiple of it only; the tokens of all
            others stay their own seeds.

    Returns:
        int64 ``[H, G]``: the seed that each token belongs to, itself for seeds and kept tokens.
    """
    num_heads, num_tokens, _ = keys.shape
    seeds = torch.arange(num_tokens).repeat(num_heads, 1)
    sampled = torch.where(chunk_ids % stride == 0, chunk_ids, -1)
    for length, tokens in _chunks_by_length(sampled).items():
        similar = _similar(keys[:, tokens], threshold)  # [H, chunks, l, l]
        free = torch.ones((num_heads, *tokens.shape), dtype=torch.bool)
        owner = tokens.repeat(num_heads, 1, 1)
        for i in range(length):
            is_seed = free[..., i : i + 1].clone()
            joins = is_seed & free[..., i + 1 :] & similar[..., i, i + 1 :]
            owner[..., i + 1 :] = torch.where(joins, tokens[:, i : i + 1], owner[..., i + 1 :])
            free[..., i + 1 :] &= ~joins
        seeds[:, tokens] = owner
    return seeds


def merge(
    keys: torch.Tensor, values: torch.Tensor, seeds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entries of one head, in the order of the seeds.

    Tokens alone in their cluster are copied. Others become the mean of their cluster, added up
    in token order in float32 and rounded once, with the logarithm of its size as bias.

    Args:
        keys: ``[G, D]``.
        values: ``[G, D]``.
        seeds: int64 ``[G]``, one head of what `assign` returns.

    Returns:
        keys ``[m, D]`` and values ``[m, D]`` in the inputs' dtype, bias float32 ``[m]``.
    """
    firsts, entry, sizes = torch.unique(seeds, return_inverse=True, return_counts=True)
    order = torch.argsort(entry, stable=True)
    rank = torch.empty_like(entry)  # how many members of its cluster come before a token
    rank[order] = torch.arange(entry.numel()) - (torch.cumsum(sizes, 0) - sizes)[entry[order]]
    merged = sizes > 1
    out = []
    for tensor in (keys, values):
        sums = tensor[firsts].float()
        for r in range(1, int(sizes.max()) if sizes.numel() else 0):
            members = rank == r
            sums[entry[members]] += tensor[members].float()
        means = (sums / sizes[:, None].float()).to(tensor.dtype)
        out.append(torch.where(merged[:, None], means, tensor[firsts]))
    bias = torch.tensor([math.log(size) for size in sizes.tolist()], dtype=torch.float32)
    return out[0], out[1], bias


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
    """See `api.cluster_merge`."""
    num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    geometry = SlabGeometry(num_layers, num_kv_heads, block_size)
    keys, values = formats.gather_prompt(kv_cache, layer, source)
    seeds = assign(keys, chunk_ids, threshold)
    entries = [merge(keys[h], values[h], seeds[h]) for h in range(num_kv_heads)]
    counts = [e[2].numel() for e in entries]
    next_cell = first_cell + sum(geometry.cells(count) for count in counts)
    if next_cell <= num_cells:
        cell = first_cell
        for count, entry in zip(counts, entries, strict=True):
            formats.write_segment(kv_cache, bias, slab, cell, *entry)
            cell += geometry.cells(count)
    return torch.tensor(counts, dtype=torch.int32), next_cell


def cluster_count(
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    chunk_ids: torch.Tensor,
    threshold: float,
    stride: int,
) -> torch.Tensor:
    """See `api.cluster_count`."""
    keys = [formats.gather_prompt(kv_cache, layer, source)[0] for layer in range(len(kv_cache))]
    return torch.stack([count(k, chunk_ids, threshold, stride) for k in keys])


def count(
    keys: torch.Tensor, chunk_ids: torch.Tensor, threshold: float, stride: int = 1
) -> torch.Tensor:
    """Clusters of every ``stride``-th chunk.

    Args:
        keys: ``[H, G, D]``.

    Returns:
        int32 ``[H]``.
    """
    seeds = assign(keys, chunk_ids, threshold, stride)
    sampled = (chunk_ids >= 0) & (chunk_ids % stride == 0)
    return ((seeds == torch.arange(seeds.shape[1])) & sampled).sum(1).int()
