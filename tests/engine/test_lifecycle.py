"""Requests that come, share, are preempted, aborted and end at any moment leak nothing."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
from harness import check_idle, check_invariants
from tiny_soft_tokens import make_soft_tokens

from vllm_kvcompress.core import SlabOverflowError
from vllm_kvcompress.engine import worker
from vllm_kvcompress.engine.worker import CompressionRunner
from vllm_kvcompress.methods.semanticache import SemantiCache

CONFIG = {
    "method": "semanticache",
    "min_prompt_tokens": 64,
    "min_output_tokens": 2,
    "window": 16,
    "threshold": 0.6,
    "max_keep": 0.7,
}
SHORT = {"max_model_len": 592}


@pytest.mark.parametrize(
    ("method", "seed"),
    [(m, s) for m in ("semanticache", "relocate") for s in range(4)]
    + [("selkv", 0), ("selkv", 1), ("metasoft", 0)],
)
def test_random_life(make_engine, tiny_model, token_ids, tmp_path, method, seed):
    """A tight pool, shared prefixes, ``n`` children, aborts: invariants after every step."""
    rng = random.Random(seed)
    config = {**CONFIG, "method": method}
    if method == "metasoft":
        config["soft_tokens"] = str(make_soft_tokens(tiny_model(), tmp_path, default="dynamic"))
    engine = make_engine(
        tiny_model(),
        config,
        num_gpu_blocks_override=rng.choice([48, 64, 96]),
        max_num_batched_tokens=rng.choice([48, 128, 512]),
        enable_prefix_caching=seed % 2 == 0,
        max_num_seqs=6,
        max_model_len=768,
    )
    alive: list[str] = []
    finished = added = 0
    for _ in range(220):
        if rng.random() < 0.25 and len(alive) < 12:
            start = rng.choice([0, 0, 1000, rng.randrange(20_000)])
            prompt = token_ids[start : start + rng.randrange(1, 560)]
            # no seed: vLLM's CPU runner cannot rewind a seeded generator between prompt chunks
            sampling = {"n": 2, "temperature": 1.0} if rng.random() < 0.2 else {}
            name = engine.add(prompt, max_tokens=rng.randrange(1, 120), **sampling)
            alive.append(name)
            added += 1
        if alive and rng.random() < 0.05:
            engine.engine.abort_request([alive.pop(rng.randrange(len(alive)))])
        if engine.engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished and output.request_id in alive:
                    alive.remove(output.request_id)
                    finished += 1
        check_invariants(engine)
    finished += len([name for name in engine.drain() if name in alive])
    check_idle(engine)
    assert added > 20
    assert finished > 10
    assert engine.planner._metrics.requests_compressed._value.get() > 0


def test_freed_blocks_are_used_by_others(make_engine, tiny_model, token_ids):
    """Blocks that a compression gave back hold another request's prompt before the first ends."""
    engine = make_engine(
        tiny_model(), CONFIG, num_gpu_blocks_override=30, enable_prefix_caching=False, **SHORT
    )
    first = engine.add(token_ids[:480], max_tokens=100)
    engine.step()
    live = engine.live_id(first)
    before = {b.block_id for b in engine.manager.req_to_blocks[live]}
    engine.step()
    held = {b.block_id for b in engine.manager.req_to_blocks[live] if not b.is_null}
    freed = before - held
    assert len(freed) >= 3
    second = engine.add(token_ids[5000:5300], max_tokens=40)
    engine.step()
    theirs = {b.block_id for b in engine.manager.req_to_blocks[engine.live_id(second)]}
    assert theirs & freed
    check_invariants(engine)
    engine.drain()
    check_idle(engine)


def test_usage_falls_when_blocks_come_back(make_engine, tiny_model, token_ids):
    engine = make_engine(tiny_model(), CONFIG, num_gpu_blocks_override=32, **SHORT)
    engine.add(token_ids[:480], max_tokens=40)
    engine.step()
    full = engine.scheduler.get_kv_cache_usage()
    engine.step()
    assert engine.scheduler.get_kv_cache_usage() < full
    engine.drain()


def test_compressed_content_is_never_published(make_engine, tiny_model, token_ids):
    """After a compressed request has generated over block borders, a prompt that continues its
    text must not hit anything past its prompt."""
    engine = make_engine(tiny_model(), CONFIG)
    prompt = token_ids[:320]
    generated = engine.generate([prompt], max_tokens=100)[0][0]
    name = engine.add(prompt + generated[:96], max_tokens=1)
    final = engine.drain()[name]
    assert final.num_cached_tokens <= len(prompt)
    fresh = make_engine(tiny_model())
    again = fresh.add(prompt + generated[:96], max_tokens=1)
    expected = fresh.drain()[again].outputs[0].token_ids
    assert final.outputs[0].token_ids == expected


def test_prefix_hits_stay_correct(make_engine, tiny_model, token_ids):
    """A request that hits the prefix of a compressed, still running one sees the exact cache."""
    prompt, tail = token_ids[:320], token_ids[9000:9040]
    engine = make_engine(tiny_model(), CONFIG)
    engine.add(prompt, max_tokens=200)
    for _ in range(4):
        engine.step()
    assert engine.compressed_manager.compressed
    name = engine.add(prompt + tail, max_tokens=8, extra_args={"kv_compression": "none"})
    final = engine.drain()[name]
    assert final.num_cached_tokens >= 288
    stock = make_engine(tiny_model())
    expected = stock.generate([prompt + tail], max_tokens=8)[0][0]
    assert list(final.outputs[0].token_ids) == expected


def test_shared_prompts_wait_for_their_last_owner(make_engine, tiny_model, token_ids):
    """Nothing comes back from blocks that others hold, so nothing is taken for them."""
    engine = make_engine(tiny_model(), CONFIG)
    prompt = token_ids[4000:4321]
    long = engine.add(prompt, max_tokens=120)
    engine.step()  # cached before the sharer is admitted
    short = engine.add(prompt, max_tokens=20, extra_args={"kv_compression": "none"})
    shared, compressed_at = True, None
    while engine.engine.has_unfinished_requests():
        finished = {output.request_id for output in engine.step() if output.finished}
        check_invariants(engine)
        if shared:
            assert not engine.compressed_manager.compressed
        elif engine.compressed_manager.compressed and compressed_at is None:
            compressed_at = engine.scheduler.requests[engine.live_id(long)].num_output_tokens
        shared = shared and short not in finished
    assert compressed_at is not None
    assert 20 <= compressed_at <= 40
    engine.flush()
    check_idle(engine)


def test_pool_full_at_planning_time(make_engine, tiny_model, token_ids):
    """No room for the slab: the request runs uncompressed and is not lost."""
    engine = make_engine(
        tiny_model(), CONFIG, num_gpu_blocks_override=20, enable_prefix_caching=False, **SHORT
    )
    bypassed = engine.planner._metrics._bypassed
    counter = bypassed.labels(*engine.planner._metrics._labels, "no_free_blocks")
    before = counter._value.get()
    name = engine.add(token_ids[:500], max_tokens=30)
    assert len(engine.drain()[name].outputs[0].token_ids) == 30
    assert counter._value.get() == before + 1
    check_idle(engine)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(SlabOverflowError, "slab_overflow"), (torch.OutOfMemoryError, "out_of_memory")],
)
def test_worker_failure_is_rolled_back(
    make_engine, tiny_model, token_ids, monkeypatch, error, reason
):
    """A compression that the worker gives up leaves the request exactly as it was."""

    def fail(self, prompt):
        raise error("made to fail")

    prompts = [token_ids[:400], token_ids[900:1300]]
    with monkeypatch.context() as patch:
        patch.setattr(SemantiCache, "compress_into", fail)
        engine = make_engine(tiny_model(), CONFIG)
        metrics = engine.planner._metrics
        failures = metrics._failed.labels(*metrics._labels, reason)
        before = failures._value.get()
        ours = engine.generate(prompts)
        check_idle(engine)
    assert failures._value.get() == before + 2
    assert ours == make_engine(tiny_model()).generate(prompts)


def test_only_compression_may_wait_for_the_device(make_engine, tiny_model, token_ids, monkeypatch):
    """What vLLM reports or refuses under ``VLLM_GPU_SYNC_CHECK`` is allowed there alone."""
    allowed, seen = [], []

    @contextmanager
    def allow():
        allowed.append(True)
        yield
        allowed.pop()

    def compress(self, prompt, original=SemantiCache.compress_into):
        seen.append(bool(allowed))
        return original(self, prompt)

    def sample(self, *args, original=CompressionRunner.sample_tokens):
        assert not allowed
        return original(self, *args)

    monkeypatch.setattr(worker, "gpu_sync_allowed", allow)
    monkeypatch.setattr(SemantiCache, "compress_into", compress)
    monkeypatch.setattr(CompressionRunner, "sample_tokens", sample)
    make_engine(tiny_model(), CONFIG).generate([token_ids[:400]])
    assert seen == [True]


def test_reset_prefix_cache_with_running_requests(make_engine, tiny_model, token_ids):
    engine = make_engine(tiny_model(), CONFIG)
    name = engine.add(token_ids[:400], max_tokens=40)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    check_invariants(engine)
    final = engine.drain()[name]
    assert len(final.outputs[0].token_ids) == 40
    check_idle(engine)


def test_no_livelock_in_a_tiny_pool(make_engine, tiny_model, token_ids):
    """More load than a tiny pool holds: every request ends, within a bounded number of steps."""
    engine = make_engine(
        tiny_model(), CONFIG, num_gpu_blocks_override=20, enable_prefix_caching=False, **SHORT
    )
    names = [engine.add(token_ids[i * 500 : i * 500 + 400], max_tokens=100) for i in range(6)]
    final, steps = {}, 0
    while engine.engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                final[output.request_id] = len(output.outputs[0].token_ids)
        steps += 1
        check_invariants(engine)
        assert steps < 3000
    engine.flush()
    assert final == dict.fromkeys(names, 100)
    check_idle(engine)
