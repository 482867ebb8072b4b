"""Plain torch form of `flow_merge`; defines the result. Computed in float64.

After the attention-flow aggregation of Meta-Soft (arXiv 2605.22337, Eqs. 7 to 13), with
``num_targets`` and temperature 1 where the paper gives no numbers. Shape letters: ``H`` KV heads,
``G`` tokens, ``D`` head size; of one head ``m`` kept and ``r`` dropped tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from kvcompress_kernels import formats
from kvcompress_kernels.formats import SlabGeometry
from kvcompress_kernels.select_merge.reference import MIN_MASS

Form = Literal["mass", "convex", "printed"]
Entries = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""For each KV head keys ``[m, D]``, values ``[m, D]`` and bias float32 ``[m]``."""

NUM_TARGETS = 4
"""Kept tokens that the value of a dropped one flows to, at most."""

EPSILON = 1e-6
"""Keeps quotients finite where nothing flows."""


class Inflow(NamedTuple):
    """What arrives at the kept tokens of one head.

    Args:
        values: ``[m, D]``, sums of weighted values of dropped tokens.
        weights: ``[m]``, sums of their weights.
        gate: ``[m]``, 0 to 1, small where much arrives.
    """

    values: torch.Tensor
    weights: torch.Tensor
    gate: torch.Tensor


def shares(dropped: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the value of each dropped token flows to, before loads are balanced: the softmax over
    the highest products of its key with kept keys, divided by ``sqrt(D)``.

    Args:
        dropped: keys ``[r, D]``.
        kept: keys ``[m, D]``.

    Returns:
        int64 ``[r, t]``, indices of kept tokens, ``t = min(NUM_TARGETS, m)``; and the shares
        ``[r, t]``, which add up to 1.
    """
    similar = dropped @ kept.T / dropped.shape[1] ** 0.5
    best, targets = similar.topk(min(NUM_TARGETS, len(kept)), dim=1)
    return targets, best.softmax(1)


def inflow(
    dropped_keys: torch.Tensor,
    dropped_values: torch.Tensor,
    dropped_mass: torch.Tensor,
    kept_keys: torch.Tensor,
    form: Form,
) -> Inflow:
    """What flows into the kept tokens, by a matrix ``W [r, m]``.

    With the shares ``A`` and the load ``l_j = sum_i A_ij``, ``W`` is ``A_ij / l_j`` with each row
    scaled to add up to 1 again; the form "mass" multiplies row ``i`` by the attention of ``i``.
    The gate is ``clip(r / m / l_j, 0, 1)``.
    """
    targets, found = shares(dropped_keys, kept_keys)
    num_dropped, num_kept = len(dropped_keys), len(kept_keys)
    flow = found.new_zeros(num_dropped, num_kept).scatter(1, targets, found)
    load = flow.sum(0)
    gate = (num_dropped / num_kept / (load + EPSILON)).clamp(0, 1)
    flow = flow / (load + EPSILON)
    flow = flow / flow.sum(1, keepdim=True)
    if form == "mass":
        flow = flow * dropped_mass[:, None]
    return Inflow(flow.T @ dropped_values, flow.sum(0), gate)


def mix(
    values: torch.Tensor, mass: torch.Tensor, arriving: Inflow, form: Form, gamma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and biases of kept tokens after the flow.

    With ``a`` the attention, ``S`` and ``w`` the sums of `Inflow`, ``g`` the gate:

    - "printed": ``v + gamma g S``. The weights of all dropped tokens add up to ``r``, so that ``S``
      is about ``r / m`` values.
    - "convex": ``(1 - gamma g) v + gamma g S / w``; ``v`` where nothing arrives.
    - "mass": ``(a v + gamma S) / (a + gamma w)``, and the bias ``log(1 + gamma w / a)``.

    Args:
        values: ``[m, D]``.
        mass: ``[m]``, at least `MIN_MASS`.

    Returns:
        ``[m, D]`` and ``[m]``.
    """
    if form == "mass":
        total = mass + gamma * arriving.weights
        mixed = (mass[:, None] * values + gamma * arriving.values) / total[:, None]
        return mixed, (gamma * arriving.weights / mass).log1p()
    step = (gamma * arriving.gate)[:, None]
    if form == "printed":
        return values + step * arriving.values, torch.zeros_like(mass)
    weights = arriving.weights[:, None]
    mean = torch.where(weights > 0, arriving.values / weights, values)
    return values + step * (mean - values), torch.zeros_like(mass)


def flow(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    mass: torch.Tensor,
    form: Form,
    gamma: float,
    *,
    arrive: Callable[..., Inflow] = inflow,
    dtype: torch.dtype = torch.float64,
) -> Entries:
    """The entries of one layer, in token order.

    Args:
        keys: ``[H, G, D]``.
        values: ``[H, G, D]``.
        kept: bool ``[H, G]``.
        mass: float32 ``[H, G]``, attention that each token gets; raised to `MIN_MASS`.
        form: see `mix`.
        gamma: strength.
        arrive: computes what `inflow` computes.
        dtype: in which all is computed.
    """
    entries = []
    mass = mass.to(dtype).clamp(min=MIN_MASS)
    for k, v, chosen, a in zip(keys, values, kept, mass, strict=True):
        own, bias = v[chosen], torch.zeros(int(chosen.sum()), dtype=dtype)
        if 0 < len(own) < len(v):
            arriving = arrive(
                k[~chosen].to(dtype), v[~chosen].to(dtype), a[~chosen], k[chosen].to(dtype), form
            )
            mixed, bias = mix(own.to(dtype), a[chosen], arriving, form, gamma)
            own = mixed.to(v.dtype)
        entries.append((k[chosen], own, bias.float()))
    return entries


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
    compute: Callable[..., Entries] = flow,
) -> tuple[torch.Tensor, int]:
    """See `api.flow_merge`; ``compute`` makes the entries as `flow` does."""
    num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    geometry = SlabGeometry(num_layers, num_kv_heads, block_size)
    num_entries = kept.sum(1).int()
    next_cell = first_cell + sum(geometry.cells(count) for count in num_entries.tolist())
    if next_cell > num_cells:
        return num_entries, next_cell
    keys, values = formats.gather_prompt(kv_cache, layer, source)
    cell = first_cell
    for entry in compute(keys, values, kept, mass, form, gamma):
        formats.write_segment(kv_cache, bias, slab, cell, *entry)
        cell += geometry.cells(entry[2].numel())
    return num_entries, next_cell
