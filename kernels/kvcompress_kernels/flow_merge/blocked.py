"""`flow_merge` in float32, by blocks of dropped tokens: memory is linear in the prompt.

Its time is that of the products of keys, which torch hands to BLAS, of finding the highest in each
row, and of the passes over memory between them.
"""

from __future__ import annotations

import torch

from kvcompress_kernels import formats
from kvcompress_kernels.flow_merge import reference
from kvcompress_kernels.flow_merge.reference import EPSILON, Form, Inflow
from kvcompress_kernels.formats import SlabGeometry
from kvcompress_kernels.select_merge.reference import MIN_MASS

_BLOCK = 256
"""Dropped tokens whose products with all kept keys are in memory at a time."""


def _shares(dropped: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.shares`, block by block."""
    parts = [reference.shares(block, kept) for block in dropped.split(_BLOCK)]
    targets, shares = zip(*parts, strict=True)
    return torch.cat(targets), torch.cat(shares)


def _inflow(
    dropped_keys: torch.Tensor,
    dropped_values: torch.Tensor,
    dropped_mass: torch.Tensor,
    kept_keys: torch.Tensor,
    form: Form,
) -> Inflow:
    """`reference.inflow`, by the few columns of each row that are not zero."""
    targets, shares = _shares(dropped_keys, kept_keys)
    num_dropped, num_kept = len(dropped_keys), len(kept_keys)
    load = shares.new_zeros(num_kept).index_add_(0, targets.flatten(), shares.flatten())
    gate = (num_dropped / num_kept / (load + EPSILON)).clamp(0, 1)
    flow = shares / (load[targets] + EPSILON)
    flow /= flow.sum(1, keepdim=True)
    if form == "mass":
        flow *= dropped_mass[:, None]
    values = torch.zeros_like(kept_keys)
    for column in range(targets.shape[1]):
        values.index_add_(0, targets[:, column], flow[:, column, None] * dropped_values)
    weights = torch.zeros_like(load).index_add_(0, targets.flatten(), flow.flatten())
    return Inflow(values, weights, gate)


def flow_merge(
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    layer: int,
    source: torch.Tensor,
    slab: torch.Tensor,
    kept: torch.Tensor,
    mass: torch.Tensor,
    form: Form,
    gamma: float,
    first_cell: int,
    num_cells: int,
) -> tuple[torch.Tensor, int]:
    """See `api.flow_merge`."""
    num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    geometry = SlabGeometry(num_layers, num_kv_heads, block_size)
    num_entries = kept.sum(1).int()
    next_cell = first_cell + sum(geometry.cells(count) for count in num_entries.tolist())
    if next_cell > num_cells:
        return num_entries, next_cell
    keys, values = formats.gather_prompt(kv_cache, layer, source)
    mass = mass.clamp(min=MIN_MASS)
    cell = first_cell
    for head, chosen in enumerate(kept):
        k, v, a = keys[head], values[head], mass[head]
        own, own_bias = v[chosen], torch.zeros(int(num_entries[head]))
        if 0 < len(own) < len(v):
            arriving = _inflow(
                k[~chosen].float(), v[~chosen].float(), a[~chosen], k[chosen].float(), form
            )
            own, own_bias = reference.mix(own.float(), a[chosen], arriving, form, gamma)
        formats.write_segment(kv_cache, bias, slab, cell, k[chosen], own, own_bias)
        cell += geometry.cells(len(own))
    return num_entries, next_cell
