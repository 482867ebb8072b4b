"""Public door of the operation that writes chosen tokens of one layer into a slab.

After SelKV (arXiv 2607.16213). Which tokens are chosen is the caller's business; the values of
others nearby are merged into them, see `reference.route` and `reference.merge`. Layouts of pool and
slab: `kvcompress_kernels.formats`.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvcompress_kernels import build
from kvcompress_kernels.select_merge import reference

__all__ = ["MAX_BUCKET", "select_merge"]

Impl = Literal["cpu", "reference"]

MAX_BUCKET = 1024

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_SIZE = 256


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

    Where a dropped token goes is decided exactly, the same in both implementations; gates, merged
    values and biases are float32 (float64 in the reference). Keys, and values that take nothing
    over, are copied bit by bit.

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``, bfloat16, float16 or float32; N and D multiples of 16,
            D at most 256; the last two dimensions contiguous. Written in the slab's blocks.
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
        impl: ``cpu`` (the C++ kernel) or ``reference`` (plain torch).

    Returns:
        ``num_entries``, int32 ``[H]``; ``num_merged``, int32 ``[H]``, the dropped tokens whose
        values were merged into kept ones; and the cell after the last one, which is above
        ``num_cells`` exactly if nothing was written.

    Raises:
        ValueError: an argument does not fit the description above.
        kvcompress_kernels.build.CompilerNotFoundError: see `build.load`.
    """
    _check_pool(kv_cache, bias, layer, source, slab, first_cell, num_cells)
    _check_choice(kv_cache, source, kept, mass, bucket, alpha)
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
    if impl == "reference":
        return reference.select_merge(*args)
    if impl != "cpu":
        raise ValueError(f"unknown impl {impl!r}; expected one of 'cpu', 'reference'")
    if not hasattr(torch.ops.kvcompress, "select_merge"):
        build.load()
    return torch.ops.kvcompress.select_merge(*args)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"


def _check_pool(
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    layer: int,
    source: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
    num_cells: int,
) -> None:
    shape = tuple(kv_cache.shape)
    if (
        kv_cache.dim() != 5
        or kv_cache.dtype not in _DTYPES
        or shape[3] % 16
        or shape[4] % 32
        or not 0 < shape[4] <= 2 * _MAX_HEAD_SIZE
        or kv_cache.stride(4) != 1
        or kv_cache.stride(3) != shape[4]
        or kv_cache.device.type != "cpu"
    ):
        raise ValueError(
            "kv_cache: expected bfloat16, float16 or float32 [L, B, H, N, 2 * D] on the CPU with N "
            f"and D multiples of 16, D at most {_MAX_HEAD_SIZE} and the last two dimensions "
            f"contiguous, got {_describe(kv_cache)} on {kv_cache.device}"
        )
    num_layers, num_blocks, num_kv_heads, block_size, _ = shape
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected 0 to L - 1 = {num_layers - 1}, got {layer}")
    expected = (num_blocks, num_layers, num_kv_heads, block_size)
    if tuple(bias.shape) != expected or bias.dtype != torch.float32 or bias.stride(-1) != 1:
        raise ValueError(
            f"bias: expected float32 [B, L, H, N] = {list(expected)} with a contiguous last "
            f"dimension, got {_describe(bias)}"
        )
    for name, symbol, blocks in (("source", "[G / N]", source), ("slab", "[c]", slab)):
        if blocks.dim() != 1 or blocks.dtype != torch.int32 or not blocks.is_contiguous():
            raise ValueError(f"{name}: expected contiguous int32 {symbol}, got {_describe(blocks)}")
        if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
            raise ValueError(
                f"{name}: expected block ids from 0 to B - 1 = {num_blocks - 1}, got ids from "
                f"{int(blocks.min())} to {int(blocks.max())}"
            )
    room = slab.numel() * num_layers * num_kv_heads
    if not 0 <= num_cells <= room:
        raise ValueError(f"num_cells: expected 0 to c * L * H = {room}, got {num_cells}")
    if not 0 <= first_cell <= num_cells:
        raise ValueError(f"first_cell: expected 0 to num_cells = {num_cells}, got {first_cell}")


def _check_choice(
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    kept: torch.Tensor,
    mass: torch.Tensor,
    bucket: int,
    alpha: float,
) -> None:
    expected = (kv_cache.shape[2], source.numel() * kv_cache.shape[3])
    for name, tensor, dtype in (("kept", kept, torch.bool), ("mass", mass, torch.float32)):
        if (
            tuple(tensor.shape) != expected
            or tensor.dtype != dtype
            or not tensor.is_contiguous()
            or tensor.device.type != "cpu"
        ):
            raise ValueError(
                f"{name}: expected contiguous {dtype} [H, G] = {list(expected)} on the CPU, got "
                f"{_describe(tensor)} on {tensor.device}"
            )
    if bucket != 0 and not 2 <= bucket <= MAX_BUCKET:
        raise ValueError(f"bucket: expected 0 or 2 to {MAX_BUCKET}, got {bucket}")
    if not 0.0 <= alpha < float("inf"):
        raise ValueError(f"alpha: expected a finite number of at least 0, got {alpha}")
