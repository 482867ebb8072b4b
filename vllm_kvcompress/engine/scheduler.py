"""Scheduler side: decides which request is compressed when, and moves the blocks.

`CompressionScheduler` and `CompressionAsyncScheduler` add to vLLM's schedulers only what happens
before and after their own methods; the decisions are in `Planner`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.config import CONFIG_KEY, CompressionConfig, parse_config, request_options
from vllm_kvcompress.core import IncompressibleError, RequestOptions, Signal, TokenLayout
from vllm_kvcompress.engine.manager import CompressedManager
from vllm_kvcompress.engine.metrics import CompressionMetrics
from vllm_kvcompress.engine.protocol import (
    ATTRIBUTE,
    CompressionStep,
    Observation,
    Plan,
    Report,
)
from vllm_kvcompress.engine.shape import model_shape
from vllm_kvcompress.methods.base import Method
from vllm_kvcompress.methods.registry import create_method

logger = init_logger("vllm.kvcompress.scheduler")

_RETRY_STEPS = 8
"""Steps between two attempts at a request that could not be compressed for want of blocks."""


@dataclass
class _Candidate:
    """A request that may be compressed and is not yet.

    Args:
        options: its options.
        retry_step: scheduler step before which nothing is tried.
        reason: why the last attempt came to nothing; None before the first.
        layout: of the first ``num_tokens`` tokens, kept between attempts.
        observed: tokens of the prompt whose last queries the worker keeps; 0: it keeps none.
        prompt_end: tokens that were computed together, those included that a request had generated
            before it was preempted; 0 before.
    """

    options: RequestOptions
    retry_step: int = 0
    reason: str | None = None
    layout: TokenLayout | None = None
    num_tokens: int = 0
    observed: int = 0
    prompt_end: int = 0


class Planner:
    """Chooses requests, takes slabs, and settles the worker's reports.

    Args:
        config: the server's configuration.
        method: of that configuration.
        manager: block manager of the compressible KV-cache group.
        geometry: of slabs.
        metrics: counters.
        requests: looks up a live request by id.
        max_model_len: positions that the model has.
    """

    def __init__(
        self,
        config: CompressionConfig,
        method: Method,
        manager: CompressedManager,
        geometry: SlabGeometry,
        metrics: CompressionMetrics,
        requests: Callable[[str], Request],
        max_model_len: int,
    ) -> None:
        self._config = config
        self._method = method
        self._manager = manager
        self._pool: BlockPool = manager.block_pool
        self._geometry = geometry
        self._metrics = metrics
        self._requests = requests
        self._max_model_len = max_model_len
        self._num_probes = 0 if method.probes is None else method.probes.num_tokens
        self._candidates: dict[str, _Candidate] = {}
        self._compressed: dict[str, RequestOptions] = {}
        self._held: dict[int, tuple[Plan, list[KVCacheBlock]]] = {}
        self._unobserved: list[str] = []
        self._sequence = itertools.count(1)
        self._step = 0

    @property
    def num_queries(self) -> int:
        """Queries at the end of a prompt that the method has to see."""
        return self._config.observed_queries if Signal.QUERY_WINDOW in self._method.needs else 0

    def num_cacheable(self, request: Request) -> int:
        """How many tokens of a request may come from the prefix cache.

        The queries of cached tokens are not computed, so the last ones have to be. One token always
        is, since something has to be sampled from.
        """
        needed = self.num_queries if request.request_id in self._candidates else 1
        return max(request.num_tokens - needed, 0)

    def add(self, request: Request) -> None:
        """A request has arrived: note it as a candidate, or count why it is none."""
        try:
            params = request.sampling_params
            options = request_options(params and params.extra_args, self._config)
        except ValueError as error:
            # the front end refuses these; what comes past it is not worth an engine
            logger.warning("request %s left uncompressed: %s", request.request_id, error)
            self._bypass("invalid_options")
            return
        if reason := self._refuse(request, options):
            self._bypass(reason)
        else:
            self._candidates[request.request_id] = _Candidate(options)

    def _refuse(self, request: Request, options: RequestOptions) -> str | None:
        """Why this request can never be compressed, from what is known on arrival."""
        if options.method == "none":
            return "method_none" if self._config.method == "none" else "opted_out"
        if request.sampling_params is None:
            return "pooling"
        if request.resumable:
            return "streaming_input"
        if request.mm_features:
            return "multimodal"
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            return "prompt_embeds"
        if request.num_prompt_tokens < self._config.min_prompt_tokens:
            return "short_prompt"
        if request.max_tokens < self._config.min_output_tokens:
            return "short_output"
        return None

    def plan(self, output: SchedulerOutput) -> CompressionStep:
        """Called right after vLLM has scheduled a step: the orders that ride on it."""
        self._step += 1
        release = self._manager.take_released()
        for request_id in release:
            # preempted: it is prefilled again, and compressed again; finished: dropped below
            options = self._compressed.pop(request_id, None)
            if options is not None:
                self._candidates[request_id] = _Candidate(options, reason="compressed_before")
        for request_id in output.finished_req_ids:
            candidate = self._candidates.get(request_id)
            if candidate is not None:
                self._discard(request_id, candidate.reason or "finished_early")

        observe, plans = [], []
        joining = {new.req_id for new in output.scheduled_new_reqs}
        joining |= output.scheduled_cached_reqs.resumed_req_ids
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if request_id not in self._candidates:
                continue
            request = self._requests(request_id)
            # num_computed_tokens already counts this step
            num_computed = request.num_computed_tokens - num_scheduled
            if (
                request.is_prefill_chunk
                or num_scheduled > 1
                or (num_computed < request.num_prompt_tokens)
            ):
                self._candidates[request_id].prompt_end = request.num_tokens
                if self.num_queries and (order := self._observe(request, num_computed)):
                    observe.append(order)
                continue
            if request_id in joining:
                continue  # resumed on cached blocks: the worker gets its list with this very step
            if self._manager.is_published(request_id, num_computed):
                continue  # others may hit what this step computes, so it has to be exact
            if plan := self._try(request, num_computed):
                plans.append(plan)
        self._metrics.slab_blocks.set(self._manager.num_slab_blocks)
        release += self._unobserved
        self._unobserved = []
        return CompressionStep(tuple(observe), tuple(plans), tuple(release))

    def _observe(self, request: Request, num_computed: int) -> Observation | None:
        """Which queries of this step to keep: those of the last tokens before the first new one.

        Of a request that was preempted, the tokens that it had generated are part of the prompt.
        """
        end = request.num_tokens
        first = max(end - self.num_queries, 0)
        start, stop = max(num_computed, first), min(request.num_computed_tokens, end)
        if start >= stop:
            return None
        self._candidates[request.request_id].observed = end
        return Observation(request.request_id, start - num_computed, start, stop, first, end)

    def _try(self, request: Request, num_computed: int) -> Plan | None:
        """Plan one request whose first ``num_computed`` tokens are in the cache."""
        candidate = self._candidates[request.request_id]
        if self._step < candidate.retry_step:
            return None
        remaining = request.max_tokens - request.num_output_tokens
        if remaining < self._config.min_output_tokens:
            return self._discard(request.request_id, candidate.reason or "short_output")
        block_size = self._geometry.block_size
        known = min(num_computed, request.num_tokens)
        if self.num_queries:
            known = min(known, candidate.observed)
        elif self._num_probes and candidate.prompt_end:
            # probes follow the prompt, whatever has been generated before there was room
            known = min(known, candidate.prompt_end)
        num_gap_blocks = (known - self._config.window) // block_size
        gap_end = num_gap_blocks * block_size
        if num_gap_blocks < 1:
            return self._discard(request.request_id, "short_prompt")
        if known + self._num_probes > self._max_model_len:
            return self._discard(request.request_id, "context_end")
        options = candidate.options
        try:
            if candidate.num_tokens != gap_end:
                token_ids = np.asarray(request.all_token_ids[:gap_end], dtype=np.int64)
                candidate.layout = self._method.layout(token_ids)
                candidate.num_tokens = gap_end
            budget = self._method.budget(gap_end, candidate.layout, options.keep, self._geometry)
        except IncompressibleError as error:
            return self._discard(request.request_id, error.reason)
        num_slab_blocks = budget.num_blocks
        if self._method.reclaims:
            exclusive = self._manager.num_exclusive_blocks(request.request_id, num_gap_blocks)
            if exclusive <= num_slab_blocks:
                return self._postpone(candidate, "shared_prefix")
        if self._pool.get_num_free_blocks() < num_slab_blocks:
            return self._postpone(candidate, "no_free_blocks")

        sequence = next(self._sequence)
        old, slab, tail = self._manager.begin(
            request.request_id, sequence, num_gap_blocks, num_slab_blocks
        )
        plan = Plan(
            sequence=sequence,
            request_id=request.request_id,
            source=[block.block_id for block in old],
            tail=[block.block_id for block in tail[: -(-(known - gap_end) // block_size)]],
            slab=[block.block_id for block in slab],
            gap_end=gap_end,
            num_tokens=known,
            options=options,
            layout=candidate.layout,
            token_ids=self._token_ids(request, known),
        )
        self._held[sequence] = (plan, old)
        del self._candidates[request.request_id]
        self._compressed[request.request_id] = options
        return plan

    def _token_ids(self, request: Request, num_tokens: int) -> np.ndarray | None:
        """The first tokens of a request, where the method's probes depend on them."""
        probes = self._method.probes
        if probes is None or probes.kind == "static":
            return None
        return np.asarray(request.all_token_ids[:num_tokens], dtype=np.int64)

    def _discard(self, request_id: str, reason: str) -> None:
        """A request will not be compressed any more."""
        candidate = self._candidates.pop(request_id)
        if candidate.observed:
            self._unobserved.append(request_id)
        if candidate.reason != "compressed_before":
            self._bypass(reason)

    def _postpone(self, candidate: _Candidate, reason: str) -> None:
        candidate.retry_step = self._step + _RETRY_STEPS
        if candidate.reason != "compressed_before":
            candidate.reason = reason

    def _bypass(self, reason: str) -> None:
        self._metrics.bypassed(reason)
        logger.info_once("first request left uncompressed with reason '%s'", reason)

    def settle(self, step: CompressionStep, reports: list[Report]) -> None:
        """The step has run: give back what it made free, or put the old blocks back.

        Raises:
            RuntimeError: a plan was not answered, so the worker is not ours or lost it.
        """
        answers = {report.sequence: report for report in reports}
        for plan in step.compress:
            report = answers.get(plan.sequence)
            if report is None:
                raise RuntimeError(
                    f"the worker did not answer compression plan {plan.sequence} of request "
                    f"{plan.request_id}; is --worker-cls overridden?"
                )
            self._settle_one(report)

    def abandon(self) -> None:
        """All requests are about to lose their blocks: hold none back for plans in flight.

        Steps in flight still read these blocks, in order before any step that could write them.
        """
        for _, old in self._held.values():
            self._pool.free_blocks(reversed(old))
        self._held.clear()

    def _settle_one(self, report: Report) -> None:
        if report.sequence not in self._held:
            return  # abandoned
        plan, old = self._held.pop(report.sequence)
        if report.error is not None:
            self._metrics.failed(report.error)
            logger.warning_once("a compression failed and was undone: %s", report.error)
            self._compressed.pop(plan.request_id, None)
            if not self._manager.rollback(plan.request_id, plan.sequence, old):
                self._pool.free_blocks(reversed(old))
            return
        used = self._geometry.blocks(report.num_cells)
        self._manager.commit(plan.request_id, plan.sequence, used)
        exclusive = sum(block.ref_cnt == 1 for block in old)
        self._pool.free_blocks(reversed(old))
        kept = report.num_entries / report.num_segments
        metrics = self._metrics
        metrics.requests_compressed.inc()
        metrics.blocks_freed.inc(max(exclusive - used, 0))
        metrics.tokens_in.inc(plan.gap_end)
        metrics.entries_kept.inc(kept)
        metrics.seconds.observe(report.seconds)
        metrics.slab_blocks.set(self._manager.num_slab_blocks)
        logger.debug(
            "compressed %s: %d tokens to %.0f entries, %d blocks to %d, %.1f ms %s",
            plan.request_id,
            plan.gap_end,
            kept,
            len(old),
            used,
            report.seconds * 1e3,
            report.details,
        )


class _Shortened:
    """A request as the prefix cache sees it when it may serve ``limit`` tokens at most.

    vLLM looks for one token less than the request has.
    """

    def __init__(self, request: Request, limit: int) -> None:
        self._request = request
        self.num_tokens = limit + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _CompressionMixin(Scheduler):
    """What both schedulers add."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.planner = _create_planner(self)
        if self.planner.num_queries:
            original = self.kv_cache_manager.get_computed_blocks
            self.kv_cache_manager.get_computed_blocks = lambda request: original(
                _Shortened(request, self.planner.num_cacheable(request))
            )

    def add_request(self, request: Request) -> None:
        is_next_input = request.request_id in self.requests  # of a streaming session
        super().add_request(request)
        if not is_next_input:
            self.planner.add(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        setattr(output, ATTRIBUTE, self.planner.plan(output))
        return output

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any) -> bool:
        if reset_running_requests:
            self.planner.abandon()
        return super().reset_prefix_cache(reset_running_requests, *args)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        step: CompressionStep = getattr(scheduler_output, ATTRIBUTE)
        self.planner.settle(step, getattr(model_runner_output, ATTRIBUTE, []))
        return super().update_from_output(scheduler_output, model_runner_output)


class CompressionScheduler(_CompressionMixin, Scheduler):
    """vLLM's scheduler with compression."""


class CompressionAsyncScheduler(_CompressionMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with compression."""


def create_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """What ``scheduler_cls`` names: the scheduler that fits the configuration."""
    use_async = vllm_config.scheduler_config.async_scheduling
    cls = CompressionAsyncScheduler if use_async else CompressionScheduler
    return cls(vllm_config=vllm_config, **kwargs)


def _create_planner(scheduler: Scheduler) -> Planner:
    vllm_config = scheduler.vllm_config
    config = parse_config(vllm_config.additional_config[CONFIG_KEY])
    managers = [
        manager
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
        if isinstance(manager, CompressedManager)
    ]
    if len(managers) != 1:
        raise ValueError(
            f"--kv-compression needs exactly one KV-cache group of full-attention layers and this "
            f"model has {len(managers)}. Start without --kv-compression."
        )
    (manager,) = managers
    group = scheduler.kv_cache_config.kv_cache_groups[manager.kv_cache_group_id]
    geometry = SlabGeometry(
        num_layers=len(group.layer_names),
        num_kv_heads=manager.kv_cache_spec.num_kv_heads,
        block_size=manager.block_size,
    )
    method = create_method(config)
    method.bind_model(model_shape(vllm_config, manager.kv_cache_spec, group.layer_names))
    if Signal.TOKEN_IDS in method.needs:
        method.bind_tokenizer(cached_tokenizer_from_config(vllm_config.model_config))
    logger.info(
        "KV-cache compression is on: method '%s', %d layers x %d KV heads, blocks of %d tokens, "
        "%s. Settings: %s",
        config.method,
        geometry.num_layers,
        geometry.num_kv_heads,
        geometry.block_size,
        "async scheduling" if vllm_config.scheduler_config.async_scheduling else "sync scheduling",
        config.model_dump(exclude={"method"}),
    )
    return Planner(
        config=config,
        method=method,
        manager=manager,
        geometry=geometry,
        metrics=CompressionMetrics(vllm_config, vllm_config.parallel_config.data_parallel_index),
        requests=scheduler.requests.__getitem__,
        max_model_len=vllm_config.model_config.max_model_len,
    )
