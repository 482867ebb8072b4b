"""Moving every token into a slab unchanged must change nothing, whatever else happens."""

from __future__ import annotations

import pytest
from harness import check_idle, check_invariants

RELOCATE = {"method": "relocate", "min_prompt_tokens": 64, "min_output_tokens": 2}
LENGTHS = (150, 201, 333, 96, 257, 480)


@pytest.fixture
def prompts(token_ids):
    return [token_ids[i * 700 : i * 700 + n] for i, n in enumerate(LENGTHS)]


def test_prefix_caching(make_engine, tiny_model, prompts):
    ours, stock = make_engine(tiny_model(), RELOCATE), make_engine(tiny_model())
    for _ in range(2):
        assert ours.generate(prompts) == stock.generate(prompts)
        check_idle(ours)


def test_second_round_hits_the_cache(make_engine, tiny_model, prompts):
    ours = make_engine(tiny_model(), RELOCATE)
    prompt = prompts[-1][::-1]  # nobody else's prefix
    first = ours.add(prompt)
    assert ours.drain()[first].num_cached_tokens == 0
    second = ours.add(prompt)
    final = ours.drain()[second]
    assert final.num_cached_tokens >= LENGTHS[-1] // 32 * 32 - 32


@pytest.mark.parametrize("chunk", [33, 96, 512])
def test_chunked_prefill(make_engine, tiny_model, prompts, chunk):
    settings = {"max_num_batched_tokens": chunk, "enable_chunked_prefill": True}
    ours = make_engine(tiny_model(), RELOCATE, **settings)
    stock = make_engine(tiny_model(), **settings)
    assert ours.generate(prompts) == stock.generate(prompts)
    assert ours.planner._metrics.requests_compressed._value.get() > 0
    check_idle(ours)


def test_preemption(make_engine, tiny_model, prompts):
    # 40 blocks: about three prompts, and their output grows past the end of the pool
    settings = {
        "num_gpu_blocks_override": 40,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
    }
    ours = make_engine(tiny_model(), RELOCATE, **settings)
    stock = make_engine(tiny_model(), **settings)
    names = [ours.add(prompt, max_tokens=150) for prompt in prompts]
    preempted, final = 0, {}
    while ours.engine.has_unfinished_requests():
        for output in ours.step():
            if output.finished:
                final[output.request_id] = list(output.outputs[0].token_ids)
        preempted = max(preempted, sum(r.num_preemptions for r in ours.scheduler.requests.values()))
        check_invariants(ours)
    ours.flush()
    assert preempted > 0, "the pool was not tight enough to test anything"
    expected = [c[0] for c in stock.generate(prompts, max_tokens=150)]
    assert [final[name] for name in names] == expected
    check_idle(ours)


def test_parallel_sampling(make_engine, tiny_model, prompts):
    params = {"n": 3, "temperature": 0.8, "seed": 7, "max_tokens": 40}
    ours, stock = make_engine(tiny_model(), RELOCATE), make_engine(tiny_model())
    assert ours.generate(prompts[:2], **params) == stock.generate(prompts[:2], **params)
    check_idle(ours)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 9])
def test_abort_leaves_the_others_alone(make_engine, tiny_model, prompts, after):
    """Abort after a number of steps: waiting, prefilling, planned, compressed, decoding."""
    settings = {"max_num_batched_tokens": 128}
    ours = make_engine(tiny_model(), RELOCATE, **settings)
    victim = ours.add(prompts[-1])
    survivor = ours.add(prompts[0])
    for _ in range(after):
        ours.step()
        check_invariants(ours)
    ours.engine.abort_request([victim])
    final = ours.drain()
    check_idle(ours)
    stock = make_engine(tiny_model(), **settings)
    expected = stock.generate([prompts[0]])[0][0]
    assert list(final[survivor].outputs[0].token_ids) == expected


def test_real_model(make_engine, model_path, token_ids):
    prompts = [token_ids[:700], token_ids[3000:4200]]
    ours, stock = make_engine(model_path, RELOCATE), make_engine(model_path)
    assert ours.generate(prompts, max_tokens=48) == stock.generate(prompts, max_tokens=48)
    check_idle(ours)
