"""Public door of the scoring operation: which tokens of a paged prompt do some queries attend to?

The score is that of VATP (arXiv 2406.12335) with the Euclidean norm: attention times the norm of
the value; see `reference.attention_mass` and `reference.weigh`. Memory is linear in the number of
tokens. Layout of the pool: `kvcompress_kernels.formats`.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvcompress_kernels import build, formats
from kvcompress_kernels.checks import check_blocks, check_cpu_pool, check_gpu_pool, describe
from kvcompress_kernels.window_scores import reference

__all__ = ["window_scores"]

Impl = Literal["cpu", "triton", "reference"]


def window_scores(
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    tail: torch.Tensor,
    num_tokens: int,
    queries: torch.Tensor,
    first_position: int,
    scale: float,
    impl: Impl = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the tokens of a prompt's first blocks, in all layers.

    Query ``i`` of each head is at position ``first_position + i``, sees the tokens of the prompt up
    to its own position, and spreads attention of 1 over them. Queries at and past the end of the
    prompt see all of it.

    Sums are made in float32; the result does not depend on the number of threads.

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``, bfloat16, float16 or float32; N and D multiples of 16,
            D at most 256; the last two dimensions contiguous. Only read. With ``triton`` the view
            ``[2, L, B, H, N, D]`` that `formats.gpu_pool` makes, any strides but the last;
            ``reference`` takes both.
        source: int32 ``[G / N]``, blocks of the tokens ``[0, G)`` that are scored, in token order.
        tail: int32 ``[ceil((n - G) / N)]``, blocks of the tokens ``[G, n)``, which get attention
            but no score. Slots past ``n`` may hold anything.
        num_tokens: tokens of the prompt, ``n``.
        queries: ``[L, num_heads, w, D]`` in the dtype of the pool, contiguous; w at least 1. Query
            heads ``[h * num_heads / H, (h + 1) * num_heads / H)`` share KV head ``h``.
        first_position: position of the first query, at least 0.
        scale: factor of the logits, above 0.
        impl: ``cpu`` (the C++ kernel), ``triton`` (CUDA devices; `triton.window_scores` does the
            same without these checks, which wait for the device) or ``reference`` (plain torch in
            float64).

    Returns:
        mass, float32 ``[L, H, G]``: attention summed over the queries of the KV head.
        scores, float32 ``[L, H, G]``: the same times the norm of the token's value.

    Raises:
        ValueError: an argument does not fit the description above.
        kvcompress_kernels.build.CompilerNotFoundError: see `build.load`.
    """
    _check(kv_cache, source, tail, num_tokens, queries, first_position, scale, impl)
    args = (kv_cache, source, tail, num_tokens, queries, first_position, float(scale))
    if impl == "triton":
        # imported on demand: installations for the CPU have no Triton
        from kvcompress_kernels.triton_cells import check_device
        from kvcompress_kernels.window_scores import triton

        check_device(kv_cache)
        return triton.window_scores(*args)
    if impl == "reference":
        cells = formats.cpu_cells(kv_cache) if kv_cache.dim() == 6 else kv_cache
        return reference.window_scores(cells, *args[1:])
    if impl != "cpu":
        raise ValueError(f"unknown impl {impl!r}; expected one of 'cpu', 'reference', 'triton'")
    if not hasattr(torch.ops.kvcompress, "window_scores"):
        build.load()
    return torch.ops.kvcompress.window_scores(*args)


def _check(
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    tail: torch.Tensor,
    num_tokens: int,
    queries: torch.Tensor,
    first_position: int,
    scale: float,
    impl: Impl,
) -> None:
    if impl == "triton" or (impl == "reference" and kv_cache.dim() == 6):
        check_gpu_pool(kv_cache)
        num_layers, num_blocks, num_kv_heads, block_size, head_size = kv_cache.shape[1:]
    else:
        check_cpu_pool(kv_cache)
        num_layers, num_blocks, num_kv_heads, block_size, width = kv_cache.shape
        head_size = width // 2
    check_blocks("source", "[G / N]", source, num_blocks)
    check_blocks("tail", "[ceil((n - G) / N)]", tail, num_blocks)
    most = (source.numel() + tail.numel()) * block_size
    least = max(most - block_size + 1 if tail.numel() else most, 1)
    if not least <= num_tokens <= most:
        raise ValueError(
            f"num_tokens: expected what {source.numel()} full blocks and {tail.numel()} blocks of "
            f"the tail hold, {least} to {most}, got {num_tokens}"
        )
    if (
        queries.dim() != 4
        or queries.shape[0] != num_layers
        or queries.shape[1] == 0
        or queries.shape[1] % num_kv_heads
        or queries.shape[2] == 0
        or queries.shape[3] != head_size
        or queries.dtype != kv_cache.dtype
        or not queries.is_contiguous()
        or queries.device != kv_cache.device
    ):
        raise ValueError(
            f"queries: expected contiguous {kv_cache.dtype} [L, num_heads, w, D] = [{num_layers}, "
            f"a multiple of {num_kv_heads}, at least 1, {head_size}] on {kv_cache.device}, got "
            f"{describe(queries)} on {queries.device}"
        )
    if first_position < 0:
        raise ValueError(f"first_position: expected at least 0, got {first_position}")
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale: expected a finite number above 0, got {scale}")
