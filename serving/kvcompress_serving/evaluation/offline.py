"""The offline back end: one prefill of a prompt, then every row's compression of the same cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging as transformers_logging

from kvcompress_serving.evaluation.peers import CacheType
from kvcompress_serving.evaluation.results import token_digest
from kvcompress_serving.evaluation.rows import Row
from kvcompress_serving.evaluation.sizes import (
    CacheBytes,
    CacheShape,
    full_bytes,
    kept_share,
    peer_bytes,
    true_bytes,
)
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import IncompressibleError
from vllm_kvcompress.methods.base import Method
from vllm_kvcompress.simulation import CompressedPrompt, Simulation

_ATTENTION = "kvcompress_evaluation"
_SDPA = "sdpa"
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def data_type(name: str) -> torch.dtype:
    """Data type by its name in torch.

    Raises:
        ValueError: not one that a model is computed in here.
    """
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype '{name}'; expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _max_observed_queries() -> int:
    """Most prompt queries that any configuration may ask for."""
    bounds = CompressionConfig.model_fields["observed_queries"].metadata
    return max(int(getattr(bound, "le", 0)) for bound in bounds)


class FullRun:
    """A prompt prefilled with full attention, and what is fed after it seen with the full cache.

    Args:
        model: transformers causal language model.
        prompt: token ids of the part that rows compress.
        continuation: token ids that are fed after it.

    Attributes:
        cache: of the prompt alone.
        queries: for each layer ``[num_heads, w, D]``, of the prompt's last tokens, after RoPE.
        prompt_logits: float32 ``[vocab]``, after the last prompt token.
        logits: float32 ``[len(continuation), vocab]``, after each token that is fed.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, prompt: Sequence[int], continuation: Sequence[int]) -> None:
        self.model = model
        self.prompt = list(prompt)
        self.continuation = list(continuation)
        self.cache = DynamicCache(config=model.config)
        self.queries: list[torch.Tensor] = []
        AttentionInterface.register(_ATTENTION, self._observe)
        model.set_attn_implementation(_ATTENTION)
        output = model(
            torch.tensor([[*self.prompt, *self.continuation]]),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=len(self.continuation) + 1,
        )
        if self.continuation:
            self.cache.crop(-len(self.continuation))
        logits = output.logits[0].float()
        self.prompt_logits = logits[0]
        self.logits = logits[1:]

    def _observe(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Plain causal attention that keeps the prompt's last queries."""
        end = len(self.prompt)
        start = max(end - _max_observed_queries(), 0)
        self.queries.append(query[0, :, start:end].clone())
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    @torch.inference_mode()
    def greedy(self, num_tokens: int) -> list[int]:
        """The full cache's own continuation of the prompt."""
        session = _FullSession(self)
        tokens = [int(self.prompt_logits.argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(session.feed(tokens[-1:])[-1].argmax()))
        return tokens


class _FullSession:
    """Tokens fed one after another over a copy of a cache that holds every token, by default the
    full one."""

    def __init__(self, run: FullRun, cache: DynamicCache | None = None) -> None:
        self._model = run.model
        self._cache = copy.deepcopy(run.cache if cache is None else cache)

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        self._model.set_attn_implementation(_SDPA)
        output = self._model(
            torch.tensor([list(token_ids)]), past_key_values=self._cache, use_cache=True
        )
        return output.logits[0].float()


class _CompressedSession:
    """The same over a compressed prompt, which stays as it is."""

    def __init__(self, simulation: Simulation, prompt: CompressedPrompt) -> None:
        self._simulation = simulation
        self._prompt = copy.copy(prompt)
        self._prompt.tail = copy.deepcopy(prompt.tail)

    def feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self._simulation.feed(self._prompt, list(token_ids))


@dataclass
class CompressedRun:
    """A row's compression of a prompt. Feed it before the next prompt is compressed.

    Args:
        bytes: what it takes.
        kept: entries and raw tail tokens per prompt token, mean over layers and heads.
        bypassed: why the prompt was left alone, as a server would leave it; empty if it was not.
    """

    bytes: CacheBytes
    kept: float
    bypassed: str
    _full: FullRun
    _compressed: tuple[Simulation, CompressedPrompt] | None = None
    _cache: DynamicCache | None = None

    @property
    def digest(self) -> str:
        """Identifies the tokens of the prompt and of what is fed after it."""
        return token_digest([*self._full.prompt, -1, *self._full.continuation])

    def _session(self) -> _CompressedSession | _FullSession:
        if self._compressed is None:
            return _FullSession(self._full, self._cache)
        return _CompressedSession(*self._compressed)

    def feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after each of the tokens, fed right after the prompt; the prompt stays as it is.

        Returns:
            float32 ``[len(token_ids), vocab]``.
        """
        known = self._full.continuation[: len(token_ids)]
        stock = self._compressed is None and self._cache is None
        if stock and list(token_ids) == known:
            return self._full.logits[: len(known)]
        return self._session().feed(token_ids)

    def greedy(self, suffix: Sequence[int], num_tokens: int, stop: frozenset[int]) -> list[int]:
        """Tokens generated after the prompt and ``suffix``, up to one of ``stop``."""
        session = self._session()
        logits = session.feed(suffix)[-1] if suffix else self._full.prompt_logits
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            token = int(logits.argmax())
            if token in stop:
                break
            tokens.append(token)
            logits = session.feed([token])[-1]
        return tokens


class Offline:
    """A model in this process, computed by transformers.

    Args:
        model: folder.
        dtype: data type of weights and cache in the simulation.
        block_size: of the engine that is simulated.
        cache_dtype: of the cache that sizes are reported for, whatever the simulation computes in.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        dtype: torch.dtype = torch.float32,
        block_size: int = 32,
        cache_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.path = Path(model).expanduser()
        self.dtype = dtype
        self.cache_dtype = cache_dtype
        bar = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype).eval()
        finally:
            if bar:
                transformers_logging.enable_progress_bar()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.path)
        config = self.model.config.get_text_config()
        head_size = getattr(config, "head_dim", None)
        self.shape = CacheShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_size=head_size or config.hidden_size // config.num_attention_heads,
            block_size=block_size,
            itemsize=cache_dtype.itemsize,
        )
        self.max_length = int(config.max_position_embeddings)
        self._shown: list[Method] = []

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end what the model generates."""
        ids = self.model.generation_config.eos_token_id
        return frozenset(ids if isinstance(ids, list) else [ids] if ids is not None else [])

    def start(self) -> list[int]:
        """Tokens that the tokenizer puts in front of every text."""
        return list(self.tokenizer("")["input_ids"])

    def full(self, prompt: Sequence[int], continuation: Sequence[int]) -> FullRun:
        """Prefill a prompt once for all rows.

        Raises:
            ValueError: it is longer than the model allows.
        """
        length = len(prompt) + len(continuation)
        if length > self.max_length:
            raise ValueError(
                f"{length} tokens are more than the model's {self.max_length}; ask for a shorter "
                "length"
            )
        return FullRun(self.model, prompt, continuation)

    def compress(self, row: Row, run: FullRun) -> CompressedRun:
        """What ``row`` makes of a prompt."""
        num_tokens = len(run.prompt)
        if row.cache_type is not None:
            kind = CacheType.of(row.cache_type, self.shape.head_size)
            cache = kind.cache(run.cache, self.model.config)
            return CompressedRun(
                peer_bytes(kind, num_tokens, self.shape), 1.0, "", run, _cache=cache
            )
        if row.method is None:
            return CompressedRun(full_bytes(num_tokens, self.shape), 1.0, "", run)
        self._show(row.method)
        simulation = Simulation(
            self.model,
            row.method,
            self.shape.block_size,
            str(self.path),
            self.cache_dtype,
        )
        observed = row.method.config.observed_queries
        try:
            prompt = simulation.compress(
                run.prompt,
                [(layer.keys[0], layer.values[0]) for layer in run.cache.layers],
                [queries[:, -observed:] for queries in run.queries],
                run.prompt_logits,
                row.options,
            )
        except IncompressibleError as error:
            return CompressedRun(full_bytes(num_tokens, self.shape), 1.0, error.reason, run)
        return CompressedRun(
            true_bytes(prompt, num_tokens, self.shape),
            kept_share(prompt, num_tokens),
            "",
            run,
            (simulation, prompt),
        )

    def _show(self, method: Method) -> None:
        """Bind the tokenizer to a method, once."""
        if not any(method is other for other in self._shown):
            method.bind_tokenizer(self.tokenizer)
            self._shown.append(method)
