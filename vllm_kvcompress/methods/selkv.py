"""SelKV: keeps the tokens that the end of the prompt attends to (arXiv 2607.16213)."""

from __future__ import annotations

from typing import Any

from kvcompress_kernels.select_merge import api as select_merge
from kvcompress_kernels.select_merge import reference as merging
from kvcompress_kernels.window_scores import reference as scoring
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    LayerView,
    PagedPrompt,
    PromptView,
    Segment,
    Signal,
    SlabUsage,
)
from vllm_kvcompress.methods.selecting import Selecting

_BUCKET = 32
"""Tokens among which the values of dropped ones are merged."""


class SelKV(Selecting):
    """Keeps the tokens that the last queries of the prompt attend to, and drops the others.

    The score of a token is the attention that it gets from the last queries of the prompt (softmax
    over the whole prompt, summed over the queries of a KV head) times the norm of its value,
    averaged with its neighbours. The first tokens are always kept, and the highest scores fill the
    rest of the budget. A dropped token may hand its value on to the kept token nearest to it in
    the direction of keys, among 32 neighbours: with the attention ``a`` of both as weights and the
    cosine of both values as a gate. The token that took others in attracts more attention than it
    did, so it gets the bias ``alpha * log(A / a)``, ``A`` being the weights that it now holds.
    Keys are never changed.

    The number of entries is fixed in advance: ``keep`` times the compressed tokens, or
    ``keep_tokens``; a request's own share goes before both. `SlabUsage.details` says which share of
    the dropped tokens was merged into others.

    Reads from the configuration: ``keep``, ``keep_tokens``, ``num_sink_tokens``,
    ``pool_kernel``, ``heads``, ``merge``, ``alpha``; ``observed_queries`` is read by the engine.

    - ``heads`` "union": one set of tokens for all KV heads of a layer (of those on one rank under
      tensor parallelism), as in the paper; "each": every head keeps its own; "adaptive": its own,
      and the heads of a layer share their budgets by score, after Ada-KV (arXiv 2407.11550).

    Based on SelKV (arXiv 2607.16213), whose full text was not found: its equations are taken from
    a port and summaries. Choices that the paper leaves open, or that differ from it:

    - A dropped token goes to the kept token of its bucket with the most similar key (after RoPE,
      before it or after it in the text). The paper takes the one before it that it attended to
      most, for which the queries of all tokens would have to be stored.
    - A token with no kept token in its bucket is dropped for good.
    - First tokens are kept (the paper has none), the recent window is the configuration's.
    - The ratio ``A / a`` is that of each KV head; the paper averages it over the heads. The
      attention ``a`` counts as at least 1e-8.

    **Limits**: what the end of the prompt does not attend to is lost. A question that comes in a
    later turn does not find it, so that retrieval fails wherever the question was not part of the
    compressed prompt. Only the prompt is compressed, never what is generated.
    """

    name = "selkv"
    needs = frozenset({Signal.QUERY_WINDOW})
    settings = (
        "keep",
        "keep_tokens",
        "num_sink_tokens",
        "observed_queries",
        "pool_kernel",
        "heads",
        "merge",
        "alpha",
    )

    def __init__(self, config: CompressionConfig) -> None:
        super().__init__(config)
        self._bucket = _BUCKET if config.merge else 0

    def compress(self, layer: LayerView, prompt: PromptView, settings: Any) -> Segment:
        mass = self._attention(layer)
        kept = self.choose(scoring.weigh(mass, layer.values).float(), prompt.options.keep)
        entries, _ = merging.select(
            layer.keys, layer.values, kept, mass.float(), self._bucket, self.config.alpha
        )
        return Segment.of(entries)

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        mass, scores = self._paged_attention(prompt)
        kept = self.choose(scores, prompt.options.keep)
        first_cell, num_entries, _ = self._place(kept, prompt)
        cell = merged = 0
        for layer in range(prompt.geometry.num_layers):
            _, num_merged, cell = select_merge.select_merge(
                prompt.kv_cache,
                prompt.bias,
                layer,
                prompt.source,
                prompt.slab,
                kept[layer],
                mass[layer],
                self._bucket,
                self.config.alpha,
                cell,
                prompt.num_cells,
            )
            merged += int(num_merged.sum())
        dropped = kept.numel() - int(num_entries.sum())
        return SlabUsage(first_cell, num_entries, cell, {"merged": merged / max(dropped, 1)})
