"""What switching compression on does to vLLM's configuration, and what it refuses.

Runs in the front end, inside ``EngineArgs.create_engine_config``, before a model is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from vllm_kvcompress.config import CONFIG_KEY, CompressionConfig, parse_config, request_options
from vllm_kvcompress.engine import compat, metrics

logger = init_logger("vllm.kvcompress.settings")

SCHEDULER = "vllm_kvcompress.engine.scheduler.create_scheduler"
CPU_WORKER = "vllm_kvcompress.engine.worker.CompressionCPUWorker"
CPU_BLOCK_SIZE = 32
"""Default on CPU in place of vLLM's 128: the raw tail and every segment are rounded up to a block
or a cell, and the smallest block the CPU kernels take whole is 32."""


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
    _refuse(list(_unsupported_arguments(args)))
    args.scheduler_cls = SCHEDULER
    args.worker_cls = CPU_WORKER
    if args.block_size is None:
        args.block_size = CPU_BLOCK_SIZE
    vllm_config = original(args, *rest, **kwargs)
    _refuse(list(_unsupported(vllm_config)))
    metrics.expose(vllm_config)
    _validate_requests(config)
    return vllm_config


def _refuse(reasons: list[str]) -> None:
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise ValueError(
            f"--kv-compression cannot be used here:{lines}\n"
            "Change these settings or start without --kv-compression."
        )


def _unsupported_arguments(args: EngineArgs) -> Iterator[str]:
    """Reasons that have to be known before vLLM reads the arguments."""
    if not current_platform.is_cpu():
        yield (
            f"platform '{current_platform.device_type}' is not supported yet; supported: the CPU "
            "build of vLLM"
        )
        return  # the rest is about that build
    for problem in compat.problems():
        yield f"this vLLM differs from the tested ones: {problem}"
    if args.scheduler_cls not in (None, SCHEDULER):
        yield f"--scheduler-cls {args.scheduler_cls}: compression brings its own scheduler"
    if args.worker_cls not in ("auto", CPU_WORKER):
        yield f"--worker-cls {args.worker_cls}: compression brings its own worker"


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
    if model.is_hybrid or model.is_attention_free:
        yield "models with Mamba or other state-space layers"
    if model.is_encoder_decoder:
        yield "encoder-decoder models"
    if model.skip_tokenizer_init:
        yield "--skip-tokenizer-init: the delimiters come from the model's tokenizer"
    if getattr(text, "attn_logit_softcapping", None):
        yield "models with a soft cap on attention logits"
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", "") == "alibi":
        yield "models with ALiBi position biases"
    if model.is_diffusion:
        yield "diffusion language models"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding (--speculative-config)"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors, offloading and disaggregated prefill (--kv-transfer-config)"
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"--kv-cache-dtype {cache.cache_dtype}: use auto"
    if cache.block_size % CPU_BLOCK_SIZE:
        yield f"--block-size {cache.block_size}: use a multiple of {CPU_BLOCK_SIZE}"
    if cache.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism (--decode- and --prefill-context-parallel-size)"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism (--pipeline-parallel-size)"
    if parallel.enable_dbo:
        yield "dual-batch overlap (--enable-dbo)"
    if vllm_config.use_v2_model_runner:
        yield "the V2 model runner on CPU (unset VLLM_USE_V2_MODEL_RUNNER)"
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and _has_sliding_window(text):
        yield "--disable-hybrid-kv-cache-manager with a model that has sliding-window layers"


def _has_sliding_window(text_config: Any) -> bool:
    types = getattr(text_config, "layer_types", None) or ()
    return any(kind != "full_attention" for kind in types)


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
