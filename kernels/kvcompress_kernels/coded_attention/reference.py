"""`coded_attention` in plain torch: decodes every row and attends to it, any precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcompress_kernels.code_format import GroupCodec, read_rows
from kvcompress_kernels.code_rows import reference as code_rows


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
    codecs: Sequence[GroupCodec],
    scale: float,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Arguments as in `api.coded_attention`; computes in ``compute_dtype``."""
    num_heads, head_size = query.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    ratio = num_heads // num_kv_heads
    group_size = num_kv_heads // len(codecs)
    for row in rows.tolist():
        blocks = block_table[row]
        slot = int(slot_of_block[blocks[0]])
        start, stop = query_start_loc[row : row + 2].tolist()
        for group, codec in enumerate(codecs):
            count = int(num_rows[slot, layer, group]) if slot else 0
            codes = read_rows(
                kv_cache, blocks, int(first_cell[slot, layer, group]), count, codec.layout
            )
            keys, values, bias = (
                part.to(compute_dtype) for part in code_rows.decode(codes, codec, head_size)
            )
            for member in range(group_size):
                for head in range(ratio):
                    query_head = (group * group_size + member) * ratio + head
                    part = query[start:stop, query_head].to(compute_dtype)
                    logits = part @ keys[member].T * scale + bias
                    log_sum[start:stop, query_head] = logits.logsumexp(-1).to(log_sum.dtype)
                    weights = logits.softmax(-1)
                    output[start:stop, query_head] = (weights @ values[member]).to(output.dtype)
