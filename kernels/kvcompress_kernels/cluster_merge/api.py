"""Public door of the SemantiCache operation: cluster, merge and write one layer.

After SemantiCache (arXiv 2603.14303). Each KV head of a layer is clustered on its own, greedily
and inside given chunks of tokens; see `reference.assign` for the rule and `reference.merge` for
the entries. Layouts of pool and slab: `kvcompress_kernels.formats`.
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
from kvcompress_kernels.cluster_merge import reference
from kvcompress_kernels.cluster_merge.reference import MERGE_ALL

__all__ = ["MERGE_ALL", "cluster_count", "cluster_merge"]

Impl = Literal["cpu", "triton", "reference"]


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
    impl: Impl = "cpu",
) -> tuple[torch.Tensor, int]:
    """Compress one layer of a prompt into its slab.

    The heads' segments follow one another from ``first_cell`` on. If they would pass
    ``num_cells``, nothing is written, and the counts are returned all the same.

    Decisions are exact: all implementations, any vector width and any number of threads give
    the same bits.

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
        chunk_ids: int32 ``[G]``: -1 for a token that is kept as it is, else the number of its
            chunk; chunks are consecutive tokens, numbered from 0 without gaps.
        threshold: cosine similarity in [0, 1) above which two keys merge, or `MERGE_ALL` (-1),
            which merges every chunk whole, whatever its keys.
        first_cell: cell of the slab at which the layer's first segment starts.
        num_cells: cells of the slab that may be used.
        impl: ``cpu`` (the C++ kernel), ``triton`` (CUDA devices; chunks of at most 128 tokens;
            waits for the device, which `triton.cluster_merge_layers` does not) or ``reference``
            (plain torch).

    Returns:
        ``num_entries``, int32 ``[H]``, and the cell after the last one; it is above ``num_cells``
        exactly if nothing was written.

    Raises:
        ValueError: an argument does not fit the description above.
        kvcompress_kernels.build.CompilerNotFoundError: see `build.load`.
    """
    _check_pool(kv_cache, source, chunk_ids, threshold, impl)
    check_slab(tuple(kv_cache.shape[-5:]), bias, layer, slab, first_cell, num_cells)
    args = (
        kv_cache,
        bias,
        layer,
        source,
        slab,
        chunk_ids,
        float(threshold),
        first_cell,
        num_cells,
    )
    if impl == "triton":
        # imported on demand: installations for the CPU have no Triton
        from kvcompress_kernels.cluster_merge import triton
        from kvcompress_kernels.triton_cells import check_device

        check_device(kv_cache)
        return triton.cluster_merge(*args)
    if _use_kernel(impl):
        return torch.ops.kvcompress.cluster_merge(*args)
    if kv_cache.dim() == 5:
        return reference.cluster_merge(*args)
    cells = formats.cpu_cells(kv_cache)
    result = reference.cluster_merge(cells, *args[1:])
    formats.copy_cpu_cells(cells, kv_cache)
    return result


def cluster_count(
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    chunk_ids: torch.Tensor,
    threshold: float,
    stride: int = 1,
    impl: Impl = "cpu",
) -> torch.Tensor:
    """Count the clusters that `cluster_merge` would make of some chunks, in all layers.

    Args:
        stride: only chunks whose number is a multiple of it are looked at; at least 1.

    The other arguments are those of `cluster_merge`.

    Returns:
        int32 ``[L, H]``; kept tokens are not counted.

    Raises:
        ValueError: an argument does not fit the description above.
        kvcompress_kernels.build.CompilerNotFoundError: see `build.load`.
    """
    _check_pool(kv_cache, source, chunk_ids, threshold, impl)
    if stride < 1:
        raise ValueError(f"stride: expected at least 1, got {stride}")
    args = (kv_cache, source, chunk_ids, float(threshold), stride)
    if impl == "triton":
        from kvcompress_kernels.cluster_merge import triton
        from kvcompress_kernels.triton_cells import check_device

        check_device(kv_cache)
        return triton.cluster_count(*args)
    if _use_kernel(impl):
        return torch.ops.kvcompress.cluster_count(*args)
    cells = formats.cpu_cells(kv_cache) if kv_cache.dim() == 6 else kv_cache
    return reference.cluster_count(cells, *args[1:])


def _use_kernel(impl: str) -> bool:
    if impl == "reference":
        return False
    if impl != "cpu":
        raise ValueError(f"unknown impl {impl!r}; expected one of 'cpu', 'reference', 'triton'")
    if not hasattr(torch.ops.kvcompress, "cluster_merge"):
        build.load()
    return True


def _check_pool(
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    chunk_ids: torch.Tensor,
    threshold: float,
    impl: Impl,
) -> None:
    shape = tuple(kv_cache.shape)
    if impl == "triton" or (impl == "reference" and kv_cache.dim() == 6):
        check_gpu_pool(kv_cache)
        shape = (*shape[1:5], 2 * shape[5])
    else:
        check_cpu_pool(kv_cache)
    check_blocks("source", "[G / N]", source, shape[1])
    num_tokens = source.numel() * shape[3]
    if (
        tuple(chunk_ids.shape) != (num_tokens,)
        or chunk_ids.dtype != torch.int32
        or not chunk_ids.is_contiguous()
    ):
        raise ValueError(
            f"chunk_ids: expected contiguous int32 [G] = [{num_tokens}], got {describe(chunk_ids)}"
        )
    runs = torch.unique_consecutive(chunk_ids.cpu())
    numbers = runs[runs >= 0]
    if not torch.equal(numbers, torch.arange(numbers.numel(), dtype=torch.int32)):
        raise ValueError(
            "chunk_ids: expected chunks of consecutive tokens numbered 0, 1, 2 ... in token order, "
            f"got the numbers {numbers[:8].tolist()} ..."
        )
    if threshold != MERGE_ALL and not 0.0 <= threshold < 1.0:
        raise ValueError(f"threshold: expected 0 up to but not 1, or {MERGE_ALL}, got {threshold}")
