"""Any order of arrivals, steps, answers, aborts, preemptions and resets leaks and mixes nothing.

Scheduler and block pool are vLLM's own with the plugin's; the worker is played (see `player`).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from harness import check_invariants
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from player import TOKEN, Player, check_idle, new_scheduler, view
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm_kvcompress.engine.protocol import ATTRIBUTE
from vllm_kvcompress.engine.scheduler import CompressionAsyncScheduler, CompressionScheduler

CONFIG = {
    "method": "semanticache",
    "min_prompt_tokens": 64,
    "min_output_tokens": 2,
    "window": 16,
    "threshold": 0.6,
    "max_keep": 0.3,
}
LIMIT = 512
"""Longest request; the pools of the tests hold one of this length and little more, or several."""

LENGTHS = st.one_of(
    st.sampled_from([1, 64, 127, 128, 129, 159, 160, 191, 192, 223, 224, 256, 288, 400, LIMIT - 1]),
    st.integers(1, LIMIT - 1),
)
MAX_TOKENS = st.one_of(st.sampled_from([1, 2, 16, 33]), st.integers(1, 100))
EXTRA_ARGS = st.sampled_from(
    [{}, {}, {}, {}, {"kv_compression": "none"}, {"kv_compression_keep": 0.3}]
)


class Life(RuleBasedStateMachine):
    """Requests in a small pool.

    Args:
        make_scheduler: makes a scheduler with ``num_blocks`` blocks.
        text: token ids that prompts are cut from.
        depth: most steps in flight.
        counts: what happened, over all lives.
    """

    def __init__(self, make_scheduler, text, depth, counts):
        super().__init__()
        self.make_scheduler, self.text, self.depth = make_scheduler, text, depth
        self.counts = counts

    @initialize(seed=st.integers(0, 1000), num_blocks=st.sampled_from([18, 22, 30, 44]))
    def start(self, seed, num_blocks):
        self.scheduler = self.make_scheduler(num_blocks)
        self.player = Player(self.scheduler, random.Random(seed), depth=self.depth)
        self.prompts, self.wanted = {}, {}

    def add_one(self, prompt, max_tokens, extra_args):
        max_tokens = min(max_tokens, LIMIT - len(prompt))
        name = self.player.add(prompt, max_tokens, **extra_args)
        self.prompts[name], self.wanted[name] = prompt, max_tokens

    @rule(
        start=st.sampled_from([0, 0, 4000, 8000, 12000]),
        length=LENGTHS,
        max_tokens=MAX_TOKENS,
        extra_args=EXTRA_ARGS,
    )
    def add(self, start, length, max_tokens, extra_args):
        self.add_one(self.text[start : start + length], max_tokens, extra_args)

    @rule(
        start=st.sampled_from([0, 4000, 8000]), length=LENGTHS, max_tokens=MAX_TOKENS, n=st.just(2)
    )
    def add_children(self, start, length, max_tokens, n):
        """As ``n`` of one request: the front end makes that many of the same prompt."""
        for _ in range(n):
            self.add_one(self.text[start : start + length], max_tokens, {})

    @precondition(lambda self: any(len(p) < 400 for p in self.prompts.values()))
    @rule(data=st.data(), num_tokens=st.integers(1, 64), max_tokens=MAX_TOKENS)
    def add_next_turn(self, data, num_tokens, max_tokens):
        """A prompt that continues another one with what that one generates."""
        names = [name for name, prompt in self.prompts.items() if len(prompt) < 400]
        prompt = self.prompts[data.draw(st.sampled_from(names))]
        self.add_one([*prompt, *[TOKEN] * num_tokens], max_tokens, {})

    def can_schedule(self):
        return self.scheduler.has_requests() and len(self.player.in_flight) < self.depth

    @precondition(can_schedule)
    @rule()
    def schedule(self):
        self.player.schedule()

    @precondition(lambda self: self.player.in_flight)
    @rule(failed=st.sampled_from([0.0, 0.0, 0.0, 1.0]), stop=st.sampled_from([0.0] * 4 + [0.3]))
    def answer(self, failed, stop):
        self.player.failure_rate, self.player.stop_rate = failed, stop
        if stop:
            for name in self.player.in_flight[0][0].num_scheduled_tokens:
                self.wanted.pop(name, None)
        self.player.answer()
        self.player.failure_rate = self.player.stop_rate = 0.0

    @precondition(lambda self: self.scheduler.has_requests())
    @rule(num_steps=st.integers(1, 40))
    def run(self, num_steps):
        for _ in range(num_steps):
            if self.scheduler.has_requests():
                self.player.step()

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.wanted.pop(name, None)

    def can_reset(self):
        return (
            self.depth > 1 or not self.player.in_flight
        )  # a synchronous engine waits for its step

    @precondition(can_reset)
    @rule(with_running=st.booleans())
    def reset_prefix_cache(self, with_running):
        done = self.scheduler.reset_prefix_cache(reset_running_requests=with_running)
        assert done or not with_running

    @rule(discard=st.booleans())
    def sleep_and_wake(self, discard):
        """As the engine does it with requests that are kept: steps in flight end first, then the
        cache is discarded, unless the sleep is of level 0."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self.player.in_flight:
            self.player.answer()
        if discard:
            assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert not view(self.scheduler).manager.compressed
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    @invariant()
    def no_block_is_mixed_up(self):
        seen = view(self.scheduler)
        check_invariants(seen)
        queue = seen.pool.free_block_queue.get_all_free_blocks()
        assert len(queue) == seen.pool.get_num_free_blocks()
        assert all(block.ref_cnt == 0 for block in queue)
        for block in seen.pool.blocks:
            if block.ref_cnt > 1 and not block.is_null:
                assert block.block_hash is not None, f"{block} has two owners"
        for blocks in seen.manager.req_to_blocks.values():
            ids = [block.block_id for block in blocks if not block.is_null]
            assert len(ids) == len(set(ids))

    @invariant()
    def nothing_is_kept_for_the_dead(self):
        planner, manager = self.scheduler.planner, view(self.scheduler).manager
        alive = set(self.scheduler.requests)
        assert set(manager.req_to_blocks) <= alive
        assert set(planner._candidates) <= alive | self.scheduler.finished_req_ids
        assert set(planner._compressed) <= set(manager.compressed) | set(manager._released)
        assert not set(planner._candidates) & set(planner._compressed)
        plans = [p for o, _ in self.player.in_flight for p in getattr(o, ATTRIBUTE).compress]
        assert set(planner._held) <= {plan.sequence for plan in plans}

    def teardown(self):
        if not hasattr(self, "player"):
            return
        self.player.drain()
        self.counts["plans"] += self.player.num_plans
        self.counts["preemptions"] += self.player.num_preemptions
        check_idle(self.scheduler)
        memory = self.player.memory
        assert not memory.states
        assert not memory.slots
        assert not memory.rows
        for name, max_tokens in self.wanted.items():
            assert len(self.player.outputs[name]) == max_tokens, name


@pytest.mark.parametrize(
    ("asynchronous", "prefix_caching"),
    [
        pytest.param(False, False, id="sync-no_cache"),
        pytest.param(True, True, id="async-cache"),
        pytest.param(False, True, id="sync-cache", marks=pytest.mark.slow),
        pytest.param(True, False, id="async-no_cache", marks=pytest.mark.slow),
    ],
)
def test_life(make_engine, tiny_model, token_ids, asynchronous, prefix_caching):
    engine = make_engine(
        tiny_model(),
        CONFIG,
        num_gpu_blocks_override=64,
        max_model_len=LIMIT,
        max_num_batched_tokens=128,
    )
    cache = {"asynchronous": asynchronous, "enable_prefix_caching": prefix_caching}
    expected = CompressionAsyncScheduler if asynchronous else CompressionScheduler
    assert type(new_scheduler(engine, **cache)) is expected
    counts = Counter()
    run_state_machine_as_test(
        lambda: Life(
            lambda num_blocks: new_scheduler(engine, num_blocks=num_blocks, **cache),
            token_ids,
            2 if asynchronous else 1,
            counts,
        ),
        settings=settings(
            max_examples=40,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # to shrink a failure takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert counts["plans"] > 40
    assert counts["preemptions"] > 40
