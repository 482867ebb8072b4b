"""The vocabulary that methods, engine, simulation and tests share. Torch and numpy only.

Shape letters: ``L`` layers, ``H`` KV heads, ``D`` head size, ``n`` prompt tokens in the cache,
``G`` how many of them are compressed (a multiple of the block size), ``m`` entries of a segment.

    tokens   0 ............................ G ............. n ...
             | compressed into segments     | raw tail: the recent window, then generated tokens |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvcompress_kernels.formats import SlabGeometry

KEPT = -1
"""Chunk id of a token that is kept as it is."""


class Signal(enum.Enum):
    """What a method wants to see beside keys and values."""

    TOKEN_IDS = "token_ids"
    QUERY_WINDOW = "query_window"
    PROBE_QUERIES = "probe_queries"
    CALIBRATION = "calibration"


@dataclass(frozen=True)
class Budget:
    """Room that a prompt gets.

    Args:
        num_blocks: blocks of the slab.
    """

    num_blocks: int


class IncompressibleError(ValueError):
    """This prompt cannot be made smaller within its budget; `reason` is the metrics label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SlabOverflowError(RuntimeError):
    """The entries of a prompt did not fit the slab that was planned for it."""


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks for: the server's configuration with the request's own values on top.

    Args:
        method: a registered name.
        keep: largest share of the compressed tokens that may be kept, (0, 1]; None: no limit of
            its own.
        threshold: cosine similarity above which two keys are merged; None where the method has
            none.
    """

    method: str
    keep: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens ``[0, G)`` of a prompt are divided, the same for all layers and heads.

    Args:
        chunk_ids: int32 ``[G]``: `KEPT`, or the number of the chunk; the tokens of a chunk are
            consecutive and chunk numbers rise by one from 0.
        loose_chunk_ids: the same for the fallback in which no token but the first ones is kept
            as it is: used where the budget cannot be met otherwise.
    """

    chunk_ids: np.ndarray
    loose_chunk_ids: np.ndarray

    @staticmethod
    def floor(chunk_ids: np.ndarray) -> int:
        """Fewest entries per head that merging inside chunks can reach."""
        kept = int((chunk_ids == KEPT).sum())
        return kept + (int(chunk_ids.max(initial=KEPT)) + 1)


@dataclass(frozen=True)
class LayerView:
    """The compressed part of one layer's cache, dense.

    Args:
        keys: ``[H, G, D]``, after RoPE, as the cache holds them.
        values: ``[H, G, D]``.
        queries: ``[num_heads, w, D]``, the last ``w`` prompt queries after RoPE, for methods that
            need `Signal.QUERY_WINDOW`; else None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor | None = None


@dataclass(frozen=True)
class Segment:
    """What one layer keeps: for each KV head ``h`` a list item of ``m_h`` entries.

    Args:
        keys: H tensors ``[m_h, D]``.
        values: H tensors ``[m_h, D]``.
        bias: H float32 tensors ``[m_h]``, added to the logits before the softmax.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    bias: list[torch.Tensor]

    @property
    def num_entries(self) -> list[int]:
        return [k.shape[0] for k in self.keys]


@dataclass(frozen=True)
class PromptView:
    """A whole prompt, dense: what `Method.compress_prompt` works on.

    Args:
        layers: L items; may compute its items when asked for them.
        options: the request's options.
        layout: for methods that need `Signal.TOKEN_IDS`; else None.
        geometry: of the slab.
        num_cells: cells that all segments together may take.
    """

    layers: Sequence[LayerView]
    options: RequestOptions
    layout: TokenLayout | None
    geometry: SlabGeometry
    num_cells: int


@dataclass(frozen=True)
class PagedPrompt:
    """A whole prompt in the paged pool, and the slab that it goes to.

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``, the pool (`kvcompress_kernels.formats`).
        bias: float32 ``[B, L, H, N]``, the side tensor.
        source: int32 ``[G / N]``, blocks of the prompt in token order.
        slab: int32 ``[c]``, private blocks, disjoint from ``source``.
        options: the request's options.
        layout: see `PromptView`.
    """

    kv_cache: torch.Tensor
    bias: torch.Tensor
    source: torch.Tensor
    slab: torch.Tensor
    options: RequestOptions
    layout: TokenLayout | None
    geometry: SlabGeometry

    @property
    def num_cells(self) -> int:
        return len(self.slab) * self.geometry.cells_per_block


@dataclass(frozen=True)
class SlabUsage:
    """Where the segments of a prompt lie.

    Args:
        first_cell: int32 ``[L, H]``.
        num_entries: int32 ``[L, H]``.
        num_cells: cells used, counted from cell 0.
        details: small numbers for the log (the threshold that was reached, for instance).
    """

    first_cell: torch.Tensor
    num_entries: torch.Tensor
    num_cells: int
    details: dict[str, float] = field(default_factory=dict)
