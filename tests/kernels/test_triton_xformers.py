"""`segment_attention` in Triton beside xformers' split-K decode, both under the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton_interpreter
from numerics import max_error
from xformers_peer import Peer

triton_interpreter.require()
attention: Any = triton_interpreter.load_module("test_triton_segment_attention")
peer = Peer()
RowSpec = attention.RowSpec

DTYPES = [torch.bfloat16, torch.float16]


def assert_as_good(actual: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Both near float64, and ours at most a few roundings farther than theirs."""
    unit = torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert max_error(theirs, exact) < 8 * unit
    assert max_error(actual, exact) <= max_error(theirs, exact) + 2 * unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_size", "ratio", "block_size"), [(64, 4, 16), (128, 8, 64), (128, 1, 32), (256, 16, 16)]
)
def test_rows_without_state_against_the_paged_decode(
    dtype: torch.dtype, head_size: int, ratio: int, block_size: int
) -> None:
    """Through the same block table, from the same pages."""
    rows = [RowSpec(entries=None, tail=length) for length in (150, 1, 77)]
    batch = attention.Batch(
        rows,
        dtype=dtype,
        head_size=head_size,
        ratio=ratio,
        block_size=block_size,
        layout="LBNHC",
    )
    # their kernel multiplies what lies behind the end of a row by zero
    batch.kv_cache.nan_to_num_(nan=0.0, posinf=0.0)
    actual = batch.run()
    keys, values = (part[attention.LAYER].transpose(1, 2) for part in batch.kv_cache)
    theirs = peer.paged(
        batch.query[: len(rows)],
        keys,
        values,
        batch.block_table,
        batch.seq_lens.tolist(),
        batch.scale,
    )()
    assert_as_good(actual[: len(rows)], theirs, batch.expected(torch.float64)[: len(rows)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_size", "ratio", "entries", "tail"),
    [(64, 4, 101, 27), (128, 8, 1, 7), (128, 1, 300, 4), (256, 16, 64, 64)],
)
def test_segments_against_additive_bias(
    dtype: torch.dtype, head_size: int, ratio: int, entries: int, tail: int
) -> None:
    """Entries with their biases, then the raw tail with none; the peer reads them in one piece."""
    batch = attention.Batch(
        [RowSpec(entries=(entries, entries), tail=tail)],
        dtype=dtype,
        head_size=head_size,
        ratio=ratio,
    )
    # the peer has biases in the dtype of the queries
    batch.bias.copy_(batch.bias.to(dtype))
    heads = [(k, v, bias.to(dtype).float()) for k, v, bias in batch.contents[0]]
    batch.contents[0] = heads
    keys, values, biases = (torch.stack([head[i] for head in heads]) for i in range(3))
    theirs = peer.biased(
        batch.query[:1],
        keys.transpose(0, 1)[None].to(dtype),
        values.transpose(0, 1)[None].to(dtype),
        biases[None],
        batch.scale,
    )()
    assert_as_good(batch.run()[:1], theirs, batch.expected(torch.float64)[:1])
