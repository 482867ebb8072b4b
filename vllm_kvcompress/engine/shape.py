"""What vLLM's configuration says of the model, in the terms of the methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvcompress.core import ModelShape


def model_shape(
    vllm_config: VllmConfig, spec: FullAttentionSpec, layer_names: Sequence[str], rank: int = 0
) -> ModelShape:
    """The shape of the compressed KV-cache group.

    Args:
        spec: of the group.
        layer_names: of the group's layers, in the order of the pool.
        rank: tensor-parallel rank.
    """
    layers = tuple(map(extract_layer_index, layer_names))
    return replace(
        expected_shape(vllm_config),
        layers=layers,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        block_size=spec.block_size,
        rank=rank,
    )


def expected_shape(vllm_config: VllmConfig) -> ModelShape:
    """The same as far as it can be told before the model is loaded."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return ModelShape(
        model=model.model,
        layers=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
        num_heads=model.get_num_attention_heads(parallel),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=model.dtype,
        block_size=vllm_config.cache_config.block_size,
        num_ranks=parallel.tensor_parallel_size,
    )
