"""vLLM's features beside compression: `relocate` is stock, `semanticache` leaks nothing.

Every test has a cache salt of its own, so that engines can be shared and hits are the test's.
"""

from __future__ import annotations

import json
import math

import pytest
import safetensors.torch
import torch
from harness import BLOCK_SIZE, check_idle, check_invariants
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

RELOCATE = {"method": "relocate", "min_prompt_tokens": 64, "window": 32}
CONFIG = {"method": "semanticache", "min_prompt_tokens": 64, "window": 32, "threshold": 0.7}


@pytest.fixture
def engines(make_engine, tiny_model):
    """Function that gives (relocate, semanticache, stock) of the same settings."""

    def engines(**settings):
        methods = (RELOCATE, CONFIG, None)
        return tuple(make_engine(tiny_model(), method, **settings) for method in methods)

    return engines


def run(engine, prompts, **params):
    """All prompts at once; their final outputs. Invariants hold after every step."""
    names = [engine.add(prompt, **params) for prompt in prompts]
    return finish(engine, names)


def finish(engine, names, watch=lambda: None):
    final = {}
    while engine.engine.has_unfinished_requests():
        watch()
        final.update({o.request_id: o for o in engine.step() if o.finished})
        if hasattr(engine.scheduler, "planner"):
            check_invariants(engine)
    engine.flush()
    return [final[name] for name in names]


def tokens(outputs):
    return [[list(c.token_ids) for c in sorted(o.outputs, key=lambda c: c.index)] for o in outputs]


def num_compressed(engine):
    return engine.planner._metrics.requests_compressed._value.get()


@pytest.mark.parametrize("size", [17, 63, 100])
def test_chunked_prefill_at_odd_sizes(engines, token_ids, size):
    """Chunks end inside blocks, and the last chunks of prompts share steps with decoding."""
    relocate, packed, stock = engines(max_num_batched_tokens=size)
    prompts = [token_ids[:257], token_ids[500:819], token_ids[900:1000]]
    salt = "chunks"
    before = num_compressed(relocate), num_compressed(packed)
    assert tokens(run(relocate, prompts, salt=salt)) == tokens(run(stock, prompts, salt=salt))
    assert all(len(c[0]) == 32 for c in tokens(run(packed, prompts, salt=salt)))
    assert num_compressed(relocate) - before[0] >= len(prompts)
    assert num_compressed(packed) - before[1] >= 2
    check_idle(relocate)
    check_idle(packed)


@pytest.mark.parametrize("shared", [BLOCK_SIZE * 3 // 2, 319, 320, 288])
@pytest.mark.parametrize("together", [False, True])
def test_partial_prefix_hits(engines, token_ids, shared, together):
    """The second prompt shares 1.5 blocks, all but a token, all of it, or a block less than all."""
    relocate, packed, stock = engines()
    first = token_ids[:320]
    second = first[:shared] + token_ids[1000 : 1320 - shared]
    salt = f"hits {shared} {together}"

    def both(engine):
        if together:
            names = [engine.add(first, salt=salt)]
            while not engine.scheduler.running or engine.scheduler.running[0].num_output_tokens < 3:
                engine.step()
            return finish(engine, [*names, engine.add(second, salt=salt)])
        return run(engine, [first], salt=salt) + run(engine, [second], salt=salt)

    expected = both(stock)
    ours = both(relocate)
    assert tokens(ours) == tokens(expected)
    hits = min(shared, len(second) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert expected[1].num_cached_tokens == hits
    assert ours[1].num_cached_tokens == hits
    merged = both(packed)
    assert merged[1].num_cached_tokens == hits
    assert all(len(c[0]) == 32 for c in tokens(merged))
    check_idle(relocate)
    check_idle(packed)


def test_seeded_samples(engines, token_ids):
    """Two completions a prompt, each prompt in one chunk."""
    relocate, packed, stock = engines()
    prompts = [token_ids[:200], token_ids[300:517]]
    params = {"n": 2, "seed": 7, "temperature": 1.0, "salt": "seeds"}
    params["output_kind"] = RequestOutputKind.FINAL_ONLY  # both completions in one output
    expected = tokens(run(stock, prompts, **params))
    assert all(first != second for first, second in expected)
    assert tokens(run(relocate, prompts, **params)) == expected
    assert all(
        [len(c) for c in found] == [32, 32] for found in tokens(run(packed, prompts, **params))
    )
    check_idle(relocate)
    check_idle(packed)


def test_logprobs_of_answers(engines, token_ids):
    relocate, packed, stock = engines()
    prompts = [token_ids[:300], token_ids[400:731]]
    params = {"logprobs": 4, "salt": "logprobs"}
    ours, plain = run(relocate, prompts, **params), run(stock, prompts, **params)
    assert tokens(ours) == tokens(plain)
    for got, want in zip(ours, plain, strict=True):
        pairs = zip(got.outputs[0].logprobs, want.outputs[0].logprobs, strict=True)
        for mine, theirs in pairs:
            assert set(mine) == set(theirs)
            for token, entry in mine.items():
                assert entry.logprob == pytest.approx(theirs[token].logprob, abs=1e-3)
    for output in run(packed, prompts, **params):
        steps = output.outputs[0].logprobs
        assert len(steps) == 32
        assert all(math.isfinite(e.logprob) for step in steps for e in step.values())
    check_idle(packed)


@pytest.mark.parametrize("size", [2048, 100])
def test_prompt_logprobs_are_exactly_stocks(engines, token_ids, size):
    """They come from the prefill; a second time too, when the prompt's blocks are cached."""
    relocate, packed, stock = engines(max_num_batched_tokens=size)
    prompt = token_ids[:300]
    params = {"prompt_logprobs": 2, "salt": "prompt logprobs"}
    for _ in range(2):
        (expected,) = run(stock, [prompt], **params)
        for engine in (relocate, packed):
            (found,) = run(engine, [prompt], **params)
            assert found.prompt_logprobs == expected.prompt_logprobs
            check_idle(engine)


def test_stop_strings(engines, token_ids):
    relocate, packed, stock = engines()
    prompts = [token_ids[:300], token_ids[500:900]]
    texts = [o.outputs[0].text for o in run(stock, prompts, salt="stop")]
    stop = [text[len(text) // 2 :][:5] for text in texts]
    expected = run(stock, prompts, salt="stop", stop=stop)
    assert {o.outputs[0].finish_reason for o in expected} == {"stop"}
    ours = run(relocate, prompts, salt="stop", stop=stop)
    for got, want in zip(ours, expected, strict=True):
        assert got.outputs[0].text == want.outputs[0].text
        assert got.outputs[0].stop_reason == want.outputs[0].stop_reason
    for output in run(packed, prompts, salt="stop", stop=stop):
        assert not any(word in output.outputs[0].text for word in stop)
    check_idle(relocate)
    check_idle(packed)


def test_min_tokens(engines, token_ids):
    """Stop tokens that would come early are held off until the asked length."""
    relocate, packed, stock = engines()
    prompts = [token_ids[:300], token_ids[500:900]]
    early = sorted({c[0][2] for c in tokens(run(stock, prompts, salt="min"))})
    params = {"stop_token_ids": early, "salt": "min", "max_tokens": 40}
    assert all(len(c[0]) <= 3 for c in tokens(run(stock, prompts, **params)))
    params["min_tokens"] = 20
    expected = tokens(run(stock, prompts, **params))
    assert tokens(run(relocate, prompts, **params)) == expected
    for found in (expected, tokens(run(packed, prompts, **params))):
        assert all(len(c[0]) >= 20 for c in found)
        assert not any(set(c[0][:20]) & set(early) for c in found)
    check_idle(relocate)
    check_idle(packed)


def test_priorities_in_a_tight_pool(make_engine, tiny_model, token_ids):
    """Late and more important requests push out earlier ones, which start again."""
    settings = {
        "scheduling_policy": "priority",
        "max_model_len": 512,
        "num_gpu_blocks_override": 24,
    }
    prompts = [token_ids[n * 400 : n * 400 + 260 + 30 * n] for n in range(4)]

    def all_of(engine):
        names, preempted = [], set()

        def watch():
            live = engine.scheduler.requests.items()
            preempted.update(name for name, request in live if request.num_preemptions)

        for number, prompt in enumerate(prompts):
            request = {"prompt_token_ids": prompt}
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            names.append(f"p{number}")
            priority = len(prompts) - number
            engine.engine.add_request(names[-1], request, params, priority=priority)
            for _ in range(6):
                engine.step()
        return tokens(finish(engine, names, watch)), len(preempted)

    expected, num_preemptions = all_of(make_engine(tiny_model(), **settings))
    assert num_preemptions > 0
    relocate = make_engine(tiny_model(), RELOCATE, **settings)
    found, num_preemptions = all_of(relocate)
    assert found == expected
    assert num_preemptions > 0
    check_idle(relocate)
    packed = make_engine(tiny_model(), CONFIG, **settings)
    assert [len(c[0]) for c in all_of(packed)[0]] == [60] * 4
    check_idle(packed)


def test_second_turn(engines, token_ids):
    """The second prompt is the first, its answer and a question: cached as far as stock has it."""
    relocate, packed, stock = engines()
    prompt, question = token_ids[:330], token_ids[2000:2040]

    def talk(engine):
        (first,) = run(engine, [prompt], salt="turns", max_tokens=40)
        answer = list(first.outputs[0].token_ids)
        (second,) = run(engine, [prompt + answer + question], salt="turns", max_tokens=40)
        return answer, list(second.outputs[0].token_ids), second.num_cached_tokens

    first, second, cached = talk(stock)
    assert cached == (330 + 40 - 1) // BLOCK_SIZE * BLOCK_SIZE
    ours = talk(relocate)
    assert ours[:2] == (first, second)
    # what a compressed request computes is not published, so hits end with its prompt
    assert ours[2] == 330 // BLOCK_SIZE * BLOCK_SIZE
    assert talk(packed)[2] == 330 // BLOCK_SIZE * BLOCK_SIZE
    check_idle(relocate)
    check_idle(packed)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two random adapters for the tiny Llama, as PEFT writes them."""
    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("adapter")
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(2):
            for name, size in (("q_proj", 128), ("v_proj", 64)):
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                weights[f"{key}.lora_A.weight"] = torch.randn(4, 64, generator=generator)
                weights[f"{key}.lora_B.weight"] = torch.randn(size, 4, generator=generator) / 4
        safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "v_proj"],
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        folders.append(folder)
    return folders


def test_two_adapters_in_one_batch(engines, token_ids, adapters):
    """The same prompt with each adapter: hits, and answers, are each one's own.

    Without a request of the base model: beside adapters vLLM's CPU kernels do not give its tokens.
    """
    relocate, packed, stock = engines(enable_lora=True, max_loras=2, max_lora_rank=8)
    requests = [LoRARequest(f"a{n}", n, str(path)) for n, path in enumerate(adapters, 1)]

    def batch(engine, time):
        names = []
        for number, lora in enumerate(requests):
            request = {"prompt_token_ids": token_ids[:300]}
            params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
            names.append(f"lora-{time}-{number}")
            engine.engine.add_request(names[-1], request, params, lora_request=lora)
        return [c[0] for c in tokens(finish(engine, names))]

    expected = batch(stock, 0)
    assert expected[0] != expected[1]
    for time in range(2):
        assert batch(relocate, time) == expected
        check_idle(relocate)
        first, second = batch(packed, time)
        assert len(first) == len(second) == 32
        assert first != second
        check_idle(packed)
