"""Worker side: executes plans before the forward pass and reports them.

The model runner stays vLLM's own; `CompressionRunner` adds three methods around it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from kvcompress_kernels import build, formats
from vllm_kvcompress.config import CONFIG_KEY, parse_config
from vllm_kvcompress.core import PagedPrompt, Signal, SlabOverflowError, SlabUsage
from vllm_kvcompress.engine.probes import Probed, Prober
from vllm_kvcompress.engine.protocol import ATTRIBUTE, CompressionStep, Plan, Report
from vllm_kvcompress.engine.shape import model_shape
from vllm_kvcompress.engine.spec import CompressedFullAttentionSpec
from vllm_kvcompress.engine.state import Batch, DeviceState, LayerState, stack_layers
from vllm_kvcompress.methods.gpu import create_gpu_method
from vllm_kvcompress.methods.registry import create_method

logger = init_logger("vllm.kvcompress.worker")

MAX_GPU_RATIO = 16
"""Most query heads for each KV head that the GPU kernel takes."""


class CompressionCPUWorker(CPUWorker):
    """vLLM's CPU worker with compression; named by ``worker_cls``."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        build.load()
        logger.info("CPU kernels ready after %.1f s", time.perf_counter() - started)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        # CPUWorker constructs its runner inside init_device and offers no hook for another class;
        # ours adds methods only, no fields, so the object can change class
        ours: type = CompressionCPUModelRunner
        if self.use_v2_model_runner:
            # imported on demand: this runner's module is not for vLLMs without Triton
            from vllm_kvcompress.engine.worker_gpu import CompressionCPUModelRunnerV2

            ours = CompressionCPUModelRunnerV2
        assert type(self.model_runner) is ours.__bases__[-1], type(self.model_runner)
        self.model_runner.__class__ = ours

    def load_model(self, **kwargs: Any) -> None:
        # vLLM ignores --attention-backend on CPU, so its one CPU backend is overridden, only while
        # the layers of this engine choose theirs: another engine in this process gets the stock one
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "vllm_kvcompress.engine.backend_cpu.CompressionCPUBackend",
        )
        selector._cached_get_attn_backend.cache_clear()
        try:
            super().load_model(**kwargs)
        finally:
            AttentionBackendEnum.CPU_ATTN.clear_override()
            selector._cached_get_attn_backend.cache_clear()

    def determine_available_memory(self) -> int:
        """vLLM's answer less the share that the bias table will take."""
        return less_bias_table(super().determine_available_memory(), self.model_runner)


def less_bias_table(available: int, runner: Any) -> int:
    """Bytes for the KV cache when its bias table has to fit in as well."""
    page_bytes = bias_bytes = 0
    for spec in runner.get_kv_cache_spec().values():
        page_bytes += spec.page_size_bytes
        if isinstance(spec, CompressedFullAttentionSpec):
            bias_bytes += formats.bias_bytes_per_block(1, spec.num_kv_heads, spec.block_size)
    return available * page_bytes // (page_bytes + bias_bytes) if page_bytes else available


class CompressionRunner:
    """Mix-in over a model runner, V1 unless a subclass says otherwise."""

    _compressor: Compressor | None = None

    def _batch(self, group: int) -> Batch:
        return V1Batch(self, group)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)  # type: ignore[misc]
        if not is_profiling:
            self._compressor = Compressor(self)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        step: CompressionStep | None = getattr(scheduler_output, ATTRIBUTE, None)
        if step is not None and self._compressor is not None:
            # methods wait for the device, once or twice per prompt
            with gpu_sync_allowed():
                self._compressor.run(step)
        return self._answer(super().execute_model(scheduler_output, *args, **kwargs))  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    def _answer(self, output: Any) -> Any:
        """Put the reports of this step on its output; None means that sample_tokens follows."""
        if output is None or self._compressor is None or not self._compressor.reports:
            return output
        # V2 answers with an output that is still on its way to the host and holds the final one;
        # otherwise a copy, since vLLM shares one constant object for empty outputs
        final = getattr(output, "model_runner_output", None)
        if final is None:
            final = output = copy.copy(output)
        setattr(final, ATTRIBUTE, self._compressor.take_reports())
        return output


class CompressionCPUModelRunner(CompressionRunner, CPUModelRunner):
    """The V1 CPU model runner with compression."""


class V1Batch:
    """The batch of a V1 model runner.

    Args:
        runner: the runner.
        group: index of the compressed KV-cache group.
    """

    def __init__(self, runner: Any, group: int) -> None:
        self._runner = runner
        self._group = group
        self.block_size: int = runner.input_batch.block_table[group].block_size

    @property
    def request_ids(self) -> Sequence[str]:
        return self._runner.input_batch.req_ids

    def row_of(self, request_id: str) -> int:
        return self._runner.input_batch.req_id_to_index[request_id]

    def rewrite(self, request_id: str, block_ids: list[int]) -> None:
        """In the two copies of a request's list: the row of the batch, and the list from which a
        row is made when the request rejoins the batch."""
        runner = self._runner
        index = runner.input_batch.req_id_to_index.get(request_id)
        if index is not None:
            table = runner.input_batch.block_table[self._group].block_table.np
            table[index, : len(block_ids)] = block_ids
        runner.requests[request_id].block_ids[self._group][: len(block_ids)] = block_ids


class Compressor:
    """Runs plans on one rank.

    Args:
        runner: the model runner, whose KV cache is initialised.

    Attributes:
        group: index of the compressed KV-cache group.
        config: of the engine.
        method: of the configuration.
        shape: of the compressed part of the model on this rank.
        state: of the requests.
        prober: runs the method's probes, if it has any.
        reports: of the plans since they were taken last.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        vllm_config: VllmConfig = runner.vllm_config
        self.reports: list[Report] = []
        groups = [
            index
            for index, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, CompressedFullAttentionSpec)
        ]
        if len(groups) != 1:
            raise ValueError(
                "--kv-compression needs exactly one KV-cache group of full-attention layers and "
                f"this model has {len(groups)}. Start without --kv-compression."
            )
        (self.group,) = groups
        self._batch = runner._batch(self.group)
        layers = runner.compilation_config.static_forward_context
        names = runner.kv_cache_config.kv_cache_groups[self.group].layer_names
        for name in names:
            _check_layer(name, layers[name])
        self._has_gpu_cells: bool = layers[names[0]].impl.has_gpu_cells
        self.config = parse_config(vllm_config.additional_config[CONFIG_KEY])
        create = create_gpu_method if self._has_gpu_cells else create_method
        self.method = create(self.config)
        self.state = self._create_state(vllm_config.scheduler_config.max_num_seqs)
        probes = self.method.probes
        self.prober: Prober | None = None
        if probes is not None:
            self.prober = Prober(runner, self.group, probes, self.state)

    def _create_state(self, max_num_seqs: int) -> DeviceState:
        runner = self._runner
        layers = runner.compilation_config.static_forward_context
        names = runner.kv_cache_config.kv_cache_groups[self.group].layer_names
        owner_of = {name: layers[name].kv_sharing_target_layer_name or name for name in names}
        owners = [name for name in names if owner_of[name] == name]
        owners.sort(key=lambda name: layers[name].kv_cache.data_ptr())
        spec = runner.kv_cache_config.kv_cache_groups[self.group].kv_cache_spec
        shape = model_shape(runner.vllm_config, spec, owners, rank=get_tp_group().rank_in_group)
        scales = {layers[name].impl.scale for name in names}
        if len(scales) == 1:
            shape = replace(shape, logit_scale=scales.pop())
        self.shape = shape
        self.method.bind_model(shape)
        caches = [layers[name].kv_cache for name in owners]
        pool = stack_layers(caches, head_major=not self._has_gpu_cells)
        if self._has_gpu_cells:
            pool = formats.gpu_pool(pool)
        state = DeviceState(pool, max_num_seqs, self._batch, self.method.codecs())
        assert self._batch.block_size == state.geometry.block_size, "kernel blocks differ"
        index = {name: i for i, name in enumerate(owners)}
        for name in names:
            layers[name].impl.compression = LayerState(index[owner_of[name]], state)
        return state

    def take_reports(self) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def run(self, step: CompressionStep) -> None:
        """Execute the orders of a step; called before vLLM looks at it."""
        for request_id in step.release:
            self.state.release(request_id)
        probed = self._probe(step.compress)
        for plan in step.compress:
            self.reports.append(self._compress(plan, probed))
        self.state.queries.begin_step(step.observe)

    def _probe(self, plans: Sequence[Plan]) -> Probed:
        """Queries of the method's probes, if it has any; none where the model failed on them."""
        if self.prober is None or not plans:
            return Probed()
        try:
            return self.prober.run(plans)
        # whatever it is, these requests stay uncompressed and the others go on
        except Exception:
            logger.exception("the model failed on the soft tokens of %d requests", len(plans))
            return Probed()

    def prompt(self, plan: Plan, queries: torch.Tensor | None) -> PagedPrompt:
        """What a plan compresses, as methods see it."""
        state = self.state

        def blocks(ids: list[int]) -> torch.Tensor:
            return torch.tensor(ids, dtype=torch.int32, device=state.kv_cache.device)

        return PagedPrompt(
            kv_cache=state.kv_cache,
            bias=state.bias,
            source=blocks(plan.source),
            tail=blocks(plan.tail),
            num_tokens=plan.num_tokens,
            slab=blocks(plan.slab),
            options=plan.options,
            layout=plan.layout,
            geometry=state.geometry,
            queries=queries,
        )

    def _compress(self, plan: Plan, probed: Probed) -> Report:
        started = time.perf_counter() - probed.seconds
        state = self.state
        queries = (
            probed.queries.pop(plan.request_id, None)
            if self.prober
            else state.queries.take(plan.request_id)
        )
        prompt = self.prompt(plan, queries)
        assert Signal.QUERY_WINDOW not in self.method.needs or prompt.queries is not None
        usage: SlabUsage | None = None
        reason = "slab_overflow"
        if self.prober is not None and prompt.queries is None:
            reason = "probe_failed"
        else:
            try:
                usage = self.method.compress_into(prompt)
            except (SlabOverflowError, torch.OutOfMemoryError) as error:
                # nothing of the prompt was written, so it can stay as it is
                logger.warning("compression of %s failed: %s", plan.request_id, error)
                if isinstance(error, torch.OutOfMemoryError):
                    reason = "out_of_memory"
        num_cells, failed = _agree(usage)
        if usage is None or failed:
            state.wipe(plan.slab)
            return Report(
                sequence=plan.sequence,
                request_id=plan.request_id,
                num_cells=0,
                num_entries=0,
                num_segments=1,
                seconds=time.perf_counter() - started,
                error=reason,
            )
        num_used = state.geometry.blocks(num_cells)
        state.add(plan.request_id, plan.slab[:num_used], plan.gap_end, usage)
        if self.prober is not None:
            usage.details["probe_seconds"] = probed.seconds
        num_nulls = len(plan.source) - num_used
        self._batch.rewrite(plan.request_id, [*plan.slab[:num_used], *[0] * num_nulls])
        return Report(
            sequence=plan.sequence,
            request_id=plan.request_id,
            num_cells=num_cells,
            num_entries=_total_entries(usage),
            num_segments=usage.num_entries.numel(),
            seconds=time.perf_counter() - started,
            details=usage.details,
        )


def _check_layer(name: str, layer: Any) -> None:
    """Refuse what our kernels do not compute, whatever the model's configuration calls it.

    Raises:
        ValueError: the layer has something of the kind.
    """
    impl = layer.impl
    if not hasattr(impl, "has_gpu_cells"):
        raise ValueError(
            f"--kv-compression does not support layer {name}, for which vLLM chose the attention "
            f"backend {layer.backend.name}. Set --attention-backend to FLASH_ATTN or TRITON_ATTN, "
            "or start without --kv-compression."
        )
    ratio = impl.num_heads // impl.num_kv_heads
    extras = {
        "ALiBi slopes": impl.alibi_slopes is not None,
        "attention sinks": impl.sinks is not None,
        "a soft cap on logits": bool(impl.logits_soft_cap),
        "a sliding window": impl.sliding_window not in (-1, (-1, -1)),
        f"head size {impl.head_size}": impl.head_size % 16 != 0 or impl.head_size > 256,
        f"{ratio} query heads for each KV head": impl.has_gpu_cells and ratio > MAX_GPU_RATIO,
    }
    if found := [extra for extra, present in extras.items() if present]:
        raise ValueError(
            f"--kv-compression does not support layer {name}, which has {' and '.join(found)}. "
            "Start without --kv-compression."
        )


def _total_entries(usage: SlabUsage) -> int:
    """Entries over all layers and KV heads of this rank; a coded row is one for each head of its
    group."""
    total = int(usage.num_entries.sum())
    if usage.num_rows is not None:
        total += int(usage.num_rows.sum()) * (usage.num_entries.shape[1] // usage.num_rows.shape[1])
    return total


def _agree(usage: SlabUsage | None) -> tuple[int, bool]:
    """Largest cell count over the tensor-parallel ranks, and whether any rank failed.

    All ranks must free the same slab blocks, and compress or not compress together.
    """
    num_cells = usage.num_cells if usage is not None else 0
    failed = usage is None
    group = get_tp_group()
    if group.world_size > 1:
        numbers = torch.tensor([num_cells, int(failed)])
        torch.distributed.all_reduce(
            numbers, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group
        )
        num_cells, failed = int(numbers[0]), bool(numbers[1])
    return num_cells, failed
