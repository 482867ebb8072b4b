"""`segment_attention` in plain torch: slow, one query at a time, any precision."""

from __future__ import annotations

import torch

from kvcompress_kernels import formats


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
    partial_output: torch.Tensor | None = None,
    partial_log_sum: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Arguments as in `api.segment_attention`; computes in ``compute_dtype``.

    ``output`` may have another dtype than ``query``, for instance float64.
    """
    block_size = kv_cache.shape[3]
    num_kv_heads = kv_cache.shape[2]
    ratio = query.shape[1] // num_kv_heads
    for row in rows.tolist():
        blocks = block_table[row]
        slot = int(slot_of_block[blocks[0]])
        seq_len = int(seq_lens[row])
        start, stop = query_start_loc[row : row + 2].tolist()
        tail_start = int(gap_end[slot]) if slot else 0
        positions = torch.arange(tail_start, seq_len)
        tail_blocks = blocks[positions // block_size].long()
        for head in range(num_kv_heads):
            keys, values, entry_bias = formats.read_segment(
                kv_cache,
                bias,
                blocks,
                int(first_cell[slot, layer, head]) if slot else 0,
                int(num_entries[slot, layer, head]) if slot else 0,
            )
            cells = kv_cache[layer, tail_blocks, head]  # [tail, N, 2 * D]
            index = torch.arange(len(positions))
            tail_keys = formats.cell_keys(cells)[index, :, positions % block_size]
            tail_values = formats.cell_values(cells)[index, positions % block_size]
            for token in range(start, stop):
                visible = positions <= seq_len - stop + token
                all_keys = torch.cat([keys, tail_keys[visible]]).to(compute_dtype)
                all_values = torch.cat([values, tail_values[visible]]).to(compute_dtype)
                all_bias = torch.cat([entry_bias, entry_bias.new_zeros(int(visible.sum()))])
                for query_head in range(head * ratio, (head + 1) * ratio):
                    logits = all_keys @ query[token, query_head].to(compute_dtype) * scale
                    logits = logits + all_bias.to(compute_dtype)
                    values_of_all = all_values
                    if partial_output is not None and partial_log_sum is not None:
                        # the partial softmax is one more key: its logit and its value
                        first = partial_log_sum[token, query_head, None].to(compute_dtype)
                        logits = torch.cat([first, logits])
                        value = partial_output[token, query_head, None].to(compute_dtype)
                        value = value.masked_fill(first == -torch.inf, 0)
                        values_of_all = torch.cat([value, all_values])
                    weights = logits.softmax(dim=0)
                    if (logits == -torch.inf).all():
                        weights = torch.zeros_like(logits)
                    output[token, query_head] = (weights @ values_of_all).to(output.dtype)
