"""What switching compression on does to vLLM's configuration, and what it refuses.

Runs in the front end, inside ``EngineArgs.create_engine_config``, before a model is loaded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from vllm_kvcompress.config import CONFIG_KEY, CompressionConfig, parse_config, request_options
from vllm_kvcompress.core import Signal
from vllm_kvcompress.engine import compat, metrics
from vllm_kvcompress.engine.shape import expected_shape
from vllm_kvcompress.methods.gpu import MIN_CAPABILITY, why_not_on_gpus
from vllm_kvcompress.methods.registry import create_method

logger = init_logger("vllm.kvcompress.settings")

SCHEDULER = "vllm_kvcompress.engine.scheduler.create_scheduler"
CPU_WORKER = "vllm_kvcompress.engine.worker.CompressionCPUWorker"
GPU_WORKER = "vllm_kvcompress.engine.worker_gpu.CompressionGPUWorker"
CPU_BLOCK_SIZE = 32
"""Default on CPU in place of vLLM's 128: the raw tail and every segment are rounded up to a block
or a cell, and the smallest block the CPU kernels take whole is 32."""
GPU_BLOCK_SIZE = 16
"""vLLM's own default on GPUs, and the smallest block of its kernels and ours."""
GPU_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
"""Attention backends whose cells the GPU kernels read."""


def create_engine_config(
    args: EngineArgs, original: Callable[..., VllmConfig], *rest: Any, **kwargs: Any
) -> VllmConfig:
    """vLLM's configuration with compression switched on.

    Args:
        args: the engine's arguments, whose ``additional_config`` holds our key.
        original: vLLM's own ``EngineArgs.create_engine_config``.

    Raises:
        ValueError: the configuration is wrong, or something that is switched on is not supported
            together with compression; the message holds all reasons.
    """
    config = parse_config(args.additional_config[CONFIG_KEY])
    _refuse(list(_unsupported_vllm()))
    reasons = list(_unsupported_arguments(args))
    args.scheduler_cls = SCHEDULER
    args.worker_cls = _worker()
    if args.block_size is None and current_platform.is_cpu():
        args.block_size = CPU_BLOCK_SIZE
    vllm_config = original(args, *rest, **kwargs)
    reasons += _unsupported(vllm_config)
    if current_platform.is_cuda():
        reasons += _unsupported_on_gpus(config, vllm_config)
    reasons += _unsupported_with_probes(config, vllm_config)
    _refuse(reasons or list(_unbound(config, vllm_config)))
    metrics.expose(vllm_config)
    _validate_requests(config)
    if current_platform.is_cuda():
        logger.warning_once(
            "KV-cache compression has been verified on GPUs by Triton's interpreter and by "
            "compiling its kernels only: check the output, and run `vllm-kvcompress doctor`"
        )
    return vllm_config


def _refuse(reasons: list[str]) -> None:
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise ValueError(
            f"--kv-compression cannot be used here:{lines}\n"
            "Change these settings or start without --kv-compression."
        )


def _worker() -> str:
    return CPU_WORKER if current_platform.is_cpu() else GPU_WORKER


def _unsupported_vllm() -> Iterator[str]:
    """Reasons to touch nothing: the rest is about this build of vLLM."""
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        yield (
            f"platform '{current_platform.device_type}' is not supported; supported: the CPU and "
            "the CUDA build of vLLM"
        )
        return
    for problem in compat.problems(gpu=current_platform.is_cuda()):
        yield f"this vLLM differs from the tested ones: {problem}"


def _unsupported_arguments(args: EngineArgs) -> Iterator[str]:
    """Reasons that are lost once vLLM, or this module, has replaced the argument."""
    if args.scheduler_cls not in (None, SCHEDULER):
        yield f"--scheduler-cls {args.scheduler_cls}: compression brings its own scheduler"
    if args.worker_cls not in ("auto", _worker()):
        yield f"--worker-cls {args.worker_cls}: compression brings its own worker"
    if args.enable_dbo:
        yield "dual-batch overlap (--enable-dbo)"


def _unsupported(vllm_config: VllmConfig) -> Iterator[str]:
    """Reasons found in the finished configuration, each with the setting to change."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    text = model.hf_text_config

    if model.runner_type == "pooling":
        yield "pooling models generate nothing, so there is nothing to compress for"
    if model.use_mla:
        yield "models with multi-head latent attention (MLA)"
    if model.is_hybrid or model.is_attention_free or _layer_types(text) & _STATE_LAYERS:
        yield "models with Mamba or other state-space layers"
    if model.is_encoder_decoder:
        yield "encoder-decoder models"
    if model.skip_tokenizer_init:
        yield "--skip-tokenizer-init: the delimiters come from the model's tokenizer"
    if getattr(text, "attn_logit_softcapping", None):
        yield "models with a soft cap on attention logits"
    if model.uses_alibi or getattr(text, "position_embedding_type", "") == "alibi":
        yield "models with ALiBi position biases"
    if model.is_diffusion:
        yield "diffusion language models"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding (--speculative-config)"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors, offloading and disaggregated prefill (--kv-transfer-config)"
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"--kv-cache-dtype {cache.cache_dtype}: use auto"
    unit = CPU_BLOCK_SIZE if current_platform.is_cpu() else GPU_BLOCK_SIZE
    if cache.block_size % unit:
        yield f"--block-size {cache.block_size}: use a multiple of {unit}"
    if cache.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism (--decode- and --prefill-context-parallel-size)"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism (--pipeline-parallel-size)"
    yield from _unsupported_runner(vllm_config)
    mixed = _layer_types(text) & {"sliding_attention", "chunked_attention"}
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and mixed:
        yield "--disable-hybrid-kv-cache-manager with a model that has sliding-window layers"


def _unsupported_runner(vllm_config: VllmConfig) -> Iterator[str]:
    if current_platform.is_cpu() and vllm_config.use_v2_model_runner:
        yield "the V2 model runner on a CPU (set VLLM_USE_V2_MODEL_RUNNER=0)"
    if current_platform.is_cuda() and not vllm_config.use_v2_model_runner:
        yield (
            "the V1 model runner on a GPU, whose block table may still be on its way to the device "
            "when a row of it is rewritten (unset VLLM_USE_V2_MODEL_RUNNER; where vLLM chose V1 by "
            "itself, its log says for which setting)"
        )


def _unsupported_on_gpus(config: CompressionConfig, vllm_config: VllmConfig) -> Iterator[str]:
    if reason := why_not_on_gpus(config):
        yield reason
    capability = current_platform.get_device_capability()
    if capability is None or capability.to_int() < MIN_CAPABILITY:
        shown = "of no GPU" if capability is None else capability.as_version_str()
        yield f"compute capability {shown}: 8.0 or newer is needed"
    attention = vllm_config.attention_config
    chosen = (attention.backend, attention.backend_per_kind.get("full_attention"))
    for backend in chosen:
        if backend is not None and backend.name not in GPU_BACKENDS:
            yield f"--attention-backend {backend.name}: use {' or '.join(GPU_BACKENDS)}"
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        yield "VLLM_BATCH_INVARIANT: how the keys of a row are split follows the batch (unset it)"


def _unsupported_with_probes(config: CompressionConfig, vllm_config: VllmConfig) -> Iterator[str]:
    """Reasons against a forward pass of embeddings beside the steps that vLLM schedules."""
    if Signal.PROBE_QUERIES not in create_method(config).needs:
        return
    name = f"with method '{config.method}', whose soft tokens the model reads after each prompt"
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if vllm_config.lora_config is not None:
        yield f"--enable-lora {name} without an adapter"
    if model.uses_mrope:
        yield f"models with several positions a token (M-RoPE) {name}"
    if model.requires_raw_input_tokens:
        yield f"models that need tokens beside embeddings {name}"
    if _layer_types(model.hf_text_config) & {"sliding_attention", "chunked_attention"}:
        yield f"models with sliding-window or chunked attention beside full attention {name}"
    spread = parallel.data_parallel_size > 1 or parallel.enable_expert_parallel
    if parallel.is_moe_model is not False and (spread or parallel.use_sequence_parallel_moe):
        yield f"mixtures of experts under data or expert parallelism {name}: ranks would wait"


_STATE_LAYERS = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}
"""Names that Hugging Face configurations give to layers with a recurrent state."""


def _layer_types(text_config: Any) -> set[str]:
    return set(getattr(text_config, "layer_types", None) or ())


def _unbound(config: CompressionConfig, vllm_config: VllmConfig) -> Iterator[str]:
    """Why the method cannot serve this model, as far as that shows before the model is loaded."""
    try:
        method = create_method(config)
        method.bind_model(expected_shape(vllm_config))
        method.codecs()
    except ValueError as error:
        yield str(error)


_active: list[CompressionConfig] = []
"""Configurations of the engines that this process is a front end of."""


def _validate_requests(config: CompressionConfig) -> None:
    """Refuse wrong per-request values while a request is parsed (HTTP 400), from now on."""
    if not _active:
        original = SamplingParams._verify_extra_args

        @functools.wraps(original)
        def verify(self: SamplingParams) -> None:
            original(self)
            _verify_options(self.extra_args)

        SamplingParams._verify_extra_args = verify
    if config not in _active:
        _active.append(config)


def _verify_options(extra_args: dict[str, Any]) -> None:
    """A request must suit one of this process's engines (almost always there is one)."""
    errors = []
    for config in _active:
        try:
            request_options(extra_args, config)
        except ValueError as error:
            errors.append(str(error))
        else:
            return
    raise VLLMValidationError(errors[-1], parameter="vllm_xargs")
