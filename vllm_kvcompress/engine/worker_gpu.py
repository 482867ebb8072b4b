"""vLLM's V2 model runner with compression, and the GPU worker.

The V2 runner keeps its block table on the device and changes it by staged writes, which it applies
at the start of a step; a rewrite is one more of them, in front of the blocks that the step appends.
It takes the ids of a step from its own state, so that nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu.model_runner import CPUModelRunner as CPUModelRunnerV2
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvcompress.config import CONFIG_KEY, parse_config
from vllm_kvcompress.engine.backend_triton import SplitBuffers
from vllm_kvcompress.engine.protocol import ATTRIBUTE, CompressionStep
from vllm_kvcompress.engine.shape import expected_shape
from vllm_kvcompress.engine.state import Batch, DeviceState
from vllm_kvcompress.engine.warm_up import warm_up
from vllm_kvcompress.engine.worker import CompressionRunner, less_bias_table

LARGEST_GROUP = 512
"""Numbers of a group that calibration takes for one transform, at most."""

NUM_PROCESSORS = 160
"""Multiprocessors of a large GPU."""

_BACKENDS = {
    AttentionBackendEnum.FLASH_ATTN: "CompressionFlashBackend",
    AttentionBackendEnum.TRITON_ATTN: "CompressionTritonBackend",
}


class CompressionGPUWorker(Worker):
    """vLLM's GPU worker with compression; named by ``worker_cls``."""

    def _make_model_runner(self) -> Any:
        assert self.use_v2_model_runner, "settings.py refuses the V1 runner"
        return CompressionGPUModelRunner(self.vllm_config, self.device)

    def load_model(self, **kwargs: Any) -> None:
        with overridden_backends():
            super().load_model(**kwargs)

    def compile_or_warm_up_model(self) -> Any:
        # before vLLM captures graphs and watches for kernels that are compiled late
        if self.vllm_config.kernel_config.enable_jit_warmup:
            self.model_runner.warm_up_compression()
        return super().compile_or_warm_up_model()

    def determine_available_memory(self) -> int:
        """vLLM's answer less the shares of bias table, split buffers and codecs."""
        available = super().determine_available_memory()
        reserved = SplitBuffers.num_bytes(self.vllm_config, self.device)
        reserved += codec_bytes(self.vllm_config)
        return less_bias_table(max(available - reserved, 0), self.model_runner)


@contextmanager
def overridden_backends() -> Iterator[None]:
    """Let layers that choose a backend now get ours in place of those that it works on.

    vLLM chooses as always, by device, model and ``--attention-backend``.
    """
    for backend, name in _BACKENDS.items():
        register_backend(backend, f"vllm_kvcompress.engine.backend_triton.{name}")
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        for backend in _BACKENDS:
            backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def bring_codecs(state: DeviceState) -> None:
    """Bring the codecs of a GPU pool to its device, before anything is captured in a graph."""
    if not state.codecs or state.kv_cache.dim() != 6:
        return
    # imported on demand: installations for the CPU have no Triton
    from kvcompress_kernels.coded_attention.triton import sizes_of

    sizes = sizes_of([group.layout for layer in state.codecs for group in layer.groups])
    for layer in state.codecs:
        layer.on_device(state.kv_cache, sizes)


def codec_bytes(vllm_config: VllmConfig) -> int:
    """Bytes that the codecs of a method take on the device, and attention to codes for its results,
    at most."""
    if "aatc" not in parse_config(vllm_config.additional_config[CONFIG_KEY]).method:
        return 0
    shape = expected_shape(vllm_config)
    numbers = shape.num_kv_heads * shape.head_size
    channels = min(numbers, LARGEST_GROUP)
    # to fold and unfold in the dtype of the cache, to encode in float32
    codecs = len(shape.layers) * numbers * channels * (2 * shape.dtype.itemsize + 2 * 4)
    rows = vllm_config.scheduler_config.max_num_seqs
    # folded queries, and about four parts for each of the multiprocessors
    scratch = (rows + 4 * NUM_PROCESSORS) * shape.num_heads * (channels + shape.head_size + 4) * 4
    return codecs + scratch


class CompressionRunnerV2(CompressionRunner):
    """Mix-in over a V2 model runner."""

    step_request_ids: Sequence[str] = ()
    """Requests of the step that is being prepared or has run last, by row; none in dummy runs."""

    def _batch(self, group: int) -> Batch:
        return V2Batch(self, group)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        if self._compressor is not None:
            bring_codecs(self._compressor.state)

    def warm_up_compression(self) -> None:
        """Compile what compressed requests need; called once the KV cache is initialised."""
        if self._compressor is not None:
            warm_up(self, self._compressor)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.step_request_ids = ()
        if self._compressor is not None:
            # dummy runs bring no orders, and have no rows that those of the last step could mean
            self._compressor.state.queries.begin_step(())
        return super().execute_model(*args, **kwargs)

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[Any, int | None]:
        """vLLM's answer, but no batch whose queries are kept counts as a decode batch: a graph
        would replay it, a last chunk of one token included, and attention would not be called."""
        state, uniform = super().gather_batch_req_state(scheduler_output, dummy_run)  # type: ignore[misc]
        step: CompressionStep | None = getattr(scheduler_output, ATTRIBUTE, None)
        return state, None if step is not None and step.observe else uniform

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> InputBatch:
        batch: InputBatch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.step_request_ids = batch.req_ids
        return batch


class CompressionCPUModelRunnerV2(CompressionRunnerV2, CPUModelRunnerV2):
    """The V2 CPU model runner with compression."""


class CompressionGPUModelRunner(CompressionRunnerV2, GPUModelRunner):
    """The V2 GPU model runner with compression."""


class V2Batch:
    """The batch of a V2 model runner.

    Args:
        runner: the runner.
        group: index of the compressed KV-cache group.
    """

    def __init__(self, runner: Any, group: int) -> None:
        self._runner = runner
        self._group = group
        self.block_size: int = runner.kernel_block_sizes[group]

    @property
    def request_ids(self) -> Sequence[str]:
        return self._runner.step_request_ids

    def row_of(self, request_id: str) -> int:
        return self._runner.step_request_ids.index(request_id)

    def rewrite(self, request_id: str, block_ids: list[int]) -> None:
        index = self._runner.req_states.req_id_to_index[request_id]
        self._runner.block_tables.block_tables[self._group].stage_write(index, 0, block_ids)
