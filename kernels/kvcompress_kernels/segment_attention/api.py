"""The public door of `segment_attention`."""

from __future__ import annotations

from typing import Literal

import torch

from kvcompress_kernels import build
from kvcompress_kernels.segment_attention import reference


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
    impl: Literal["cpu", "reference"] = "cpu",
) -> None:
    """Attention of some rows of a batch over their segments and raw tails.

    Row ``r`` has the state slot ``s = slot_of_block[block_table[r, 0]]``. The keys of KV head ``h``
    are the ``num_entries[s, layer, h]`` entries of its segment, with their biases added to the
    logits and visible to every query, then the raw tokens ``j`` in ``[gap_end[s], seq_lens[r])``,
    causally: query ``i`` of ``q`` has position ``seq_lens[r] - q + i``. A row of slot 0 has no
    segment and no gap: ordinary causal paged attention. A query that sees no key yields 0.

    Slots that hold neither an entry nor a token of the row may hold anything, NaN included. The
    result of a row depends on nothing but that row, to the bit.

    Args:
        query: ``[num_tokens, num_heads, D]``, bfloat16, float16 or float32; ``D`` a multiple of 16
            up to 256, contiguous.
        output: as ``query``; written for the tokens of ``rows`` only.
        kv_cache: ``[L, B, H, N, 2 * D]``, dtype of ``query``; any strides of ``L``, ``B`` and
            ``H``; ``N`` a multiple of 16 up to 512.
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
        impl: ``cpu`` (C++, compiled on first use) or ``reference`` (plain torch, for tests).

    Raises:
        ValueError: a shape, dtype, stride or per-row number is not as above.
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
        torch.ops.kvcompress.segment_attention.default(*arguments)
    elif impl == "reference":
        reference.segment_attention(*arguments)
    else:
        raise ValueError(f"impl: expected 'cpu' or 'reference', got {impl!r}")
