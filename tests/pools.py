"""Pools for the tests of kernels, and what they are compared by."""

from __future__ import annotations

import math

import torch

from kvcompress_kernels import formats

ORDERS = ["layers first", "blocks first", "heads outside layers, padded"]

GPU_LAYOUTS = ["LBHNC", "BLHNC", "BHLNC", "LBNHC", "heads apart", "leading two"]
"""Orders of a GPU pool in memory; the last two keep keys and values apart."""


def gpu_pool(cells: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy CPU cells into a pool that vLLM could have made, with NaN around it."""
    shape = cells.shape
    L, B, H, N, width = shape
    if layout == "heads apart":
        buffer = torch.full((L, B, 2 * H, N, width // 2), math.nan, dtype=cells.dtype)
        pool = formats.gpu_pool(buffer, num_kv_heads=H)
    elif layout == "leading two":
        pool = torch.full((2, L, B, H, N, width // 2), math.nan, dtype=cells.dtype)
    else:
        order = ["LBHNC".index(letter) for letter in layout]
        # another layer before and after, as in a buffer that several groups share
        sizes = [shape[axis] + 2 * (axis == 0) for axis in order]
        buffer = torch.full(sizes, math.nan, dtype=cells.dtype)
        view = buffer.permute(*(order.index(axis) for axis in range(5)))
        pool = formats.gpu_pool(view[1:-1])
    formats.copy_cpu_cells(cells, pool)
    return pool


def make_pool(shape: tuple[int, ...], dtype: torch.dtype, order: str) -> torch.Tensor:
    """A pool full of NaN, ``[L, B, H, N, 2 * D]``, as a view of a buffer in some order."""
    layers, blocks, heads, slots, width = shape
    if order == "layers first":
        return torch.full(shape, math.nan, dtype=dtype)
    if order == "blocks first":
        buffer = torch.full((blocks, layers, heads, slots, width), math.nan, dtype=dtype)
        return buffer.permute(1, 0, 2, 3, 4)
    buffer = torch.full((blocks, heads + 1, layers + 1, slots, width), math.nan, dtype=dtype)
    return buffer[:, 1:, 1:].permute(2, 0, 1, 3, 4)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    assert torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
