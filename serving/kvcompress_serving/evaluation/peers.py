"""vLLM's own quantized caches (``--kv-cache-dtype``), as rows to compare with.

What a cache of one of these types holds is computed in plain torch from what vLLM 0.32 stores:
presets, codebooks, slot sizes and the layers left raw come from vLLM's own functions. The whole
cache is of this type, the newest tokens too. The prompt itself is prefilled exactly, as it is for
the methods beside which these rows stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

Recode = Callable[[torch.Tensor], torch.Tensor]

_FP8 = "fp8"
_INT8 = "int8_per_token_head"
_TURBOQUANT = (
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)
CACHE_TYPES = (_FP8, _INT8, *_TURBOQUANT)
"""Names as vLLM has them. Of these, ``fp8`` runs on CPU."""

_RAW_ENDS = 2


@dataclass(frozen=True)
class CacheType:
    """A type of cache for heads of one size.

    Args:
        name: an item of `CACHE_TYPES`.
        keys: what is left of keys ``[..., D]`` that were stored.
        values: the same of values.
        slot_bytes: of the key and the value of a token in one head.
        raw_layers: from either end, layers that vLLM leaves in the model's data type.
    """

    name: str
    keys: Recode
    values: Recode
    slot_bytes: int
    raw_layers: int = 0

    @staticmethod
    def of(name: str, head_size: int) -> CacheType:
        """By its name.

        Raises:
            ValueError: unknown, or made for heads of another size.
        """
        if name == _FP8:
            return CacheType(name, _float8, _float8, 2 * head_size)
        if name == _INT8:
            return CacheType(name, _integer8, _integer8, 2 * (head_size + 4))
        if name in _TURBOQUANT:
            return _turboquant(name, head_size)
        raise ValueError(f"unknown cache type '{name}'; expected one of {', '.join(CACHE_TYPES)}")

    def stores(self, layer: int, num_layers: int) -> bool:
        """Whether a layer's cache is of this type, rather than raw."""
        ends = min(self.raw_layers, num_layers // 2)
        return ends <= layer < num_layers - ends

    def bytes_per_token(self, num_layers: int, num_kv_heads: int, raw_slot_bytes: int) -> int:
        """Of a token's cache, all layers and heads."""
        layers = sum(self.stores(layer, num_layers) for layer in range(num_layers))
        slots = layers * self.slot_bytes + (num_layers - layers) * raw_slot_bytes
        return num_kv_heads * slots

    def cache(self, full: DynamicCache, config: Any) -> DynamicCache:
        """A cache of this type that holds the tokens of another."""
        cache = _Cache(self, config)
        for index, layer in enumerate(full.layers):
            cache.update(layer.keys, layer.values, index)
        return cache


class _Cache(DynamicCache):
    """Stores what is left of keys and values, the first time that they go in."""

    def __init__(self, kind: CacheType, config: Any) -> None:
        super().__init__(config=config)
        self._kind = kind
        self._num_layers = int(config.get_text_config().num_hidden_layers)

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any
    ) -> Any:
        if self._kind.stores(layer_idx, self._num_layers):
            key_states = self._kind.keys(key_states).to(key_states.dtype)
            value_states = self._kind.values(value_states).to(value_states.dtype)
        return super().update(key_states, value_states, layer_idx, *args)


def _float8(x: torch.Tensor) -> torch.Tensor:
    """Scale 1, as vLLM has it without calibrated scales."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return x.float().clamp(-limit, limit).to(torch.float8_e4m3fn).float()


def _integer8(x: torch.Tensor) -> torch.Tensor:
    """One scale for each token and head."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-6)
    return (x / scale).round().clamp(-127, 127) * scale


def _turboquant(name: str, head_size: int) -> CacheType:
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

    if head_size & (head_size - 1):
        raise ValueError(f"{name} rotates heads of a power of two, the model's have {head_size}")
    config = TurboQuantConfig.from_cache_dtype(name, head_size)
    keys: Recode = _float8
    if not config.key_fp8:
        centroids = get_centroids(head_size, config.key_mse_bits)
        keys = _rotated(hadamard(head_size), centroids, config.norm_correction)
    values = _uniform(config.effective_value_quant_bits)
    return CacheType(name, keys, values, config.slot_size_aligned, _RAW_ENDS)


def hadamard(size: int) -> torch.Tensor:
    """Orthonormal Hadamard matrix in Sylvester's form; ``size`` is a power of two."""
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(step, matrix)
    return matrix / math.sqrt(size)


def _rotated(rotation: torch.Tensor, centroids: torch.Tensor, renormalize: bool) -> Recode:
    """The nearest centroid of each coordinate of the rotated direction, and the length."""
    middles = (centroids[1:] + centroids[:-1]) / 2

    def recode(x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        length = x.norm(dim=-1, keepdim=True)
        direction = (x / (length + 1e-8)) @ rotation
        coded = centroids[torch.bucketize(direction, middles, right=True)]
        if renormalize:
            coded = coded / coded.norm(dim=-1, keepdim=True)
        return (coded @ rotation.T) * length.half().float()

    return recode


def _uniform(bits: int) -> Recode:
    """Levels between the least and the greatest number of a token and head."""
    top = 2**bits - 1

    def recode(x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = ((high - low) / top).clamp_min(1e-8)
        code = ((x - low) / scale + 0.5).floor().clamp(0, top)
        return code * scale.half().float() + low.half().float()

    return recode
