"""Compression in plain torch on a Hugging Face model: the engine's answer key.

Prefills with transformers, compresses the cache with the same `Method` objects as the engine, and
continues over segments with biases and the raw tail. Slow and simple; for tests and evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache

from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.core import LayerView, PromptView, RequestOptions, Segment
from vllm_kvcompress.methods.base import Method

_ATTENTION = "kvcompress_simulation"


@dataclass
class CompressedPrompt:
    """A prefilled and compressed prompt.

    Args:
        segments: L items.
        tail: cache of the raw tail, ``[gap_end, num_tokens)``; grows with what is fed.
        gap_end: tokens that are compressed.
        num_tokens: tokens fed so far; the position of the next one.
        logits: float32 ``[vocab]``, of the last prompt token (exact, before compression).
    """

    segments: list[Segment]
    tail: DynamicCache
    gap_end: int
    num_tokens: int
    logits: torch.Tensor

    def num_entries(self) -> torch.Tensor:
        """int64 ``[L, H]``."""
        return torch.tensor([segment.num_entries for segment in self.segments])


class Simulation:
    """One model and one method.

    Args:
        model: a transformers causal language model with grouped-query attention and RoPE, in the
            data type to be simulated.
        method: with its tokenizer bound, if it needs token ids.
        block_size: of the engine that is simulated.
    """

    def __init__(self, model: Any, method: Method, block_size: int) -> None:
        self._model = model
        self._method = method
        self._block_size = block_size
        self._segments: list[Segment] | None = None
        AttentionInterface.register(_ATTENTION, self._attend)

    @torch.inference_mode()
    def prefill(self, token_ids: list[int], options: RequestOptions) -> CompressedPrompt:
        """Feed a prompt with full attention, then compress all but its recent window."""
        cache = DynamicCache(config=self._model.config)
        self._model.set_attn_implementation("sdpa")
        output = self._model(
            torch.tensor([token_ids]), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        window = self._method.config.window
        gap_end = (len(token_ids) - window) // self._block_size * self._block_size
        layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        num_kv_heads = layers[0][0].shape[0]
        geometry = SlabGeometry(len(layers), num_kv_heads, self._block_size)
        layout = self._method.layout(np.asarray(token_ids[:gap_end], dtype=np.int64))
        budget = self._method.budget(gap_end, layout, options.keep, geometry)
        prompt = PromptView(
            layers=[LayerView(k[:, :gap_end], v[:, :gap_end]) for k, v in layers],
            options=options,
            layout=layout,
            geometry=geometry,
            num_cells=budget.num_blocks * geometry.cells_per_block,
        )
        segments = list(self._method.compress_prompt(prompt))
        tail = DynamicCache(config=self._model.config)
        for index, (keys, values) in enumerate(layers):
            tail.update(keys[None, :, gap_end:], values[None, :, gap_end:], index)
        return CompressedPrompt(
            segments, tail, gap_end, len(token_ids), output.logits[0, -1].float()
        )

    @torch.inference_mode()
    def feed(self, prompt: CompressedPrompt, token_ids: list[int]) -> torch.Tensor:
        """Feed further tokens over the compressed prompt.

        Returns:
            float32 ``[len(token_ids), vocab]``, logits after each of them.
        """
        self._segments = prompt.segments
        self._model.set_attn_implementation(_ATTENTION)
        start = prompt.num_tokens
        output = self._model(
            torch.tensor([token_ids]),
            position_ids=torch.arange(start, start + len(token_ids))[None],
            past_key_values=prompt.tail,
            use_cache=True,
        )
        self._segments = None
        prompt.num_tokens += len(token_ids)
        return output.logits[0].float()

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of ``query [1, Hq, q, D]`` over the layer's segments, then over the raw tail
        ``key, value [1, H, t, D]`` whose last ``q`` tokens are the queries' own."""
        assert self._segments is not None
        segment = self._segments[module.layer_idx]
        num_queries, num_tail = query.shape[2], key.shape[2]
        group = query.shape[1] // key.shape[1]
        scale = scaling or query.shape[-1] ** -0.5
        future = torch.ones(num_queries, num_tail).triu(num_tail - num_queries + 1).bool()
        outputs = []
        for head in range(query.shape[1]):
            kv_head = head // group
            keys = torch.cat([segment.keys[kv_head], key[0, kv_head]])
            values = torch.cat([segment.values[kv_head], value[0, kv_head]])
            logits = (query[0, head] @ keys.T).float() * scale
            num_entries = len(segment.keys[kv_head])
            logits[:, :num_entries] += segment.bias[kv_head]
            logits[:, num_entries:].masked_fill_(future, float("-inf"))
            outputs.append(logits.softmax(-1).to(values.dtype) @ values)
        return torch.stack(outputs, dim=1)[None], None
