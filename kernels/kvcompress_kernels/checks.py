"""Checks of arguments that the public doors of several operations share."""

from __future__ import annotations

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Data types of a pool."""

MAX_HEAD_SIZE = 256


def describe(tensor: torch.Tensor) -> str:
    """A tensor in an error message."""
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"


def check_cpu_pool(kv_cache: torch.Tensor) -> None:
    """Raise ValueError unless ``kv_cache`` is a pool of CPU cells (`formats`)."""
    shape = tuple(kv_cache.shape)
    if (
        kv_cache.dim() != 5
        or kv_cache.dtype not in DTYPES
        or shape[3] % 16
        or shape[4] % 32
        or not 0 < shape[4] <= 2 * MAX_HEAD_SIZE
        or kv_cache.stride(4) != 1
        or kv_cache.stride(3) != shape[4]
        or kv_cache.device.type != "cpu"
    ):
        raise ValueError(
            "kv_cache: expected bfloat16, float16 or float32 [L, B, H, N, 2 * D] on the CPU with N "
            f"and D multiples of 16, D at most {MAX_HEAD_SIZE} and the last two dimensions "
            f"contiguous, got {describe(kv_cache)} on {kv_cache.device}"
        )


def check_gpu_pool(kv_cache: torch.Tensor) -> None:
    """Raise ValueError unless ``kv_cache`` is a pool of GPU cells (`formats.gpu_pool`)."""
    shape = tuple(kv_cache.shape)
    if (
        kv_cache.dim() != 6
        or shape[0] != 2
        or kv_cache.dtype not in DTYPES
        or shape[4] % 16
        or shape[5] % 16
        or not 0 < shape[5] <= MAX_HEAD_SIZE
        or kv_cache.stride(5) != 1
        or kv_cache[0].stride() != kv_cache[1].stride()
    ):
        raise ValueError(
            "kv_cache: expected bfloat16, float16 or float32 [2, L, B, H, N, D] (formats.gpu_pool "
            f"makes it of vLLM's cache) with N and D multiples of 16, D at most {MAX_HEAD_SIZE} "
            f"and the last dimension contiguous, got {describe(kv_cache)}"
        )


def check_blocks(name: str, symbol: str, blocks: torch.Tensor, num_blocks: int) -> None:
    """Raise ValueError unless ``blocks`` is a list of block ids.

    Args:
        name: of the argument.
        symbol: its shape in words.
        num_blocks: of the pool.
    """
    if blocks.dim() != 1 or blocks.dtype != torch.int32 or not blocks.is_contiguous():
        raise ValueError(f"{name}: expected contiguous int32 {symbol}, got {describe(blocks)}")
    if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
        raise ValueError(
            f"{name}: expected block ids from 0 to B - 1 = {num_blocks - 1}, got ids from "
            f"{int(blocks.min())} to {int(blocks.max())}"
        )


def check_slab(
    shape: tuple[int, ...],
    bias: torch.Tensor,
    layer: int,
    slab: torch.Tensor,
    first_cell: int,
    num_cells: int,
) -> None:
    """Raise ValueError unless segments of one layer can be written into a slab.

    Args:
        shape: ``(L, B, H, N, ...)`` of the pool; the other arguments are those of the operations.
    """
    num_layers, num_blocks, num_kv_heads, block_size = shape[:4]
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected 0 to L - 1 = {num_layers - 1}, got {layer}")
    expected = (num_blocks, num_layers, num_kv_heads, block_size)
    if tuple(bias.shape) != expected or bias.dtype != torch.float32 or bias.stride(-1) != 1:
        raise ValueError(
            f"bias: expected float32 [B, L, H, N] = {list(expected)} with a contiguous last "
            f"dimension, got {describe(bias)}"
        )
    check_blocks("slab", "[c]", slab, num_blocks)
    room = slab.numel() * num_layers * num_kv_heads
    if not 0 <= num_cells <= room:
        raise ValueError(f"num_cells: expected 0 to c * L * H = {room}, got {num_cells}")
    if not 0 <= first_cell <= num_cells:
        raise ValueError(f"first_cell: expected 0 to num_cells = {num_cells}, got {first_cell}")
