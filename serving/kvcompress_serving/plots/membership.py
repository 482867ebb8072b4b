"""Which token of a prompt stands in which entry, layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcompress_kernels.cluster_merge import reference as clustering
from kvcompress_kernels.select_merge import reference as merging
from kvcompress_kernels.window_scores import reference as scoring
from kvcompress_serving.evaluation.offline import Offline
from kvcompress_serving.evaluation.rows import Row
from vllm_kvcompress.core import IncompressibleError, LayerView, PromptView
from vllm_kvcompress.methods.base import Method
from vllm_kvcompress.methods.selkv import SelKV
from vllm_kvcompress.methods.semanticache import SemantiCache
from vllm_kvcompress.simulation import CompressedPrompt, Simulation

DROPPED = -1
"""Owner of a token that is in no entry."""

Owners = Callable[[Method, LayerView, PromptView, Any], torch.Tensor]


@dataclass(frozen=True)
class Compressed:
    """One prompt and what a method made of it; ``n`` tokens, ``G`` of them compressed.

    Args:
        method: its name.
        settings: of the row.
        tokens: n pieces of text, which joined are the prompt.
        gap_end: ``G``; the tokens from there on stay as they are.
        entries: int64 ``[L, H]``, entries of each segment.
        owners: int32 ``[L, H, G]``, for each token the one whose entry it is part of, itself for
            the entry's own, `DROPPED` for none; None if the method does not say.
        weights: float32 ``[L, H, G]``, ``exp`` of the bias of a token's own entry, how many equal
            tokens the entry counts as; 0 for tokens that own none.
    """

    method: str
    settings: dict[str, Any]
    tokens: list[str]
    gap_end: int
    entries: np.ndarray
    owners: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def kept(self) -> np.ndarray:
        """float64 ``[L, H]``: entries per compressed token."""
        return np.asarray(self.entries / self.gap_end)


def compress(engine: Offline, row: Row, text: str, num_tokens: int) -> Compressed:
    """Compress the first tokens of a text with a row's method.

    Args:
        engine: the model.
        row: a method and its settings.
        text: the prompt.
        num_tokens: how much of it.

    Raises:
        ValueError: the method leaves such a prompt alone, or the row compresses nothing.
    """
    if row.method is None:
        raise ValueError(f"row '{row.name}' compresses nothing")
    ids = [*engine.start(), *engine.encode(text)][:num_tokens]
    run = engine.full(ids, [])
    seen: list[tuple[PromptView, list[torch.Tensor]]] = []
    method: Any = _Watched(row.method, seen)
    method.bind_tokenizer(engine.tokenizer)
    simulation = Simulation(engine.model, method, engine.shape.block_size, str(engine.path))
    observed = row.method.config.observed_queries
    try:
        result = simulation.compress(
            ids,
            [(layer.keys[0], layer.values[0]) for layer in run.cache.layers],
            [queries[:, -observed:] for queries in run.queries],
            run.prompt_logits,
            row.options,
        )
    except IncompressibleError as error:
        raise ValueError(f"row '{row.name}' leaves {len(ids)} tokens alone: {error}") from None
    owners = weights = None
    if seen[0][1]:
        owners = torch.stack(seen[0][1]).int().numpy()
        weights = _weights(owners, result)
    return Compressed(
        row.method.name,
        dict(row.settings),
        _pieces(engine.tokenizer, ids),
        result.gap_end,
        result.num_entries().numpy(),
        owners,
        weights,
    )


class _Watched:
    """A method that also says which tokens went where."""

    def __init__(self, method: Method, seen: list[tuple[PromptView, list[torch.Tensor]]]) -> None:
        self._method = method
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def compress_prompt(self, prompt: PromptView) -> Any:
        owners: list[torch.Tensor] = []
        self._seen.append((prompt, owners))
        if (explain := _EXPLAINED.get(type(self._method))) is not None:
            settings = self._method.fit(prompt)
            owners += [explain(self._method, layer, prompt, settings) for layer in prompt.layers]
        return self._method.compress_prompt(prompt)


def _semanticache(_: Method, layer: LayerView, prompt: PromptView, settings: Any) -> torch.Tensor:
    assert prompt.layout is not None
    chunk_ids = torch.tensor(settings.rung.chunk_ids(prompt.layout))
    return clustering.assign(layer.keys, chunk_ids, settings.rung.threshold)


def _selkv(method: Method, layer: LayerView, prompt: PromptView, _: Any) -> torch.Tensor:
    assert isinstance(method, SelKV)
    assert layer.queries is not None
    assert layer.tail_keys is not None
    num_tokens = layer.keys.shape[1]
    keys = torch.cat([layer.keys, layer.tail_keys], dim=1)
    first = keys.shape[1] - layer.queries.shape[1]
    scale = method._scale or keys.shape[2] ** -0.5
    mass = scoring.attention_mass(layer.queries, keys, first, scale)[:, :num_tokens]
    kept = method.choose(scoring.weigh(mass, layer.values).float(), prompt.options.keep)
    own = torch.arange(num_tokens).expand_as(kept)
    if not method._bucket:
        return torch.where(kept, own, DROPPED)
    target = merging.route(layer.keys, kept, method._bucket)
    *_, moved = merging.merge(layer.values, kept, target, mass.float(), method.config.alpha)
    return torch.where(kept, own, torch.where(moved, target, DROPPED))


_EXPLAINED: dict[type[Method], Owners] = {SemantiCache: _semanticache, SelKV: _selkv}


def explained_methods() -> list[str]:
    """Methods whose entries can be traced to tokens."""
    return sorted(kind.name for kind in _EXPLAINED)


def _weights(owners: np.ndarray, result: CompressedPrompt) -> np.ndarray:
    """Spread each segment's biases over the tokens that own its entries, in their order."""
    weights = np.zeros(owners.shape, dtype=np.float32)
    own = owners == np.arange(owners.shape[-1])
    for layer, segment in enumerate(result.segments):
        for head, bias in enumerate(segment.bias):
            places = own[layer, head]
            assert int(places.sum()) == len(bias), "owners and entries disagree"
            weights[layer, head, places] = np.exp(bias.float().numpy())
    return weights


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text of each token, so that the pieces joined are the decoded text.

    A character whose bytes are spread over several tokens goes to the last of them.
    """
    pieces: list[str] = []
    done, start = "", 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and end < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(done) :])
        done = text
        if end - start >= 64:
            # decoding from the start again and again would take quadratic time; one token stays,
            # since some tokenizers leave out a space in front of the first
            start = end - 1
            done = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
    return pieces
