"""Meta-Soft: keeps the tokens that learned probes attend to (arXiv 2605.22337)."""

from __future__ import annotations

from typing import Any

from kvcompress_kernels.flow_merge import api as flow_merge
from kvcompress_kernels.flow_merge import reference as flowing
from kvcompress_kernels.formats import SlabGeometry
from kvcompress_kernels.select_merge import api as select_merge
from kvcompress_kernels.select_merge import reference as merging
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    LayerView,
    ModelShape,
    PagedPrompt,
    PromptView,
    Segment,
    Signal,
    SlabUsage,
)
from vllm_kvcompress.methods.selecting import Selecting
from vllm_kvcompress.soft_tokens.artifact import load_soft_tokens
from vllm_kvcompress.soft_tokens.model import SoftTokens


class MetaSoft(Selecting):
    """Keeps the tokens that learned soft tokens, read after the prompt, attend to.

    The soft tokens are vectors in place of embeddings that were trained to attend to a prompt as
    the model's own answer does. The model reads them once, right after the prompt and with its
    whole cache, and forgets them. The score of a token is the attention that their queries pay to
    it (softmax over the prompt alone), summed over the queries of a KV head, and averaged with its
    neighbours' if ``pool_kernel`` says so. The first tokens are always kept, and the highest scores
    fill the rest of the budget; see `Selecting`. Keys are never changed.

    Values of dropped tokens may flow into kept ones (``flow``, off by default), each to the four
    with the most similar keys; the forms are in `kvcompress_kernels.flow_merge.reference`. The form
    "printed" is that of the paper, whose sums grow with the share that is dropped: beyond a
    ``gamma`` of about 0.05 it does harm. "convex" moves a value at most ``gamma`` of the way to the
    mean of what flows in, and "mass" weighs by attention and adds a bias to the logits.

    Reads from the configuration: ``keep``, ``keep_tokens``, ``num_sink_tokens``,
    ``pool_kernel``, ``heads``, ``probes``, ``soft_tokens``, ``flow``, ``gamma``. The soft tokens
    are an artifact that ``vllm-kvcompress train metasoft`` makes from the model.

    Based on Meta-Soft (arXiv 2605.22337), which leaves much open. Choices: every layer and KV head
    scores by the attention of its own queries; the recent window is the configuration's; the flow
    is the paper's Eqs. 7 to 13 with m = 4, tau = 1.

    **Limits**: it needs training, on prompts like those that are served. What neither the end of
    the prompt nor an expected answer points at is lost, so a question of a later turn may not find
    what it asks for. The slab has to hold the soft tokens' own keys and values for a moment, so
    that very short prompts are left alone. Only the prompt is compressed, never what is generated.
    """

    name = "metasoft"
    needs = frozenset({Signal.PROBE_QUERIES})
    settings = (*Selecting.settings, "probes", "soft_tokens", "flow", "gamma")
    queries_follow = True
    pool_kernel = 1

    _bound: tuple[str, SoftTokens] | None = None

    def __init__(self, config: CompressionConfig) -> None:
        super().__init__(config)
        self._flow: flowing.Form | None = None if config.flow == "none" else config.flow

    def bind_model(self, shape: ModelShape) -> None:
        super().bind_model(shape)
        if self._bound is None or self._bound[0] != shape.model:
            try:
                tokens = load_soft_tokens(shape.model, self.config.soft_tokens, self.config.probes)
            except ValueError as error:
                raise ValueError(f"metasoft: {error}") from error
            self._bound = shape.model, tokens

    @property
    def probes(self) -> SoftTokens:
        assert self._bound is not None, "bind_model() must be called first"
        return self._bound[1]

    def _scratch_blocks(self, geometry: SlabGeometry) -> int:
        """A copy of the prompt's last block, if it is partly filled, and the soft tokens behind it;
        the prompt's length modulo the block size is not known yet."""
        return geometry.cells(geometry.block_size - 1 + self.probes.num_tokens)

    def compress(self, layer: LayerView, prompt: PromptView, settings: Any) -> Segment:
        mass = self._attention(layer).float()
        kept = self.choose(mass, prompt.options.keep)
        if self._flow is None:
            entries, _ = merging.select(layer.keys, layer.values, kept, mass, 0, 0.0)
        else:
            entries = flowing.flow(
                layer.keys, layer.values, kept, mass, self._flow, self.config.gamma
            )
        return Segment.of(entries)

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        mass, _ = self._paged_attention(prompt)
        kept = self.choose(mass, prompt.options.keep)
        first_cell, num_entries, _ = self._place(kept, prompt)
        cell = 0
        for layer in range(prompt.geometry.num_layers):
            chosen = (
                prompt.kv_cache,
                prompt.bias,
                layer,
                prompt.source,
                prompt.slab,
                kept[layer],
                mass[layer],
            )
            if self._flow is None:
                *_, cell = select_merge.select_merge(*chosen, 0, 0.0, cell, prompt.num_cells)
            else:
                _, cell = flow_merge.flow_merge(
                    *chosen, self._flow, self.config.gamma, cell, prompt.num_cells
                )
        return SlabUsage(first_cell, num_entries, cell)
