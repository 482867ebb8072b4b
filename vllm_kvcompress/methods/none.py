"""No compression: the engine with everything switched on, and nothing done."""

from __future__ import annotations

from typing import Any

from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.core import (
    Budget,
    IncompressibleError,
    LayerView,
    PromptView,
    Segment,
    TokenLayout,
)
from vllm_kvcompress.methods.base import Method


class NoCompression(Method):
    """Leaves every request alone; must reproduce the tokens of stock vLLM."""

    name = "none"

    def budget(
        self,
        num_tokens: int,
        layout: TokenLayout | None,
        keep: float | None,
        geometry: SlabGeometry,
    ) -> Budget:
        raise IncompressibleError("method_none", "method 'none' compresses nothing")

    def compress(self, layer: LayerView, prompt: PromptView, settings: Any) -> Segment:
        raise AssertionError("method 'none' is never planned")
