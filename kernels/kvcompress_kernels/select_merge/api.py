"""Public door of the operation that writes chosen tokens of one layer into a slab.

After SelKV (arXiv 2607.16213). Which tokens are chosen is the caller's business; the values of
others nearby are merged into them, see `reference.route` and `reference.merge`. Layouts of pool and
slab: `kvcompress_kernels.formats`.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvcompress_kernels import build, formats
from kvcompress_kernels.checks import (
    check_blocks,
    check_cpu_pool,
    check_gpu_pool,
    check_slab,
    describe,
)
from kvcompress_kernels.select_merge import reference

__all__ = ["MAX_BUCKET", "select_merge"]

Impl = Literal["cpu", "triton", "reference"]

MAX_BUCKET = 1024


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
    impl: Impl = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Write the kept tokens of one layer into its slab, with what they take over from the others.

    The heads' segments follow one another from ``first_cell`` on, entries in token order. If they
    would pass ``num_cells``, nothing is written, and the numbers of entries are returned all the
    same.

    Where a dropped token goes is decided exactly, the same in all implementations; gates, merged
    values and biases are float32 (float64 in the reference). Keys, and values that take nothing
    over, are copied bit by bit.

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``, bfloat16, float16 or float32; N and D multiples of 16,
            D at most 256; the last two dimensions contiguous. Written in the slab's blocks. With
            ``triton`` the view ``[2, L, B, H, N, D]`` that `formats.gpu_pool` makes, any strides
            but the last; ``reference`` takes both.
        bias: float32 ``[B, L, H, N]``, last dimension contiguous. Written in the slab's blocks.
        layer: index into ``L``.
        source: int32 ``[G / N]``, blocks of the prompt in token order; only read.
        slab: int32 ``[c]``, blocks of the slab. That it is disjoint from ``source`` is the
            caller's responsibility.
        kept: bool ``[H, G]``, contiguous.
        mass: float32 ``[H, G]``, contiguous: attention that each token gets, at least 0.
        bucket: tokens within which values are merged, 2 to `MAX_BUCKET`; 0 merges nothing and
            does not look at ``mass``.
        alpha: weight of the bias, at least 0.
        first_cell: cell of the slab at which the layer's first segment starts.
        num_cells: cells of the slab that may be used.
        impl: ``cpu`` (the C++ kernel), ``triton`` (CUDA devices; waits for the device, which
            `triton.select_merge_layers` does not) or ``reference`` (plain torch).

    Returns:
        ``num_entries``, int32 ``[H]``; ``num_merged``, int32 ``[H]``, the dropped tokens whose
        values were merged into kept ones; and the cell after the last one, which is above
        ``num_cells`` exactly if nothing was written.

    Raises:
        ValueError: an argument does not fit the description above.
        kvcompress_kernels.build.CompilerNotFoundError: see `build.load`.
    """
    if impl == "triton" or (impl == "reference" and kv_cache.dim() == 6):
        check_gpu_pool(kv_cache)
    else:
        check_cpu_pool(kv_cache)
    shape = tuple(kv_cache.shape[-5:])
    check_blocks("source", "[G / N]", source, shape[1])
    check_slab(shape, bias, layer, slab, first_cell, num_cells)
    _check_choice(shape, source, kept, mass, bucket, alpha, kv_cache.device)
    args = (
        kv_cache,
        bias,
        layer,
        source,
        slab,
        kept,
        mass,
        bucket,
        float(alpha),
        first_cell,
        num_cells,
    )
    if impl == "triton":
        # imported on demand: installations for the CPU have no Triton
        from kvcompress_kernels.select_merge import triton
        from kvcompress_kernels.triton_cells import check_device

        check_device(kv_cache)
        return triton.select_merge(*args)
    if impl == "reference":
        if kv_cache.dim() == 5:
            return reference.select_merge(*args)
        cells = formats.cpu_cells(kv_cache)
        result = reference.select_merge(cells, *args[1:])
        formats.copy_cpu_cells(cells, kv_cache)
        return result
    if impl != "cpu":
        raise ValueError(f"unknown impl {impl!r}; expected one of 'cpu', 'reference', 'triton'")
    if not hasattr(torch.ops.kvcompress, "select_merge"):
        build.load()
    return torch.ops.kvcompress.select_merge(*args)


def _check_choice(
    shape: tuple[int, ...],
    source: torch.Tensor,
    kept: torch.Tensor,
    mass: torch.Tensor,
    bucket: int,
    alpha: float,
    device: torch.device,
) -> None:
    expected = (shape[2], source.numel() * shape[3])
    for name, tensor, dtype in (("kept", kept, torch.bool), ("mass", mass, torch.float32)):
        if (
            tuple(tensor.shape) != expected
            or tensor.dtype != dtype
            or not tensor.is_contiguous()
            or tensor.device != device
        ):
            raise ValueError(
                f"{name}: expected contiguous {dtype} [H, G] = {list(expected)} on {device}, got "
                f"{describe(tensor)} on {tensor.device}"
            )
    if bucket != 0 and not 2 <= bucket <= MAX_BUCKET:
        raise ValueError(f"bucket: expected 0 or 2 to {MAX_BUCKET}, got {bucket}")
    if not 0.0 <= alpha < float("inf"):
        raise ValueError(f"alpha: expected a finite number of at least 0, got {alpha}")
