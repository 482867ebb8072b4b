"""Meta-Soft: what probes are worth, budgets that hold them, flows, one result for both forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scored_prompts import Case, is_settled, make_case, positions
from tiny_soft_tokens import make_soft_tokens

from kvcompress_kernels.formats import SlabGeometry
from kvcompress_kernels.window_scores import reference as scoring
from vllm_kvcompress.config import parse_config
from vllm_kvcompress.core import IncompressibleError, ModelShape, Signal, SlabOverflowError
from vllm_kvcompress.methods.metasoft import MetaSoft
from vllm_kvcompress.methods.registry import create_method
from vllm_kvcompress.soft_tokens.model import StaticTokens

RULES = ("union", "each", "adaptive")
FLOWS = ("none", "mass", "convex", "printed")

pytestmark = pytest.mark.usefixtures("one_thread")


def make_method(num_probes: int = 8, **settings_: object) -> MetaSoft:
    method = MetaSoft(parse_config({"method": "metasoft", **settings_}))
    method._bound = "", StaticTokens(torch.zeros(num_probes, 16))
    return method


def scores_of(case: Case) -> torch.Tensor:
    """Float32 ``[L, H, G]``: attention of queries that see the whole prompt."""
    keys, queries = case.keys, case.paged.queries
    mass = [
        scoring.attention_mass(q, k, k.shape[1], k.shape[2] ** -0.5)
        for q, k in zip(queries, keys, strict=True)
    ]
    return torch.stack(mass)[..., : case.dense.layers[0].keys.shape[1]].float()


@settings(max_examples=50, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    flow=st.sampled_from(FLOWS),
    keep=st.floats(0.05, 0.9),
    blocks=st.integers(4, 24),
    tail=st.integers(0, 40),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    num_probes=st.integers(1, 32),
    size=st.sampled_from([16, 64]),
    sinks=st.integers(0, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 100),
)
def test_both_forms_agree_and_every_budget_is_met(
    rule, flow, keep, blocks, tail, layers, heads, group, num_probes, size, sinks, dtype, seed
):
    method = make_method(num_probes, heads=rule, flow=flow, num_sink_tokens=sinks)
    tokens = 16 * blocks
    try:
        budget = method.budget(tokens, None, keep, SlabGeometry(layers, heads, 16))
    except IncompressibleError:
        assume(False)
    case = make_case(
        method,
        blocks=blocks,
        tail=tail,
        layers=layers,
        heads=heads,
        group=group,
        num_queries=num_probes,
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
    after = case.paged.kv_cache[:, budget.num_blocks :]
    assert torch.equal(after.nan_to_num(7.0), before.nan_to_num(7.0))

    tolerance = 2 * torch.finfo(dtype).eps + 2e-5
    for ours, theirs in zip(case.read(usage), case.run_dense(), strict=True):
        assert torch.equal(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-3, atol=1e-5)


def test_kept_are_the_highest_scores_of_the_probes():
    method = make_method(num_sink_tokens=0, heads="each")  # and neighbours play no part
    case = make_case(method)
    for (entry_keys, values, bias), keys, all_values, scores in zip(
        case.run(),
        case.keys.flatten(0, 1),
        case.values.flatten(0, 1),
        scores_of(case).flatten(0, 1),
        strict=True,
    ):
        found = positions(entry_keys, keys)
        kept = torch.zeros(160, dtype=torch.bool)
        kept[found] = True
        assert kept.sum() == 40
        assert scores[kept].min() >= scores[~kept].max()
        assert torch.equal(values, all_values[found])
        assert torch.equal(bias, torch.zeros(40))


@pytest.mark.parametrize("form", ["run", "run_dense"])
def test_every_probe_sees_all_of_the_prompt(form):
    """The last token of the prompt takes the attention of all probes, the first one's too."""
    method = make_method(num_sink_tokens=0, pool_kernel=1, keep_tokens=16)
    keys = 0.01 * torch.randn(1, 1, 68, 16, generator=torch.Generator().manual_seed(0))
    keys[0, 0, 20, 0] = 24.0
    keys[0, 0, 21:37, 1] = 12.0
    queries = torch.zeros(1, 2, 2, 16)
    queries[0, 0, :, 0] = queries[0, 1, :, 1] = 1.0
    rival = keys.clone()
    rival[0, 0, 67, 0] = 48.0
    case, beside = (
        Case(method, k, torch.ones_like(k), queries, 64, None, num_blocks=3) for k in (keys, rival)
    )
    assert 20 in positions(getattr(case, form)()[0][0], keys[0, 0])
    assert 20 not in positions(getattr(beside, form)()[0][0], rival[0, 0])


def test_values_play_no_part_in_the_choice():
    method = make_method(num_sink_tokens=0)
    case = make_case(method)
    loud = Case(method, case.keys, case.values * 100, case.paged.queries, 160, 0.25)
    loud.values[:, :, 7] *= 1e4
    for ours, theirs in zip(case.run(), loud.run(), strict=True):
        assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("flow", FLOWS[1:])
@pytest.mark.parametrize("form", ["run", "run_dense"])
def test_flows_change_values_only_where_asked(form, flow):
    plain = getattr(make_case(make_method()), form)()
    still = getattr(make_case(make_method(flow=flow, gamma=0.0)), form)()
    flown = getattr(make_case(make_method(flow=flow)), form)()
    for evicted, none, some in zip(plain, still, flown, strict=True):
        assert torch.equal(evicted[0], some[0])
        torch.testing.assert_close(evicted[1], none[1])
        assert (evicted[1] != some[1]).any(-1).float().mean() > 0.5
        assert (some[2] > 0).any() == (flow == "mass")


@pytest.mark.parametrize(
    ("num_probes", "keep", "blocks"),
    [
        (8, 0.5, 80),
        (8, 0.1, 16),
        # 15 slots of the prompt's last block and 32 probes take 3 blocks, 64 of them 5
        (32, 0.021, 4),
        (64, 0.021, 5),
    ],
)
def test_the_slab_holds_the_probes_for_a_moment(num_probes, keep, blocks):
    budget = make_method(num_probes).budget(2560, None, keep, SlabGeometry(4, 3, 16))
    assert budget.num_blocks == blocks


@pytest.mark.parametrize(
    ("tokens", "keep", "settings_"),
    [
        (0, 0.5, {}),
        (48, 0.5, {"num_probes": 32}),  # room for the entries, none for the probes
        (1600, 1.0, {}),
        (512, None, {"keep_tokens": 512}),
        (320, 0.5, {"num_sink_tokens": 160}),
    ],
)
def test_budgets_that_save_nothing_are_refused(tokens, keep, settings_):
    with pytest.raises(IncompressibleError) as caught:
        make_method(**settings_).budget(tokens, None, keep, SlabGeometry(2, 2, 16))
    assert caught.value.reason == "no_room"


@pytest.mark.parametrize("flow", ["none", "mass"])
def test_a_slab_that_is_too_small_is_an_error(flow):
    case = make_case(make_method(flow=flow), num_blocks=2)
    before = case.paged.kv_cache.clone()
    with pytest.raises(SlabOverflowError, match="160 tokens take 12 cells, the slab has 8"):
        case.method.compress_into(case.paged)
    assert torch.equal(case.paged.kv_cache.nan_to_num(7.0), before.nan_to_num(7.0))


def shape_of(model):
    return ModelShape(str(model), (0, 1), 4, 2, 32, torch.float32, 32)


def test_soft_tokens_are_found_for_the_model(tiny_model, tmp_path):
    model = tiny_model()
    folder = str(make_soft_tokens(model, tmp_path / "a", 12, default="dynamic"))

    def probes(**settings_):
        method = create_method(parse_config({"method": "metasoft", **settings_}))
        assert method.needs == {Signal.PROBE_QUERIES}
        method.bind_model(shape_of(model))
        return method.probes

    assert (probes(soft_tokens=folder).kind, probes(soft_tokens=folder).num_tokens) == (
        "dynamic",
        12,
    )
    assert probes(soft_tokens=folder, probes="static").kind == "static"
    with pytest.raises(ValueError, match=r"metasoft: .*vllm-kvcompress train metasoft"):
        probes()
    other = make_soft_tokens(tiny_model(seed=1, num_layers=3), tmp_path / "b")
    with pytest.raises(ValueError, match=r"metasoft: .*another model"):
        probes(soft_tokens=str(other))


def test_the_composition_reads_the_same_probes(tiny_model, tmp_path):
    """Without a calibration the start fails for that reason alone."""
    model = tiny_model()
    folder = str(make_soft_tokens(model, tmp_path))
    method = create_method(parse_config({"method": "metasoft+aatc", "soft_tokens": folder}))
    assert method.needs == {Signal.PROBE_QUERIES, Signal.CALIBRATION}
    with pytest.raises(ValueError, match="aatc: no artifact is shipped"):
        method.bind_model(shape_of(model))
    assert method.probes.num_tokens == 8


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"flow": "some"}, ["flow = 'some'", "'mass'"]),
        ({"probes": "other"}, ["probes = 'other'", "'static', 'dynamic' or null"]),
        ({"gamma": 1.5}, ["gamma = 1.5", "at most 1"]),
        ({"soft_tokens": 3}, ["soft_tokens = 3", "text or null"]),
    ],
)
def test_wrong_settings(settings_, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        parse_config({"method": "metasoft", **settings_})
    for word in words:
        assert word in str(error.value)
