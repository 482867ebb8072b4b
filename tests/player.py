"""A played worker: vLLM's scheduler and block pool are real, what they schedule is not computed.

Steps are answered in order with invented tokens and honest or failing reports. What a real worker
would write and read is tracked block by block, so that a step that would read anything but its own
request's context fails.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from types import SimpleNamespace

import pytest
from harness import check_invariants
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_kvcompress.engine.protocol import ATTRIBUTE, Report
from vllm_kvcompress.engine.scheduler import create_scheduler

BLOCK_SIZE = 32
CELLS_PER_BLOCK = 4
"""2 layers x 2 KV heads of the tiny model."""
TOKEN = 7
"""What every request generates."""
STOP = 9
"""What ends every request that generates it."""


def new_scheduler(engine, *, asynchronous=True, num_blocks=None, **cache):
    """A fresh scheduler with the configuration of a real engine.

    Args:
        engine: the engine, whose blocks have `BLOCK_SIZE` tokens.
        asynchronous: which of the two.
        num_blocks: of the pool; None takes the engine's.
        **cache: changes of the cache configuration.
    """
    vllm_config = copy.copy(engine.scheduler.vllm_config)
    for name in ("scheduler_config", "cache_config"):
        setattr(vllm_config, name, copy.copy(getattr(vllm_config, name)))
    vllm_config.scheduler_config.async_scheduling = asynchronous
    for name, value in cache.items():
        setattr(vllm_config.cache_config, name, value)
    kv_cache_config = copy.copy(engine.scheduler.kv_cache_config)
    if num_blocks is not None:
        kv_cache_config.num_blocks = num_blocks
    return create_scheduler(
        vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=engine.scheduler.structured_output_manager,
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


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


def check_idle(scheduler):
    seen = view(scheduler)
    check_invariants(seen)
    assert seen.pool.get_num_free_blocks() == seen.pool.num_gpu_blocks - 1
    assert not seen.manager.compressed
    assert not seen.planner._held
    assert not seen.planner._candidates
    assert not seen.planner._compressed


class Memory:
    """What the worker knows and what its blocks hold.

    An entry stands for all tokens it depends on: an exact one for the tokens up to its own, one
    computed after a compression for that compression, one of a slab for its plan.

    Attributes:
        rows: block ids by request.
        states: (plan, blocks used, first block) of compressed requests.
        slots: compressed request by first block, as ``DeviceState.slot_of_block``.
    """

    def __init__(self):
        self.rows, self.states, self.slots = {}, {}, {}
        self._blocks, self._expected, self._texts = {}, {}, {}

    def run(self, output, report):
        """Execute a step; ``report`` makes the answer to a plan. Returns the reports."""
        step = getattr(output, ATTRIBUTE)
        for name in step.release:
            _, _, first = self.states.pop(name, (None, 0, None))
            self.slots.pop(first, None)
        reports = [self._compress(plan, report(plan)) for plan in step.compress]
        for name in output.finished_req_ids:
            for table in (self.rows, self._expected, self._texts):
                table.pop(name, None)
        starts = {}
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = list(new.block_ids[0])
            self._texts[new.req_id] = []
            self._extend(new.req_id, new.prompt_token_ids)
            self._expected[new.req_id] = []
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.rows[name] = list(blocks[0])
                self._expected[name] = []
            elif blocks is not None:
                self.rows[name] += blocks[0]
            starts[name] = start
        for name, num_tokens in output.num_scheduled_tokens.items():
            self._write(name, starts[name], starts[name] + num_tokens)
        for name, num_tokens in output.num_scheduled_tokens.items():
            self._read(name, starts[name] + num_tokens)
        return reports

    def _compress(self, plan, report):
        row = self.rows[plan.request_id]
        assert row[: len(plan.source)] == plan.source
        self._check_content(plan.request_id, 0, plan.gap_end)
        for block in plan.slab:
            self._blocks[block] = [("slab", plan.sequence)] * BLOCK_SIZE
        if report.error is None:
            assert plan.request_id not in self.states
            used = math.ceil(report.num_cells / CELLS_PER_BLOCK)
            row[: len(plan.source)] = plan.slab[:used] + [0] * (len(plan.source) - used)
            self.states[plan.request_id] = (plan, used, plan.slab[0])
            self.slots[plan.slab[0]] = plan.request_id
        return report

    def _extend(self, name, tokens):
        text = self._texts[name]
        for token in tokens:
            text.append(hash((text[-1] if text else None, token)))

    def _write(self, name, start, end):
        text, expected, row = self._texts[name], self._expected[name], self.rows[name]
        self._extend(name, [TOKEN] * (end - len(text)))
        expected[:] = [*expected, *text[len(expected) : start]][:start]
        plan = self.states[name][0] if name in self.states else None
        for position in range(start, end):
            entry = (plan.sequence, position) if plan else text[position]
            expected.append(entry)
            block = row[position // BLOCK_SIZE]
            assert block, f"{name} writes position {position} into the null block"
            content = self._blocks.setdefault(block, [None] * BLOCK_SIZE)
            content[position % BLOCK_SIZE] = entry

    def _read(self, name, end):
        row, start = self.rows[name], 0
        assert self.slots.get(row[0]) == (name if name in self.states else None)
        if name in self.states:
            plan, used, _ = self.states[name]
            start = plan.gap_end
            for block in row[:used]:
                assert self._blocks[block] == [("slab", plan.sequence)] * BLOCK_SIZE
        self._check_content(name, start, end)

    def _check_content(self, name, start, end):
        row, expected = self.rows[name], self._expected[name]
        for first in range(start, end, BLOCK_SIZE):
            num_tokens = min(BLOCK_SIZE, end - first)
            found = self._blocks[row[first // BLOCK_SIZE]][:num_tokens]
            assert found == expected[first : first + num_tokens], (
                f"{name} would read another context from position {first} on"
            )


class Player:
    """Runs a scheduler with up to ``depth`` steps in flight.

    Args:
        scheduler: the scheduler.
        rng: decides how many cells a plan uses, which plans fail, and which requests stop.
        failure_rate: share of plans that the worker gives up.
        depth: most steps in flight; 1 is what a synchronous engine does.
    """

    def __init__(self, scheduler, rng, failure_rate=0.0, depth=2):
        self.scheduler, self.rng, self.failure_rate = scheduler, rng, failure_rate
        self.stop_rate = 0.0
        self.depth = depth
        self.memory = Memory()
        self.in_flight = deque()
        self.num_plans = self.num_requests = self.num_preemptions = 0
        self.outputs = {}
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    def add(self, prompt, max_tokens, **extra_args):
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[STOP],
            extra_args=extra_args or None,
        )
        params.update_from_generation_config({}, None)
        name = f"q{self.num_requests}"
        self.num_requests += 1
        self.scheduler.add_request(
            Request(name, list(prompt), params, None, block_hasher=self.hasher)
        )
        return name

    def report(self, plan):
        cells = len(plan.slab) * CELLS_PER_BLOCK
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
        """Schedule one step and answer the oldest if as many as allowed are in flight."""
        while len(self.in_flight) >= self.depth:
            self.answer()
        if not self.schedule() or len(self.in_flight) == self.depth:
            self.answer()

    def schedule(self):
        """Schedule one step; whether it computes anything."""
        output = self.scheduler.schedule()
        plans = getattr(output, ATTRIBUTE).compress
        self.num_plans += len(plans)
        self.num_preemptions += len(output.preempted_req_ids)
        decoding = {
            name
            for name in output.num_scheduled_tokens
            if not self.scheduler.requests[name].is_prefill_chunk
        }
        self.in_flight.append((output, decoding))
        check_invariants(view(self.scheduler))
        return output.total_num_scheduled_tokens > 0

    def answer(self):
        """Answer the oldest step."""
        output, decoding = self.in_flight.popleft()
        names = list(output.num_scheduled_tokens)
        reports = self.memory.run(output, self.report)
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[self.token()] if name in decoding else [] for name in names],
        )
        setattr(answer, ATTRIBUTE, reports)
        for item in self.scheduler.update_from_output(output, answer).values():
            for result in item.outputs:
                tokens = self.outputs.setdefault(result.request_id, [])
                tokens.extend(result.new_token_ids)
        check_invariants(view(self.scheduler))

    def token(self):
        return STOP if self.rng.random() < self.stop_rate else TOKEN

    def drain(self):
        """Run until no request and no step is left."""
        for _ in range(5000):
            if not (self.scheduler.has_requests() or self.in_flight):
                break
            if self.scheduler.has_requests():
                self.step()
            else:
                self.answer()
        else:
            pytest.fail("requests did not end: livelock")
