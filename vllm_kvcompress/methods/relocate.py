"""Relocation: copies every token into the slab unchanged. For diagnosis; saves nothing."""

from __future__ import annotations

from typing import Any

import torch

from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.core import Budget, LayerView, PromptView, Segment, TokenLayout
from vllm_kvcompress.methods.base import Method


class Relocate(Method):
    """Every entry of the prompt, in order, with bias 0.

    The cache holds what it held before, in other blocks, so the output must be that of stock
    vLLM. Whatever differs is a fault of the engine, never of a method.
    """

    name = "relocate"
    reclaims = False

    def budget(
        self,
        num_tokens: int,
        layout: TokenLayout | None,
        keep: float | None,
        geometry: SlabGeometry,
    ) -> Budget:
        return Budget(geometry.cells(num_tokens))

    def compress(self, layer: LayerView, prompt: PromptView, settings: Any) -> Segment:
        zeros = torch.zeros(layer.keys.shape[1], dtype=torch.float32)
        return Segment(list(layer.keys), list(layer.values), [zeros] * layer.keys.shape[0])
