"""SelKV: budgets to the cell, what is kept and why, and one result for both forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scored_prompts import Case, is_settled, make_case, positions

from kvcompress_kernels.formats import SlabGeometry, cell_keys, cell_values
from kvcompress_kernels.window_scores import reference as scoring
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import IncompressibleError, SlabOverflowError
from vllm_kvcompress.methods.selkv import SelKV

RULES = {
    "union": {},
    "each": {"heads": "each"},
    "adaptive": {"heads": "adaptive"},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def make_method(**settings_: object) -> SelKV:
    return SelKV(CompressionConfig(method="selkv", **settings_))


def scores_of(case: Case) -> torch.Tensor:
    """Float32 ``[L, H, G]``, before pooling."""
    out = []
    for view in case.dense.layers:
        assert view.tail_keys is not None
        assert view.queries is not None
        keys = torch.cat([view.keys, view.tail_keys], 1)
        first = keys.shape[1] - view.queries.shape[1]
        mass = scoring.attention_mass(view.queries, keys, first, keys.shape[2] ** -0.5)
        out.append(scoring.weigh(mass[:, : view.keys.shape[1]], view.values).float())
    return torch.stack(out)


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(sorted(RULES)),
    merge=st.booleans(),
    keep=st.floats(0.05, 0.9),
    blocks=st.integers(3, 24),
    tail=st.integers(0, 40),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    num_queries=st.integers(1, 32),
    size=st.sampled_from([16, 64]),
    pool_kernel=st.sampled_from([1, 5, 7]),
    sinks=st.integers(0, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 100),
)
def test_both_forms_agree_and_every_budget_is_met(
    rule, merge, keep, blocks, tail, layers, heads, group, num_queries, size, pool_kernel, sinks,
    dtype, seed,
):  # fmt: skip
    method = make_method(merge=merge, pool_kernel=pool_kernel, num_sink_tokens=sinks, **RULES[rule])
    tokens = 16 * blocks
    try:
        budget = method.budget(tokens, None, keep, SlabGeometry(layers, heads, 16))
    except IncompressibleError:
        assume(False)
    assert budget.num_blocks < blocks
    case = make_case(
        method,
        blocks=blocks,
        tail=tail,
        layers=layers,
        heads=heads,
        group=group,
        num_queries=num_queries,
        size=size,
        keep=keep,
        dtype=dtype,
        seed=seed,
    )
    assume(is_settled(method, scores_of(case), keep))
    before = case.paged.kv_cache[:, budget.num_blocks :].clone()
    usage = method.compress_into(case.paged)
    assert usage.num_cells <= case.paged.num_cells
    per_layer = usage.num_entries.sum(1)
    assert torch.equal(per_layer, torch.full_like(per_layer, heads * int(keep * tokens)))
    if rule != "adaptive":
        assert (usage.num_entries == int(keep * tokens)).all()
    after = case.paged.kv_cache[:, budget.num_blocks :]
    assert torch.equal(after.nan_to_num(7.0), before.nan_to_num(7.0))

    entries = case.read(usage)
    # weights are float32 here and float64 there, then the values are rounded once
    tolerance = 2 * torch.finfo(dtype).eps + 1e-5
    for ours, theirs in zip(entries, case.run_dense(), strict=True):
        assert torch.equal(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-5)
    # the entries are tokens in order, the first ones among them, and keys are never changed
    flat_keys = case.keys[:, :, :tokens].flatten(0, 1)
    for (entry_keys, _, _), keys in zip(entries, flat_keys, strict=True):
        if dtype == torch.float32:
            found = positions(entry_keys, keys)
            assert found == sorted(found)
            assert found[:sinks] == list(range(sinks))


def test_kept_are_the_highest_scores():
    method = make_method(num_sink_tokens=0, pool_kernel=1, heads="each")
    case = make_case(method)
    for (entry_keys, _, _), keys, scores in zip(
        case.run(), case.keys.flatten(0, 1), scores_of(case).flatten(0, 1), strict=True
    ):
        kept = torch.zeros(160, dtype=torch.bool)
        kept[positions(entry_keys, keys)] = True
        assert kept.sum() == 40
        assert scores[kept].min() >= scores[~kept].max()


@pytest.mark.parametrize("rule", RULES)
def test_heads_share_as_the_rule_says(rule):
    case = make_case(make_method(**RULES[rule]))
    first, second, *_ = (
        positions(entry[0], keys)
        for entry, keys in zip(case.run(), case.keys.flatten(0, 1), strict=True)
    )
    assert (first == second) == (rule == "union")
    assert (len(first) == len(second)) == (rule != "adaptive")
    assert len(first) + len(second) == 80


@pytest.mark.parametrize("form", ["run", "run_dense"])
def test_plain_eviction(form):
    case = make_case(make_method(merge=False))
    for (entry_keys, values, bias), keys, all_values in zip(
        getattr(case, form)(), case.keys.flatten(0, 1), case.values.flatten(0, 1), strict=True
    ):
        assert torch.equal(values, all_values[positions(entry_keys, keys)])
        assert torch.equal(bias, torch.zeros(40))
    assert case.method.compress_into(case.paged).details == {"merged": 0.0}


@pytest.mark.parametrize("form", ["run", "run_dense"])
def test_merging_changes_values_and_adds_a_bias(form):
    plain = getattr(make_case(make_method(merge=False)), form)()
    merged = getattr(make_case(make_method()), form)()
    without_bias = getattr(make_case(make_method(alpha=0.0)), form)()
    for evicted, full, half in zip(plain, merged, without_bias, strict=True):
        assert torch.equal(evicted[0], full[0])
        assert torch.equal(full[1], half[1])
        assert torch.equal(half[2], torch.zeros(40))
        changed = (evicted[1] != full[1]).any(-1)
        assert 0 < changed.sum() < 40
        assert torch.equal(changed, full[2] > 0)


def test_details_say_how_much_was_merged():
    case = make_case(make_method())
    usage = case.method.compress_into(case.paged)
    assert 0.1 < usage.details["merged"] < 0.9


@pytest.mark.parametrize("form", ["run", "run_dense"])
@pytest.mark.parametrize("rival", [True, False])
def test_the_raw_tail_takes_its_share_of_attention(rival, form):
    # One KV head with two query heads and room for 16 tokens. The first head likes token 20, the
    # second tokens 0 to 15 a little. A rival in the tail takes the first head's attention away.
    method = make_method(num_sink_tokens=0, pool_kernel=1, merge=False, keep_tokens=16)
    keys = 0.01 * torch.randn(1, 1, 68, 16, generator=torch.Generator().manual_seed(0))
    keys[0, 0, :16, 1] = 12.0
    keys[0, 0, 20, 0] = 24.0
    keys[0, 0, 66, 0] = 48.0 if rival else 0.0
    queries = torch.zeros(1, 2, 1, 16)
    queries[0, 0, 0, 0] = queries[0, 1, 0, 1] = 1.0
    case = Case(method, keys, torch.ones_like(keys), queries, 64, None)
    kept = positions(getattr(case, form)()[0][0], keys[0, 0])
    assert (20 in kept) != rival
    assert kept[:15] == list(range(15))


def test_values_weigh_as_much_as_attention():
    method = make_method(num_sink_tokens=0, pool_kernel=1, keep_tokens=16)
    case = make_case(method, layers=1, heads=1, keep=None)
    last = int(scores_of(case)[0, 0].argmin())
    values = case.values.clone()
    values[0, 0, last] *= 1e6
    loud = Case(method, case.keys, values, case.paged.queries, 160, None)
    kept = [positions(c.run()[0][0], c.keys[0, 0]) for c in (case, loud)]
    assert last not in kept[0]
    assert last in kept[1]


@pytest.mark.parametrize(
    ("rule", "keep", "blocks"),
    [
        ("union", 0.5, 80),
        ("union", 0.1, 16),
        ("each", 0.1, 16),
        ("each", 0.11, 18),
        ("adaptive", 0.1, 17),
        ("adaptive", 0.5, 81),
    ],
)
def test_budget_by_hand(rule, keep, blocks):
    # 2,560 tokens, blocks of 16
    budget = make_method(**RULES[rule]).budget(2560, None, keep, SlabGeometry(4, 3, 16))
    assert budget.num_blocks == blocks


def test_budgets_of_equal_heads_are_exact():
    case = make_case(make_method(heads="each"), keep=0.4)
    usage = case.method.compress_into(case.paged)
    assert usage.num_cells == case.paged.num_cells == 4 * 4  # 64 entries, 2 layers, 2 heads


def test_where_the_budget_comes_from():
    geometry = SlabGeometry(2, 2, 16)

    def blocks(asked_for: float | None, **settings_: object) -> int:
        return make_method(**settings_).budget(1600, None, asked_for, geometry).num_blocks

    assert blocks(None) == blocks(0.25) == 25
    assert blocks(None, keep=0.1) == 10
    assert blocks(None, keep=0.1, keep_tokens=512) == 32
    assert blocks(0.5, keep=0.1, keep_tokens=512) == 50


@pytest.mark.parametrize(
    ("tokens", "keep", "settings_"),
    [
        (0, 0.5, {}),
        (16, 0.5, {}),
        (16, 0.24, {}),
        (160, 0.03, {}),
        (1600, 1.0, {}),
        (1600, 0.995, {}),
        (512, None, {"keep_tokens": 512}),
        (512, None, {"keep_tokens": 10_000}),
        (320, 0.5, {"num_sink_tokens": 160}),
        (32, 0.5, {"heads": "adaptive"}),
    ],
)
def test_budgets_that_save_nothing_are_refused(tokens, keep, settings_):
    with pytest.raises(IncompressibleError) as caught:
        make_method(**settings_).budget(tokens, None, keep, SlabGeometry(2, 2, 16))
    assert caught.value.reason == "no_room"


def test_a_slab_that_is_too_small_is_an_error():
    case = make_case(make_method(), num_blocks=2)
    before = case.paged.kv_cache.clone()
    with pytest.raises(SlabOverflowError, match="160 tokens take 12 cells, the slab has 8"):
        case.method.compress_into(case.paged)
    assert torch.equal(case.paged.kv_cache.nan_to_num(7.0), before.nan_to_num(7.0))
    assert case.paged.bias.isnan().all()


def test_even_windows_are_refused():
    with pytest.raises(ValueError, match="pool_kernel = 4: expected an odd number"):
        make_method(pool_kernel=4)


def test_tail_blocks_may_hold_generated_tokens():
    case = make_case(make_method(), tail=5)
    expected = case.run()
    other = make_case(make_method(), tail=5)
    cells = other.paged.kv_cache[:, int(other.paged.tail[0])]
    cell_keys(cells)[..., 5:] = 100.0
    cell_values(cells)[..., 5:, :] = 100.0
    for ours, theirs in zip(other.run(), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_same_prompt_gives_the_same_bits():
    case = make_case(make_method(), dtype=torch.bfloat16, heads=3)
    first = case.run()
    again = Case(case.method, case.keys, case.values, case.paged.queries, 160, 0.25)
    shuffled = dataclasses.replace(again.paged, slab=again.paged.slab.flip(0))
    again.paged = shuffled
    for ours, theirs in zip(again.run(), first, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
