"""Ways to choose which tokens of a prompt are kept, the true future among them.

Every selector gives scores; the choice, the budget and the format of what is kept are the same for
all, so that they differ in nothing else.

Shape letters: ``L`` layers, ``H`` KV heads, ``n`` tokens of a prompt, ``G`` of them compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from kvcompress_kernels.formats import SlabGeometry
from kvcompress_kernels.window_scores import reference as scoring
from kvcompress_serving.evaluation.offline import FullRun
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import Budget, LayerView, PromptView, Segment, TokenLayout
from vllm_kvcompress.methods import selection
from vllm_kvcompress.methods.base import Method
from vllm_kvcompress.simulation import logit_scale
from vllm_kvcompress.soft_tokens.frozen import FrozenModel, PromptCache
from vllm_kvcompress.soft_tokens.losses import hit_rate
from vllm_kvcompress.soft_tokens.model import SoftTokens

ORACLE = "oracle"
LAST = "last queries"
AGAIN = "last tokens, read again"
POOLED = "last queries, pooled"
NUM_QUERIES = 32
POOL_KERNEL = 5


class Chosen(Method):
    """Keeps the tokens with the highest of given scores, as many of every head.

    Args:
        config: of which ``num_sink_tokens`` and ``heads`` are read.
        scores: float32 ``[L, H, G]``.
        keep: share of the ``G`` tokens.
    """

    name = "chosen"

    def __init__(self, config: CompressionConfig, scores: torch.Tensor, keep: float) -> None:
        super().__init__(config)
        num_entries = max(int(keep * scores.shape[-1]), config.num_sink_tokens)
        self._kept = selection.select(
            scores.clone(), num_entries, config.num_sink_tokens, config.heads
        )

    def budget(
        self,
        num_tokens: int,
        layout: TokenLayout | None,
        keep: float | None,
        geometry: SlabGeometry,
    ) -> Budget:
        per_layer = geometry.block_size * geometry.num_kv_heads
        entries = int(self._kept.sum((1, 2)).max()) + per_layer
        return Budget(-(-entries // geometry.num_kv_heads // geometry.block_size) + 1)

    def compress_prompt(self, prompt: PromptView) -> Iterator[Segment]:
        for index, layer in enumerate(prompt.layers):
            yield self.compress(layer, prompt, index)

    def compress(self, layer: LayerView, prompt: PromptView, settings: int) -> Segment:
        kept = self._kept[settings]
        return Segment(
            [keys[own] for keys, own in zip(layer.keys, kept, strict=True)],
            [values[own] for values, own in zip(layer.values, kept, strict=True)],
            [torch.zeros(int(own.sum())) for own in kept],
        )


@dataclass(frozen=True)
class Judged:
    """Scores of all selectors for one prompt.

    Args:
        scores: by name, float32 ``[L, H, G]``.
        num_sink_tokens: first tokens, kept whatever their scores.
    """

    scores: Mapping[str, torch.Tensor]
    num_sink_tokens: int

    def hit_rate(self, name: str, keep: float) -> float:
        """Share of the tokens that the continuation attends to most which a selector chooses; mean
        over layers and KV heads, each choosing for itself."""
        found, wanted = (self.scores[key][..., self.num_sink_tokens :] for key in (name, ORACLE))
        return float(hit_rate(found, wanted, keep).mean())


@torch.no_grad()
def judge(
    run: FullRun,
    probes: Mapping[str, SoftTokens],
    num_compressed: int,
    num_sink_tokens: int,
) -> Judged:
    """Scores of the last queries, of the last tokens when they are read once more after the
    prompt, of soft tokens, and of the true continuation.

    Args:
        run: a prompt and its continuation.
        probes: soft tokens by name.
        num_compressed: ``G``.
        num_sink_tokens: see `Judged`.
    """
    model = FrozenModel(run.model)
    cache = PromptCache(
        torch.stack([layer.keys[0] for layer in run.cache.layers]),
        torch.stack([layer.values[0] for layer in run.cache.layers]),
    )
    last = _last_attention(run, cache)
    scores = {
        ORACLE: model.attention_of(cache, torch.tensor(run.continuation)),
        LAST: last,
        POOLED: selection.pool(last, POOL_KERNEL),
        "last queries, pooled, times value norm": selection.pool(
            scoring.weigh(last, cache.values, torch.float32), POOL_KERNEL
        ),
        "random": torch.rand(last.shape, generator=torch.Generator().manual_seed(len(run.prompt))),
    }
    embeddings = model.embed(torch.tensor(run.prompt))
    (scores[AGAIN],) = model.probe(embeddings[-NUM_QUERIES:][None], [cache])
    for name, tokens in probes.items():
        (found,) = model.probe(tokens(embeddings)[None], [cache])
        scores[name] = found
        scores[f"{name}, pooled"] = selection.pool(found, POOL_KERNEL)
        # both are distributions over the prompt, the one that knows the model's own last words too
        scores[f"{name} and last queries"] = found + last / last.sum(-1, keepdim=True)
    return Judged({k: v[..., :num_compressed] for k, v in scores.items()}, num_sink_tokens)


def _last_attention(run: FullRun, cache: PromptCache) -> torch.Tensor:
    """Attention of the last queries of the prompt, ``[L, H, n]``."""
    queries = [layer[:, -NUM_QUERIES:] for layer in run.queries]
    first = cache.num_tokens - queries[0].shape[1]
    scale = logit_scale(run.model) or queries[0].shape[-1] ** -0.5
    masses = [
        scoring.attention_mass(own, keys, first, scale, torch.float32)
        for own, keys in zip(queries, cache.keys, strict=True)
    ]
    return torch.stack(masses)
