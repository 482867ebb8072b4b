"""The public door of `coded_attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from kvcompress_kernels import build, code_format
from kvcompress_kernels.checks import check_gpu_pool, describe
from kvcompress_kernels.code_format import WIDTHS, Counts, GroupCodec, SideCodec
from kvcompress_kernels.coded_attention import reference

if TYPE_CHECKING:
    from kvcompress_kernels.coded_attention.triton import DeviceCodecs

Impl = Literal["cpu", "triton", "reference"]

# channels of a class begin at multiples of these in the operands of the C++ kernel (decode.h)
_KEY_STEP = 2
_VALUE_STEP = 16
_WINDOW = 16


class LayerCodecs:
    """The codecs of one layer in the form in which `coded_attention` reads them; made once.

    Args:
        groups: codecs of the groups of KV heads of the layer, in the order of the heads; each group
            has ``num_kv_heads / len(groups)`` heads. Their layouts may differ.
        num_kv_heads: KV heads of the layer (``H``).
        dtype: of the pool. The decoding matrices are held in bfloat16 if it is, else in float32.

    Raises:
        ValueError: the groups do not divide the heads, or a codec's tensors do not fit its counts.
    """

    def __init__(self, groups: Sequence[GroupCodec], num_kv_heads: int, dtype: torch.dtype) -> None:
        self.groups = tuple(groups)
        self.num_kv_heads = num_kv_heads
        if not groups or num_kv_heads % len(groups):
            raise ValueError(
                f"groups: expected a number that divides the {num_kv_heads} KV heads, "
                f"got {len(groups)}"
            )
        group_size = num_kv_heads // len(groups)
        size = self.groups[0].keys.mean.numel()
        for number, group in enumerate(self.groups):
            for name, side in (("keys", group.keys), ("values", group.values)):
                shapes = tuple(side.mean.shape), tuple(side.decode.shape)
                if shapes != ((size,), (side.num_channels, size)) or size % group_size:
                    raise ValueError(
                        f"group {number}, {name}: expected a mean and a decoding matrix of "
                        f"{group_size} heads and {side.num_channels} channels each, got shapes "
                        f"{shapes[0]} and {shapes[1]}"
                    )
        held = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.layouts = torch.tensor(
            [
                [*group.keys.counts, *group.values.counts, int(group.has_bias)]
                for group in self.groups
            ]
        )
        fold, unfold = [], []
        for group in self.groups:
            for head in _heads(group.keys, group_size, _KEY_STEP):  # [key_width, D]
                fold.append(head.T.flatten())
            for head in _heads(group.values, group_size, _VALUE_STEP):  # [value_width, D]
                unfold.append(head.flatten())
        self.fold = torch.cat(fold).to(held)
        self.unfold = torch.cat(unfold).to(held)
        self.means = torch.stack(
            [
                torch.cat([group.keys.mean for group in self.groups]),
                torch.cat([group.values.mean for group in self.groups]),
            ]
        ).float()
        self._on_device: DeviceCodecs | None = None

    def on_device(
        self, kv_cache: torch.Tensor, sizes: tuple[int, int] | None = None
    ) -> DeviceCodecs:
        """The same for the Triton kernels, on the device of a GPU pool; made once, and before a
        CUDA graph is captured.

        Args:
            kv_cache: ``[2, L, B, H, N, D]``, always the same.
            sizes: see `triton.prepare`.
        """
        if self._on_device is None:
            # imported on demand: installations for the CPU have no Triton
            from kvcompress_kernels.coded_attention import triton

            self._on_device = triton.prepare(self.groups, self.num_kv_heads, kv_cache, sizes)
        return self._on_device


def _heads(side: SideCodec, group_size: int, step: int) -> list[torch.Tensor]:
    """Decoding matrices of the heads of a group, their channels where the kernel has them."""
    positions, width = _positions(side.counts, step)
    padded = torch.zeros(width, side.decode.shape[1])
    padded[positions] = side.decode.float()
    return list(padded.chunk(group_size, dim=1))


def _positions(counts: Counts, step: int) -> tuple[torch.Tensor, int]:
    """Places of the channels when classes begin at multiples of ``step``, and their number."""
    parts = [torch.empty(0, dtype=torch.long)]
    start = 0
    for count in counts:
        parts.append(torch.arange(start, start + count))
        start += -(-count // step) * step
    return torch.cat(parts), -(-start // _WINDOW) * _WINDOW


@functools.cache
def _levels() -> torch.Tensor:
    """Levels of the widths up to 4 bits, one after another."""
    return torch.cat([code_format.levels(width) for width in WIDTHS if width <= 4])


def coded_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    slot_of_block: torch.Tensor,
    first_cell: torch.Tensor,
    num_rows: torch.Tensor,
    codecs: LayerCodecs,
    scale: float,
    *,
    impl: Impl = "cpu",
    max_query_len: int | None = None,
    num_splits: int = 1,
) -> None:
    """Partial softmax of some rows of a batch over the coded rows of their segments.

    Row ``r`` has the state slot ``s = slot_of_block[block_table[r, 0]]``. The keys of the KV heads
    of group ``g`` are ``num_rows[s, layer, g]`` coded rows, in the cells from
    ``first_cell[s, layer, g]`` on; all of them are visible to every query. ``output`` is the
    attention over them alone, and ``log_sum`` the natural logarithm of the sum of the exponentials
    of their logits, biases included: `segment_attention` goes on from both. A row of slot 0, and a
    group without coded rows, yield 0 and -inf.

    A query is multiplied by the decoding matrix of the keys once, then meets codes, and the output
    is multiplied by that of the values once. Codes of rows past the end may be anything, their
    scales NaN included. The result of a row depends on nothing but that row, to the bit.

    With ``triton`` the cells are those of the GPU, their bytes in the order of
    `code_format.gpu_rows`; the numbers in the tensors are not checked, because reading them would
    stop the device, and a row's result also depends on ``num_splits``. The launches depend on
    shapes and on ``max_query_len`` alone, so that they may be captured in a CUDA graph.

    Args:
        query: ``[num_tokens, num_heads, D]``, bfloat16, float16 or float32; ``D`` a multiple of 16
            up to 256, contiguous.
        output: float32 ``[num_tokens, num_heads, D]``, the last dimension contiguous; written for
            the tokens of ``rows`` only.
        log_sum: float32 ``[num_tokens, num_heads]``, likewise.
        kv_cache: ``[L, B, H, N, 2 * D]``, dtype of ``query``; any strides of ``L``, ``B`` and
            ``H``. With ``triton`` the view ``[2, L, B, H, N, D]`` that `formats.gpu_pool` makes,
            any strides but the last; ``reference`` takes both.
        layer: index into ``L``.
        block_table: int32 ``[R, W]``, contiguous rows.
        query_start_loc: int32 ``[R + 1]``.
        rows: int32 ``[K]``, rows to compute.
        slot_of_block: int32 ``[B]``, state slot by first physical block; 0 is no state.
        first_cell: int32 ``[S, L, groups]``, first cell of the coded rows within the row's blocks.
        num_rows: int32 ``[S, L, groups]``.
        codecs: of this layer.
        scale: factor of the logits.
        impl: ``cpu`` (C++, compiled on first use), ``triton`` (CUDA devices) or ``reference``
            (plain torch, for tests).
        max_query_len: only for ``triton``: at least the longest query of ``rows``; longer queries
            are cut off. None launches programs for ``num_tokens``.
        num_splits: only for ``triton``: programs among which the rows of a group are divided.

    Raises:
        ValueError: a shape, dtype, stride or per-row number is not as above, or ``codecs`` are for
            another number of heads, another head size or another dtype.
        CompilerNotFoundError: the C++ code is not compiled yet and there is no compiler.
    """
    arguments = (
        query,
        output,
        log_sum,
        kv_cache,
        layer,
        block_table,
        query_start_loc,
        rows,
        slot_of_block,
        first_cell,
        num_rows,
    )
    if impl == "cpu":
        build.load()
        torch.ops.kvcompress.coded_attention.default(
            *arguments,
            codecs.layouts,
            _levels(),
            codecs.fold,
            codecs.unfold,
            codecs.means,
            scale,
        )
    elif impl == "reference":
        cells = code_format.gpu_rows(kv_cache) if kv_cache.dim() == 6 else kv_cache
        query, output, log_sum, _, *others = arguments
        compute: Callable[..., None] = reference.coded_attention
        compute(query, output, log_sum, cells, *others, codecs.groups, scale)
    elif impl == "triton":
        # imported on demand: installations for the CPU have no Triton
        from kvcompress_kernels.coded_attention import triton
        from kvcompress_kernels.triton_cells import check_device

        _check_gpu(*arguments, codecs, max_query_len, num_splits)
        check_device(kv_cache)
        triton.coded_attention(
            *arguments,
            codecs.on_device(kv_cache),
            scale,
            max_query_len=query.shape[0] if max_query_len is None else max_query_len,
            num_splits=num_splits,
        )
    else:
        raise ValueError(f"impl: expected 'triton', 'cpu' or 'reference', got {impl!r}")


def _check_gpu(
    query: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    slot_of_block: torch.Tensor,
    first_cell: torch.Tensor,
    num_rows: torch.Tensor,
    codecs: LayerCodecs,
    max_query_len: int | None,
    num_splits: int,
) -> None:
    """Raise one ValueError with everything that can be told without reading a tensor."""
    check_gpu_pool(kv_cache)
    _, num_layers, num_blocks, num_kv_heads, _, head_size = kv_cache.shape
    num_tokens, num_heads = query.shape[0], query.shape[1] if query.dim() == 3 else 0
    table = (first_cell.shape[0], num_layers, len(codecs.groups))
    wanted: tuple[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]], ...] = (
        ("query", query, kv_cache.dtype, (num_tokens, num_heads, head_size)),
        ("output", output, torch.float32, (num_tokens, num_heads, head_size)),
        ("log_sum", log_sum, torch.float32, (num_tokens, num_heads)),
        ("block_table", block_table, torch.int32, (len(block_table), block_table.shape[-1])),
        ("query_start_loc", query_start_loc, torch.int32, (len(block_table) + 1,)),
        ("rows", rows, torch.int32, (rows.numel(),)),
        ("slot_of_block", slot_of_block, torch.int32, (num_blocks,)),
        ("first_cell", first_cell, torch.int32, table),
        ("num_rows", num_rows, torch.int32, table),
    )
    faults = [
        f"{name}: expected {dtype} {list(shape)} with the last dimension contiguous on "
        f"{kv_cache.device}, got {describe(tensor)} on {tensor.device}"
        for name, tensor, dtype, shape in wanted
        if tuple(tensor.shape) != shape
        or tensor.dtype != dtype
        or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1)
        or tensor.device != kv_cache.device
    ]
    faults += [
        f"{name}: expected contiguous, got {describe(tensor)}"
        for name, tensor in (("first_cell", first_cell), ("num_rows", num_rows))
        if not tensor.is_contiguous()
    ]
    if not num_heads or num_heads % num_kv_heads:
        faults.append(f"query: expected a multiple of {num_kv_heads} heads, got {num_heads}")
    if codecs.num_kv_heads != num_kv_heads or codecs.means.shape[1] != num_kv_heads * head_size:
        faults.append(
            f"codecs: expected for {num_kv_heads} KV heads of {head_size}, got "
            f"{codecs.num_kv_heads} of {codecs.means.shape[1] // codecs.num_kv_heads}"
        )
    if not 0 <= layer < num_layers:
        faults.append(f"layer: expected 0 <= layer < {num_layers}, got {layer}")
    if num_splits < 1:
        faults.append(f"num_splits: expected at least 1, got {num_splits}")
    if max_query_len is not None and max_query_len < 1:
        faults.append(f"max_query_len: expected at least 1, got {max_query_len}")
    if faults:
        raise ValueError("; ".join(faults))
