"""The public door of `code_rows`: transform, quantize and pack rows into the cells of a slab."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from kvcompress_kernels import build, code_format, formats
from kvcompress_kernels.checks import check_blocks, check_gpu_pool, describe
from kvcompress_kernels.code_format import SCALE_DTYPE, WIDTHS, Codes, GroupCodec, RowLayout
from kvcompress_kernels.code_rows import reference

Impl = Literal["cpu", "triton", "reference"]

_TILE_ROWS = 2048
"""Rows that `encode_prompt` holds in float32 at once, about."""


def code_rows(
    z_keys: torch.Tensor,
    z_values: torch.Tensor,
    bias: torch.Tensor | None,
    layout: RowLayout,
    kv_cache: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
    *,
    impl: Impl = "cpu",
) -> int:
    """Quantize the channels of ``m`` rows and write them into consecutive cells of a slab.

    All implementations write the same bytes. Bits of rows past the end of the last cell become 0.

    Args:
        z_keys: float32 ``[m, r_k]``, what `reference.transform` makes of keys; rows contiguous.
        z_values: float32 ``[m, r_v]``, likewise of values.
        bias: float32 ``[m]``, contiguous; given exactly if the layout has one.
        layout: sizes of the rows.
        kv_cache: ``[L, B, H, N, 2 * D]``, any dtype, the last two dimensions contiguous; written.
            With ``triton`` the view ``[2, L, B, H, N, D]`` that `formats.gpu_pool` makes, any
            strides but the last; the bytes of its cells are in the order of
            `code_format.gpu_rows`. ``reference`` takes both.
        slab: int32 ``[c]``, block ids.
        first_cell: cell of the slab in which the first row goes.
        impl: ``cpu`` (the C++ kernel), ``triton`` (CUDA devices; `triton.code_rows` does the same
            without checks) or ``reference`` (plain torch).

    Returns:
        The cell after the last one written.

    Raises:
        ValueError: an argument does not fit the description above, or the rows do not fit the slab.
        kvcompress_kernels.build.CompilerNotFoundError: see `build.load`.
    """
    if impl == "triton":
        # imported on demand: installations for the CPU have no Triton
        from kvcompress_kernels.code_rows import triton
        from kvcompress_kernels.triton_cells import check_device

        _check_gpu(z_keys, z_values, bias, layout, kv_cache, slab, first_cell)
        check_device(kv_cache)
        return triton.code_rows(z_keys, z_values, bias, layout, kv_cache, slab, first_cell)
    if _use_kernel(impl):
        numbers = [*layout.key_counts, *layout.value_counts, int(layout.has_bias)]
        end: int = torch.ops.kvcompress.code_rows.default(
            z_keys, z_values, bias, numbers, _thresholds(), kv_cache, slab, first_cell
        )
        return end
    key_codes, scales = reference.quantize_channels(z_keys, layout.key_counts)
    value_codes, value_scales = reference.quantize_channels(z_values, layout.value_counts)
    scales += value_scales
    if bias is not None:
        scales.append(bias.to(SCALE_DTYPE))
    codes = Codes(key_codes, value_codes, torch.stack(scales))
    if kv_cache.dim() == 6:
        cells = code_format.gpu_rows(kv_cache)
        code_format.write_rows(cells, slab, first_cell, codes, layout)
        code_format.copy_gpu_rows(cells, kv_cache)
    else:
        cells = kv_cache
        code_format.write_rows(cells, slab, first_cell, codes, layout)
    cell_bytes = cells[0, 0, 0].numel() * cells.element_size()
    return first_cell - (-codes.num_rows // layout.rows_per_cell(cell_bytes))


def encode_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    codec: GroupCodec,
    kv_cache: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
    *,
    impl: Impl = "cpu",
) -> int:
    """Code dense rows of one group of KV heads, for instance merged ones.

    Args:
        keys: ``[group_size, m, D]``, any floating dtype.
        values: ``[group_size, m, D]``.
        bias: ``[m]``; given exactly if the codec's rows carry one.
        codec: of the group.

    The other arguments, the result and the errors are those of `code_rows`. With ``triton`` the
    channels are computed on the device, with other last bits: a channel between two levels may take
    either.
    """
    if impl == "triton":
        from kvcompress_kernels.code_rows import triton

        z_keys, z_values = triton.EncodeMatrices.of(codec, keys.device).transform(keys, values)
        biases = None if bias is None else bias.float().contiguous()
        layout = codec.layout
        return code_rows(
            z_keys, z_values, biases, layout, kv_cache, slab, first_cell, impl="triton"
        )
    return code_rows(
        reference.transform(keys, codec.keys),
        reference.transform(values, codec.values),
        None if bias is None else bias.float().contiguous(),
        codec.layout,
        kv_cache,
        slab,
        first_cell,
        impl=impl,
    )


def encode_prompt(
    kv_cache: torch.Tensor,
    layer: int,
    source: torch.Tensor,
    first_head: int,
    codec: GroupCodec,
    slab: torch.Tensor,
    first_cell: int,
    *,
    start: int = 0,
    stop: int | None = None,
    bias: torch.Tensor | None = None,
    impl: Impl = "cpu",
) -> int:
    """Code the rows of one layer and group straight from the blocks of a prompt.

    Works through the tokens in tiles, so that it takes a few megabytes beside the pool.

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``, bfloat16, float16 or float32, the last two dimensions
            contiguous; read in the blocks of ``source``, written in those of ``slab``.
        layer: index into ``L``.
        source: int32 ``[G / N]``, blocks of the prompt in token order. That ``slab`` is disjoint
            from it is the caller's responsibility.
        first_head: first KV head of the group.
        codec: of the group.
        slab: int32 ``[c]``, block ids.
        first_cell: cell of the slab in which the first row goes.
        start: first token of ``source`` that is coded.
        stop: the token after the last one; None is ``G``.
        bias: ``[stop - start]``; given exactly if the codec's rows carry one.
        impl: ``cpu`` (gathered and packed by C++), ``triton`` (CUDA devices, see `encode_rows`) or
            ``reference`` (plain torch).

    The result and the errors are those of `code_rows`.
    """
    if impl == "triton":
        from kvcompress_kernels.code_rows import triton
        from kvcompress_kernels.triton_cells import check_device

        check_gpu_pool(kv_cache)
        check_device(kv_cache)
        return triton.encode_prompt(
            *(kv_cache, layer, source, first_head, codec, slab, first_cell),
            start=start,
            stop=stop,
            bias=bias,
        )
    block_size, head_size = kv_cache.shape[3], kv_cache.shape[4] // 2
    stop = source.numel() * block_size if stop is None else stop
    group_size = codec.keys.mean.numel() // head_size
    heads = slice(first_head, first_head + group_size)
    if not _use_kernel(impl):
        keys, values = formats.gather_prompt(kv_cache, layer, source)
        keys, values = keys[heads, start:stop], values[heads, start:stop]
        return encode_rows(keys, values, bias, codec, kv_cache, slab, first_cell, impl=impl)
    key_offset = -(codec.keys.mean @ codec.keys.encode)
    value_offset = -(codec.values.mean @ codec.values.encode)
    cell_bytes = block_size * 2 * head_size * kv_cache.element_size()
    rows_per_cell = codec.layout.rows_per_cell(cell_bytes)
    # tiles end where cells end
    tile = -(-_TILE_ROWS // rows_per_cell) * rows_per_cell
    for begin in range(start, stop, tile):
        end = min(begin + tile, stop)
        keys, values = torch.ops.kvcompress.gather_rows.default(
            kv_cache, layer, source, first_head, group_size, begin, end
        )
        first_cell = code_rows(
            torch.addmm(key_offset, keys.T, codec.keys.encode),
            torch.addmm(value_offset, values, codec.values.encode),
            None if bias is None else bias[begin - start : end - start].float().contiguous(),
            codec.layout,
            kv_cache,
            slab,
            first_cell,
            impl=impl,
        )
    return first_cell


@functools.cache
def _thresholds() -> torch.Tensor:
    """Thresholds of the widths up to 4 bits, one after another."""
    return torch.cat([code_format.thresholds(width) for width in WIDTHS if width <= 4])


def _check_gpu(
    z_keys: torch.Tensor,
    z_values: torch.Tensor,
    bias: torch.Tensor | None,
    layout: RowLayout,
    kv_cache: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
) -> None:
    check_gpu_pool(kv_cache)
    _, num_layers, num_blocks, num_kv_heads, block_size, head_size = kv_cache.shape
    num_rows, device = z_keys.shape[0], kv_cache.device
    sides = (("z_keys", z_keys, layout.key_counts), ("z_values", z_values, layout.value_counts))
    for name, z, counts in sides:
        expected = (num_rows, sum(counts))
        if (
            tuple(z.shape) != expected
            or z.dtype != torch.float32
            or (z.stride(1) != 1 and z.shape[1] > 1)
            or z.device != device
        ):
            raise ValueError(
                f"{name}: expected float32 [num_rows, num_channels] = {list(expected)} with "
                f"contiguous rows on {device}, got {describe(z)} on {z.device}"
            )
    if (bias is not None) != layout.has_bias:
        found = "none" if bias is None else "one"
        raise ValueError(f"bias: expected exactly if the layout has one, got {found}")
    if bias is not None and (
        tuple(bias.shape) != (num_rows,)
        or bias.dtype != torch.float32
        or not bias.is_contiguous()
        or bias.device != device
    ):
        raise ValueError(
            f"bias: expected contiguous float32 [num_rows] = [{num_rows}] on {device}, got "
            f"{describe(bias)} on {bias.device}"
        )
    check_blocks("slab", "[c]", slab, num_blocks)
    cell_bytes = 2 * block_size * head_size * kv_cache.element_size()
    num_cells = -(-num_rows // layout.rows_per_cell(cell_bytes))
    room = slab.numel() * num_layers * num_kv_heads
    if first_cell < 0 or first_cell + num_cells > room:
        raise ValueError(
            f"first_cell: expected {num_cells} cells from it on within the {room} of the slab, got "
            f"{first_cell}"
        )


def _use_kernel(impl: str) -> bool:
    if impl == "reference":
        return False
    if impl != "cpu":
        raise ValueError(f"impl: expected 'triton', 'cpu' or 'reference', got {impl!r}")
    build.load()
    return True
