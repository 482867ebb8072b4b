"""The asynchronous scheduler: plans are settled one step after the next one was scheduled.

vLLM's CPU worker runs synchronously, so the scheduler is real here and the worker is played: it
answers steps in order, one step late.
"""

from __future__ import annotations

import random

import pytest
from harness import check_invariants
from player import Player, check_idle, new_scheduler, view
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from vllm_kvcompress.engine.protocol import ATTRIBUTE
from vllm_kvcompress.engine.scheduler import CompressionAsyncScheduler

CONFIG = {
    "method": "semanticache",
    "min_prompt_tokens": 64,
    "min_output_tokens": 2,
    "window": 16,
    "threshold": 0.6,
    "max_keep": 0.6,
}


@pytest.fixture
def make_scheduler(make_engine, tiny_model):
    """A fresh asynchronous scheduler with the configuration of a real engine."""
    engine = make_engine(
        tiny_model(),
        CONFIG,
        num_gpu_blocks_override=64,
        max_model_len=1024,
        max_num_batched_tokens=128,
    )

    return lambda **cache: new_scheduler(engine, **cache)


def test_it_is_vllms_asynchronous_scheduler(make_scheduler):
    scheduler = make_scheduler()
    assert type(scheduler) is CompressionAsyncScheduler
    assert isinstance(scheduler, AsyncScheduler)


def test_the_plan_comes_before_the_first_token_is_known(make_scheduler, token_ids):
    """The first decode step carries the plan although the step before it is not answered yet."""
    player = Player(make_scheduler(), random.Random(0))
    name = player.add(token_ids[:200], 20)
    player.step()
    player.step()
    assert player.num_plans == 0
    player.step()
    assert player.num_plans == 1
    assert player.scheduler.requests[name].num_output_tokens == 1
    player.drain()
    assert len(player.outputs[name]) == 20
    check_idle(player.scheduler)


@pytest.mark.parametrize("failure_rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_random_life(make_scheduler, token_ids, seed, failure_rate):
    rng = random.Random(seed)
    player = Player(make_scheduler(enable_prefix_caching=seed % 2 == 0), rng, failure_rate)
    alive, wanted = [], {}
    for _ in range(400):
        if rng.random() < 0.2 and len(player.scheduler.requests) < 10:
            start = rng.choice([0, 0, rng.randrange(20_000)])
            length = rng.randrange(1, 700)
            max_tokens = rng.randrange(1, 150)
            name = player.add(token_ids[start : start + length], max_tokens)
            alive.append(name)
            wanted[name] = max_tokens
        if alive and rng.random() < 0.04:
            name = alive.pop(rng.randrange(len(alive)))
            player.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            wanted.pop(name)
        if rng.random() < 0.01:
            player.scheduler.reset_prefix_cache(reset_running_requests=True)
        player.step()
    player.drain()
    check_idle(player.scheduler)
    assert player.num_plans > 0
    for name, max_tokens in wanted.items():
        assert len(player.outputs[name]) == max_tokens, name


def test_a_plan_in_flight_of_an_aborted_request_is_dropped(make_scheduler, token_ids):
    player = Player(make_scheduler(), random.Random(0))
    name = player.add(token_ids[:200], 20)
    for _ in range(3):
        player.step()
    assert player.num_plans == 1
    player.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    check_invariants(view(player.scheduler))
    player.drain()
    check_idle(player.scheduler)


def test_a_worker_that_does_not_answer_a_plan_is_an_error(make_scheduler, token_ids):
    player = Player(make_scheduler(), random.Random(0))
    player.add(token_ids[:200], 20)
    player.step()
    player.step()
    output = player.scheduler.schedule()
    answer = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    with pytest.raises(RuntimeError, match=r"did not answer compression plan .*--worker-cls"):
        player.scheduler.planner.settle(getattr(output, ATTRIBUTE), getattr(answer, ATTRIBUTE, []))
