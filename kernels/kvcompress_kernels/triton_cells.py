"""Device functions that address the paged pool and the slab; used by the Triton kernels.

The Triton counterpart of `formats` for the GPU pool ``[2, L, B, H, N, D]``. Strides are in
elements, in the order of that view's ``L``, ``B``, ``H`` and ``N``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel was defined under Triton's interpreter, which runs it on CPU tensors."""
    return not isinstance(kernel, triton.runtime.jit.JITFunction)


def check_device(kv_cache: torch.Tensor) -> None:
    """Raise ValueError if kernels cannot run where the cache is."""
    if not (kv_cache.is_cuda or is_interpreted(load_rows)):
        raise ValueError(
            f"kv_cache: expected on a CUDA device with impl='triton', got it on {kv_cache.device}; "
            "impl='cpu' computes there"
        )


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"


@triton.jit
def slots_of_blocks(
    first_slot,
    slots,
    slot_mask,
    table_ptr,
    layer,
    head,
    STRIDES,
    BLOCK_SIZE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """Offsets of the slots ``[n]`` of one layer and head, numbered along a block table; int64.

    ``ONE_BLOCK``: all of them are known to be in the block of ``first_slot``.
    """
    if ONE_BLOCK:
        block = tl.load(table_ptr + first_slot // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(table_ptr + slots // BLOCK_SIZE, mask=slot_mask, other=0).to(tl.int64)
    inside = (slots % BLOCK_SIZE).to(tl.int64)
    return (
        tl.cast(layer, tl.int64) * STRIDES[0]
        + block * STRIDES[1]
        + tl.cast(head, tl.int64) * STRIDES[2]
        + inside * STRIDES[3]
    )


@triton.jit
def slots_of_cells(
    first_cell,
    first_entry,
    entries,
    entry_mask,
    slab_ptr,
    STRIDES,
    BIAS_STRIDES,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ONE_CELL: tl.constexpr,
):
    """Offsets of the entries ``[n]`` of a segment in the pool and in the bias tensor; int64.

    ``ONE_CELL``: all of them are known to be in the cell of ``first_entry``.
    """
    if ONE_CELL:
        cells = first_cell + first_entry // BLOCK_SIZE
        block = tl.load(slab_ptr + cells // (NUM_LAYERS * NUM_KV_HEADS)).to(tl.int64)
    else:
        cells = first_cell + entries // BLOCK_SIZE
        block = tl.load(
            slab_ptr + cells // (NUM_LAYERS * NUM_KV_HEADS), mask=entry_mask, other=0
        ).to(tl.int64)
    layer = (cells % (NUM_LAYERS * NUM_KV_HEADS) // NUM_KV_HEADS).to(tl.int64)
    head = (cells % NUM_KV_HEADS).to(tl.int64)
    inside = (entries % BLOCK_SIZE).to(tl.int64)
    return (
        layer * STRIDES[0] + block * STRIDES[1] + head * STRIDES[2] + inside * STRIDES[3],
        block * BIAS_STRIDES[0] + layer * BIAS_STRIDES[1] + head * BIAS_STRIDES[2] + inside,
    )


@triton.jit
def load_rows(ptr, offsets, row_mask, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[n, BLOCK_D]``: ``HEAD_SIZE`` contiguous elements at every offset, 0 where masked."""
    dimension = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None]
    if BLOCK_D != HEAD_SIZE:
        mask = mask & (dimension < HEAD_SIZE)[None, :]
    return tl.load(ptr + offsets[:, None] + dimension[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, offsets, rows, row_mask, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store ``[n, BLOCK_D]`` as `load_rows` reads it."""
    dimension = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None]
    if BLOCK_D != HEAD_SIZE:
        mask = mask & (dimension < HEAD_SIZE)[None, :]
    tl.store(ptr + offsets[:, None] + dimension[None, :], rows, mask=mask)


@triton.jit
def base_of_cell(
    cell,
    slab_ptr,
    STRIDES,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
):
    """Offset of the first byte of one cell of a slab; strides in bytes, int64."""
    block = tl.load(slab_ptr + cell // (NUM_LAYERS * NUM_KV_HEADS)).to(tl.int64)
    layer = (cell % (NUM_LAYERS * NUM_KV_HEADS) // NUM_KV_HEADS).to(tl.int64)
    head = (cell % NUM_KV_HEADS).to(tl.int64)
    return layer * STRIDES[0] + block * STRIDES[1] + head * STRIDES[2]


@triton.jit
def bytes_of_cell(index, SIDE_STRIDE, SLOT_STRIDE, HALF: tl.constexpr):
    """Offsets from the first byte of a cell to its bytes ``index``.

    A slot has ``HALF`` bytes of its key, then as many of its value; slots follow one another.
    """
    half = index // HALF
    return half // 2 * SLOT_STRIDE + half % 2 * SIDE_STRIDE + index % HALF
