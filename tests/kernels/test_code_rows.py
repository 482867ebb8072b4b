"""`code_rows`: the kernel writes the bytes of the reference, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from coding import random_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress_kernels import code_format, formats
from kvcompress_kernels.code_format import Counts, RowLayout
from kvcompress_kernels.code_rows import code_rows, encode_prompt, encode_rows, reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS = st.tuples(*[st.integers(0, 70)] * 4)


def pool_of(dtype: torch.dtype = torch.bfloat16, num_blocks: int = 60) -> torch.Tensor:
    """Random bits, NaN among them: what is not written must stay as it is."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, num_blocks, 3, 16, 64 * dtype.itemsize)
    bits = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    return bits.view(dtype)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def both(
    z_keys: torch.Tensor, z_values: torch.Tensor, bias: torch.Tensor | None, layout: RowLayout
) -> None:
    pools = [pool_of(), pool_of()]
    slab = torch.randperm(60, generator=torch.Generator().manual_seed(2)).int()
    arguments = (z_keys, z_values, bias, layout)
    ends = [
        code_rows(*arguments, pool, slab, 5, impl=impl)
        for pool, impl in zip(pools, ("cpu", "reference"), strict=True)
    ]
    assert ends[0] == ends[1] == 5 - (-z_keys.shape[0] // layout.rows_per_cell(2048))
    assert same(*pools)


@settings(max_examples=80, deadline=None)
@given(
    key_counts=COUNTS,
    value_counts=COUNTS,
    has_bias=st.booleans(),
    num_rows=st.integers(0, 300),
    spread=st.sampled_from([1e-9, 1.0, 1e9]),
    seed=st.integers(0, 3),
)
def test_bytes_of_the_reference(
    key_counts: Counts,
    value_counts: Counts,
    has_bias: bool,
    num_rows: int,
    spread: float,
    seed: int,
) -> None:
    layout = RowLayout(key_counts, value_counts, has_bias or not any(key_counts + value_counts))
    generator = torch.Generator().manual_seed(seed)
    z_keys = torch.randn(num_rows, sum(key_counts), generator=generator) * spread
    z_values = torch.randn(num_rows, sum(value_counts), generator=generator) * spread
    bias = torch.randn(num_rows, generator=generator) if layout.has_bias else None
    both(z_keys, z_values, bias, layout)


def test_ties() -> None:
    # 8 bits: the scale is 1, halves go to the even neighbour, the largest value is clipped
    values = [128.0, -128.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5, 127.5, 0.0]
    layout = RowLayout((len(values), 0, 0, 0), (0, 2, 0, 0))
    z = torch.tensor([values])
    z_values = torch.ones(1, 2)
    both(z, z_values, None, layout)
    pool, slab = pool_of(), torch.arange(4, dtype=torch.int32)
    code_rows(z, z_values, None, layout, pool, slab, 0)
    codes = code_format.read_rows(pool, slab, 0, 1, layout).keys[0]
    found = [int(code) - 128 for code in codes]
    assert found == [127, -128, 0, 2, 2, 0, -2, -126, 126, 127, 0]


def test_a_value_on_a_threshold_takes_the_lower_level() -> None:
    # eight rows whose root mean square is 1 to the bit
    for width, counts in ((4, (0, 2, 0, 0)), (2, (0, 0, 2, 0)), (1, (0, 0, 0, 2))):
        thresholds = code_format.thresholds(width)
        z = torch.stack([thresholds, (2 - thresholds**2).clamp(0).sqrt()], 1)
        both(z, torch.ones(len(z), 2), None, RowLayout(counts, (0, 0, 0, 2)))


def test_rows_of_nothing_and_of_zeros() -> None:
    layout = RowLayout((3, 5, 2, 1), (0, 0, 0, 9), has_bias=True)
    both(torch.zeros(0, 11), torch.zeros(0, 9), torch.zeros(0), layout)
    both(torch.zeros(30, 11), torch.zeros(30, 9), torch.full((30,), -math.inf), layout)


def test_strided_channels() -> None:
    layout = RowLayout((3, 5, 2, 1), (0, 4, 0, 5))
    z = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    both(z[:, 1:12], z[:, 20:29], None, layout)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_write_the_same(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layout = RowLayout((3, 50, 20, 10), (0, 40, 0, 50))
        z = torch.randn(300, 90, generator=torch.Generator().manual_seed(0))
        both(z[:, :83], z, None, layout)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 64), (5, 130), (16, 17), (3, 3)])
@pytest.mark.parametrize("first_head", [0, 1])
def test_a_prompt_is_coded_like_its_rows(
    dtype: torch.dtype, start: int, stop: int | None, first_head: int
) -> None:
    codec = random_codec(2, 32, (2, 20, 15, 7), (0, 30, 11, 3), has_bias=True)
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(2, 70, 3, 16, 64, generator=generator).to(dtype)
    blocks = torch.randperm(70, generator=generator).int()
    source, slab = blocks[:12].clone(), blocks[12:].clone()
    end = 12 * 16 if stop is None else stop
    bias = torch.randn(end - start, generator=generator)
    keys, values = formats.gather_prompt(pool, 1, source)
    heads = slice(first_head, first_head + 2)
    rows = keys[heads, start:end], values[heads, start:end], bias
    pools = [pool.clone() for _ in range(3)]
    ends = [
        encode_prompt(
            pools[0], 1, source, first_head, codec, slab, 7, start=start, stop=stop, bias=bias
        ),
        encode_prompt(
            pools[1],
            1,
            source,
            first_head,
            codec,
            slab,
            7,
            start=start,
            stop=stop,
            bias=bias,
            impl="reference",
        ),
        encode_rows(*rows, codec, pools[2], slab, 7),
    ]
    assert ends[0] == ends[1] == ends[2]
    assert same(pools[1], pools[2])
    found, expected = (
        code_format.read_rows(p, slab, 7, end - start, codec.layout) for p in pools[:2]
    )
    # sums of the transform in another order: a channel on a threshold may fall on its other side,
    # a scale may be rounded to its neighbour
    for codes, others in ((found.keys, expected.keys), (found.values, expected.values)):
        difference = (codes.int() - others.int()).abs()
        assert difference.max() <= 1 if difference.numel() else True
        assert difference.float().mean().nan_to_num() < 1e-3
    torch.testing.assert_close(found.scales.float(), expected.scales.float(), rtol=2e-3, atol=0)


def test_long_prompts_are_coded_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = random_codec(1, 32, (0, 20, 7, 5), (0, 0, 20, 9))
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(2, 90, 3, 16, 64, generator=generator)
    blocks = torch.randperm(90, generator=generator).int()
    source, slab = blocks[:50].clone(), blocks[50:].clone()
    pools = [pool.clone(), pool.clone()]
    ends = [encode_prompt(pools[0], 0, source, 2, codec, slab, 1)]
    monkeypatch.setattr("kvcompress_kernels.code_rows.api._TILE_ROWS", 100)
    ends.append(encode_prompt(pools[1], 0, source, 2, codec, slab, 1))
    assert ends[0] == ends[1]
    tables = [code_format.read_rows(p, slab, 1, 800, codec.layout) for p in pools]
    assert (tables[0].keys == tables[1].keys).float().mean() > 0.999
    assert (tables[0].values == tables[1].values).float().mean() > 0.999


def test_what_the_kernel_writes_is_decoded_to_what_was_coded() -> None:
    codec = random_codec(3, 32, (6, 80, 10, 0), (6, 80, 10, 0))
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 200, 32, generator=generator)
    pool, slab = pool_of(), torch.arange(60, dtype=torch.int32)
    encode_rows(keys, values, None, codec, pool, slab, 0)
    codes = code_format.read_rows(pool, slab, 0, 200, codec.layout)
    found_keys, found_values, _ = reference.decode(codes, codec, 32)
    assert (found_keys - keys).square().mean() < 0.1
    assert (found_values - values).square().mean() < 0.1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("z_keys", lambda x: x[:, 1:], r"z_keys: expected \[num_rows, num_channels\] = \[20, 11\]"),
        ("z_keys", lambda x: x.double(), "z_keys: expected float32"),
        ("z_values", lambda x: x[1:], r"z_values: expected .* = \[20, 9\], got \[19, 9\]"),
        ("z_values", lambda x: x.T.contiguous().T, "contiguous rows"),
        ("bias", lambda x: None, "bias: expected exactly if the layout has one, got none"),
        ("bias", lambda x: x[1:], r"bias: expected contiguous float32 \[num_rows\] = \[20\]"),
        ("layout", lambda x: RowLayout((0, 0, 0, 0), (0, 0, 0, 0)), "z_keys"),
        ("kv_cache", lambda x: x[0], "kv_cache: expected"),
        ("kv_cache", lambda x: x[..., :32], "last two dimensions contiguous"),
        ("slab", lambda x: x.long(), "slab: expected contiguous int32"),
        ("slab", lambda x: x + 55, r"slab\[5\]: expected a block below 60, got 60"),
        ("first_cell", lambda x: 60, "first_cell: expected 1 cells from it on within the 60"),
        ("first_cell", lambda x: -1, "first_cell"),
        ("impl", lambda x: "auto", "'cpu' or 'reference'"),
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
        "impl": "cpu",
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        code_rows(**arguments)
