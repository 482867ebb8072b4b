"""The asynchronous scheduler: plans are settled one step after the next one was scheduled.

vLLM's CPU worker runs synchronously, so the scheduler is real here and the worker is played: it
answers steps in order, one step late, with invented tokens and honest or failing reports.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from types import SimpleNamespace

import pytest
from harness import check_invariants
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_kvcompress.engine.protocol import ATTRIBUTE, Report
from vllm_kvcompress.engine.scheduler import CompressionAsyncScheduler, create_scheduler

CONFIG = {
    "method": "semanticache",
    "min_prompt_tokens": 64,
    "min_output_tokens": 2,
    "window": 16,
    "threshold": 0.6,
    "max_keep": 0.6,
}
BLOCK_SIZE = 32


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

    def make(**changes):
        vllm_config = copy.deepcopy(engine.scheduler.vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        for name, value in changes.items():
            setattr(vllm_config.cache_config, name, value)
        return create_scheduler(
            vllm_config,
            kv_cache_config=engine.scheduler.kv_cache_config,
            structured_output_manager=engine.scheduler.structured_output_manager,
            block_size=BLOCK_SIZE,
            log_stats=True,
        )

    return make


def view(scheduler):
    """What `check_invariants` looks at."""
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    return SimpleNamespace(
        scheduler=scheduler,
        pool=scheduler.kv_cache_manager.block_pool,
        manager=manager,
        compressed_manager=manager,
        planner=scheduler.planner,
    )


class Player:
    """Runs a scheduler with up to two steps in flight.

    Args:
        scheduler: the scheduler.
        rng: decides how many cells a plan uses and which plans fail.
        failure_rate: share of plans that the worker gives up.
    """

    def __init__(self, scheduler, rng, failure_rate=0.0):
        self.scheduler, self.rng, self.failure_rate = scheduler, rng, failure_rate
        self.in_flight = deque()
        self.num_plans = self.num_requests = 0
        self.outputs = {}
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    def add(self, prompt, max_tokens, **extra_args):
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args or None
        )
        params.update_from_generation_config({}, None)
        name = f"q{self.num_requests}"
        self.num_requests += 1
        self.scheduler.add_request(
            Request(name, list(prompt), params, None, block_hasher=self.hasher)
        )
        return name

    def report(self, plan):
        cells = len(plan.slab) * 4  # 2 layers x 2 KV heads
        failed = self.rng.random() < self.failure_rate
        return Report(
            sequence=plan.sequence,
            request_id=plan.request_id,
            num_cells=0 if failed else self.rng.randrange(1, cells + 1),
            num_entries=4,
            num_segments=4,
            seconds=0.001,
            error="slab_overflow" if failed else None,
        )

    def step(self):
        """Schedule one step and answer the oldest if two are in flight."""
        output = self.scheduler.schedule()
        plans = getattr(output, ATTRIBUTE).compress
        self.num_plans += len(plans)
        decoding = {
            name
            for name in output.num_scheduled_tokens
            if not self.scheduler.requests[name].is_prefill_chunk
        }
        self.in_flight.append((output, decoding))
        check_invariants(view(self.scheduler))
        if len(self.in_flight) == 2 or not output.total_num_scheduled_tokens:
            self.answer()

    def answer(self):
        output, decoding = self.in_flight.popleft()
        names = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] if name in decoding else [] for name in names],
        )
        reports = [self.report(plan) for plan in getattr(output, ATTRIBUTE).compress]
        setattr(answer, ATTRIBUTE, reports)
        for item in self.scheduler.update_from_output(output, answer).values():
            for result in item.outputs:
                tokens = self.outputs.setdefault(result.request_id, [])
                tokens.extend(result.new_token_ids)
        check_invariants(view(self.scheduler))

    def drain(self):
        for _ in range(5000):
            if not (self.scheduler.has_requests() or self.in_flight):
                break
            if self.scheduler.has_requests():
                self.step()
            else:
                self.answer()
        else:
            pytest.fail("requests did not end: livelock")


def check_idle(scheduler):
    seen = view(scheduler)
    check_invariants(seen)
    assert seen.pool.get_num_free_blocks() == seen.pool.num_gpu_blocks - 1
    assert not seen.manager.compressed
    assert not seen.planner._held


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
