"""`segment_attention` in Triton, under Triton's interpreter: as good as torch, blind to garbage.

`test_triton_interpreter` runs this module in a process of its own, because the interpreter is
chosen when Triton's kernels are defined.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton_interpreter
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numerics import assert_no_worse_than_eager, max_error
from pools import GPU_LAYOUTS as LAYOUTS
from pools import gpu_pool

from kvcompress_kernels import formats
from kvcompress_kernels.segment_attention import segment_attention

triton_interpreter.require()
kernel: Any = pytest.importorskip("kvcompress_kernels.segment_attention.triton")
cpu: Any = triton_interpreter.load_module("test_segment_attention")
RowSpec, LAYER, UNTOUCHED = cpu.RowSpec, cpu.LAYER, cpu.UNTOUCHED

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Batch(cpu.Batch):  # type: ignore[misc, name-defined]
    """The batches of the CPU tests in a GPU pool."""

    def __init__(self, rows: Any, *, layout: str = "LBHNC", splits: int = 3, **kwargs: Any) -> None:
        super().__init__(rows, **kwargs)
        self.kv_cache = gpu_pool(self.kv_cache, layout)
        self.splits = splits
        self.max_query_len = max(row.query_len for row in rows)

    def workspace(self, splits: int | None = None) -> Any:
        tokens, heads, size = self.query.shape
        space = kernel.allocate_workspace(tokens, heads, size, splits or self.splits, "cpu")
        space.partial.fill_(math.nan)
        space.stats.fill_(math.nan)
        return space

    def run(self, rows: Any = None, impl: str = "triton", splits: int | None = None) -> Any:
        arguments = self.arguments(rows)
        segment_attention(
            **arguments,
            impl=impl,
            max_query_len=self.max_query_len,
            workspace=self.workspace(splits),
        )
        return arguments["output"]


MIXED = (
    RowSpec(entries=(101, 40), tail=3),
    RowSpec(entries=None, tail=77),
    RowSpec(entries=(0, 1), tail=1),
    RowSpec(entries=None, tail=1),
)
LONG = (
    RowSpec(entries=(65, 0), tail=37, query_len=5),
    RowSpec(entries=None, tail=41, query_len=6),
    RowSpec(entries=(1, 130), tail=2),
    RowSpec(entries=(30, 7), tail=18, query_len=18),
)
SHORT = (RowSpec(entries=(65, 0), tail=37, query_len=3), RowSpec(entries=None, tail=41))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_size", "ratio", "block_size"),
    [(64, 1, 16), (80, 7, 48), (96, 4, 128), (112, 2, 32), (128, 4, 16), (256, 8, 64)],
)
def test_no_worse_than_eager_over_the_grid(
    dtype: torch.dtype, head_size: int, ratio: int, block_size: int
) -> None:
    Batch(MIXED, dtype=dtype, head_size=head_size, ratio=ratio, block_size=block_size).check()


@pytest.mark.parametrize("ratio", range(1, 17))
def test_any_number_of_heads_per_kv_head(ratio: int) -> None:
    Batch(MIXED[2:3], dtype=torch.bfloat16, ratio=ratio).check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_strides_do_not_matter(layout: str) -> None:
    batch = Batch(SHORT, dtype=torch.bfloat16, layout=layout)
    batch.check()
    assert torch.equal(batch.run(), Batch(SHORT, dtype=torch.bfloat16).run())


@pytest.mark.parametrize("entries", [1, 2, 31, 32, 33, 63, 64, 65, 257, 1000])
@pytest.mark.parametrize("block_size", [32, 64])
def test_any_length(entries: int, block_size: int) -> None:
    rows = [RowSpec((entries, 3), tail=1), RowSpec((3, entries), tail=45)]
    Batch(rows, dtype=torch.float16, block_size=block_size).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "splits"), [(1, 1), (3, 4)])
def test_longer_queries_are_causal_in_the_tail(dtype: torch.dtype, splits: int, ratio: int) -> None:
    Batch(LONG, dtype=dtype, ratio=ratio, splits=splits).check()


def test_more_lanes_than_one_program_takes() -> None:
    rows = [RowSpec(entries=(9, 130), tail=40, query_len=11)]
    Batch(rows, dtype=torch.bfloat16, ratio=16).check()


# shrinking would take longer than a test may
@settings(max_examples=8, deadline=None, database=None, phases=[Phase.generate])
@given(
    rows=st.lists(
        st.builds(
            lambda entries, tail, query_len: RowSpec(entries, tail + query_len, query_len),
            st.none() | st.tuples(st.integers(0, 150), st.integers(0, 150)),
            st.integers(0, 90),
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=3,
    ),
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([16, 32, 64]),
    splits=st.integers(1, 9),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 5),
)
def test_any_batch(
    rows: Any, dtype: torch.dtype, block_size: int, splits: int, layout: str, seed: int
) -> None:
    options = {"dtype": dtype, "block_size": block_size, "seed": seed}
    Batch(rows, head_size=32, splits=splits, layout=layout, **options).check()


@pytest.mark.parametrize("splits", [1, 2, 5, 16, 40, pytest.param(128, marks=pytest.mark.slow)])
def test_any_number_of_splits(splits: int) -> None:
    Batch([RowSpec((2100, 30), tail=9)], splits=splits, ratio=1).check()


def test_a_small_workspace_is_not_overrun() -> None:
    batch = Batch(LONG)
    arguments = batch.arguments()
    tokens, heads, size = batch.query.shape
    small = kernel.allocate_workspace(tokens - 1, heads, size, 4, "cpu")
    segment_attention(**arguments, impl="triton", workspace=small)
    assert torch.equal(arguments["output"], batch.run(splits=1))


def test_other_rows_are_left_alone() -> None:
    batch = Batch(LONG, dtype=torch.bfloat16)
    for splits in (1, 3):
        output = batch.run(rows=[3, 0], splits=splits)
        for row in range(len(LONG)):
            untouched = (output[batch.tokens(row)] == UNTOUCHED).all()
            assert untouched == (row not in (0, 3))
        assert (output[batch.query_start_loc[-1] :] == UNTOUCHED).all()
    assert (batch.run(rows=[]) == UNTOUCHED).all()


def test_a_row_does_not_depend_on_the_batch() -> None:
    batch = Batch([*LONG[:2], RowSpec((600, 9), tail=2)], dtype=torch.bfloat16)
    together = batch.run()
    for row in range(3):
        assert torch.equal(batch.run(rows=[row])[batch.tokens(row)], together[batch.tokens(row)])


def test_the_bound_of_query_lengths_may_be_left_out() -> None:
    batch = Batch(SHORT, ratio=7)
    arguments = batch.arguments()
    segment_attention(**arguments, impl="triton")
    assert torch.equal(arguments["output"], batch.run(splits=1))


def test_padded_rows_are_harmless() -> None:
    """Rows with which a batch is filled up for a CUDA graph: null block, no query, no token."""
    batch = Batch(MIXED)
    plain = batch.run()
    table, lens = batch.block_table, batch.seq_lens
    batch.block_table = torch.cat([table, torch.zeros_like(table[:2])])
    batch.seq_lens = torch.cat([lens, torch.zeros(2, dtype=torch.int32)])
    end = batch.query_start_loc[-1:]
    # one has no query, the other has one of the padding tokens
    batch.query_start_loc = torch.cat([batch.query_start_loc, end, end + 1])
    output = batch.run(rows=range(6))
    tokens = int(end)
    assert torch.equal(output[:tokens], plain[:tokens])
    assert (output[tokens] == 0).all()
    assert (output[tokens + 1 :] == UNTOUCHED).all()


def test_tables_are_read_anew_by_every_launch() -> None:
    """The launch of one step is right for the next one after tables and cache changed in place."""
    batch = Batch([RowSpec((70, 30), tail=40), RowSpec((9, 64), tail=1)])
    arguments = batch.arguments()
    workspace = batch.workspace()
    call = {**arguments, "impl": "triton", "max_query_len": 1, "workspace": workspace}
    segment_attention(**call)
    batch.num_entries[1, LAYER] = torch.tensor([33, 1])
    batch.seq_lens -= torch.tensor([7, 0], dtype=torch.int32)
    batch.bias.mul_(0.5)
    batch.slot_of_block[batch.block_table[1, 0]] = 0
    # a row that lost its state reads all its blocks
    batch.kv_cache.nan_to_num_(nan=0.5, posinf=0.5)
    segment_attention(**call)
    expected = batch.arguments()
    segment_attention(**expected, impl="reference")
    assert max_error(arguments["output"][:2], expected["output"][:2]) < 1e-5


def test_a_query_without_keys_yields_zero() -> None:
    batch = Batch([RowSpec((0, 5), tail=1)])
    # the tail starts behind the query: its position is inside the gap
    batch.gap_end += batch.block_size
    for splits in (1, 4):
        output = batch.run(splits=splits)
        assert (output[0, : batch.ratio] == 0).all()
        assert (output[0, batch.ratio :] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_do_not_overflow(dtype: torch.dtype) -> None:
    batch = Batch([RowSpec((300, 300), tail=5)], dtype=dtype)
    batch.query *= 200
    batch.check()


def test_a_bias_of_minus_infinity_removes_entries() -> None:
    batch = Batch([RowSpec((200, 40), tail=1)])
    batch.bias[torch.isfinite(batch.bias)] = -math.inf
    for keys, _, bias in batch.contents[0]:
        bias[: len(keys) - 1] = -math.inf
    batch.check()


def test_strided_query_and_output() -> None:
    batch = Batch(SHORT, dtype=torch.float16)
    arguments = batch.arguments()
    tokens, heads, size = batch.query.shape
    packed = torch.zeros(tokens, 2 * heads, size, dtype=torch.float16)
    packed[:, :heads] = batch.query
    arguments["query"] = packed[:, :heads]
    arguments["output"] = torch.full_like(packed, UNTOUCHED)[:, heads:]
    arguments.update(max_query_len=batch.max_query_len, workspace=batch.workspace())
    segment_attention(**arguments, impl="triton")
    assert torch.equal(arguments["output"], batch.run())


def test_a_pool_of_more_than_two_billion_elements() -> None:
    """Offsets beyond 32 bits; the pool is virtual memory of which a few pages are touched."""
    entries, tail, size = 40, 9, 64
    elements_per_block = 2 * 16 * 2 * size  # 2 heads of 16 slots
    blocks = 2**31 // elements_per_block + 8
    pool = formats.gpu_pool(torch.empty((1, blocks, 2, 16, 2 * size), dtype=torch.float16))
    bias = torch.empty((blocks, 1, 2, 16))
    # three blocks of the slab, one of the tail
    table = torch.tensor([blocks - 1 - i for i in range(4)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, entries + tail, size, generator=generator).half()
    for head in range(2):
        head_entries = keys[:entries], values[:entries], torch.zeros(entries)
        formats.gpu_write_segment(pool, bias, table, 3 * head, *head_entries)
        pool[:, 0, blocks - 4, head, :tail] = torch.stack([keys[entries:], values[entries:]])
    slots = torch.zeros(blocks, dtype=torch.int32)
    slots[blocks - 1] = 1
    query = torch.randn(1, 2, size, generator=generator).half()
    output = torch.empty_like(query)
    segment_attention(
        query,
        output,
        pool,
        bias,
        0,
        table[None],
        torch.tensor([48 + tail], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        slots,
        torch.tensor([0, 48], dtype=torch.int32),
        torch.tensor([[[0, 0]], [[0, 3]]], dtype=torch.int32),
        torch.full((2, 1, 2), entries, dtype=torch.int32),
        size**-0.5,
        impl="triton",
    )
    logits = query[0].double() @ keys.double().T * size**-0.5
    exact = logits.softmax(1) @ values.double()
    assert max_error(output[0], exact) < 2e-3


def test_the_reference_reads_gpu_cells() -> None:
    batch = Batch(SHORT, ratio=3)
    exact = batch.expected(torch.float64)
    assert max_error(batch.run(impl="reference"), exact) < 1e-5
    assert max_error(batch.run(), exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_good_as_the_attention_of_torch(dtype: torch.dtype) -> None:
    """An independent implementation, with the biases as its additive mask."""
    batch = Batch(MIXED, dtype=dtype, ratio=2)
    actual = batch.run()
    exact = batch.expected(torch.float64)
    for row, contents in enumerate(batch.contents):
        token = int(batch.query_start_loc[row])
        for head, (keys, values, bias) in enumerate(contents):
            lanes = slice(head * 2, head * 2 + 2)
            theirs = torch.nn.functional.scaled_dot_product_attention(
                batch.query[None, token, lanes, None],
                keys.expand(1, 2, -1, -1),
                values.expand(1, 2, -1, -1),
                attn_mask=bias.to(dtype).expand(1, 2, 1, -1),
                scale=batch.scale,
            )[0, :, 0]
            yardstick = exact[token, lanes]
            unit = 2 * torch.finfo(dtype).eps * yardstick.abs().max().item()
            assert max_error(actual[token, lanes], yardstick) <= max_error(theirs, yardstick) + unit


def test_num_splits_fill_the_device() -> None:
    assert kernel.choose_num_splits(1, 8, 132) == 128
    assert kernel.choose_num_splits(8, 8, 132) == 16
    assert kernel.choose_num_splits(32, 8, 132) == 4
    assert kernel.choose_num_splits(1000, 8, 132) == 1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x[:, :3], r"1 to 16 times num_kv_heads = 2, got 3"),
        (
            "query",
            lambda x: x[..., :32],
            r"num_heads, head_size\] = \[16, 4, 64\], got \[16, 4, 32",
        ),
        ("query", lambda x: x.half(), "one dtype"),
        ("query", lambda x: x.mT.contiguous().mT, "query: expected the last dimension contiguous"),
        ("output", lambda x: x[1:], r"output: expected \[num_tokens, num_heads, head_size\] = "),
        ("kv_cache", lambda x: x[0], r"gpu_pool makes it"),
        ("kv_cache", lambda x: x.mT.contiguous().mT, "kv_cache: expected the last dimension"),
        ("kv_cache", lambda x: x[..., :24], "multiple of 16 up to 256, got 24"),
        ("kv_cache", lambda x: x[:, :, :, :, :24], "block_size: expected a multiple of 16, got 24"),
        ("bias", lambda x: x[1:], r"\[num_blocks, num_layers, num_kv_heads, block_size\] = "),
        ("bias", lambda x: x.double(), "float32"),
        ("layer", lambda x: 3, "0 <= layer < 3, got 3"),
        ("block_table", lambda x: x.long(), r"block_table: expected int32"),
        ("block_table", lambda x: x[0], r"block_table: expected \[num_rows, max_blocks\]"),
        ("seq_lens", lambda x: x.float(), r"seq_lens: expected int32"),
        ("query_start_loc", lambda x: x[1:], r"\[num_rows \+ 1\] = \[5\], got \[4\]"),
        ("rows", lambda x: x.long(), "rows: expected int32"),
        ("slot_of_block", lambda x: x[1:], r"slot_of_block: expected \[num_blocks\]"),
        ("first_cell", lambda x: x[:, 1:], r"\[num_slots, num_layers, num_kv_heads\] = \[5, 3, 2]"),
        ("num_entries", lambda x: x.float(), "num_entries: expected contiguous int32"),
        ("max_query_len", lambda x: 0, "max_query_len: expected at least 1, got 0"),
        (
            "workspace",
            lambda x: kernel.allocate_workspace(4, 2, 64, 2, "cpu"),
            r"workspace: expected one that allocate_workspace made for .* = 4, 64 on cpu",
        ),
    ],
)
def test_wrong_arguments(name: str, change: Any, message: str) -> None:
    batch = Batch([RowSpec((5, 9), tail=4)] * 3 + [RowSpec((5, 9), tail=20, query_len=11)])
    arguments = {**batch.arguments(), "max_query_len": 6, "workspace": batch.workspace()}
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        segment_attention(**arguments, impl="triton")


def test_all_faults_are_told_at_once() -> None:
    arguments = Batch(MIXED).arguments()
    arguments.update(layer=7, rows=arguments["rows"].long())
    with pytest.raises(ValueError, match=r"layer: expected.*rows: expected int32"):
        segment_attention(**arguments, impl="triton")


def test_too_many_splits() -> None:
    with pytest.raises(ValueError, match="num_splits: expected 1 to 128, got 129"):
        kernel.allocate_workspace(1, 1, 64, 129, "cpu")


def test_the_yardstick_notices_a_wrong_kernel() -> None:
    batch = Batch(MIXED, dtype=torch.bfloat16)
    end = int(batch.query_start_loc[-1])
    eager, exact = batch.expected(batch.dtype)[:end], batch.expected(torch.float64)[:end]
    batch.bias.zero_()
    with pytest.raises(AssertionError, match="plain torch and one unit"):
        assert_no_worse_than_eager(batch.run()[:end], eager, exact)


def test_the_repair_is_needed() -> None:
    """Fails once Triton's own interpreter multiplies bfloat16 right, and `repair` may go."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    ones = interpreter.TensorHandle(np.full((16, 16), 0x3F80, np.uint16), tl.bfloat16)
    zeros = interpreter.TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
    builder: Any = interpreter.interpreter_builder
    assert (builder.create_dot(ones, ones, zeros, None, 0).data == 16).all()
    assert (builder.unrepaired_dot(ones, ones, zeros, None, 0).data != 16).all()
