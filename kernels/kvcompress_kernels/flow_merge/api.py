"""Public door of the operation that writes chosen tokens of one layer into a slab and lets the
values of all others flow into them.

After the attention-flow aggregation of Meta-Soft (arXiv 2605.22337); see `reference`. Which tokens
are chosen is the caller's business. Layouts of pool and slab: `kvcompress_kernels.formats`.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvcompress_kernels.checks import check_blocks, check_cpu_pool, check_slab, describe
from kvcompress_kernels.flow_merge import blocked, reference
from kvcompress_kernels.flow_merge.reference import Form

__all__ = ["flow_merge"]

Impl = Literal["torch", "reference"]


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
    impl: Impl = "torch",
) -> tuple[torch.Tensor, int]:
    """Write the kept tokens of one layer into its slab, with what flows in from the dropped ones.

    The heads' segments follow one another from ``first_cell`` on, entries in token order. If they
    would pass ``num_cells``, nothing is written, and the numbers of entries are returned all the
    same. Keys are copied bit by bit; flows, values and biases are float32 (float64 in the
    reference).

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``, bfloat16, float16 or float32; N and D multiples of 16,
            D at most 256; the last two dimensions contiguous. Written in the slab's blocks.
        bias: float32 ``[B, L, H, N]``, last dimension contiguous. Written in the slab's blocks.
        layer: index into ``L``.
        source: int32 ``[G / N]``, blocks of the prompt in token order; only read.
        slab: int32 ``[c]``, blocks of the slab. That it is disjoint from ``source`` is the
            caller's responsibility.
        kept: bool ``[H, G]``.
        mass: float32 ``[H, G]``: attention that each token gets, at least 0.
        form: how values are mixed, see `reference.mix`.
        gamma: strength, 0 to 1.
        first_cell: cell of the slab at which the layer's first segment starts.
        num_cells: cells of the slab that may be used.
        impl: ``torch`` (blocks of dropped tokens; memory is linear in G) or ``reference``.

    Returns:
        ``num_entries``, int32 ``[H]``; and the cell after the last one, which is above
        ``num_cells`` exactly if nothing was written.

    Raises:
        ValueError: an argument does not fit the description above.
    """
    check_cpu_pool(kv_cache)
    check_blocks("source", "[G / N]", source, kv_cache.shape[1])
    check_slab(tuple(kv_cache.shape), bias, layer, slab, first_cell, num_cells)
    _check_choice(kv_cache, source, kept, mass)
    if form not in ("mass", "convex", "printed"):
        raise ValueError(f"form: expected 'mass', 'convex' or 'printed', got {form!r}")
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma: expected 0 to 1, got {gamma}")
    if impl not in ("torch", "reference"):
        raise ValueError(f"unknown impl {impl!r}; expected one of 'torch', 'reference'")
    return reference.flow_merge(
        kv_cache,
        bias,
        layer,
        source,
        slab,
        kept,
        mass,
        form,
        float(gamma),
        first_cell,
        num_cells,
        reference.flow if impl == "reference" else blocked.flow,
    )


def _check_choice(
    kv_cache: torch.Tensor, source: torch.Tensor, kept: torch.Tensor, mass: torch.Tensor
) -> None:
    expected = (kv_cache.shape[2], source.numel() * kv_cache.shape[3])
    for name, tensor, dtype in (("kept", kept, torch.bool), ("mass", mass, torch.float32)):
        if tuple(tensor.shape) != expected or tensor.dtype != dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"{name}: expected {dtype} [H, G] = {list(expected)} on the CPU, got "
                f"{describe(tensor)} on {tensor.device}"
            )
