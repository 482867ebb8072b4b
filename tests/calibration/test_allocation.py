"""Bits are spent where they count, never more than there are, and the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.calibration.allocation import CHOICES, GroupWidths, allocate
from vllm_kvcompress.calibration.published import water_fill

ERRORS = np.array([1.0, 0.36, 0.12, 0.01, 1e-4])


def tables(seed: int, num_groups: int, width: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Costs of channels with weights over many orders of magnitude."""
    generator = np.random.default_rng(seed)

    def side() -> np.ndarray:
        weight = np.exp(generator.normal(-4, 3, (width, 1)))
        errors = ERRORS * generator.uniform(0.7, 1.4, (width, 5))
        errors[:, 0] = 1.0
        return weight * errors

    return [side() for _ in range(num_groups)], [side() for _ in range(num_groups)]


def loss(found: list[GroupWidths], keys: list[np.ndarray], values: list[np.ndarray]) -> float:
    total = 0.0
    for group, *sides in zip(found, keys, values, strict=True):
        for widths, table in zip((group.keys, group.values), sides, strict=True):
            total += table[np.arange(len(widths)), np.searchsorted(CHOICES, widths)].sum()
    return total


@given(
    seed=st.integers(0, 1000),
    num_groups=st.integers(1, 6),
    width=st.sampled_from([16, 64, 96]),
    bits=st.floats(0.75, 6.0),
    cell_bytes=st.sampled_from([2048, 8192, 16384, 65536]),
    has_bias=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_rows_fit_their_cells_and_cells_fit_the_budget(
    seed: int, num_groups: int, width: int, bits: float, cell_bytes: int, has_bias: bool
) -> None:
    keys, values = tables(seed, num_groups, width)
    found = allocate(keys, values, bits, cell_bytes, has_bias)
    for group in found:
        layout = group.layout(has_bias)
        assert layout.row_bits * group.rows <= 8 * cell_bytes
        assert layout.rows_per_cell(cell_bytes) >= group.rows
        assert group.rows % 8 == 0
        assert set(np.concatenate([group.keys, group.values])) <= set(CHOICES)
    wanted = bits * 2 * width + 16 * (4 + has_bias)
    assert np.mean([8 * cell_bytes / group.rows for group in found]) <= wanted * (1 + 1e-9)
    again = allocate(keys, values, bits, cell_bytes, has_bias)
    for one, other in zip(found, again, strict=True):
        assert np.array_equal(one.keys, other.keys)
        assert np.array_equal(one.values, other.values)


@given(seed=st.integers(0, 1000), num_groups=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_more_bits_lose_less(seed: int, num_groups: int) -> None:
    keys, values = tables(seed, num_groups, 96)
    losses = [loss(allocate(keys, values, b, 8192), keys, values) for b in (1, 1.5, 2, 2.5, 3, 4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 4


def test_the_budget_is_used() -> None:
    keys, values = tables(3, 30, 192)
    found = allocate(keys, values, 2.5, 8192)
    assert np.mean([8 * 8192 / group.rows for group in found]) > 0.98 * (2.5 * 384 + 64)
    for group in found:
        # not even one more bit fits any value channel, nor any key channel
        room = 8 * 8192 // group.rows - group.layout().row_bits
        assert room < 8
    assert np.mean([group.bits for group in found]) == pytest.approx(2.5, abs=0.06)


def test_weighty_channels_and_groups_get_more() -> None:
    weight = np.geomspace(1.0, 1e-6, 64)[:, None]
    keys, values = [weight * ERRORS, 100 * weight * ERRORS], [weight * ERRORS, weight * ERRORS]
    light, heavy = allocate(keys, values, 2.5, 8192)
    for group in (light, heavy):
        for widths in (group.keys, group.values):
            assert (np.diff(widths) <= 0).all()
    assert heavy.keys.sum() > light.keys.sum()
    assert heavy.rows <= light.rows
    # what can be lost for nothing gets nothing
    keys[0][40:] = 0.0
    light, _ = allocate(keys, values, 2.5, 8192)
    assert not light.keys[40:].any()


def test_it_comes_near_the_best_there_is() -> None:
    """No allocation with as many bits in all loses less than the bound of Lagrange."""
    keys, values = tables(5, 8, 96)
    found = allocate(keys, values, 2.5, 1 << 20)
    table = np.concatenate(keys + values)
    bits = np.array(CHOICES)
    spent = sum(int(g.keys.sum() + g.values.sum()) for g in found)
    bound = max(
        (table + price * bits).min(1).sum() - price * spent
        for price in np.geomspace(1e-9, 10, 2000)
    )
    assert bound <= loss(found, keys, values) < 1.01 * bound


def test_rows_too_long_for_a_cell_are_refused() -> None:
    keys, values = tables(0, 1, 512)
    with pytest.raises(ValueError, match="lower bits, or raise the block size"):
        allocate(keys, values, 8.0, 4096)


@given(logs=st.lists(st.floats(-30, 30), min_size=1, max_size=40), bits=st.floats(0.0, 20.0))
@settings(max_examples=100, deadline=None)
def test_water_filling_spends_exactly_its_budget(logs: list[float], bits: float) -> None:
    product = np.exp(np.array(logs))
    budget = round(bits * len(logs))
    found = water_fill(product, budget)
    assert found.sum() == min(budget, 16 * len(logs))
    assert found.min() >= 0
    assert found.max() <= 16
    order = np.argsort(product, kind="stable")
    assert (np.diff(found[order]) >= -1).all()
