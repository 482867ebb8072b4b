"""The KV-cache spec that carries our block manager through vLLM's own registry."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvcompress.engine.manager import CompressedManager


@dataclass(frozen=True, kw_only=True)
class CompressedFullAttentionSpec(FullAttentionSpec):
    """A full-attention cache whose requests may be compressed; pages as in the stock spec."""


def compressed_spec(spec: AttentionSpec) -> AttentionSpec:
    """The compressible form of a plain full-attention spec; any other spec unchanged.

    Layers with a sliding window or chunked attention keep the stock spec, and with it the stock
    manager.
    """
    if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
        return spec
    register()
    return CompressedFullAttentionSpec(
        **{f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
    )


def register() -> None:
    """Tell vLLM which manager our spec has; safe to call again.

    vLLM fills its registry with the built-in specs only while it is empty, so these come first.
    """
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        CompressedFullAttentionSpec, CompressedManager, uniform_type_base_spec=FullAttentionSpec
    )


# a spec that arrives pickled in another process brings its manager along by importing this module
register()
