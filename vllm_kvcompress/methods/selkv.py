"""SelKV: keeps the tokens that the end of the prompt attends to (arXiv 2607.16213)."""

from __future__ import annotations

from typing import Any

import torch

from kvcompress_kernels.formats import SlabGeometry
from kvcompress_kernels.select_merge import api as select_merge
from kvcompress_kernels.select_merge import reference as merging
from kvcompress_kernels.window_scores import api as window_scores
from kvcompress_kernels.window_scores import reference as scoring
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    Budget,
    IncompressibleError,
    LayerView,
    ModelShape,
    PagedPrompt,
    PromptView,
    Segment,
    Signal,
    SlabOverflowError,
    SlabUsage,
    TokenLayout,
)
from vllm_kvcompress.methods import selection
from vllm_kvcompress.methods.base import Method

_BUCKET = 32
"""Tokens among which the values of dropped ones are merged."""


class SelKV(Method):
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
    size = "keep of the entries"

    def __init__(self, config: CompressionConfig) -> None:
        super().__init__(config)
        if config.pool_kernel % 2 == 0:
            raise ValueError(
                f"pool_kernel = {config.pool_kernel}: expected an odd number, so that a token is "
                "averaged with as many neighbours on either side"
            )
        self._rule: selection.HeadRule = config.heads
        self._bucket = _BUCKET if config.merge else 0
        self._scale: float | None = None

    def bind_model(self, shape: ModelShape) -> None:
        self._scale = shape.logit_scale

    def _entries_per_head(self, num_tokens: int, keep: float | None) -> int:
        """What the request asks for, else the configured number, else the configured share."""
        if keep is None and self.config.keep_tokens is not None:
            return self.config.keep_tokens
        return int((self.config.keep if keep is None else keep) * num_tokens)

    def budget(
        self,
        num_tokens: int,
        layout: TokenLayout | None,
        keep: float | None,
        geometry: SlabGeometry,
    ) -> Budget:
        """Blocks for as many entries per layer and head as are to be kept.

        A block has one cell for each layer and head. Heads of equal budgets fill them to the last
        one; otherwise the rounding up of each head is added, less than a cell on average.
        """
        entries = self._entries_per_head(num_tokens, keep)
        if entries <= self.config.num_sink_tokens:
            raise IncompressibleError(
                "no_room",
                f"{self.name}: {entries} entries of {num_tokens} tokens are allowed, the first "
                f"{self.config.num_sink_tokens} tokens alone take as many",
            )
        uneven = geometry.block_size - 1 if self._rule == "adaptive" else 0
        num_blocks = geometry.cells(entries + uneven)
        source_blocks = geometry.cells(num_tokens)
        if num_blocks >= source_blocks:
            raise IncompressibleError(
                "no_room",
                f"{self.name}: {entries} entries of {num_tokens} tokens take {num_blocks} blocks, "
                f"no fewer than the {source_blocks} of the prompt",
            )
        return Budget(num_blocks)

    def choose(self, scores: torch.Tensor, keep: float | None) -> torch.Tensor:
        """The tokens that each head keeps, from scores alone.

        Args:
            scores: float32 ``[..., H, G]``.
            keep: `RequestOptions.keep`.

        Returns:
            bool ``[..., H, G]``.
        """
        return selection.select(
            selection.pool(scores, self.config.pool_kernel),
            self._entries_per_head(scores.shape[-1], keep),
            self.config.num_sink_tokens,
            self._rule,
        )

    def compress(self, layer: LayerView, prompt: PromptView, settings: Any) -> Segment:
        assert layer.queries is not None, (
            "the engine collects the queries of methods that need them"
        )
        assert layer.tail_keys is not None
        keys = torch.cat([layer.keys, layer.tail_keys], dim=1)
        first = keys.shape[1] - layer.queries.shape[1]
        mass = scoring.attention_mass(
            layer.queries, keys, first, self._scale or keys.shape[2] ** -0.5
        )
        mass = mass[:, : layer.keys.shape[1]]
        kept = self.choose(scoring.weigh(mass, layer.values).float(), prompt.options.keep)
        entries, _ = merging.select(
            layer.keys, layer.values, kept, mass.float(), self._bucket, self.config.alpha
        )
        keys_of, values_of, bias_of = map(list, zip(*entries, strict=True))
        return Segment(keys_of, values_of, bias_of)

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        assert prompt.queries is not None, (
            "the engine collects the queries of methods that need them"
        )
        geometry = prompt.geometry
        mass, scores = window_scores.window_scores(
            prompt.kv_cache,
            prompt.source,
            prompt.tail,
            prompt.num_tokens,
            prompt.queries,
            prompt.num_tokens - prompt.queries.shape[2],
            self._scale or prompt.queries.shape[3] ** -0.5,
        )
        kept = self.choose(scores, prompt.options.keep)
        num_entries = kept.sum(-1, dtype=torch.int32)  # [L, H]
        cells = (num_entries + geometry.block_size - 1) // geometry.block_size
        num_cells = int(cells.sum())
        if num_cells > prompt.num_cells:
            raise SlabOverflowError(
                f"{self.name}: {kept.shape[-1]} tokens take {num_cells} cells, the slab has "
                f"{prompt.num_cells}"
            )
        cell = merged = 0
        for layer in range(geometry.num_layers):
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
        first_cell = (cells.flatten().cumsum(0) - cells.flatten()).view_as(cells).int()
        dropped = kept.numel() - int(num_entries.sum())
        return SlabUsage(first_cell, num_entries, cell, {"merged": merged / max(dropped, 1)})
