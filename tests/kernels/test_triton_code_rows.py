"""`code_rows` in Triton, under Triton's interpreter: the bytes of the reference, and nothing else.

`test_triton_interpreter` runs this module in a process of its own.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton_interpreter
from coding import random_codec
from pools import GPU_LAYOUTS, gpu_pool

from kvcompress_kernels import code_format, formats
from kvcompress_kernels.code_format import RowLayout
from kvcompress_kernels.code_rows import code_rows, encode_prompt, encode_rows, reference

triton_interpreter.require()
kernel: Any = pytest.importorskip("kvcompress_kernels.code_rows.triton")
cpu: Any = triton_interpreter.load_module("test_code_rows")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDE = RowLayout((2, 21, 40, 11), (3, 17, 30, 37), has_bias=True)


def pool_of(
    dtype: torch.dtype = torch.bfloat16, order: str = "LBHNC", num_blocks: int = 24
) -> torch.Tensor:
    """Random bits, NaN among them: what is not written must stay as it is."""
    return gpu_pool(cpu.pool_of(dtype, num_blocks), order)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def both(
    z_keys: torch.Tensor,
    z_values: torch.Tensor,
    bias: torch.Tensor | None,
    layout: RowLayout,
    **pool: Any,
) -> None:
    pools = [pool_of(**pool), pool_of(**pool)]
    slab = torch.randperm(24, generator=torch.Generator().manual_seed(2)).int()
    arguments = (z_keys, z_values, bias, layout)
    ends = [
        code_rows(*arguments, pool, slab, 5, impl=impl)
        for pool, impl in zip(pools, ("triton", "reference"), strict=True)
    ]
    cell_bytes = kernel.cell_bytes_of(pools[0])
    assert ends[0] == ends[1] == 5 - (-z_keys.shape[0] // layout.rows_per_cell(cell_bytes))
    assert same(*pools)


def channels(layout: RowLayout, num_rows: int, spread: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_rows)
    sizes = (sum(layout.key_counts), sum(layout.value_counts))
    z_keys, z_values = (torch.randn(num_rows, n, generator=generator) * spread for n in sizes)
    return z_keys, z_values, torch.randn(num_rows, generator=generator)


@pytest.mark.parametrize("spread", [1e-9, pytest.param(1e9, marks=pytest.mark.slow)])
def test_bytes_of_the_reference(spread: float) -> None:
    both(*channels(WIDE, 30, spread), WIDE)


@pytest.mark.parametrize(
    "layout",
    [
        RowLayout((40, 0, 0, 0), (0, 0, 0, 70)),
        RowLayout((1, 1, 1, 1), (1, 1, 1, 1)),
        RowLayout((0, 0, 0, 0), (0, 5, 0, 0)),
        RowLayout((0, 0, 3, 0), (0, 0, 0, 0)),
    ],
)
def test_widths(layout: RowLayout) -> None:
    z_keys, z_values, _ = channels(layout, 21)
    both(z_keys, z_values, None, layout)


@pytest.mark.parametrize(("dtype", "order"), list(zip(DTYPES, GPU_LAYOUTS[-3:], strict=True)))
def test_layouts_of_the_pool(dtype: torch.dtype, order: str) -> None:
    both(*channels(WIDE, 20), WIDE, dtype=dtype, order=order)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", range(0, 60, 7))
@pytest.mark.parametrize("width", [8, 4, 2, 1])
def test_any_number_of_rows(num_rows: int, width: int) -> None:
    counts = tuple(33 * (other == width) for other in code_format.WIDTHS)
    layout = RowLayout(counts, counts[::-1], has_bias=True)  # type: ignore[arg-type]
    both(*channels(layout, num_rows), layout)


def test_ties() -> None:
    # 8 bits: the scale is 1, halves go to the even neighbour, the largest value is clipped
    values = [128.0, -128.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5, 127.5, 0.0]
    layout = RowLayout((len(values), 0, 0, 0), (0, 2, 0, 0))
    both(torch.tensor([values]), torch.ones(1, 2), None, layout)
    # a value on a threshold, in rows whose root mean square is 1 to the bit
    for width, counts in ((4, (0, 2, 0, 0)), (2, (0, 0, 2, 0)), (1, (0, 0, 0, 2))):
        thresholds = code_format.thresholds(width)
        z = torch.stack([thresholds, (2 - thresholds**2).clamp(0).sqrt()], 1)
        both(z, torch.ones(len(z), 2), None, RowLayout(counts, (0, 0, 0, 2)))


def test_rows_of_nothing_and_of_zeros() -> None:
    layout = RowLayout((3, 5, 2, 1), (0, 0, 0, 9), has_bias=True)
    both(torch.zeros(0, 11), torch.zeros(0, 9), torch.zeros(0), layout)
    both(torch.zeros(30, 11), torch.zeros(30, 9), torch.full((30,), -math.inf), layout)


@pytest.mark.parametrize("dtype", DTYPES[::2])
def test_a_prompt_is_coded_like_its_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles that do not begin where blocks do; beside the reference within a code."""
    monkeypatch.setattr(kernel, "_TILE_ROWS", 24)
    codec = random_codec(2, 32, (2, 20, 15, 7), (0, 30, 11, 3), has_bias=True)
    generator = torch.Generator().manual_seed(0)
    cells = torch.randn(2, 30, 3, 16, 64, generator=generator).to(dtype)
    pool = gpu_pool(cells, "LBNHC")
    blocks = torch.randperm(30, generator=generator).int()
    source, slab, start, end = blocks[:5].clone(), blocks[5:].clone(), 5, 75
    bias = torch.randn(end - start, generator=generator)
    keys, values = formats.gpu_gather_prompt(pool, 1, source)
    rows = keys[1:, start:end], values[1:, start:end], bias
    pools = [pool.clone(), pool.clone(), pool.clone()]
    cells_after = [
        encode_prompt(
            *(pools[0], 1, source, 1, codec, slab, 7),
            start=start,
            stop=end,
            bias=bias,
            impl="triton",
        ),
        encode_rows(*rows, codec, pools[1], slab, 7, impl="triton"),
        encode_rows(*rows, codec, pools[2], slab, 7, impl="reference"),
    ]
    assert len(set(cells_after)) == 1
    ours, dense, expected = (
        code_format.read_rows(code_format.gpu_rows(p), slab, 7, end - start, codec.layout)
        for p in pools
    )
    for found in (ours, dense):
        for codes, others in ((found.keys, expected.keys), (found.values, expected.values)):
            difference = (codes.int() - others.int()).abs()
            assert difference.max() <= 1
            assert difference.float().mean() < 1e-3
        torch.testing.assert_close(found.scales.float(), expected.scales.float(), rtol=2e-3, atol=0)
    decoded, best = (reference.decode(codes, codec, 32)[:2] for codes in (ours, expected))
    for number, side in enumerate((codec.keys, codec.values)):
        row = rows[number].float()
        error = (decoded[number] - row).square().mean()
        assert error < 1.01 * (best[number] - row).square().mean()
        assert error < (row - side.mean.view(2, 1, 32)).square().mean() / 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("z_keys", lambda x: x[:, 1:], r"z_keys: expected float32 .* = \[20, 11\]"),
        ("z_values", lambda x: x.double(), "z_values: expected float32"),
        ("bias", lambda x: None, "bias: expected exactly if the layout has one, got none"),
        ("bias", lambda x: x[1:], r"bias: expected contiguous float32 \[num_rows\] = \[20\]"),
        ("kv_cache", lambda x: x[0], "kv_cache: expected"),
        ("slab", lambda x: x + 20, "slab: expected block ids"),
        ("first_cell", lambda x: 60, "first_cell: expected 1 cells from it on within the 60"),
    ],
)
def test_wrong_arguments(name: str, change: Any, message: str) -> None:
    arguments: dict[str, Any] = {
        "z_keys": torch.zeros(20, 11),
        "z_values": torch.zeros(20, 9),
        "bias": torch.zeros(20),
        "layout": RowLayout((3, 5, 2, 1), (0, 0, 0, 9), has_bias=True),
        "kv_cache": pool_of(),
        "slab": torch.arange(10, dtype=torch.int32),
        "first_cell": 0,
        "impl": "triton",
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        code_rows(**arguments)
