"""Worker side: executes plans before the forward pass and reports them.

The model runner stays vLLM's own; `CompressionRunner` adds three methods around it.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from kvcompress_kernels import build, formats
from vllm_kvcompress.config import CONFIG_KEY, parse_config
from vllm_kvcompress.core import PagedPrompt, SlabOverflowError, SlabUsage
from vllm_kvcompress.engine.protocol import ATTRIBUTE, CompressionStep, Plan, Report
from vllm_kvcompress.engine.spec import CompressedFullAttentionSpec
from vllm_kvcompress.engine.state import DeviceState, LayerState, stack_layers
from vllm_kvcompress.methods.registry import create_method

logger = init_logger("vllm.kvcompress.worker")


class CompressionCPUWorker(CPUWorker):
    """vLLM's CPU worker with compression; named by ``worker_cls``."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        build.load()
        logger.info("CPU kernels ready after %.1f s", time.perf_counter() - started)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        assert type(self.model_runner) is CPUModelRunner, type(self.model_runner)
        # CPUWorker constructs its runner inside init_device and offers no hook for another class;
        # ours adds methods only, no fields, so the object can change class
        self.model_runner.__class__ = CompressionCPUModelRunner

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
        available = super().determine_available_memory()
        page_bytes = bias_bytes = 0
        for spec in self.model_runner.get_kv_cache_spec().values():
            page_bytes += spec.page_size_bytes
            if isinstance(spec, CompressedFullAttentionSpec):
                bias_bytes += formats.bias_bytes_per_block(1, spec.num_kv_heads, spec.block_size)
        return available * page_bytes // (page_bytes + bias_bytes) if page_bytes else available


class CompressionRunner:
    """Mix-in over a V1 model runner."""

    _compressor: Compressor | None = None

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)  # type: ignore[misc]
        if not is_profiling:
            self._compressor = Compressor(self)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        step: CompressionStep | None = getattr(scheduler_output, ATTRIBUTE, None)
        if step is not None and self._compressor is not None:
            self._compressor.run(step)
        return self._answer(super().execute_model(scheduler_output, *args, **kwargs))  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    def _answer(self, output: Any) -> Any:
        """Put the reports of this step on its output; None means that sample_tokens follows."""
        if output is None or self._compressor is None or not self._compressor.reports:
            return output
        output = copy.copy(output)  # vLLM shares one constant object for empty outputs
        setattr(output, ATTRIBUTE, self._compressor.take_reports())
        return output


class CompressionCPUModelRunner(CompressionRunner, CPUModelRunner):
    """The V1 CPU model runner with compression."""


class Compressor:
    """Runs plans on one rank.

    Args:
        runner: the V1 model runner, whose KV cache is initialised.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        vllm_config: VllmConfig = runner.vllm_config
        config = parse_config(vllm_config.additional_config[CONFIG_KEY])
        self._method = create_method(config)
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
        (self._group,) = groups
        self.state = self._create_state(vllm_config.scheduler_config.max_num_seqs)

    def _create_state(self, max_num_seqs: int) -> DeviceState:
        runner = self._runner
        layers = runner.compilation_config.static_forward_context
        names = runner.kv_cache_config.kv_cache_groups[self._group].layer_names
        owners = [name for name in names if name not in runner.shared_kv_cache_layers]
        owners.sort(key=lambda name: layers[name].kv_cache.data_ptr())
        state = DeviceState(stack_layers([layers[name].kv_cache for name in owners]), max_num_seqs)
        table = runner.input_batch.block_table[self._group]
        assert table.block_size == state.geometry.block_size, "kernel blocks differ from blocks"
        index = {name: i for i, name in enumerate(owners)}
        for name in names:
            _check_layer(name, layers[name].impl)
            target = runner.shared_kv_cache_layers.get(name, name)
            layers[name].impl.compression = LayerState(index[target], state)
        return state

    def take_reports(self) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def run(self, step: CompressionStep) -> None:
        """Execute the orders of a step; called before vLLM looks at it."""
        for request_id in step.release:
            self.state.release(request_id)
        for plan in step.compress:
            self.reports.append(self._compress(plan))

    def _compress(self, plan: Plan) -> Report:
        started = time.perf_counter()
        state = self.state
        prompt = PagedPrompt(
            kv_cache=state.kv_cache,
            bias=state.bias,
            source=torch.tensor(plan.source, dtype=torch.int32),
            slab=torch.tensor(plan.slab, dtype=torch.int32),
            options=plan.options,
            layout=plan.layout,
            geometry=state.geometry,
        )
        usage: SlabUsage | None = None
        try:
            usage = self._method.compress_into(prompt)
        except SlabOverflowError as error:
            logger.warning("compression of %s failed: %s", plan.request_id, error)
        num_cells, failed = _agree(usage)
        if usage is None or failed:
            return Report(
                sequence=plan.sequence,
                request_id=plan.request_id,
                num_cells=0,
                num_entries=0,
                num_segments=1,
                seconds=time.perf_counter() - started,
                error="slab_overflow",
            )
        num_used = state.geometry.blocks(num_cells)
        state.add(plan.request_id, plan.slab[0], plan.gap_end, usage)
        num_nulls = len(plan.source) - num_used
        self._rewrite_row(plan.request_id, [*plan.slab[:num_used], *[0] * num_nulls])
        return Report(
            sequence=plan.sequence,
            request_id=plan.request_id,
            num_cells=num_cells,
            num_entries=int(usage.num_entries.sum()),
            num_segments=usage.num_entries.numel(),
            seconds=time.perf_counter() - started,
            details=usage.details,
        )

    def _rewrite_row(self, request_id: str, block_ids: list[int]) -> None:
        """Replace the first blocks of a request in the runner's two copies of its list: the row
        of the batch, and the list from which a row is made when the request rejoins the batch."""
        runner = self._runner
        index = runner.input_batch.req_id_to_index.get(request_id)
        if index is not None:
            table = runner.input_batch.block_table[self._group].block_table.np
            table[index, : len(block_ids)] = block_ids
        runner.requests[request_id].block_ids[self._group][: len(block_ids)] = block_ids


def _check_layer(name: str, impl: Any) -> None:
    """Refuse what our kernel does not compute, whatever the model's configuration calls it.

    Raises:
        ValueError: the layer has something of the kind.
    """
    extras = {
        "ALiBi slopes": impl.alibi_slopes is not None,
        "attention sinks": impl.sinks is not None,
        "a soft cap on logits": bool(impl.logits_soft_cap),
        "a sliding window": impl.sliding_window not in (-1, (-1, -1)),
        f"head size {impl.head_size}": impl.head_size % 16 != 0 or impl.head_size > 256,
    }
    if found := [extra for extra, present in extras.items() if present]:
        raise ValueError(
            f"--kv-compression does not support layer {name}, which has {' and '.join(found)}. "
            "Start without --kv-compression."
        )


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
