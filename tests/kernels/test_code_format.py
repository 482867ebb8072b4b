"""Byte layout of coded pages: what is written is read back, at the bytes that are described."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from coding import random_codec, random_codes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress_kernels import code_format
from kvcompress_kernels.code_format import WIDTHS, RowLayout
from kvcompress_kernels.code_rows import reference

COUNTS = st.tuples(*[st.integers(0, 40)] * 4)


@pytest.mark.parametrize(
    ("width", "expected"), [(1, [0.7979]), (2, [0.4528, 1.5104]), (4, [0.1284, 2.7326])]
)
def test_levels_are_those_of_max(width: int, expected: list[float]) -> None:
    # J. Max, 1960, table I: the smallest and the largest positive level
    levels = code_format.levels(width)
    assert levels.tolist() == sorted(levels.tolist())
    assert torch.equal(levels, -levels.flip(0))
    assert torch.equal(levels.bfloat16().float(), levels)
    positive = levels[levels > 0]
    for level, value in zip([positive[0], positive[-1]][: len(expected)], expected, strict=True):
        assert math.isclose(level, value, rel_tol=2**-8)


def test_wide_levels_and_thresholds() -> None:
    assert code_format.levels(8).tolist() == list(range(-128, 128))
    for width in WIDTHS:
        levels, thresholds = code_format.levels(width), code_format.thresholds(width)
        assert len(thresholds) == 2**width - 1
        for value in (-9.0, *thresholds.tolist(), 9.0):
            nearest = (levels - value).abs().min()
            found = levels[torch.bucketize(torch.tensor(value), thresholds)]
            assert torch.isclose((found - value).abs(), nearest)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_codes", [1, 2, 7, 8, 9, 30, 64])
def test_a_byte_holds_codes_a_stride_apart(width: int, num_codes: int) -> None:
    generator = torch.Generator().manual_seed(num_codes)
    codes = torch.randint(0, 2**width, (3, num_codes), generator=generator).to(torch.uint8)
    packed = code_format.pack(codes, width)
    stride = code_format.run_bytes(num_codes, width)
    assert packed.shape == (3, stride)
    for row, i in itertools.product(range(3), range(num_codes)):
        byte = int(packed[row, i % stride])
        assert byte >> i // stride * width & 2**width - 1 == codes[row, i]
    assert torch.equal(code_format.unpack(packed, num_codes, width), codes)


@settings(max_examples=60, deadline=None)
@given(key_counts=COUNTS, value_counts=COUNTS, has_bias=st.booleans(), size=st.integers(11, 15))
def test_sizes(
    key_counts: code_format.Counts,
    value_counts: code_format.Counts,
    has_bias: bool,
    size: int,
) -> None:
    layout = RowLayout(key_counts, value_counts, has_bias)
    if layout.row_bits == 0 or layout.row_bits > 2**size:
        with pytest.raises(ValueError, match="must fit a cell"):
            layout.rows_per_cell(2**size)
        return
    rows = layout.rows_per_cell(2**size)
    assert rows % code_format.ROW_STEP == 0
    content = layout.value_offset(rows) + rows * layout.value_bytes
    assert content == rows * layout.row_bits // 8 <= 2**size
    assert (rows + code_format.ROW_STEP) * layout.row_bits > 8 * 2**size
    assert layout.num_scales == len(list(layout.scales()))


@settings(max_examples=40, deadline=None)
@given(
    key_counts=COUNTS,
    value_counts=COUNTS,
    has_bias=st.booleans(),
    num_rows=st.integers(0, 400),
    seed=st.integers(0, 3),
)
def test_rows_are_read_back(
    key_counts: code_format.Counts,
    value_counts: code_format.Counts,
    has_bias: bool,
    num_rows: int,
    seed: int,
) -> None:
    layout = RowLayout(key_counts, value_counts, has_bias or not any(key_counts + value_counts))
    generator = torch.Generator().manual_seed(seed)
    pool = torch.full((2, 60, 3, 16, 64), math.nan, dtype=torch.bfloat16)
    slab = torch.randperm(60, generator=generator).int()
    codes = random_codes(num_rows, layout, generator)
    code_format.write_rows(pool, slab, 4, codes, layout)
    found = code_format.read_rows(pool, slab, 4, num_rows, layout)
    assert torch.equal(found.keys, codes.keys)
    assert torch.equal(found.values, codes.values)
    assert torch.equal(found.scales, codes.scales)
    assert pool.isnan().flatten(3).all(3).sum() >= 2 * 60 * 3 - -(
        -num_rows // layout.rows_per_cell(2048)
    )


def test_the_planes_of_a_cell() -> None:
    layout = RowLayout((1, 2, 0, 3), (0, 3, 5, 0), has_bias=True)
    assert list(layout.scales()) == ["key_rms", "key_max", "value_rms", "bias"]
    rows = layout.rows_per_cell(1024)
    codes = random_codes(rows, layout, torch.Generator().manual_seed(0))
    cell = torch.zeros(1024, dtype=torch.uint8)
    code_format.write_cell(cell, codes, layout)
    assert torch.equal(cell[: 8 * rows].view(torch.float16).view(4, rows), codes.scales)
    # the second channel of 4 bits, behind a plane of `rows` bytes and one of half as many
    plane = cell[8 * rows + rows + rows // 2 :][: rows // 2]
    assert torch.equal(plane & 15, codes.keys[: rows // 2, 2])
    assert torch.equal(plane >> 4, codes.keys[rows // 2 :, 2])
    # a value row: 3 codes of 4 bits in 2 bytes, 5 of 2 bits in 2 bytes
    row = cell[layout.value_offset(rows) + 4 * 6 :][:4].tolist()
    values = codes.values[6].tolist()
    assert row == [
        values[0] | values[2] << 4,
        values[1],
        values[3] | values[5] << 2 | values[7] << 4,
        values[4] | values[6] << 2,
    ]


@pytest.mark.parametrize(("width", "expected"), [(1, 0.3634), (2, 0.1175), (4, 0.009497)])
def test_distortion_of_a_normal_source(width: int, expected: float) -> None:
    # J. Max, 1960, table I: mean squared error of a standard normal variable
    counts = tuple(256 if w == width else 0 for w in WIDTHS)
    codec = random_codec(1, 256, counts, counts)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(5000, 256, generator=generator)
    keys = (codec.keys.mean + z @ codec.keys.decode)[None]
    codes = reference.encode(keys, keys, codec)
    level = reference.dequantize(codes.keys, list(codes.scales[:1]), codec.keys)
    assert math.isclose((level - z).square().mean(), expected, rel_tol=0.03)


def test_coding_is_exact_to_half_a_step_at_8_bits() -> None:
    codec = random_codec(2, 32, (64, 0, 0, 0), (64, 0, 0, 0), has_bias=True)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 100, 32, generator=generator)
    bias = torch.randn(100, generator=generator)
    codes = reference.encode(keys, values, codec, bias)
    found_keys, found_values, found_bias = reference.decode(codes, codec, 32)
    assert (found_keys - keys).abs().max() < 0.1
    assert (found_values - values).abs().max() < 0.1
    assert torch.equal(found_bias, bias.half().float())
    z = reference.transform(keys, codec.keys)
    step = codes.scales[0].float()[:, None]
    level = reference.dequantize(codes.keys, [codes.scales[0]], codec.keys)
    # the largest magnitude itself may be clipped: 127 is the last positive level
    assert ((level - z).abs() <= 0.501 * step).float().mean() > 0.98
    assert ((level - z).abs() <= 1.1 * step).all()
