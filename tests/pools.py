"""Pools for the tests of kernels, and what they are compared by."""

from __future__ import annotations

import math

import torch

ORDERS = ["layers first", "blocks first", "heads outside layers, padded"]


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
