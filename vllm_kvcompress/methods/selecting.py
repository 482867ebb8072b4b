"""What methods share that keep tokens by a score: budget, choice, attention, room in the slab."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kvcompress_kernels.formats import SlabGeometry
from kvcompress_kernels.window_scores import api as window_scores
from kvcompress_kernels.window_scores import reference as scoring
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    Budget,
    IncompressibleError,
    LayerView,
    ModelShape,
    PagedPrompt,
    SlabOverflowError,
    TokenLayout,
)
from vllm_kvcompress.methods import selection
from vllm_kvcompress.methods.base import Method


class Selecting(Method):
    """Keeps the tokens with the highest scores, as many as the budget says.

    The number of entries is fixed in advance: ``keep`` times the compressed tokens, or
    ``keep_tokens``; a request's own share goes before both. Scores come from the attention that
    some queries pay to the prompt, averaged with their neighbours'; the first tokens are always
    kept.

    Reads from the configuration: ``keep``, ``keep_tokens``, ``num_sink_tokens``,
    ``pool_kernel``, ``heads``.

    Class attributes:
        queries_follow: whether the queries come after the prompt and see all of it; otherwise they
            are those of its last tokens.
        pool_kernel: used where the configuration names none.
    """

    queries_follow: ClassVar[bool] = False
    pool_kernel: ClassVar[int] = 5
    settings: ClassVar[tuple[str, ...]] = (
        "keep",
        "keep_tokens",
        "num_sink_tokens",
        "pool_kernel",
        "heads",
    )
    size = "keep of the entries"

    def __init__(self, config: CompressionConfig) -> None:
        super().__init__(config)
        self._pool_kernel = config.pool_kernel or self.pool_kernel
        if self._pool_kernel % 2 == 0:
            raise ValueError(
                f"pool_kernel = {config.pool_kernel}: expected an odd number, so that a token is "
                "averaged with as many neighbours on either side"
            )
        self._rule: selection.HeadRule = config.heads
        self._scale: float | None = None

    def bind_model(self, shape: ModelShape) -> None:
        self._scale = shape.logit_scale

    def _entries_per_head(self, num_tokens: int, keep: float | None) -> int:
        """What the request asks for, else the configured number, else the configured share."""
        if keep is None and self.config.keep_tokens is not None:
            return self.config.keep_tokens
        return int((self.config.keep if keep is None else keep) * num_tokens)

    def _scratch_blocks(self, geometry: SlabGeometry) -> int:
        """Blocks of the slab that are needed before anything is written to it."""
        return 0

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
        num_blocks = max(geometry.cells(entries + uneven), self._scratch_blocks(geometry))
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
            selection.pool(scores, self._pool_kernel),
            self._entries_per_head(scores.shape[-1], keep),
            self.config.num_sink_tokens,
            self._rule,
        )

    def _attention(self, layer: LayerView) -> torch.Tensor:
        """Attention that the tokens of a dense layer receive, float64 ``[H, G]``."""
        assert layer.queries is not None, (
            "the engine collects the queries of methods that need them"
        )
        assert layer.tail_keys is not None
        keys = torch.cat([layer.keys, layer.tail_keys], dim=1)
        first = keys.shape[1] - (0 if self.queries_follow else layer.queries.shape[1])
        scale = self._scale or keys.shape[2] ** -0.5
        mass = scoring.attention_mass(layer.queries, keys, first, scale)
        return mass[:, : layer.keys.shape[1]]

    def _paged_attention(self, prompt: PagedPrompt) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in the pool for all layers, and the same times the norm of the tokens' values,
        both float32 ``[L, H, G]``."""
        assert prompt.queries is not None, (
            "the engine collects the queries of methods that need them"
        )
        return self._window_scores(
            prompt.kv_cache,
            prompt.source,
            prompt.tail,
            prompt.num_tokens,
            prompt.queries,
            prompt.num_tokens - (0 if self.queries_follow else prompt.queries.shape[2]),
            self._scale or prompt.queries.shape[3] ** -0.5,
        )

    def _window_scores(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`window_scores.window_scores`, for the pool that the method works on."""
        return window_scores.window_scores(*arguments)

    def _place(
        self, kept: torch.Tensor, prompt: PagedPrompt
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Segments one after another.

        Args:
            kept: bool ``[L, H, G]``.

        Returns:
            first cells and numbers of entries, int32 ``[L, H]``; and all cells together.

        Raises:
            SlabOverflowError: they take more cells than there are.
        """
        num_entries = kept.sum(-1, dtype=torch.int32)
        block_size = prompt.geometry.block_size
        cells = (num_entries + block_size - 1) // block_size
        num_cells = int(cells.sum())
        if num_cells > prompt.num_cells:
            raise SlabOverflowError(
                f"{self.name}: {kept.shape[-1]} tokens take {num_cells} cells, the slab has "
                f"{prompt.num_cells}"
            )
        first_cell = (cells.flatten().cumsum(0) - cells.flatten()).view_as(cells).int()
        return first_cell, num_entries, num_cells
