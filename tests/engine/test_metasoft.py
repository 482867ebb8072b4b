"""Meta-Soft in the engine: the probes' pass through the model, and what it leaves behind."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
import torch
from harness import check_idle, check_invariants
from player import Player, new_scheduler
from tiny_soft_tokens import make_soft_tokens
from vllm.engine.arg_utils import EngineArgs

from kvcompress_kernels import formats
from vllm_kvcompress.config import parse_config, request_options
from vllm_kvcompress.engine import settings
from vllm_kvcompress.engine.probes import Prober
from vllm_kvcompress.engine.scheduler import Planner
from vllm_kvcompress.methods.registry import create_method
from vllm_kvcompress.simulation import Simulation

NUM_PROBES = 40
"""More than a block, so that they begin in one and end in the next but one."""


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model()


@pytest.fixture(scope="module")
def soft_tokens(model, tmp_path_factory):
    return str(make_soft_tokens(model, tmp_path_factory.mktemp("soft_tokens"), NUM_PROBES))


@pytest.fixture
def engine(make_engine, model, config):
    """Function: the engine with static probes, with dynamic ones and shorter steps, or stock vLLM;
    no more engines than are needed."""

    def engine(probes):
        compression = None if probes == "stock" else config(probes=probes)
        chunk = {"max_num_batched_tokens": 100} if probes == "dynamic" else {}
        return make_engine(model, compression, max_model_len=512, **chunk)

    return engine


@pytest.fixture
def config(soft_tokens):
    """Settings of the method, with what is asked for on top."""

    def config(**changes):
        base = {"min_prompt_tokens": 64, "window": 32, "keep": 0.3, "soft_tokens": soft_tokens}
        return {"method": "metasoft", **base, **changes}

    return config


def entries(state, slot, slab):
    """Keys of all segments of a request, ``[entries, D]``."""
    places = zip(
        state.first_cell[slot].flatten().tolist(),
        state.num_entries[slot].flatten().tolist(),
        strict=True,
    )
    segments = [
        formats.read_segment(state.kv_cache, state.bias, torch.tensor(slab), *place)
        for place in places
    ]
    return torch.cat([keys for keys, _, _ in segments])


def kept(engine, prompts, **params):
    """For each prompt, all added at once: the keys that it keeps, and the tokens that follow."""
    names = {engine.add(prompt, max_tokens=24, **params): n for n, prompt in enumerate(prompts)}
    found, tokens = {}, {}
    while engine.engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[names[output.request_id]] = list(output.outputs[0].token_ids)
        check_invariants(engine)
        state = engine.compressor.state
        for request_id, (slot, slab) in state._requests.items():
            number = names[request_id.rsplit("-", 1)[0]]
            if number not in found:
                found[number] = entries(state, slot, slab)
    engine.flush()
    check_idle(engine)
    return [(found[n], tokens[n]) for n in range(len(prompts))]


def assert_same(ours, theirs):
    """Other batches, other last bits: a token at the edge of the budget may be another one."""
    assert ours[0].shape == theirs[0].shape
    same = ((ours[0] - theirs[0]).abs() < 1e-3).all(-1)
    assert same.float().mean() > 0.99
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("probes", ["static", "dynamic"])
@pytest.mark.parametrize("length", [400, 384, 383])
def test_same_entries_as_the_simulation(
    engine, model, config, token_ids, probes, length, monkeypatch
):
    """The prompt's last block partly filled, full, and full but for one slot."""
    from transformers import AutoModelForCausalLM

    asked = config(probes=probes)
    prompt = token_ids[100 : 100 + length]
    (ours,) = kept(engine(probes), [prompt], salt=f"{probes}{length}")

    parsed = parse_config(asked)
    method = create_method(parsed)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    simulation = Simulation(original, method, 32, str(model))
    packed = simulation.prefill(prompt, request_options({}, parsed))
    keys = torch.cat([key for segment in packed.segments for key in segment.keys])
    following = simulation.feed(packed, ours[1][:-1]).argmax(-1).tolist()
    # a step that fills a block for the prefix cache is exact, and all that follow build on it
    tokens = ours[1] if length % 32 == 31 else [ours[1][0], *following]
    assert_same(ours, (keys, tokens))
    # other probes would have kept other tokens
    monkeypatch.setattr(type(method.probes), "forward", lambda self, x: torch.ones(2, 64))
    other = simulation.prefill(prompt, request_options({}, parsed))
    keys = torch.cat([key for segment in other.segments for key in segment.keys])
    assert ((ours[0] - keys).abs() < 1e-3).all(-1).float().mean() < 0.9


def test_the_simulation_reads_prompt_and_probes_as_one_text(model, config, token_ids):
    """Queries of the probes as of the last tokens of one prefill."""
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    method = create_method(parse_config(config(probes="dynamic")))
    simulation = Simulation(original, method, 32, str(model))
    prompt = token_ids[:200]
    with torch.inference_mode():
        output = original(torch.tensor([prompt]), use_cache=True)
        layers = [(layer.keys[0], layer.values[0]) for layer in output.past_key_values.layers]
        found = simulation.probe(prompt, layers)
        assert layers[0][0].shape[1] == len(prompt)
        embeddings = original.get_input_embeddings()(torch.tensor(prompt))
        text = torch.cat([embeddings, method.probes(embeddings)])
        simulation._queries = []
        original.set_attn_implementation("kvcompress_probe")
        original(inputs_embeds=text[None], use_cache=False)
    for ours, whole in zip(found, simulation._queries, strict=True):
        assert ours.shape == (4, NUM_PROBES, 32)
        torch.testing.assert_close(ours, whole[:, -NUM_PROBES:], rtol=1e-4, atol=1e-4)


def test_plans_of_one_step_are_as_if_alone(engine, token_ids, monkeypatch):
    """Two passes for three plans, since three times the probes are more than a step may have; the
    plans wait for each other, and what is generated meanwhile changes nothing."""
    ours = engine("dynamic")
    prompts = [token_ids[n * 700 : n * 700 + 200 + 41 * n] for n in range(3)]
    alone = [kept(ours, [prompt], salt="alone")[0] for prompt in prompts]
    passes, run = [], Prober._run_batch
    monkeypatch.setattr(
        Prober,
        "_run_batch",
        lambda self, plans, found: passes.append(len(plans)) or run(self, plans, found),
    )
    names = [ours.add(prompt, max_tokens=40, salt="together") for prompt in prompts]
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "_try", lambda self, request, num_computed: None)
        while len(ours.scheduler.running) < 3 or not all(
            request.num_output_tokens > 2 for request in ours.scheduler.running
        ):
            ours.step()
    ours.step()
    assert passes == [2, 1]
    state = ours.compressor.state
    for request_id, (slot, slab) in state._requests.items():
        number = names.index(request_id.rsplit("-", 1)[0])
        assert_same((entries(state, slot, slab), None), (alone[number][0], None))
    assert all(len(found.outputs[0].token_ids) == 40 for found in ours.drain().values())
    check_idle(ours)


def test_prompts_that_end_in_one_step_are_as_if_alone(engine, token_ids):
    ours = engine("static")
    prompts = [token_ids[n * 700 : n * 700 + 200 + 41 * n] for n in range(3)]
    alone = [kept(ours, [prompt], salt="alone")[0] for prompt in prompts]
    together = kept(ours, prompts, salt="together")
    for one, other in zip(together, alone, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("probes", ["static", "dynamic"])
def test_prefix_hits_change_nothing(engine, token_ids, probes):
    """On the blocks of the same prompt, and of a longer one that goes on where this one ends."""
    ours = engine(probes)
    prompt = token_ids[4000:4320]
    (first,), (second,) = (kept(ours, [prompt], salt="hits") for _ in range(2))
    assert_same(second, first)
    ours.generate([token_ids[4000:4400]], salt="longer", max_tokens=20)
    (third,) = kept(ours, [prompt], salt="longer")
    assert_same(third, first)


@pytest.mark.parametrize("length", [200, 223, 224])
def test_plans_are_the_same_under_asynchronous_scheduling(engine, token_ids, monkeypatch, length):
    """With steps in flight, and a wait for free blocks, the probes follow the same prompt."""
    prompt = token_ids[:length]
    plans = []
    for depth, wait in ((1, 0), (2, 0), (2, 5)):
        scheduler = new_scheduler(engine("dynamic"), asynchronous=depth > 1)
        player = Player(scheduler, random.Random(0), depth=depth)
        report = player.report
        player.report = lambda plan, report=report: plans.append(plan) or report(plan)
        player.add(prompt, 40)
        with monkeypatch.context() as patch:
            if wait:
                patch.setattr(Planner, "_try", lambda self, request, num_computed: None)
            for _ in range(wait):
                player.step()
        player.drain()
    assert len(plans) == 3
    for plan in plans:
        assert plan.num_tokens == length
        assert plan.gap_end == (length - 32) // 32 * 32
        assert plan.token_ids.tolist() == prompt
        assert len(plan.tail) == -(-(length - plan.gap_end) // 32)


def test_the_pass_leaves_no_trace(engine, token_ids, monkeypatch):
    """Every byte of the pool but the scratch blocks is as before, and those are cleared."""
    ours = engine("dynamic")
    state = ours.compressor.state
    seen = []

    def run(self, plans, original=Prober.run):
        with torch.inference_mode():
            state.kv_cache[:, plans[0].slab] = 7.0
        before = state.kv_cache.clone()
        found = original(self, plans)
        seen.append((plans[0], before, state.kv_cache.clone()))
        return found

    monkeypatch.setattr(Prober, "run", run)
    kept(ours, [token_ids[:350]], salt="trace")
    ((plan, before, after),) = seen
    scratch = plan.slab[:3]  # 350 % 32 + 40 slots
    assert not after[:, scratch].any()
    others = [block for block in range(before.shape[1]) if block not in scratch]
    assert torch.equal(before[:, others], after[:, others])
    assert plan.token_ids.tolist() == token_ids[:350]


@pytest.mark.parametrize("where", ["before", "within"])
def test_a_failing_pass_leaves_its_requests_uncompressed(
    engine, token_ids, monkeypatch, caplog, where
):
    ours, stock = engine("static"), engine("stock")
    prompts = [token_ids[:300], token_ids[1000:1400]]
    expected = stock.generate(prompts)
    failures = ours.planner._metrics._failed.labels(*ours.planner._metrics._labels, "probe_failed")
    count = failures._value.get()

    def fail(self, common, embeddings, original=Prober._forward):
        if where == "within":
            original(self, common, embeddings * torch.nan)
        raise RuntimeError("no such model")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(Prober, "_forward", fail)
        assert ours.generate(prompts) == expected
        assert failures._value.get() == count + 2
    check_idle(ours)
    assert not ours.compressor.state.kv_cache[:, 1:].isnan().any()
    # and the next ones are compressed
    compressed = ours.planner._metrics.requests_compressed._value.get()
    ours.generate(prompts)
    assert ours.planner._metrics.requests_compressed._value.get() == compressed + 2
    check_idle(ours)


def test_what_is_left_alone(engine, token_ids, changes):
    """No slab for the probes, no position for them."""
    ours, stock = engine("static"), engine("stock")
    short = token_ids[:128]  # three blocks to compress, and three are needed
    late = token_ids[:480]  # 480 + 40 positions are more than there are
    length = {"max_tokens": 24}
    assert ours.generate([short, late], **length) == stock.generate([short, late], **length)
    assert changes() == {"no_room": 1, "context_end": 1}
    check_idle(ours)


@pytest.mark.slow
def test_the_compiled_model_reads_probes_too(make_engine, engine, model, config, token_ids):
    """vLLM's default on a CPU compiles the model for tokens; the pass takes it uncompiled."""
    prompt = token_ids[100:500]
    (eager,) = kept(engine("static"), [prompt], salt="eager")
    (compiled,) = kept(make_engine(model, config(), enforce_eager=False), [prompt])
    assert_same(compiled, eager)


def _create(model, compression, **changes):
    return EngineArgs(
        model=str(model),
        max_model_len=256,
        additional_config={"kv_compression": compression},
        **changes,
    ).create_engine_config()


def test_a_start_without_soft_tokens_is_refused(model, tiny_model, config):
    with pytest.raises(ValueError, match=r"metasoft: no soft tokens.*train metasoft"):
        _create(model, {"method": "metasoft"})
    with pytest.raises(ValueError, match=r"metasoft: .*another model"):
        _create(tiny_model(seed=3, num_layers=1), config())


def test_adapters_are_refused(model, config):
    with pytest.raises(ValueError, match="--enable-lora with method 'metasoft'") as error:
        _create(model, config(), enable_lora=True, block_size=24)
    assert "--block-size 24" in str(error.value)


def test_models_that_are_refused(config):
    """By what vLLM's configuration says of them."""
    parallel = {"data_parallel_size": 2, "enable_expert_parallel": True, "is_moe_model": True}
    found = settings._unsupported_with_probes(
        parse_config(config()),
        SimpleNamespace(
            lora_config=None,
            model_config=SimpleNamespace(
                uses_mrope=True,
                requires_raw_input_tokens=True,
                hf_text_config=SimpleNamespace(layer_types=["sliding_attention"]),
            ),
            parallel_config=SimpleNamespace(**parallel, use_sequence_parallel_moe=False),
        ),
    )
    words = ("M-RoPE", "need tokens beside embeddings", "sliding-window", "mixtures of experts")
    for reason, word in zip(found, words, strict=True):
        assert word in reason


def test_models_without_embeddings_are_refused(engine):
    """Asked of the loaded model, whose code no configuration describes."""
    ours = engine("static")
    compressor = ours.compressor
    probes = compressor.method.probes

    class Deaf(torch.nn.Module):
        def forward(self, input_ids, positions):
            raise AssertionError

    runner = SimpleNamespace(
        vllm_config=ours.runner.vllm_config,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None, None]),
        get_model=Deaf,
    )
    with pytest.raises(ValueError, match=r"Deaf takes no embeddings.*2 KV-cache groups"):
        Prober(runner, 0, probes, compressor.state)
