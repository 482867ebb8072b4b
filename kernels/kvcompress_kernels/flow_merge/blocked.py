"""`reference.flow` in float32, by blocks of dropped tokens: memory is linear in the prompt.

Its time is that of the products of keys, which torch hands to BLAS, of finding the highest in each
row, and of the passes over memory between them.
"""

from __future__ import annotations

import torch

from kvcompress_kernels.flow_merge import reference
from kvcompress_kernels.flow_merge.reference import EPSILON, Entries, Form, Inflow

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


def flow(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    mass: torch.Tensor,
    form: Form,
    gamma: float,
) -> Entries:
    """`reference.flow`."""
    return reference.flow(
        keys, values, kept, mass, form, gamma, arrive=_inflow, dtype=torch.float32
    )
