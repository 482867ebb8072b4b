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
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vllm_kvcompress.core import (
    LayerView,
    ModelShape,
    PromptView,
    RequestOptions,
    Segment,
    Signal,
)
from vllm_kvcompress.methods.base import Method

_PREFILL = "kvcompress_prefill"
_PROBE = "kvcompress_probe"
_ATTENTION = "kvcompress_simulation"


@dataclass
class CompressedPrompt:
    """A prefilled and compressed prompt.

    Args:
        segments: L items, decoded.
        num_cells: cells that the segments take in the slab.
        tail: cache of the raw tail, ``[gap_end, num_tokens)``; grows with what is fed.
        gap_end: tokens that are compressed.
        num_tokens: tokens fed so far; the position of the next one.
        logits: float32 ``[vocab]``, of the last prompt token (exact, before compression).
    """

    segments: list[Segment]
    num_cells: int
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
        name: folder or name of the model, for methods that need an artifact made for it.
        cache_dtype: of the cache whose cells are counted; the model's by default.
    """

    def __init__(
        self,
        model: Any,
        method: Method,
        block_size: int,
        name: str = "",
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._method = method
        config = model.config
        self._shape = ModelShape(
            model=name or config.name_or_path,
            layers=tuple(range(config.num_hidden_layers)),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            dtype=cache_dtype or model.dtype,
            block_size=block_size,
            logit_scale=logit_scale(model),
        )
        method.bind_model(self._shape)
        self._segments: list[Segment] | None = None
        self._queries: list[torch.Tensor] = []

    @torch.inference_mode()
    def prefill(self, token_ids: list[int], options: RequestOptions) -> CompressedPrompt:
        """Feed a prompt with full attention, then compress all but its recent window."""
        cache = DynamicCache(config=self._model.config)
        self._queries = []
        AttentionInterface.register(_PREFILL, self._observe)
        self._model.set_attn_implementation(_PREFILL)
        output = self._model(
            torch.tensor([token_ids]), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        return self.compress(token_ids, layers, self._queries, output.logits[0, -1], options)

    @torch.inference_mode()
    def probe(
        self, token_ids: list[int], layers: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Let the model read the method's probes after a prompt whose cache is at hand; it is left
        as it is.

        Args:
            token_ids: of the prompt, ``n``.
            layers: L pairs of keys and values, each ``[H, n, D]``, after RoPE.

        Returns:
            L tensors ``[num_heads, k, D]``, the probes' queries after RoPE.
        """
        probes = self._method.probes
        assert probes is not None, "methods that need probes have some"
        cache = DynamicCache(config=self._model.config)
        for index, (keys, values) in enumerate(layers):
            cache.update(keys[None], values[None], index)
        embeddings = self._model.get_input_embeddings()(torch.tensor(token_ids))
        read = probes(embeddings).to(embeddings.dtype)
        positions = torch.arange(len(token_ids), len(token_ids) + len(read))
        self._queries = []
        AttentionInterface.register(_PROBE, self._observe_probes)
        self._model.set_attn_implementation(_PROBE)
        self._model(
            inputs_embeds=read[None],
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return self._queries

    @torch.inference_mode()
    def compress(
        self,
        token_ids: list[int],
        layers: list[tuple[torch.Tensor, torch.Tensor]],
        queries: list[torch.Tensor],
        logits: torch.Tensor,
        options: RequestOptions,
    ) -> CompressedPrompt:
        """Compress a prompt whose cache is at hand; it is left as it is.

        Args:
            token_ids: of the prompt, ``n``.
            layers: L pairs of keys and values, each ``[H, n, D]``, after RoPE.
            queries: L tensors ``[num_heads, w, D]``, of the last ``w`` tokens; methods that need
                `Signal.PROBE_QUERIES` get those of `probe` instead.
            logits: ``[vocab]``, of the last token.
        """
        geometry = self._shape.geometry
        block_size = geometry.block_size
        if Signal.PROBE_QUERIES in self._method.needs:
            queries = self.probe(token_ids, layers)
        gap_end = (len(token_ids) - self._method.config.window) // block_size * block_size
        layout = self._method.layout(np.asarray(token_ids[:gap_end], dtype=np.int64))
        budget = self._method.budget(gap_end, layout, options.keep, geometry)
        prompt = PromptView(
            layers=[
                LayerView(k[:, :gap_end], v[:, :gap_end], k[:, gap_end:], q)
                for (k, v), q in zip(layers, queries, strict=True)
            ],
            options=options,
            layout=layout,
            geometry=geometry,
            num_cells=budget.num_blocks * geometry.cells_per_block,
        )
        segments = list(self._method.compress_prompt(prompt))
        num_cells = sum(s.num_cells(geometry, self._shape.cell_bytes) for s in segments)
        tail = DynamicCache(config=self._model.config)
        for index, (keys, values) in enumerate(layers):
            tail.update(keys[None, :, gap_end:], values[None, :, gap_end:], index)
        return CompressedPrompt(
            [segment.dense() for segment in segments],
            num_cells,
            tail,
            gap_end,
            len(token_ids),
            logits.float(),
        )

    @torch.inference_mode()
    def feed(self, prompt: CompressedPrompt, token_ids: list[int]) -> torch.Tensor:
        """Feed further tokens over the compressed prompt.

        Returns:
            float32 ``[len(token_ids), vocab]``, logits after each of them.
        """
        self._segments = prompt.segments
        AttentionInterface.register(_ATTENTION, self._attend)
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

    def _observe(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Plain causal attention that keeps the last queries."""
        last = self._method.config.observed_queries
        self._queries.append(query[0, :, -last:].clone())
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def _observe_probes(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Causal attention of queries that are the last of the keys' tokens, which are kept."""
        self._queries.append(query[0].clone())
        num_queries, num_keys = query.shape[2], key.shape[2]
        visible = torch.ones(num_queries, num_keys).tril(num_keys - num_queries).bool()
        return sdpa_attention_forward(module, query, key, value, visible[None, None], **kwargs)

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


def logit_scale(model: Any) -> float | None:
    """Factor of the logits in the attention layers; None where they do not say."""
    scales = {module.scaling for module in model.modules() if hasattr(module, "scaling")}
    return scales.pop() if len(scales) == 1 else None
