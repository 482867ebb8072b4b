"""Plain torch form of `select_merge`; defines the result. Computed in float64.

Shape letters: ``H`` KV heads, ``G`` tokens, ``D`` head size, ``m`` entries of one head.
"""

from __future__ import annotations

import torch

from kvcompress_kernels import formats
from kvcompress_kernels.formats import SlabGeometry

MIN_MASS = 1e-8
"""Attention mass below which a token counts as having this much."""

NOWHERE = -1
"""Target of a token that is merged into none."""


def route(keys: torch.Tensor, kept: torch.Tensor, bucket: int) -> torch.Tensor:
    """Kept token of the same bucket whose key points most nearly the same way.

    The token ``i`` with the largest ``k_j . k_i / |k_i|``, the lowest one of several. Products of
    two numbers of the cache's dtypes are exact in float64, and they are added in the order of
    ``d``, so the choice is the same wherever it is made. A kept key of norm zero or one that is
    not finite attracts nothing.

    Args:
        keys: ``[H, G, D]``.
        kept: bool ``[H, G]``.
        bucket: tokens ``[0, bucket)``, ``[bucket, 2 * bucket)``, ... are routed among themselves.

    Returns:
        int64 ``[H, G]``: the token that takes a dropped token in; `NOWHERE` for kept tokens, and
        where the bucket has no kept token.
    """
    _, num_tokens, head_size = keys.shape
    pad = -num_tokens % bucket
    rows = torch.nn.functional.pad(keys.double(), (0, 0, 0, pad)).unflatten(1, (-1, bucket))
    allowed = torch.nn.functional.pad(kept, (0, pad)).unflatten(1, (-1, bucket))
    dots = torch.zeros((*rows.shape[:3], bucket), dtype=torch.float64)
    squares = torch.zeros(rows.shape[:3], dtype=torch.float64)
    for d in range(head_size):
        column = rows[..., d]
        dots += column[..., :, None] * column[..., None, :]
        squares += column * column
    similar = dots / squares.sqrt()[..., None, :]  # [H, buckets, from, to]
    similar = similar.masked_fill(similar.isnan() | ~allowed[..., None, :], float("-inf"))
    best, target = similar.max(-1)
    target += torch.arange(rows.shape[1])[:, None] * bucket
    target = torch.where((best > float("-inf")) & ~allowed, target, NOWHERE)
    return target.flatten(1)[:, :num_tokens]


def merge(
    values: torch.Tensor,
    kept: torch.Tensor,
    target: torch.Tensor,
    mass: torch.Tensor,
    alpha: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move the values of dropped tokens into their targets.

    With ``g_j = max(cos(v_j, v_i), 0)`` for each token ``j`` that is routed to ``i``, and ``a`` the
    mass: ``v_i`` becomes ``(a_i v_i + sum g_j a_j v_j) / A`` with ``A = a_i + sum g_j a_j``, and
    its bias ``alpha * log(A / a_i)``.

    Args:
        values: ``[H, G, D]``.
        kept: bool ``[H, G]``.
        target: int64 ``[H, G]``, from `route`.
        mass: float32 ``[H, G]``; raised to `MIN_MASS`.
        alpha: weight of the bias.
        dtype: of every intermediate result.

    Returns:
        values ``[H, G, D]`` in the inputs' dtype and bias float32 ``[H, G]``, right where ``kept``;
        and bool ``[H, G]``, the tokens whose value has moved.
    """
    exact = values.to(dtype)
    mass = mass.to(dtype).clamp(min=MIN_MASS)
    norms = torch.linalg.vector_norm(exact, dim=-1)
    into = target.clamp(min=0)
    partner = exact.gather(1, into[..., None].expand_as(exact))
    gate = (exact * partner).sum(-1) / (norms * norms.gather(1, into))
    moved = (target != NOWHERE) & (gate > 0)
    weight = torch.where(moved, gate * mass, 0)
    total = mass.scatter_add(1, into, weight)
    moving = torch.where(moved[..., None], weight[..., None] * exact, 0)
    sums = (mass[..., None] * exact).scatter_add(1, into[..., None].expand_as(exact), moving)
    merged = kept & torch.zeros_like(kept).scatter_reduce(1, into, moved, "amax")
    out = torch.where(merged[..., None], (sums / total[..., None]).to(values.dtype), values)
    bias = torch.where(merged, alpha * (total / mass).log(), 0)
    return out, bias.float(), moved


def select(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    mass: torch.Tensor,
    bucket: int,
    alpha: float,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], torch.Tensor]:
    """The entries of one layer, in token order.

    Args:
        bucket: see `route`; 0 merges nothing.

    The other arguments are those of `route` and `merge`.

    Returns:
        for each KV head keys ``[m, D]``, values ``[m, D]`` and bias float32 ``[m]``; and int32
        ``[H]``, how many dropped tokens were merged into others.
    """
    bias = torch.zeros(kept.shape)
    moved = torch.zeros_like(kept)
    if bucket:
        values, bias, moved = merge(values, kept, route(keys, kept, bucket), mass, alpha)
    entries = [(k[i], v[i], b[i]) for k, v, b, i in zip(keys, values, bias, kept, strict=True)]
    return entries, moved.sum(1).int()


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
    """See `api.select_merge`."""
    num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    geometry = SlabGeometry(num_layers, num_kv_heads, block_size)
    num_entries = kept.sum(1).int()
    next_cell = first_cell + sum(geometry.cells(count) for count in num_entries.tolist())
    if next_cell > num_cells:
        return num_entries, torch.zeros_like(num_entries), next_cell
    keys, values = formats.gather_prompt(kv_cache, layer, source)
    entries, num_merged = select(keys, values, kept, mass, bucket, alpha)
    cell = first_cell
    for entry in entries:
        formats.write_segment(kv_cache, bias, slab, cell, *entry)
        cell += geometry.cells(entry[2].numel())
    return num_entries, num_merged, next_cell
