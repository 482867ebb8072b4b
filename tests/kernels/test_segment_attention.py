"""`segment_attention`: no worse than plain torch, blind to garbage, independent of the batch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_no_worse_than_eager, eager_attention, max_error

from kvcompress_kernels import formats
from kvcompress_kernels.segment_attention import reference, segment_attention

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUM_LAYERS, LAYER = 3, 1
UNTOUCHED = 7.0


@dataclass(frozen=True)
class RowSpec:
    """A row of a batch: ``entries`` per KV head and ``tail`` raw tokens behind a gap.

    ``entries`` None is a row without state, whose ``tail`` is all of its sequence.
    """

    entries: tuple[int, ...] | None
    tail: int
    query_len: int = 1


class Batch:
    """Rows in scattered blocks of a pool that is NaN and Inf wherever no row has anything."""

    def __init__(
        self,
        rows: Sequence[RowSpec],
        *,
        dtype: torch.dtype = torch.float32,
        head_size: int = 64,
        ratio: int = 2,
        block_size: int = 32,
        blocks_first: bool = False,
        seed: int = 0,
    ) -> None:
        self.rows, self.dtype, self.ratio, self.block_size = rows, dtype, ratio, block_size
        self.generator = torch.Generator().manual_seed(seed)
        self.num_kv_heads = next((len(r.entries) for r in rows if r.entries is not None), 2)
        self.scale = head_size**-0.5
        self.head_size = head_size
        H, N = self.num_kv_heads, block_size
        geometry = formats.SlabGeometry(NUM_LAYERS, H, N)

        plans = []  # per row: first cell of each head, blocks of the slab, first block of the tail
        for number, row in enumerate(rows):
            cells = [geometry.cells(count) for count in row.entries or ()]
            starts = list(itertools.accumulate(cells, initial=number))  # not always at cell 0
            slab = geometry.blocks(starts[-1]) if row.entries is not None else 0
            # the gap ends anywhere behind the slab; what lies between belongs to nobody
            gap = slab + number % 3 if row.entries is not None else 0
            plans.append((starts[:-1], slab, gap, geometry.cells(row.tail)))
        width = max(gap + tail for _, _, gap, tail in plans) + 1
        num_blocks = sum(slab + tail for _, slab, _, tail in plans) + 3

        shape = (NUM_LAYERS, num_blocks, H, N, 2 * head_size)
        pool = torch.where(self._uniform(shape) < 0.5, math.nan, math.inf).to(dtype)
        if blocks_first:
            pool = pool.permute(1, 0, 2, 3, 4).contiguous().permute(1, 0, 2, 3, 4)
        self.kv_cache = pool
        self.bias = torch.full((num_blocks, NUM_LAYERS, H, N), math.nan)
        num_tokens = sum(row.query_len for row in rows) + 2  # padding at the end
        self.query = self._normal((num_tokens, H * ratio, head_size))
        self.query_start_loc = torch.tensor(
            list(itertools.accumulate((r.query_len for r in rows), initial=0)), dtype=torch.int32
        )
        free = iter((torch.randperm(num_blocks - 1, generator=self.generator) + 1).tolist())
        self.block_table = torch.zeros(len(rows), width, dtype=torch.int32)
        self.seq_lens = torch.zeros(len(rows), dtype=torch.int32)
        self.slot_of_block = torch.zeros(num_blocks, dtype=torch.int32)
        # slot 0 is no state; what it holds must not matter
        self.gap_end = torch.full((len(rows) + 1,), N, dtype=torch.int32)
        self.first_cell = torch.full((len(rows) + 1, NUM_LAYERS, H), 3, dtype=torch.int32)
        self.num_entries = torch.full_like(self.first_cell, 5)
        self.contents: list[list[tuple[torch.Tensor, ...]]] = []
        for number, (row, (starts, slab, gap, tail)) in enumerate(zip(rows, plans, strict=True)):
            table = self.block_table[number]
            table[:slab] = torch.tensor([next(free) for _ in range(slab)])
            table[gap : gap + tail] = torch.tensor([next(free) for _ in range(tail)])
            self.seq_lens[number] = gap * N + row.tail
            if row.entries is not None:
                self.slot_of_block[table[0]] = number + 1
                self.gap_end[number + 1] = gap * N
                self.first_cell[number + 1, LAYER] = torch.tensor(starts)
                self.num_entries[number + 1, LAYER] = torch.tensor(row.entries)
            self.contents.append(
                [self._fill(row, h, table[:slab], table[gap:], starts) for h in range(H)]
            )

    def _uniform(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator)

    def _normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def _fill(
        self,
        row: RowSpec,
        head: int,
        slab: torch.Tensor,
        tail_blocks: torch.Tensor,
        starts: list[int],
    ) -> tuple[torch.Tensor, ...]:
        """Write one head's entries and raw tokens; returns keys, values and biases of all."""
        count = row.entries[head] if row.entries is not None else 0
        keys, values = (self._normal((count + row.tail, self.head_size)) for _ in range(2))
        bias = torch.zeros(count + row.tail)
        bias[:count] = 2 * torch.randn(count, generator=self.generator)
        if count:
            formats.write_segment(
                self.kv_cache,
                self.bias,
                slab,
                starts[head],
                keys[:count],
                values[:count],
                bias[:count],
            )
        for j in range(row.tail):
            cell = self.kv_cache[LAYER, int(tail_blocks[j // self.block_size]), head]
            formats.cell_keys(cell)[:, j % self.block_size] = keys[count + j]
            formats.cell_values(cell)[j % self.block_size] = values[count + j]
        return keys, values, bias

    def arguments(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        names = ("query", "kv_cache", "bias", "block_table", "seq_lens", "query_start_loc")
        names += ("slot_of_block", "gap_end", "first_cell", "num_entries", "scale")
        selected = list(range(len(self.rows)) if rows is None else rows)
        return {
            **{name: getattr(self, name) for name in names},
            "layer": LAYER,
            "output": torch.full_like(self.query, UNTOUCHED),
            "rows": torch.tensor(selected, dtype=torch.int32),
        }

    def run(self, rows: Sequence[int] | None = None, impl: str = "cpu") -> torch.Tensor:
        arguments = self.arguments(rows)
        segment_attention(**arguments, impl=impl)
        return arguments["output"]

    def tokens(self, row: int) -> slice:
        start, stop = self.query_start_loc[row : row + 2].tolist()
        return slice(start, stop)

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """Plain torch in ``dtype`` from what was written, not from the pool."""
        output = torch.full_like(self.query, UNTOUCHED, dtype=dtype)
        for number, row in enumerate(self.rows):
            tokens = self.tokens(number)
            for head, (keys, values, bias) in enumerate(self.contents[number]):
                age = torch.arange(len(keys) - 1, -1, -1) - (row.query_len - 1)
                mask = bias.repeat(row.query_len, 1)
                hidden = age[None, :] < -torch.arange(row.query_len)[:, None]
                hidden[:, : len(keys) - row.tail] = False
                mask[hidden] = -math.inf
                for h in range(head * self.ratio, (head + 1) * self.ratio):
                    output[tokens, h] = eager_attention(
                        self.query[tokens, h], keys, values, mask, self.scale, dtype
                    )
        return output

    def check(self) -> None:
        end = int(self.query_start_loc[-1])
        actual, eager = self.run()[:end], self.expected(self.dtype)[:end]
        assert_no_worse_than_eager(actual, eager, self.expected(torch.float64)[:end])


MIXED = (
    RowSpec(entries=(101, 40), tail=3),
    RowSpec(entries=None, tail=77),
    RowSpec(entries=(0, 1), tail=1),
    RowSpec(entries=(65, 0), tail=37, query_len=5),
    RowSpec(entries=None, tail=41, query_len=6),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize(("ratio", "block_size"), [(1, 16), (2, 48), (3, 32), (4, 128), (7, 64)])
def test_no_worse_than_eager_over_the_grid(
    dtype: torch.dtype, head_size: int, ratio: int, block_size: int
) -> None:
    Batch(MIXED, dtype=dtype, head_size=head_size, ratio=ratio, block_size=block_size).check()


@pytest.mark.parametrize("ratio", range(1, 17))
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_heads_per_kv_head(dtype: torch.dtype, ratio: int) -> None:
    Batch(MIXED[:3], dtype=dtype, ratio=ratio).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entries", [1, 2, 31, 32, 33, 255, 256, 257, 1000, 8192 + 77])
def test_any_length(dtype: torch.dtype, entries: int) -> None:
    Batch([RowSpec((entries, 3), tail=1), RowSpec((3, entries), tail=45)], dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [2, 33, 100])
@pytest.mark.parametrize("entries", [(70, 300), None])
def test_long_queries_are_causal_in_the_tail(
    dtype: torch.dtype, query_len: int, entries: tuple[int, int] | None
) -> None:
    rows = [RowSpec(entries, tail=query_len), RowSpec(entries, tail=query_len + 50, query_len=7)]
    rows[0] = RowSpec(entries, tail=query_len, query_len=query_len)
    Batch(rows, dtype=dtype, ratio=3).check()


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.builds(
            lambda entries, tail, query_len: RowSpec(entries, tail + query_len, query_len),
            st.none() | st.tuples(*[st.integers(0, 150)] * 3),
            st.integers(0, 90),
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=4,
    ),
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 5),
)
def test_any_batch(rows: list[RowSpec], dtype: torch.dtype, block_size: int, seed: int) -> None:
    rows = [RowSpec(r.entries and r.entries[:3], r.tail, r.query_len) for r in rows]
    if all(row.entries is None for row in rows):
        rows.append(RowSpec((4, 0, 60), tail=2))
    Batch(rows, dtype=dtype, head_size=32, block_size=block_size, seed=seed).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_the_pool_do_not_matter(dtype: torch.dtype) -> None:
    batches = [Batch(MIXED, dtype=dtype, blocks_first=order) for order in (False, True)]
    assert batches[0].kv_cache.stride() != batches[1].kv_cache.stride()
    assert torch.equal(batches[0].run(), batches[1].run())


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_query_and_output(dtype: torch.dtype) -> None:
    batch = Batch(MIXED, dtype=dtype)
    arguments = batch.arguments()
    tokens, heads, size = batch.query.shape
    packed = torch.zeros(tokens, 2 * heads, size, dtype=dtype)
    packed[:, :heads] = batch.query
    arguments["query"] = packed[:, :heads]
    arguments["output"] = torch.full_like(packed, UNTOUCHED)[:, heads:]
    segment_attention(**arguments)
    assert torch.equal(arguments["output"], batch.run())


def test_other_rows_are_left_alone() -> None:
    batch = Batch(MIXED, dtype=torch.bfloat16)
    output = batch.run(rows=[3, 0])
    for row in range(len(MIXED)):
        untouched = (output[batch.tokens(row)] == UNTOUCHED).all()
        assert untouched == (row not in (0, 3))
    assert (output[batch.query_start_loc[-1] :] == UNTOUCHED).all()


def test_no_rows() -> None:
    assert (Batch(MIXED).run(rows=[]) == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    rows = [*MIXED, RowSpec((3000, 2500), tail=20), RowSpec((700, 10), tail=50, query_len=40)]
    batch = Batch(rows, dtype=dtype, ratio=3)
    together = batch.run()
    threads = torch.get_num_threads()
    for count in (1, threads):
        torch.set_num_threads(count)
        for row in range(len(rows)):
            alone = batch.run(rows=[row])
            tokens = batch.tokens(row)
            assert torch.equal(alone[tokens], together[tokens])


def test_a_query_without_keys_yields_zero() -> None:
    batch = Batch([RowSpec((0, 5), tail=1)])
    # the tail starts behind the query: its position is inside the gap
    batch.gap_end += batch.block_size
    output = batch.run()
    assert (output[0, : batch.ratio] == 0).all()
    assert (output[0, batch.ratio :] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_do_not_overflow(dtype: torch.dtype) -> None:
    batch = Batch([RowSpec((300, 300), tail=5)], dtype=dtype)
    batch.query *= 200
    batch.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_of_minus_infinity_removes_entries(dtype: torch.dtype) -> None:
    batch = Batch([RowSpec((600, 40), tail=1)], dtype=dtype)
    block_bias = batch.bias[torch.isfinite(batch.bias)]
    batch.bias[torch.isfinite(batch.bias)] = torch.full_like(block_bias, -math.inf)
    for keys, _, bias in batch.contents[0]:
        bias[: len(keys) - 1] = -math.inf
    batch.check()


def partial_softmax(batch: Batch) -> dict[str, torch.Tensor]:
    """Outputs and log sums of keys that are not in the pool; some queries have seen none."""
    shape = batch.query.shape
    output = torch.randn(shape, generator=batch.generator)
    log_sum = 3 + 2 * torch.randn(shape[:2], generator=batch.generator)
    log_sum[::3, 1:] = -math.inf
    output[log_sum == -math.inf] = math.nan
    return {"partial_output": output, "partial_log_sum": log_sum}


def merged(batch: Batch, partial: dict[str, torch.Tensor]) -> torch.Tensor:
    """What attention over the keys of the batch becomes behind a partial softmax, float64."""
    output = batch.expected(torch.float64)
    for number, row in enumerate(batch.rows):
        tokens = batch.tokens(number)
        for head, (keys, _, bias) in enumerate(batch.contents[number]):
            age = torch.arange(len(keys) - 1, -1, -1) - (row.query_len - 1)
            hidden = age[None, :] < -torch.arange(row.query_len)[:, None]
            hidden[:, : len(keys) - row.tail] = False
            for h in range(head * batch.ratio, (head + 1) * batch.ratio):
                query = batch.query[tokens, h].double()
                logits = query @ keys.double().T * batch.scale + bias.double()
                own = logits.masked_fill(hidden, -math.inf).logsumexp(1)
                first = partial["partial_log_sum"][tokens, h].double()
                weight = (first - torch.logaddexp(first, own)).exp()[:, None]
                value = partial["partial_output"][tokens, h].double().nan_to_num()
                output[tokens, h] = weight * value + (1 - weight) * output[tokens, h]
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [1, 3])
def test_a_partial_softmax_goes_on(dtype: torch.dtype, ratio: int) -> None:
    rows = [*MIXED, RowSpec((3000, 500), tail=20), RowSpec((70, 10), tail=50, query_len=40)]
    batch = Batch(rows, dtype=dtype, ratio=ratio)
    partial = partial_softmax(batch)
    arguments = batch.arguments()
    segment_attention(**arguments, **partial)
    end = int(batch.query_start_loc[-1])
    exact = merged(batch, partial)[:end]
    own_error = max_error(batch.run()[:end], batch.expected(torch.float64)[:end])
    unit = torch.finfo(dtype).eps * exact.abs().max().item()
    assert max_error(arguments["output"][:end], exact) <= own_error + 2 * unit
    assert (arguments["output"][end:] == UNTOUCHED).all()
    arguments["output"] = arguments["output"].double()
    reference.segment_attention(**arguments, **partial, compute_dtype=torch.float64)
    assert max_error(arguments["output"][:end], exact) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_partial_softmax_changes_no_bit(dtype: torch.dtype) -> None:
    batch = Batch([*MIXED, RowSpec((0, 5), tail=1)], dtype=dtype, ratio=3)
    partial = partial_softmax(batch)
    partial["partial_log_sum"].fill_(-math.inf)
    partial["partial_output"].fill_(math.nan)
    arguments = batch.arguments()
    segment_attention(**arguments, **partial)
    assert torch.equal(arguments["output"], batch.run())


def test_a_partial_softmax_alone() -> None:
    batch = Batch([RowSpec((0, 0), tail=1)])
    batch.gap_end += batch.block_size  # no key is visible
    output = torch.randn(batch.query.shape, generator=batch.generator)
    log_sum = torch.full(batch.query.shape[:2], -7.0)
    arguments = batch.arguments()
    segment_attention(**arguments, partial_output=output, partial_log_sum=log_sum)
    assert torch.equal(arguments["output"][0], output[0])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("partial_output", lambda x: None, "both or neither"),
        ("partial_log_sum", lambda x: None, "both or neither"),
        ("partial_output", lambda x: x[1:], r"partial_output: expected float32 \[num_tokens, num"),
        ("partial_output", lambda x: x.half(), "partial_output: expected float32"),
        ("partial_log_sum", lambda x: x[:, 1:], r"partial_log_sum: expected float32 \[num_tokens"),
        ("partial_log_sum", lambda x: x.double(), "partial_log_sum: expected float32"),
    ],
)
def test_a_wrong_partial_softmax(name: str, change: Any, message: str) -> None:
    batch = Batch(MIXED)
    partial = partial_softmax(batch)
    partial[name] = change(partial[name])
    with pytest.raises(ValueError, match=message):
        segment_attention(**batch.arguments(), **partial)


def test_the_reference_is_right() -> None:
    batch = Batch(MIXED, ratio=3)
    exact = batch.expected(torch.float64)
    assert max_error(batch.run(impl="reference"), exact) < 1e-5
    arguments = batch.arguments()
    arguments["output"] = arguments["output"].double()
    reference.segment_attention(**arguments, compute_dtype=torch.float64)
    assert max_error(arguments["output"], exact) < 1e-12


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="'cpu' or 'reference'"):
        Batch(MIXED[:1]).run(impl="auto")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x[:, :3], r"num_heads a multiple of num_kv_heads = 2.*\[\d+, 3, 64\]"),
        ("query", lambda x: x[..., :32], r"num_tokens, num_heads, head_size.*head_size = 64"),
        ("query", lambda x: x.half(), "one dtype"),
        ("query", lambda x: x.mT.contiguous().mT, "last dimension contiguous"),
        ("output", lambda x: x[1:], r"output: expected \[num_tokens, num_heads, head_size\] = "),
        ("kv_cache", lambda x: x[0], "num_layers, num_blocks, num_kv_heads, block_size"),
        ("kv_cache", lambda x: x[..., :64], "contiguous"),
        ("bias", lambda x: x[1:], r"\[num_blocks, num_layers, num_kv_heads, block_size\] = "),
        ("bias", lambda x: x.double(), "float32"),
        ("layer", lambda x: 3, "0 <= layer < 3, got 3"),
        ("block_table", lambda x: x.long(), r"int32 \[num_rows, max_blocks\]"),
        ("seq_lens", lambda x: x[1:], r"seq_lens: expected \[num_rows\] = \[5\], got \[4\]"),
        ("seq_lens", lambda x: x * 1000, "seq_len <= max_blocks"),
        ("query_start_loc", lambda x: x[1:], r"\[num_rows \+ 1\] = \[6\], got \[5\]"),
        ("query_start_loc", lambda x: x + 90, "within 16 tokens"),
        ("rows", lambda x: x + 1, r"rows\[4\]: expected 0 <= row < 5, got 5"),
        ("rows", lambda x: x.long(), "rows: expected contiguous int32"),
        ("slot_of_block", lambda x: x[1:], r"slot_of_block: expected \[num_blocks\]"),
        ("slot_of_block", lambda x: x + 9, "0 <= slot < 6"),
        ("gap_end", lambda x: x + 1, "multiple of the block size 32"),
        ("first_cell", lambda x: x[:, 1:], r"\[num_slots, num_layers, num_kv_heads\] = \[6, 3, 2]"),
        ("first_cell", lambda x: x + 10**6, "expected cells within"),
        ("num_entries", lambda x: x - 200, "expected cells within"),
        ("num_entries", lambda x: x.float(), "num_entries: expected contiguous int32"),
    ],
)
def test_wrong_arguments(name: str, change: Any, message: str) -> None:
    arguments = Batch(MIXED).arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        segment_attention(**arguments)


@pytest.mark.parametrize(("isa", "head_size"), [("vec", 64), ("vec16", 80), ("vec", 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_vllm_writes_the_cells_of_formats(dtype: torch.dtype, isa: str, head_size: int) -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    pool = torch.zeros(5, 2, 32, 2 * head_size, dtype=dtype)  # one layer, [B, H, N, 2 * D]
    keys, values = torch.randn(2, 50, 2, head_size).to(dtype)
    slots = torch.randperm(5 * 32)[:50]
    key_cache, value_cache = pool.view(5, 2, 64, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    block, offset = slots // 32, slots % 32
    assert torch.equal(formats.cell_keys(pool)[block, :, :, offset], keys)
    assert torch.equal(formats.cell_values(pool)[block, :, offset], values)


@pytest.mark.parametrize(("isa", "head_size"), [("vec", 64), ("vec16", 80), ("vec", 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_state_agree_with_vllm(dtype: torch.dtype, isa: str, head_size: int) -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    rows = [RowSpec(None, 300), RowSpec(None, 33, query_len=33), RowSpec(None, 90, query_len=9)]
    batch = Batch(rows, dtype=dtype, head_size=head_size, ratio=3)
    # vLLM's kernel reads whole blocks: it relies on finite garbage
    batch.kv_cache.nan_to_num_(nan=1.0, posinf=2.0)
    pool = batch.kv_cache[LAYER]
    blocks, heads, slots, width = pool.shape
    key_cache, value_cache = pool.view(blocks, heads, 2 * slots, width // 2).chunk(2, dim=2)
    num_tokens = int(batch.query_start_loc[-1])
    theirs = torch.zeros_like(batch.query[:num_tokens])
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(rows),
        num_heads=batch.query.shape[1],
        num_kv_heads=heads,
        head_dim=head_size,
        seq_lens=batch.seq_lens,
        dtype=dtype,
        query_start_loc=batch.query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    ops.cpu_attention_with_kv_cache(
        query=batch.query[:num_tokens],
        key_cache=key_cache,
        value_cache=value_cache,
        output=theirs,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        scale=batch.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=batch.block_table,
        softcap=0,
        scheduler_metadata=metadata,
        s_aux=None,
    )
    exact = batch.expected(torch.float64)[:num_tokens]
    ours = batch.run()[:num_tokens]
    tolerance = 4 * torch.finfo(dtype).eps * exact.abs().max().item()
    assert max_error(ours, theirs) <= max_error(theirs, exact) + tolerance


@pytest.mark.slow
def test_all_of_this_on_avx2() -> None:
    program = (
        "import sys, pytest; from kvcompress_kernels import build; build.load('AVX2'); "
        "sys.exit(pytest.main(['-q', '-m', 'not slow', '-p', 'no:cacheprovider', sys.argv[1]]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, __file__], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
