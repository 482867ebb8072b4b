"""`coded_attention`: no worse than plain torch, blind to garbage, independent of the batch."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from coding import random_codec, random_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_no_worse_than_eager, max_error

from kvcompress_kernels import code_format, formats
from kvcompress_kernels.code_format import WIDTHS, Codes, Counts, GroupCodec, SideCodec
from kvcompress_kernels.coded_attention import LayerCodecs, coded_attention
from kvcompress_kernels.segment_attention import segment_attention

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUM_LAYERS, LAYER = 3, 1
UNTOUCHED = 7.0
KEYS, VALUES, NARROW = (2, 21, 25, 11), (0, 17, 30, 13), (0, 9, 9, 9)


@dataclass(frozen=True)
class RowSpec:
    """A row of a batch: coded rows of each group, or None for a row without state."""

    counts: tuple[int, ...] | None
    query_len: int = 1


def levels_in(
    codes: torch.Tensor, scales: dict[str, torch.Tensor], name: str, side: SideCodec, dtype: Any
) -> torch.Tensor:
    """Keys or values ``[m, group_size * D]`` that codes stand for, every step in ``dtype``."""
    parts = []
    for part, width in zip(codes.split(list(side.counts), 1), WIDTHS, strict=True):
        scale = scales.get(f"{name}_max" if width == 8 else f"{name}_rms", torch.zeros(len(codes)))
        level = code_format.levels(width)[part.long()]
        parts.append(level.to(dtype) * scale.to(dtype)[:, None])
    return side.mean.to(dtype) + torch.cat(parts, 1) @ side.decode.to(dtype)


class Batch:
    """Rows in scattered blocks of a pool that is NaN wherever no row has anything.

    The rows of a cell past the last one have codes, and scales that are NaN.
    """

    def __init__(
        self,
        rows: Sequence[RowSpec],
        codecs: Sequence[GroupCodec],
        *,
        dtype: torch.dtype = torch.float32,
        head_size: int = 64,
        ratio: int = 2,
        block_size: int = 32,
        blocks_first: bool = False,
        seed: int = 0,
    ) -> None:
        self.rows, self.codecs, self.dtype, self.ratio = rows, tuple(codecs), dtype, ratio
        self.head_size, self.block_size = head_size, block_size
        self.generator = torch.Generator().manual_seed(seed)
        self.group_size = codecs[0].keys.mean.numel() // head_size
        self.num_kv_heads = self.group_size * len(codecs)
        self.scale = head_size**-0.5
        H, N = self.num_kv_heads, block_size
        geometry = formats.SlabGeometry(NUM_LAYERS, H, N)
        cell_bytes = N * 2 * head_size * dtype.itemsize
        capacity = [codec.layout.rows_per_cell(cell_bytes) for codec in codecs]
        starts_of, slabs = [], []
        for number, row in enumerate(rows):
            cells = [-(-m // r) for m, r in zip(row.counts or (), capacity, strict=False)]
            starts_of.append(list(itertools.accumulate(cells, initial=number)))
            slabs.append(geometry.blocks(starts_of[-1][-1]) + 1)
        num_blocks = sum(slabs) + 2
        pool = torch.full((NUM_LAYERS, num_blocks, H, N, 2 * head_size), math.nan, dtype=dtype)
        if blocks_first:
            pool = pool.permute(1, 0, 2, 3, 4).contiguous().permute(1, 0, 2, 3, 4)
        self.kv_cache = pool
        lengths = [row.query_len for row in rows]
        starts = list(itertools.accumulate(lengths, initial=0))
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        num_tokens = starts[-1] + 2  # padding at the end
        self.query = torch.randn(num_tokens, H * ratio, head_size, generator=self.generator)
        self.query = self.query.to(dtype)
        self.block_table = torch.zeros(len(rows), max(slabs), dtype=torch.int32)
        self.slot_of_block = torch.zeros(num_blocks, dtype=torch.int32)
        # slot 0 is no state; what it holds must not matter
        state = (len(rows) + 1, NUM_LAYERS, len(codecs))
        self.first_cell = torch.full(state, 3, dtype=torch.int32)
        self.num_rows = torch.full(state, 5, dtype=torch.int32)
        free = iter((torch.randperm(num_blocks - 1, generator=self.generator) + 1).tolist())
        self.contents: list[list[Codes]] = []
        for number, row in enumerate(rows):
            slab = torch.tensor([next(free) for _ in range(slabs[number])], dtype=torch.int32)
            self.block_table[number, : len(slab)] = slab
            if row.counts is None:
                self.contents.append([])
                continue
            self.slot_of_block[slab[0]] = number + 1
            self.first_cell[number + 1, LAYER] = torch.tensor(starts_of[number][:-1])
            self.num_rows[number + 1, LAYER] = torch.tensor(row.counts)
            self.contents.append(
                [
                    self._fill(codec.layout, slab, starts_of[number][g], row.counts[g], capacity[g])
                    for g, codec in enumerate(codecs)
                ]
            )
        self.layer_codecs = LayerCodecs(self.codecs, H, dtype)

    def _fill(
        self,
        layout: code_format.RowLayout,
        slab: torch.Tensor,
        first_cell: int,
        count: int,
        capacity: int,
    ) -> Codes:
        codes = random_codes(-(-count // capacity) * capacity, layout, self.generator)
        codes.scales[:, count:] = math.nan
        code_format.write_rows(self.kv_cache, slab, first_cell, codes, layout)
        return Codes(codes.keys[:count], codes.values[:count], codes.scales[:, :count])

    def arguments(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        names = ("query", "kv_cache", "block_table", "query_start_loc", "slot_of_block")
        names += ("first_cell", "num_rows", "scale")
        selected = list(range(len(self.rows)) if rows is None else rows)
        return {
            **{name: getattr(self, name) for name in names},
            "codecs": self.layer_codecs,
            "layer": LAYER,
            "output": torch.full(self.query.shape, UNTOUCHED),
            "log_sum": torch.full(self.query.shape[:2], UNTOUCHED),
            "rows": torch.tensor(selected, dtype=torch.int32),
        }

    def run(
        self, rows: Sequence[int] | None = None, impl: str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = self.arguments(rows)
        coded_attention(**arguments, impl=impl)
        return arguments["output"], arguments["log_sum"]

    def tokens(self, row: int) -> slice:
        start, stop = self.query_start_loc[row : row + 2].tolist()
        return slice(start, stop)

    def expected(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain torch in ``dtype`` from what was written, not from the pool."""
        output = torch.full(self.query.shape, UNTOUCHED, dtype=dtype)
        log_sum = torch.full(self.query.shape[:2], UNTOUCHED, dtype=dtype)
        for number, row in enumerate(self.rows):
            tokens = self.tokens(number)
            if row.counts is None:
                output[tokens], log_sum[tokens] = 0, -math.inf
            for group, codes in enumerate(self.contents[number]):
                codec = self.codecs[group]
                scales = dict(zip(codec.layout.scales(), codes.scales, strict=True))
                keys = levels_in(codes.keys, scales, "key", codec.keys, dtype)
                values = levels_in(codes.values, scales, "value", codec.values, dtype)
                bias = scales.get("bias", torch.zeros(codes.num_rows)).to(dtype)
                for member, head in itertools.product(range(self.group_size), range(self.ratio)):
                    query_head = (group * self.group_size + member) * self.ratio + head
                    own = slice(member * self.head_size, (member + 1) * self.head_size)
                    query = self.query[tokens, query_head].to(dtype)
                    logits = query @ keys[:, own].T * self.scale + bias
                    log_sum[tokens, query_head] = logits.logsumexp(1)
                    weights = logits.softmax(1)
                    if codes.num_rows == 0 or (bias == -math.inf).all():
                        weights = torch.zeros_like(logits)
                    output[tokens, query_head] = weights @ values[:, own]
        return output, log_sum

    def check(self) -> None:
        end = int(self.query_start_loc[-1])
        exact, eager = self.expected(torch.float64), self.expected(self.dtype)
        for actual, plain, right in zip(self.run(), eager, exact, strict=True):
            visible = right[:end].isfinite()
            assert torch.equal(actual[:end].isfinite(), visible)
            assert (actual[end:] == UNTOUCHED).all()
            if not visible.any():
                continue
            found, plain, right = actual[:end][visible], plain[:end][visible], right[:end][visible]
            if self.dtype == torch.float32:
                # sums in the space of the codes have other terms than those of plain torch
                unit = torch.finfo(self.dtype).eps * right.abs().max().item()
                assert max_error(found, right) <= 2 * max_error(plain, right) + 6 * unit
            else:
                assert_no_worse_than_eager(found.to(self.dtype), plain, right)


def codecs_of(
    num_groups: int,
    group_size: int,
    head_size: int,
    keys: Counts = KEYS,
    values: Counts = VALUES,
    has_bias: bool = False,
) -> list[GroupCodec]:
    return [
        random_codec(group_size, head_size, keys, values, has_bias, seed=g)
        for g in range(num_groups)
    ]


MIXED = (
    RowSpec((101, 40)),
    RowSpec(None),
    RowSpec((0, 1)),
    RowSpec((65, 0), query_len=5),
    RowSpec(None, query_len=6),
    RowSpec((0, 0), query_len=2),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((64, 0, 0, 0), (64, 0, 0, 0)),
        ((0, 64, 0, 0), (0, 64, 0, 0)),
        ((0, 0, 64, 0), (0, 0, 64, 0)),
        ((0, 0, 0, 64), (0, 0, 0, 64)),
        ((1, 1, 1, 1), (1, 1, 1, 1)),
        ((3, 17, 9, 5), (5, 9, 17, 3)),
        ((16, 0, 0, 33), (0, 16, 31, 0)),
        ((7, 0, 15, 0), (31, 0, 1, 0)),
        ((0, 0, 0, 0), (0, 5, 0, 0)),
        ((0, 0, 3, 0), (0, 0, 0, 0)),
        ((0, 0, 0, 1), (0, 0, 1, 0)),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_widths(dtype: torch.dtype, keys: Counts, values: Counts, has_bias: bool) -> None:
    codecs = codecs_of(2, 1, 64, keys, values, has_bias)
    Batch(MIXED, codecs, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((0, 66, 0, 190), (0, 200, 0, 31)),
        ((0, 0, 256, 0), (0, 150, 106, 0)),
        ((140, 20, 0, 0), (17, 0, 239, 0)),
    ],
)
@pytest.mark.parametrize("block_size", [16, 128])
def test_long_runs(dtype: torch.dtype, keys: Counts, values: Counts, block_size: int) -> None:
    """Runs of more bytes than a vector: of a value's channels, and of the rows of a large cell."""
    codec = random_codec(4, 64, keys, values)
    rows = [RowSpec((300,)), RowSpec((41,), query_len=3)]
    Batch(rows, [codec], dtype=dtype, block_size=block_size).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("head_size", "block_size", "ratio"), [(64, 32, 3), (80, 16, 4), (96, 48, 1), (128, 64, 2)]
)
def test_groups_and_heads(
    dtype: torch.dtype, group_size: int, head_size: int, block_size: int, ratio: int
) -> None:
    codecs = codecs_of(2, group_size, head_size)
    shape = {"head_size": head_size, "block_size": block_size, "ratio": ratio}
    Batch(MIXED, codecs, dtype=dtype, **shape).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", range(1, 9))
@pytest.mark.parametrize("group_size", [1, 3])
def test_any_number_of_heads_per_kv_head(dtype: torch.dtype, ratio: int, group_size: int) -> None:
    codec = random_codec(group_size, 64, KEYS, VALUES)
    rows = [RowSpec((75,)), RowSpec((20,), query_len=2)]
    Batch(rows, [codec], dtype=dtype, ratio=ratio).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_numbers_of_rows_around_the_cells(dtype: torch.dtype, block_size: int) -> None:
    codec = random_codec(1, 64, KEYS, VALUES)
    capacity = codec.layout.rows_per_cell(block_size * 128 * dtype.itemsize)
    counts = [1, 15, 16, 17, 31, 33, capacity - 1, capacity, capacity + 1, 2 * capacity + 7]
    Batch([RowSpec((m,)) for m in counts], [codec], dtype=dtype, block_size=block_size).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(dtype: torch.dtype) -> None:
    codecs = codecs_of(2, 2, 64, has_bias=True)
    rows = [RowSpec((6000, 17)), RowSpec((1500, 2500))]
    Batch(rows, codecs, dtype=dtype, ratio=3).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [2, 7, 40])
def test_long_queries(dtype: torch.dtype, query_len: int) -> None:
    codecs = codecs_of(2, 2, 64)
    rows = [RowSpec((200, 90), query_len), RowSpec((0, 30), 3), RowSpec((30, 0), query_len)]
    Batch(rows, codecs, dtype=dtype, ratio=2).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_with_different_layouts(dtype: torch.dtype) -> None:
    codecs = [
        random_codec(2, 64, KEYS, VALUES, seed=0),
        random_codec(2, 64, (0, 3, 0, 80), (1, 0, 2, 0), has_bias=True, seed=1),
    ]
    Batch(MIXED, codecs, dtype=dtype).check()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.builds(RowSpec, st.none() | st.tuples(*[st.integers(0, 150)] * 2), st.integers(1, 5)),
        min_size=1,
        max_size=4,
    ),
    keys=st.tuples(*[st.integers(0, 16)] * 4),
    values=st.tuples(*[st.integers(0, 16)] * 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 5),
)
def test_any_batch(
    rows: list[RowSpec], keys: Counts, values: Counts, dtype: torch.dtype, seed: int
) -> None:
    has_bias = not any(keys + values) or seed % 2 == 0
    Batch(rows, codecs_of(2, 1, 64, keys, values, has_bias), dtype=dtype, seed=seed).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_the_pool_do_not_matter(dtype: torch.dtype) -> None:
    codecs = codecs_of(2, 1, 64)
    batches = [Batch(MIXED, codecs, dtype=dtype, blocks_first=order) for order in (False, True)]
    assert batches[0].kv_cache.stride() != batches[1].kv_cache.stride()
    for first, second in zip(batches[0].run(), batches[1].run(), strict=True):
        assert torch.equal(first, second)


def test_strided_query_output_and_log_sum() -> None:
    batch = Batch(MIXED, codecs_of(2, 1, 64))
    arguments = batch.arguments()
    heads = batch.query.shape[1]
    arguments["query"] = torch.cat([batch.query, batch.query * 2], 1)[:, :heads]
    arguments["output"] = arguments["output"].repeat(1, 2, 1)[:, heads:]
    arguments["log_sum"] = arguments["log_sum"].repeat(1, 2)[:, heads:]
    coded_attention(**arguments)
    output, log_sum = batch.run()
    assert torch.equal(arguments["output"], output)
    assert torch.equal(arguments["log_sum"], log_sum)


def test_other_rows_are_left_alone() -> None:
    batch = Batch(MIXED, codecs_of(2, 1, 64), dtype=torch.bfloat16)
    for result in batch.run(rows=[3, 0, 1]):
        for row in range(len(MIXED)):
            untouched = (result[batch.tokens(row)] == UNTOUCHED).all()
            assert untouched == (row not in (0, 1, 3))
    for result in batch.run(rows=[]):
        assert (result == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    rows = [*MIXED, RowSpec((3000, 2500)), RowSpec((700, 10), query_len=40)]
    batch = Batch(rows, codecs_of(2, 2, 64), dtype=dtype, ratio=3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = batch.run()
        for count in (1, 2):
            torch.set_num_threads(count)
            for row, tokens in ((r, batch.tokens(r)) for r in range(len(rows))):
                for alone, all_rows in zip(batch.run(rows=[row]), together, strict=True):
                    assert torch.equal(alone[tokens], all_rows[tokens])
        for _ in range(5):
            for again, first in zip(batch.run(), together, strict=True):
                assert torch.equal(again, first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_do_not_overflow(dtype: torch.dtype) -> None:
    batch = Batch([RowSpec((300, 300))], codecs_of(2, 1, 64), dtype=dtype)
    batch.query *= 50
    batch.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_of_minus_infinity_removes_rows(dtype: torch.dtype) -> None:
    codecs = codecs_of(2, 1, 64, has_bias=True)
    batch = Batch([RowSpec((150, 60))], codecs, dtype=dtype)
    for group, (codec, codes) in enumerate(zip(codecs, batch.contents[0], strict=True)):
        codes.scales[-1, 20 if group == 0 else 0 :] = -math.inf
        first = int(batch.first_cell[1, LAYER, group])
        code_format.write_rows(batch.kv_cache, batch.block_table[0], first, codes, codec.layout)
    batch.check()
    assert (batch.run()[1][0, batch.ratio :] == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_past_the_pool_is_read(dtype: torch.dtype) -> None:
    """The pool ends at a page that must not be touched, and its last cell is used to its end."""
    codec = random_codec(1, 64, (0, 40, 0, 20), (3, 8, 50, 3))
    batch = Batch([RowSpec((1000,))], [codec], dtype=dtype)
    size = batch.kv_cache.numel() * dtype.itemsize
    pages = -(-size // mmap.PAGESIZE) + 1
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    guard = ctypes.c_void_p(address + (pages - 1) * mmap.PAGESIZE)
    assert libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    offset = (pages - 1) * mmap.PAGESIZE - size
    count = size // dtype.itemsize
    pool = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    expected = batch.run()
    # blocks renumbered, so that the last of the slab is the last of the pool
    slab = batch.block_table[0].clone()
    last = batch.kv_cache.shape[1] - 1
    order = torch.arange(last + 1)
    order[[last, int(slab[-2])]] = order[[int(slab[-2]), last]]
    pool = pool.view(batch.kv_cache.shape)
    pool.copy_(batch.kv_cache[:, order])
    batch.kv_cache = pool
    place = torch.empty_like(order)
    place[order] = torch.arange(last + 1)
    batch.block_table[0] = place[slab.long()].int()
    batch.slot_of_block = batch.slot_of_block[order]
    for found, right in zip(batch.run(), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_entries_go_on_from_it(dtype: torch.dtype) -> None:
    """Coded rows, then raw tokens of the tail: one softmax."""
    rows = [RowSpec((90, 33)), RowSpec((0, 50), query_len=3)]
    batch = Batch(rows, codecs_of(2, 1, 64), dtype=dtype)
    output, log_sum = batch.run()
    N, tail = batch.block_size, 3
    width = batch.block_table.shape[1]
    raw_blocks = torch.arange(len(rows)) + batch.kv_cache.shape[1]
    cells = torch.randn(NUM_LAYERS, len(rows), 2, N, 128, generator=batch.generator).to(dtype)
    kv_cache = torch.cat([batch.kv_cache, cells], 1)
    table = torch.cat([batch.block_table, raw_blocks[:, None].int()], 1)
    slot_of_block = torch.cat([batch.slot_of_block, torch.zeros(len(rows), dtype=torch.int32)])
    state = torch.zeros(len(rows) + 1, NUM_LAYERS, 2, dtype=torch.int32)
    final = torch.full_like(batch.query, UNTOUCHED)
    segment_attention(
        batch.query,
        final,
        kv_cache,
        torch.zeros(kv_cache.shape[1], NUM_LAYERS, 2, N),
        LAYER,
        table,
        torch.full((len(rows),), width * N + tail, dtype=torch.int32),
        batch.query_start_loc,
        torch.arange(len(rows), dtype=torch.int32),
        slot_of_block,
        torch.full((len(rows) + 1,), width * N, dtype=torch.int32),
        state,
        state,
        batch.scale,
        partial_output=output,
        partial_log_sum=log_sum,
    )
    exact_output, exact_log_sum = batch.expected(torch.float64)
    for row in range(len(rows)):
        tokens = batch.tokens(row)
        for i, token in enumerate(range(tokens.start, tokens.stop)):
            visible = tail - (tokens.stop - tokens.start) + i + 1
            for head in range(4):
                cell = cells[LAYER, row, head // 2]
                keys = formats.cell_keys(cell)[:, :visible].T.double()
                values = formats.cell_values(cell)[:visible].double()
                logits = keys @ batch.query[token, head].double() * batch.scale
                weights = torch.cat([exact_log_sum[token, head, None], logits]).softmax(0)
                exact = weights[0] * exact_output[token, head] + weights[1:] @ values
                error = max_error(final[token, head], exact)
                assert error <= 8 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_right(dtype: torch.dtype) -> None:
    batch = Batch(MIXED, codecs_of(2, 2, 64, has_bias=True), dtype=dtype)
    exact = batch.expected(torch.float64)
    for found, right in zip(batch.run(impl="reference"), exact, strict=True):
        finite = right.isfinite()
        assert torch.equal(found[~finite].double(), right[~finite])
        assert max_error(found[finite], right[finite]) < 2e-5


def test_the_scales_of_the_codec_matter() -> None:
    """Codes of real rows lead to the attention over these rows."""
    codec = random_codec(2, 64, (128, 0, 0, 0), (128, 0, 0, 0))
    batch = Batch([RowSpec((70,))], [codec])
    keys, values = torch.randn(2, 2, 70, 64, generator=batch.generator)
    from kvcompress_kernels.code_rows import encode_rows

    first = int(batch.first_cell[1, LAYER, 0])
    encode_rows(keys, values, None, codec, batch.kv_cache, batch.block_table[0], first)
    output, log_sum = batch.run()
    for head in range(4):
        logits = keys[head // 2] @ batch.query[0, head] * batch.scale
        assert math.isclose(log_sum[0, head], logits.logsumexp(0), abs_tol=0.02)
        assert max_error(output[0, head], logits.softmax(0) @ values[head // 2]) < 0.02


@pytest.mark.parametrize(
    ("groups", "heads", "message"),
    [
        ([], 2, "divides the 2 KV heads, got 0"),
        (codecs_of(2, 1, 64), 3, "divides the 3 KV heads, got 2"),
        (
            [random_codec(1, 64, KEYS, VALUES), random_codec(1, 32, NARROW, NARROW)],
            2,
            "group 1, key",
        ),
        (
            [
                GroupCodec(
                    random_codec(1, 64, KEYS, VALUES).keys,
                    SideCodec(
                        (1, 0, 0, 0), torch.zeros(64), torch.zeros(64, 2), torch.zeros(2, 64)
                    ),
                )
            ],
            1,
            "group 0, values: expected .* 1 channels",
        ),
    ],
)
def test_wrong_codecs(groups: list[GroupCodec], heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerCodecs(groups, heads, torch.float32)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x[:, :3], r"num_heads a multiple of num_kv_heads = 2.*\[\d+, 3, 64\]"),
        ("query", lambda x: x[..., :32], r"num_tokens, num_heads, head_size.*head_size = 64"),
        ("query", lambda x: x.half(), "one dtype"),
        ("output", lambda x: x.half(), r"output: expected float32 \[num_tokens, num_heads, head"),
        ("output", lambda x: x.mT.contiguous().mT, "last dimension contiguous"),
        ("log_sum", lambda x: x[1:], r"log_sum: expected float32 \[num_tokens, num_heads\]"),
        ("kv_cache", lambda x: x[0], "num_layers, num_blocks, num_kv_heads, block_size"),
        ("kv_cache", lambda x: x[..., :64], "contiguous"),
        ("layer", lambda x: 3, "0 <= layer < 3, got 3"),
        ("block_table", lambda x: x.long(), r"int32 \[num_rows, max_blocks\]"),
        ("query_start_loc", lambda x: x[1:], r"\[num_rows \+ 1\] = \[7\], got \[6\]"),
        ("query_start_loc", lambda x: x + 90, "within the 18 of query"),
        ("rows", lambda x: x + 1, r"rows\[5\]: expected 0 <= row < 6, got 6"),
        ("rows", lambda x: x.long(), "rows: expected contiguous int32"),
        ("slot_of_block", lambda x: x[1:], r"slot_of_block: expected \[num_blocks\]"),
        ("slot_of_block", lambda x: x + 9, "0 <= slot < 7"),
        ("first_cell", lambda x: x[:, 1:], r"\[num_slots, num_layers, num_groups\] = \[7, 3, 2]"),
        ("first_cell", lambda x: x + 10**6, "expected cells within"),
        ("num_rows", lambda x: x - 200, "expected cells within"),
        ("num_rows", lambda x: x.float(), "num_rows: expected contiguous int32"),
        ("codecs", lambda x: LayerCodecs(x.groups, 2, torch.bfloat16), "fold.*dtype of this pool"),
        ("codecs", lambda x: LayerCodecs(codecs_of(3, 1, 64), 3, torch.float32), "equal size"),
        (
            "codecs",
            lambda x: LayerCodecs(codecs_of(2, 1, 32, NARROW, NARROW), 2, torch.float32),
            "codecs: expect",
        ),
    ],
)
def test_wrong_arguments(name: str, change: Any, message: str) -> None:
    arguments = Batch(MIXED, codecs_of(2, 1, 64, (0, 9, 9, 9), (0, 9, 9, 9))).arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        coded_attention(**arguments)


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="'cpu' or 'reference'"):
        Batch(MIXED[:1], codecs_of(2, 1, 64)).run(impl="auto")


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
