"""A frozen transformers model over stored prompts.

Keys and values of a prompt never depend on what follows it, so a prompt is read once; responses and
soft tokens, any number of times, are computed alone over its stored cache.

Shape letters: ``L`` layers, ``H`` KV heads, ``T`` tokens of a prompt, ``D`` head size, ``B``
prompts of a batch, ``n`` tokens that are fed, ``d`` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_ATTENTION = "kvcompress_soft_tokens"
_OBSERVING = "kvcompress_soft_tokens_read"
_SDPA = "sdpa"


@dataclass(frozen=True)
class PromptCache:
    """What a model remembers of one prompt.

    Args:
        keys: ``[L, H, T, D]``, after RoPE.
        values: ``[L, H, T, D]``.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> PromptCache:
        return PromptCache(self.keys.to(device, dtype), self.values.to(device, dtype))


class _Session:
    """Tokens that were fed after a prompt, and the attention of what is fed to the prompt."""

    def __init__(self, cache: PromptCache, alone: bool) -> None:
        self.cache = cache
        self.alone = alone
        self.keys: list[torch.Tensor | None] = [None] * len(cache.keys)
        self.values: list[torch.Tensor | None] = [None] * len(cache.keys)
        self.attention: list[torch.Tensor | None] = [None] * len(cache.keys)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        keep: bool,
    ) -> torch.Tensor:
        """Causal attention of ``[H * g, n, D]`` over the prompt, what was fed, and the new tokens.

        Adds the attention to the prompt, ``[H, T]``, mean over the new tokens and the queries of a
        KV head, to `attention`: softmax over the prompt alone, or the prompt's part of all of it.
        """
        num_kv_heads, num_new, head_size = key.shape
        before, before_values = self.keys[layer], self.values[layer]
        if before is not None and before_values is not None:
            key = torch.cat([before, key], 1)
            value = torch.cat([before_values, value], 1)
        if keep:
            self.keys[layer], self.values[layer] = key, value
        prompt_keys = self.cache.keys[layer].to(query.dtype)
        prompt_values = self.cache.values[layer].to(query.dtype)
        grouped = query.reshape(num_kv_heads, -1, head_size)  # [H, g * n, D]
        to_prompt = (grouped @ prompt_keys.mT).float() * scale
        to_new = (grouped @ key.mT).float() * scale
        hidden = torch.ones(num_new, key.shape[1], dtype=torch.bool, device=key.device)
        hidden = hidden.triu(key.shape[1] - num_new + 1)
        to_new = to_new.unflatten(1, (-1, num_new)).masked_fill(hidden, float("-inf")).flatten(1, 2)
        num_prompt = to_prompt.shape[2]
        weights = torch.cat([to_prompt, to_new], 2).softmax(-1)
        part = to_prompt.softmax(-1) if self.alone else weights[..., :num_prompt]
        found = part.mean(1)
        so_far = self.attention[layer]
        self.attention[layer] = found if so_far is None else so_far + found
        weights = weights.to(value.dtype)
        output = weights[..., :num_prompt] @ prompt_values + weights[..., num_prompt:] @ value
        return output.reshape(query.shape)

    def attentions(self) -> torch.Tensor:
        """Of all layers, float32 ``[L, H, T]``."""
        found = [layer for layer in self.attention if layer is not None]
        assert len(found) == len(self.attention), "every layer attends"
        return torch.stack(found)


class FrozenModel:
    """A model that is run, never trained.

    Args:
        network: transformers causal language model with grouped-query attention and RoPE.
    """

    def __init__(self, network: Any) -> None:
        self.network = network.eval().requires_grad_(False)
        self._sessions: list[_Session] = []
        self._keep = False

    @property
    def device(self) -> torch.device:
        return self.network.device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table, ``[n, d]`` for int64 ``[n]``."""
        return self.network.get_input_embeddings().weight[token_ids.to(self.device)]

    @torch.no_grad()
    def prefill(self, token_ids: torch.Tensor) -> PromptCache:
        """Read a prompt, int64 ``[T]``."""
        return self.read(token_ids, [])[0]

    @torch.no_grad()
    def read(
        self, token_ids: torch.Tensor, spans: Sequence[tuple[int, int]]
    ) -> tuple[PromptCache, list[torch.Tensor]]:
        """Read a text, and see what parts of it attend to before them.

        Args:
            token_ids: int64 ``[T]``.
            spans: parts as their first token and the one after their last.

        Returns:
            its cache, and for each span the attention of its tokens to those before it, float32
            ``[L, H, start]``, as `attention_of` has it.
        """
        cache = DynamicCache(config=self.network.config)
        found: list[list[torch.Tensor]] = [[] for _ in spans]

        def observe(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            for (start, stop), layers in zip(spans, found, strict=True):
                part = query[0, :, start:stop]
                layers.append(_attention_before(part, key[0, :, :stop], scale))
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

        AttentionInterface.register(_OBSERVING, observe)
        self.network.set_attn_implementation(_OBSERVING)
        try:
            self.network.base_model(
                token_ids[None].to(self.device), past_key_values=cache, use_cache=True
            )
        finally:
            self.network.set_attn_implementation(_SDPA)
        keys = torch.stack([layer.keys[0] for layer in cache.layers])
        values = torch.stack([layer.values[0] for layer in cache.layers])
        return PromptCache(keys, values), [torch.stack(layers) for layers in found]

    @torch.no_grad()
    def respond(
        self,
        caches: Sequence[PromptCache],
        last_tokens: Sequence[int],
        num_tokens: int,
        temperature: float,
        generators: Sequence[torch.Generator],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Let the model answer prompts, all at once, and see what its answers attend to.

        Args:
            caches: of B prompts.
            last_tokens: id of the last token of each.
            num_tokens: of each response.
            temperature: of the choice of tokens; 0 for the likeliest.
            generators: one for each prompt, on the CPU.

        Returns:
            int64 ``[B, num_tokens]`` on the CPU, and B attentions of the response to the prompt,
            float32 ``[L, H, T]``, as `attention_of` has them.
        """
        # the first step reads the last token of the prompt again, over the tokens before it
        shorter = [PromptCache(c.keys[:, :, :-1], c.values[:, :, :-1]) for c in caches]
        first = [_Session(cache, alone=False) for cache in shorter]
        tokens = torch.tensor(list(last_tokens))
        logits = self._step(first, tokens, 0)
        sessions = [_Session(cache, alone=False) for cache in caches]
        chosen: list[torch.Tensor] = []
        for place in range(num_tokens):
            tokens = _draw(logits, temperature, generators)
            chosen.append(tokens)
            logits = self._step(sessions, tokens, place)
        return torch.stack(chosen, 1), [s.attentions() / num_tokens for s in sessions]

    def _step(self, sessions: list[_Session], tokens: torch.Tensor, place: int) -> torch.Tensor:
        """Feed one token to each session, ``place`` tokens after its prompt; logits
        ``[B, vocab]``."""
        positions = torch.tensor([[session.cache.num_tokens + place] for session in sessions])
        with self._attending(sessions, keep=True):
            output = self.network(
                tokens[:, None].to(self.device),
                position_ids=positions.to(self.device),
                use_cache=False,
                logits_to_keep=1,
            )
        return output.logits[:, -1].float()

    @torch.no_grad()
    def attention_of(self, cache: PromptCache, token_ids: torch.Tensor) -> torch.Tensor:
        """Attention of tokens that follow a prompt to the prompt; mean over the tokens and the
        query heads of a KV head, of softmax over all that a token sees.

        Args:
            cache: of the prompt.
            token_ids: int64 ``[n]``.

        Returns:
            float32 ``[L, H, T]``.
        """
        return self._read(self.embed(token_ids)[None], [cache], alone=False)[0]

    def probe(self, tokens: torch.Tensor, caches: Sequence[PromptCache]) -> list[torch.Tensor]:
        """Attention of vectors that follow prompts in place of embeddings; with gradients.

        Args:
            tokens: ``[B, k, d]``, after prompt ``b`` at the positions ``T_b`` to ``T_b + k - 1``.
            caches: of the prompts.

        Returns:
            B of float32 ``[L, H, T_b]``: softmax over the prompt's keys alone, mean over the
            vectors and the query heads of a KV head. Each row sums to 1.
        """
        return self._read(tokens, caches, alone=True)

    def _read(
        self, embeddings: torch.Tensor, caches: Sequence[PromptCache], alone: bool
    ) -> list[torch.Tensor]:
        sessions = [_Session(cache, alone) for cache in caches]
        steps = torch.arange(embeddings.shape[1])
        positions = torch.stack([cache.num_tokens + steps for cache in caches])
        with self._attending(sessions, keep=False):
            self.network.base_model(
                inputs_embeds=embeddings.to(self.device, self.network.dtype),
                position_ids=positions.to(self.device),
                use_cache=False,
            )
        return [session.attentions() for session in sessions]

    @contextmanager
    def _attending(self, sessions: list[_Session], keep: bool) -> Iterator[None]:
        """The model attends to what the sessions hold."""
        self._sessions, self._keep = sessions, keep
        AttentionInterface.register(_ATTENTION, self._attend)
        self.network.set_attn_implementation(_ATTENTION)
        try:
            yield
        finally:
            self._sessions = []
            self.network.set_attn_implementation(_SDPA)

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
        """For `AttentionInterface`: ``[B, H * g, n, D]`` to ``[B, n, H * g, D]``."""
        scale = scaling or query.shape[-1] ** -0.5
        outputs = [
            session.attend(module.layer_idx, query[b], key[b], value[b], scale, self._keep)
            for b, session in enumerate(self._sessions)
        ]
        return torch.stack(outputs).transpose(1, 2), None


def _attention_before(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of the last ``n`` of ``t`` tokens to those before them, ``[H, t - n]``; mean over
    the tokens and the queries of a KV head, ``[H * g, n, D]``, of causal softmax over all keys,
    ``[H, t, D]``."""
    num_kv_heads, num_tokens, head_size = key.shape
    num_new = query.shape[1]
    logits = (query.reshape(num_kv_heads, -1, head_size) @ key.mT).float() * scale
    hidden = torch.ones(num_new, num_tokens, dtype=torch.bool, device=key.device)
    hidden = hidden.triu(num_tokens - num_new + 1)
    logits = logits.unflatten(1, (-1, num_new)).masked_fill(hidden, float("-inf"))
    return logits.softmax(-1)[..., : num_tokens - num_new].mean((1, 2))


def _draw(
    logits: torch.Tensor, temperature: float, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """One token of each row of ``[B, vocab]``, int64 ``[B]`` on the CPU."""
    if temperature == 0:
        return logits.argmax(-1).cpu()
    chances = (logits / temperature).softmax(-1).cpu()
    drawn = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(chances, generators, strict=True)
    ]
    return torch.cat(drawn)
