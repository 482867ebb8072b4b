"""The flow of dropped values: formulas by hand, both implementations, bounds, what stays."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress_kernels import formats
from kvcompress_kernels.flow_merge import blocked, reference
from kvcompress_kernels.flow_merge.api import flow_merge

FORMS = ("mass", "convex", "printed")
N = 16

pytestmark = pytest.mark.usefixtures("one_thread")


def make_inputs(heads=2, blocks=4, size=32, keep=0.3, dtype=torch.float32, seed=0):
    """Keys and values ``[H, G, D]``, kept and mass ``[H, G]``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = blocks * N
    keys, values = torch.randn(2, heads, tokens, size, generator=generator).to(dtype)
    kept = torch.rand(heads, tokens, generator=generator) < keep
    mass = torch.rand(heads, tokens, generator=generator) ** 4
    return keys, values, kept, mass


class Pool:
    """The same in a pool whose other slots are poisoned; layer 1 of 2."""

    def __init__(self, keys, values, num_slab_blocks):
        heads, tokens, size = keys.shape
        count = tokens // N
        total = count + num_slab_blocks + 1
        self.kv_cache = torch.full((2, total, heads, N, 2 * size), math.nan, dtype=keys.dtype)
        self.bias = torch.full((total, 2, heads, N), math.nan)
        self.source = torch.arange(total - 1, total - 1 - count, -1).int()
        for i, block in enumerate(self.source.tolist()):
            cells = self.kv_cache[1, block]
            formats.cell_keys(cells).copy_(keys[:, i * N : (i + 1) * N].mT)
            formats.cell_values(cells).copy_(values[:, i * N : (i + 1) * N])
        self.slab = torch.arange(num_slab_blocks).int()

    def run(self, kept, mass, form, gamma, impl="torch", first_cell=0, num_cells=None):
        room = self.slab.numel() * 2 * self.kv_cache.shape[2]
        return flow_merge(
            self.kv_cache,
            self.bias,
            1,
            self.source,
            self.slab,
            kept,
            mass,
            form,
            gamma,
            first_cell,
            room if num_cells is None else num_cells,
            impl,
        )

    def read(self, num_entries, first_cell=0):
        found = []
        for count in num_entries.tolist():
            found.append(
                formats.read_segment(self.kv_cache, self.bias, self.slab, first_cell, count)
            )
            first_cell += -(-count // N)
        return found


def error(ours, theirs):
    return float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    gamma=st.floats(0.0, 1.0),
    heads=st.integers(1, 3),
    blocks=st.integers(1, 24),
    size=st.sampled_from([16, 64, 128]),
    keep=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.95, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 100),
)
def test_both_implementations(form, gamma, heads, blocks, size, keep, dtype, seed):
    keys, values, kept, mass = make_inputs(heads, blocks, size, keep, dtype, seed)
    pools = [Pool(keys, values, blocks) for _ in range(2)]
    before = pools[0].kv_cache[:, blocks:].clone()
    results = [
        pool.run(kept, mass, form, gamma, impl)
        for pool, impl in zip(pools, ("torch", "reference"), strict=True)
    ]
    assert torch.equal(results[0][0], kept.sum(1).int())
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == sum(-(-n // N) for n in kept.sum(1).tolist())
    after = pools[0].kv_cache[:, blocks:]
    assert torch.equal(after.nan_to_num(7.0), before.nan_to_num(7.0))
    # the yardstick: the formulas in the inputs' own range, rounded once to the pool's type
    spread = float(values.abs().max()) * (len(values[0]) if form == "printed" else 1)
    tolerance = 2e-5 * spread + 2 * torch.finfo(dtype).eps * spread
    for ours, theirs in zip(*(p.read(r[0]) for p, r in zip(pools, results, strict=True)),
                            strict=True):  # fmt: skip
        assert torch.equal(ours[0], theirs[0])
        assert error(ours[1], theirs[1]) <= tolerance
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-5)


def test_float32_is_as_near_to_float64_as_plain_torch_in_float32():
    """The yardstick: `reference.flow` computed in float32 in place of float64."""
    keys, values, kept, mass = make_inputs(blocks=40, size=64)
    exact = reference.flow(keys, values, kept, mass, "mass", 0.5)
    pool = Pool(keys, values, 40)
    ours = pool.read(pool.run(kept, mass, "mass", 0.5)[0])
    plain = reference.flow(keys, values, kept, mass, "mass", 0.5, dtype=torch.float32)
    for one, two, true in zip(ours, plain, exact, strict=True):
        for part in (1, 2):
            assert error(one[part], true[part]) <= 4 * error(two[part], true[part]) + 1e-7


def test_by_hand():
    """Two kept tokens and two dropped ones; both flow to the first alone but for e**-large."""
    keys = torch.zeros(1, N, 16)
    keys[0, 0, 0] = keys[0, 2, 0] = keys[0, 3, 0] = 12.0  # 144 / 4 = 36 against 0
    values = torch.zeros(1, N, 16)
    for token, value in enumerate((1.0, 1.0, 5.0, 9.0)):
        values[0, token, 0] = value
    kept = torch.ones(1, N, dtype=torch.bool)
    kept[0, 2:4] = False
    mass = torch.full((1, N), 0.1)
    mass[0, 2], mass[0, 3] = 0.1, 0.3

    def first(form, gamma):
        pool = Pool(keys, values, 2)
        (found,) = pool.read(pool.run(kept, mass, form, gamma)[0])
        assert found[1][1, 0] == pytest.approx(1.0, abs=1e-3)
        return float(found[1][0, 0]), float(found[2][0])

    gate = 2 / 14 / 2  # dropped / kept / load
    assert first("printed", 0.5) == pytest.approx((1 + 0.5 * gate * (5 + 9), 0.0), rel=1e-4)
    assert first("convex", 0.5) == pytest.approx((1 + 0.5 * gate * (7 - 1), 0.0), rel=1e-4)
    value = (0.1 * 1 + 0.5 * (0.1 * 5 + 0.3 * 9)) / (0.1 + 0.5 * 0.4)
    assert first("mass", 0.5) == pytest.approx((value, math.log(1 + 0.5 * 0.4 / 0.1)), rel=1e-4)


@pytest.mark.parametrize("form", ["mass", "convex"])
def test_normalised_forms_stay_within_the_values(form):
    keys, values, kept, mass = make_inputs(blocks=30, keep=0.03)
    pool = Pool(keys, values, 30)
    for found, whole in zip(pool.read(pool.run(kept, mass, form, 1.0)[0]), values, strict=True):
        assert (found[1] <= whole.amax(0) + 1e-5).all()
        assert (found[1] >= whole.amin(0) - 1e-5).all()


def test_the_printed_form_grows_with_what_is_dropped():
    keys, values, kept, mass = make_inputs(blocks=30, keep=0.03)
    pool = Pool(keys, values + 1.0, 30)
    (found, _) = pool.read(pool.run(kept, mass, "printed", 1.0)[0])
    assert found[1].abs().max() > 4 * (values + 1.0).abs().max()


def test_memory_is_linear(monkeypatch):
    """Products of keys are made block by block."""
    seen = []
    original = reference.shares
    monkeypatch.setattr(reference, "shares", lambda a, b: seen.append(len(a)) or original(a, b))
    keys, values, kept, mass = make_inputs(heads=1, blocks=60, keep=0.2)
    Pool(keys, values, 60).run(kept, mass, "mass", 0.5)
    assert max(seen) <= blocked._BLOCK
    assert sum(seen) == int((~kept).sum())


def test_nothing_is_written_beyond_the_room():
    keys, values, kept, mass = make_inputs()
    pool = Pool(keys, values, 4)
    before = pool.kv_cache.clone()
    num_entries, cell = pool.run(kept, mass, "mass", 0.5, first_cell=1, num_cells=2)
    assert cell > 2
    assert torch.equal(num_entries, kept.sum(1).int())
    assert torch.equal(before.nan_to_num(7.0), pool.kv_cache.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"form": "some"}, "form: expected"),
        ({"gamma": 1.5}, "gamma: expected 0 to 1"),
        ({"gamma": math.nan}, "gamma: expected 0 to 1"),
        ({"impl": "cpu"}, "unknown impl 'cpu'"),
        ({"kept": torch.zeros(2, 3, dtype=torch.bool)}, "kept: expected"),
        ({"mass": torch.zeros(2, 64, dtype=torch.float64)}, "mass: expected"),
        ({"num_cells": 1000}, "num_cells: expected"),
    ],
)
def test_wrong_arguments(changes, word):
    keys, values, kept, mass = make_inputs()
    arguments = {"kept": kept, "mass": mass, "form": "mass", "gamma": 0.5, **changes}
    with pytest.raises(ValueError, match=word):
        Pool(keys, values, 4).run(**arguments)
