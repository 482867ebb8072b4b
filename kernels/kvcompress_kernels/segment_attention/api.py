"""The public door of `segment_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from kvcompress_kernels import build, formats
from kvcompress_kernels.segment_attention import reference

if TYPE_CHECKING:
    from kvcompress_kernels.segment_attention.triton import Workspace


def segment_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    slot_of_block: torch.Tensor,
    gap_end: torch.Tensor,
    first_cell: torch.Tensor,
    num_entries: torch.Tensor,
    scale: float,
    *,
    partial_output: torch.Tensor | None = None,
    partial_log_sum: torch.Tensor | None = None,
    impl: Literal["cpu", "triton", "reference"] = "cpu",
    max_query_len: int | None = None,
    workspace: Workspace | None = None,
) -> None:
    """Attention of some rows of a batch over their segments and raw tails.

    Row ``r`` has the state slot ``s = slot_of_block[block_table[r, 0]]``. The keys of KV head ``h``
    are the ``num_entries[s, layer, h]`` entries of its segment, with their biases added to the
    logits and visible to every query, then the raw tokens ``j`` in ``[gap_end[s], seq_lens[r])``,
    causally: query ``i`` of ``q`` has position ``seq_lens[r] - q + i``. A row of slot 0 has no
    segment and no gap: ordinary causal paged attention. A query that sees no key yields 0.

    Slots that hold neither an entry nor a token of the row may hold anything, NaN included. The
    result of a row depends on nothing but that row, to the bit.

    With ``triton`` the cells are those of the GPU, the numbers in the tensors are not checked,
    because reading them would stop the device, and a row's result also depends on the tiling, which
    is chosen by ``max_query_len`` and by the number of splits of the workspace. All memory that the
    launches read is in the arguments, and the launches depend on shapes and on ``max_query_len``
    alone, so that they may be captured in a CUDA graph.

    Args:
        query: ``[num_tokens, num_heads, D]``, bfloat16, float16 or float32; ``D`` a multiple of 16
            up to 256, contiguous. With ``triton`` any strides of the first two dimensions, and at
            most 16 heads for each KV head.
        output: as ``query``; written for the tokens of ``rows`` only.
        kv_cache: ``[L, B, H, N, 2 * D]``, dtype of ``query``; any strides of ``L``, ``B`` and
            ``H``; ``N`` a multiple of 16 up to 512. With ``triton`` the view ``[2, L, B, H, N, D]``
            that `formats.gpu_pool` makes, any strides but the last; ``reference`` takes both.
        bias: float32 ``[B, L, H, N]``.
        layer: index into ``L``.
        block_table: int32 ``[R, W]``, contiguous rows.
        seq_lens: int32 ``[R]``, tokens of the sequence with those of this step.
        query_start_loc: int32 ``[R + 1]``.
        rows: int32 ``[K]``, rows to compute.
        slot_of_block: int32 ``[B]``, state slot by first physical block; 0 is no state.
        gap_end: int32 ``[S]``, multiples of ``N``.
        first_cell: int32 ``[S, L, H]``, first cell of the segment within the row's blocks.
        num_entries: int32 ``[S, L, H]``.
        scale: factor of the logits.
        partial_output: float32 ``[num_tokens, num_heads, D]``, what `coded_attention` wrote for the
            tokens of ``rows``: the softmax goes on from it.
        partial_log_sum: float32 ``[num_tokens, num_heads]``, likewise; both or neither. Where it is
            -inf, ``partial_output`` may hold anything.
        impl: ``cpu`` (C++, compiled on first use), ``triton`` (CUDA devices) or ``reference``
            (plain torch, for tests).
        max_query_len: only for ``triton``: at least the longest query of ``rows``, 1 for decode
            rows; longer queries are cut off. None launches programs for ``num_tokens``.
        workspace: only for ``triton``: memory with which the keys of a row are split among
            programs (`triton.allocate_workspace`). Without it, and for more query tokens than it
            holds, they are not split.

    Raises:
        ValueError: a shape, dtype, stride or, but for ``triton``, a per-row number is not as above.
        ModuleNotFoundError: Triton is asked for and not installed.
        CompilerNotFoundError: the C++ code is not compiled yet and there is no compiler.
    """
    arguments = (
        query,
        output,
        kv_cache,
        bias,
        layer,
        block_table,
        seq_lens,
        query_start_loc,
        rows,
        slot_of_block,
        gap_end,
        first_cell,
        num_entries,
        scale,
    )
    if impl == "cpu":
        build.load()
        torch.ops.kvcompress.segment_attention.default(*arguments, partial_output, partial_log_sum)
    elif impl == "triton":
        # imported on demand: installations for the CPU have no Triton
        from kvcompress_kernels.segment_attention import triton

        triton.segment_attention(
            *arguments,
            max_query_len=max_query_len,
            workspace=workspace,
            partial_output=partial_output,
            partial_log_sum=partial_log_sum,
        )
    elif impl == "reference":
        cells = formats.cpu_cells(kv_cache) if kv_cache.dim() == 6 else kv_cache
        query, output, _, *others = arguments
        compute: Callable[..., None] = reference.segment_attention
        compute(query, output, cells, *others, partial_output, partial_log_sum)
    else:
        raise ValueError(f"impl: expected 'triton', 'cpu' or 'reference', got {impl!r}")
