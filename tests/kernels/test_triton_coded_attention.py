"""`coded_attention` in Triton, under Triton's interpreter: as good as torch, blind to garbage.

`test_triton_interpreter` runs this module in a process of its own.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton_interpreter
from coding import random_codec
from numerics import assert_no_worse_than_eager
from pools import GPU_LAYOUTS, gpu_pool

from kvcompress_kernels import code_format, formats
from kvcompress_kernels.code_format import Counts
from kvcompress_kernels.coded_attention import coded_attention
from kvcompress_kernels.segment_attention import reference as raw_reference
from kvcompress_kernels.segment_attention import segment_attention

triton_interpreter.require()
kernel: Any = pytest.importorskip("kvcompress_kernels.coded_attention.triton")
segments: Any = pytest.importorskip("kvcompress_kernels.segment_attention.triton")
cpu: Any = triton_interpreter.load_module("test_coded_attention")
RowSpec, LAYER, UNTOUCHED = cpu.RowSpec, cpu.LAYER, cpu.UNTOUCHED
KEYS, VALUES, codecs_of = cpu.KEYS, cpu.VALUES, cpu.codecs_of

slow = pytest.mark.slow
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def gpu_rows_pool(cells: torch.Tensor, layout: str) -> torch.Tensor:
    """A GPU pool whose cells have the bytes of CPU cells."""
    pool = gpu_pool(torch.full_like(cells, math.nan), layout)
    # bits, not numbers: NaNs have to stay what they are
    code_format.copy_gpu_rows(cells.view(torch.int8), pool.view(torch.int8))
    return pool


class Batch(cpu.Batch):  # type: ignore[misc, name-defined]
    """The batches of the CPU tests in a GPU pool."""

    def __init__(
        self, rows: Any, codecs: Any, *, layout: str = "LBHNC", splits: int = 3, **kwargs: Any
    ) -> None:
        super().__init__(rows, codecs, **kwargs)
        self.kv_cache = gpu_rows_pool(self.kv_cache, layout)
        self.splits = splits
        self.max_query_len = max(row.query_len for row in rows)

    def run(self, rows: Any = None, impl: str = "triton", splits: int | None = None) -> Any:
        arguments = self.arguments(rows)
        coded_attention(
            **arguments,
            impl=impl,
            max_query_len=self.max_query_len,
            num_splits=splits or self.splits,
        )
        return arguments["output"], arguments["log_sum"]


MIXED = (
    RowSpec((61, 20)),
    RowSpec(None),
    RowSpec((0, 1)),
    RowSpec((33, 0), query_len=3),
    RowSpec(None, query_len=2),
    RowSpec((0, 0), query_len=2),
)
SHORT = (RowSpec((41, 20)), RowSpec(None), RowSpec((0, 9), query_len=2))


@pytest.mark.parametrize(
    ("dtype", "keys", "values", "has_bias"),
    [
        (torch.float16, (3, 17, 9, 5), (5, 9, 17, 3), True),
        pytest.param(torch.float32, (40, 0, 0, 0), (0, 40, 0, 0), True, marks=slow),
        pytest.param(torch.bfloat16, (0, 0, 40, 0), (0, 0, 0, 40), False, marks=slow),
        pytest.param(torch.float32, (0, 0, 0, 0), (0, 5, 0, 0), False, marks=slow),
    ],
)
def test_widths(dtype: torch.dtype, keys: Counts, values: Counts, has_bias: bool) -> None:
    Batch(SHORT, codecs_of(2, 1, 48, keys, values, has_bias), dtype=dtype, head_size=48).check()


@pytest.mark.parametrize(
    ("dtype", "head_size", "block_size", "ratio", "group_size"),
    [
        (torch.bfloat16, 80, 16, 2, 2),
        pytest.param(torch.float16, 64, 32, 3, 1, marks=slow),
        pytest.param(torch.float32, 64, 16, 3, 1, marks=slow),
    ],
)
def test_groups_and_heads(
    dtype: torch.dtype, head_size: int, block_size: int, ratio: int, group_size: int
) -> None:
    codecs = codecs_of(2, group_size, head_size)
    shape = {"head_size": head_size, "block_size": block_size, "ratio": ratio}
    Batch(SHORT if head_size == 80 else MIXED, codecs, dtype=dtype, **shape).check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "group_size"), [(7, 4), (16, 1), (12, 3), (1, 1)])
def test_lanes_that_take_several_programs(dtype: torch.dtype, ratio: int, group_size: int) -> None:
    value_counts = (0, 90, 0, 30) if group_size > 1 else (0, 40, 0, 20)
    codecs = [random_codec(group_size, 64, (2, 40, 10, 3), value_counts)]
    Batch([RowSpec((75,)), RowSpec((20,))], codecs, dtype=dtype, ratio=ratio, block_size=16).check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_groups(dtype: torch.dtype) -> None:
    """More channels than the tilings of smaller groups are for."""
    codec = random_codec(4, 128, (10, 200, 90, 60), (20, 150, 100, 60))
    Batch([RowSpec((70,))], [codec], dtype=dtype, head_size=128, ratio=4, block_size=16).check()


@pytest.mark.parametrize(
    "layout",
    [x if x == "LBNHC" else pytest.param(x, marks=slow) for x in GPU_LAYOUTS[1:]],
)
def test_layouts_do_not_matter(layout: str) -> None:
    codecs = codecs_of(2, 1, 32, (1, 9, 5, 3), (0, 9, 3, 5))
    shape = {"dtype": torch.bfloat16, "head_size": 32, "block_size": 16}
    ours = Batch(SHORT, codecs, layout=layout, **shape).run()
    assert all(map(torch.equal, ours, Batch(SHORT, codecs, **shape).run()))


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=slow)])
def test_numbers_of_rows_around_the_cells(many: bool) -> None:
    codec = random_codec(1, 32, (1, 9, 5, 3), (0, 9, 3, 5))
    capacity = codec.layout.rows_per_cell(16 * 64 * 4)
    counts = [capacity, capacity + 1]
    if many:
        counts += [1, 15, 16, 17, capacity - 1, 2 * capacity, 2 * capacity + 7]
    Batch([RowSpec((m,)) for m in counts], [codec], head_size=32, block_size=16, ratio=1).check()


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_any_number_of_splits(splits: int) -> None:
    codec = random_codec(1, 32, (1, 9, 5, 3), (0, 9, 3, 5), has_bias=True)
    rows = [RowSpec((300,)), RowSpec((3,))]
    Batch(rows, [codec], splits=splits, head_size=32, block_size=16, ratio=1).check()


def test_groups_with_different_layouts() -> None:
    codecs = [
        random_codec(2, 32, (2, 21, 5, 11), (0, 17, 3, 13), seed=0),
        random_codec(2, 32, (0, 3, 0, 50), (1, 0, 2, 0), has_bias=True, seed=1),
    ]
    Batch(SHORT, codecs, dtype=torch.float16, head_size=32, ratio=1).check()


def test_large_queries_do_not_overflow_in_half_precision() -> None:
    codecs = codecs_of(2, 1, 32, (1, 9, 5, 3), (0, 9, 3, 5))
    batch = Batch(SHORT, codecs, dtype=torch.float16, head_size=32, block_size=16)
    fold = batch.layer_codecs.on_device(batch.kv_cache).fold[0].float()  # [D, channels]
    longest = fold[:, fold.norm(dim=0).argmax()]
    batch.query += (60_000 * longest / longest.norm()).half()
    assert (batch.query @ fold.half()).isinf().any()
    batch.scale /= 60_000
    batch.check()


def test_a_row_does_not_depend_on_the_others() -> None:
    codecs = codecs_of(2, 1, 32, (1, 9, 5, 3), (0, 9, 3, 5))
    batch = Batch(SHORT, codecs, dtype=torch.bfloat16, head_size=32, block_size=16)
    together = batch.run()
    for row in (0, 2):
        alone, tokens = batch.run([row]), batch.tokens(row)
        for one, both in zip(alone, together, strict=True):
            assert torch.equal(one[tokens], both[tokens])
            one[tokens] = UNTOUCHED
            assert (one == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("dtype", "splits"),
    [
        (torch.float32, 3),
        pytest.param(torch.bfloat16, 1, marks=slow),
        pytest.param(torch.float16, 3, marks=slow),
    ],
)
def test_raw_entries_go_on_from_it(dtype: torch.dtype, splits: int) -> None:
    """The partial softmax and the attention over entries and tail, against one softmax of all."""
    codecs = codecs_of(2, 1, 32, (1, 9, 5, 3), (0, 9, 3, 5), has_bias=True)
    specs = (RowSpec((41, 0)), RowSpec(None), RowSpec((0, 9), query_len=2))
    batch = Batch(specs, codecs, dtype=dtype, head_size=32, block_size=16, splits=splits)
    generator = torch.Generator().manual_seed(3)
    # a segment of the other layer's tables, and a tail, for the same queries
    entries, tail, num_rows, block = (5, 70), 20, len(specs), 16
    geometry = formats.SlabGeometry(1, 2, block)
    slab_blocks = geometry.blocks(sum(map(geometry.cells, entries)))
    width = slab_blocks + 2
    pool = formats.gpu_pool(
        torch.full((1, num_rows * width + 1, 2, block, 64), math.nan, dtype=dtype)
    )
    bias = torch.full((num_rows * width + 1, 1, 2, block), math.nan)
    table = torch.arange(1, num_rows * width + 1, dtype=torch.int32).view(num_rows, width)
    keys, values = torch.randn(2, num_rows, 2, 90, 32, generator=generator).to(dtype)
    first_cell = torch.zeros(num_rows + 1, 1, 2, dtype=torch.int32)
    num_entries = torch.zeros_like(first_cell)
    for row in range(num_rows):
        cell = 0
        for head, count in enumerate(entries):
            formats.gpu_write_segment(
                *(pool, bias, table[row], cell),
                keys[row, head, :count],
                values[row, head, :count],
                torch.zeros(count),
            )
            first_cell[row + 1, 0, head], num_entries[row + 1, 0, head] = cell, count
            cell += geometry.cells(count)
            position = torch.arange(tail)
            blocks = table[row, slab_blocks + position // block].long()
            pool[0, 0, blocks, head, position % block] = keys[row, head, 70 : 70 + tail]
            pool[1, 0, blocks, head, position % block] = values[row, head, 70 : 70 + tail]
    slots = torch.zeros(pool.shape[2], dtype=torch.int32)
    slots[table[:, 0].long()] = torch.arange(1, num_rows + 1, dtype=torch.int32)

    partial_output, partial_log_sum = batch.run()
    arguments: dict[str, Any] = {
        "query": batch.query,
        "kv_cache": pool,
        "bias": bias,
        "layer": 0,
        "block_table": table,
        "seq_lens": torch.full((num_rows,), slab_blocks * block + tail, dtype=torch.int32),
        "query_start_loc": batch.query_start_loc,
        "rows": torch.arange(num_rows, dtype=torch.int32),
        "slot_of_block": slots,
        "gap_end": torch.full((num_rows + 1,), slab_blocks * block, dtype=torch.int32),
        "first_cell": first_cell,
        "num_entries": num_entries,
        "scale": batch.scale,
        "partial_output": partial_output,
        "partial_log_sum": partial_log_sum,
    }
    output, eager = torch.zeros_like(batch.query), torch.zeros_like(batch.query)
    exact = torch.zeros(batch.query.shape).double()
    tokens, heads, size = batch.query.shape
    workspace = segments.allocate_workspace(tokens, heads, size, splits, "cpu")
    workspace.partial.fill_(math.nan)
    segment_attention(
        **arguments, output=output, impl="triton", max_query_len=2, workspace=workspace
    )
    arguments["kv_cache"] = formats.cpu_cells(pool)
    raw_reference.segment_attention(**arguments, output=eager, compute_dtype=dtype)
    raw_reference.segment_attention(**arguments, output=exact, compute_dtype=torch.float64)
    end = int(batch.query_start_loc[-1])
    assert_no_worse_than_eager(output[:end], eager[:end], exact[:end])


def test_wrong_arguments() -> None:
    codecs = codecs_of(2, 1, 32, (1, 9, 5, 3), (0, 9, 3, 5))
    batch = Batch(SHORT, codecs, head_size=32, block_size=16)
    arguments = batch.arguments()
    wrong = {
        "query": arguments["query"].half(),
        "num_rows": arguments["num_rows"].long(),
        "layer": 9,
    }
    with pytest.raises(ValueError, match=r"query: expected torch\.float32") as error:
        coded_attention(**{**arguments, **wrong}, impl="triton", num_splits=0)
    for word in ("num_rows: expected torch.int32", "0 <= layer < 3", "at least 1, got 0"):
        assert word in str(error.value)
    with pytest.raises(ValueError, match="'cpu' or 'reference'"):
        coded_attention(**arguments, impl="gpu")
