"""The vocabulary that methods, engine, simulation and tests share. Torch and numpy only.

Shape letters: ``L`` layers, ``H`` KV heads, ``D`` head size, ``n`` prompt tokens in the cache,
``G`` how many of them are compressed (a multiple of the block size), ``m`` entries of a segment.

    tokens   0 ............................ G ............. n ...
             | compressed into segments     | raw tail: the recent window, then generated tokens |
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvcompress_kernels.code_format import Codes, GroupCodec
from kvcompress_kernels.code_rows import reference as code_rows
from kvcompress_kernels.formats import SlabGeometry

KEPT = -1
"""Chunk id of a token that is kept as it is."""


class Signal(enum.Enum):
    """What a method wants to see beside keys and values.

    - ``TOKEN_IDS``: the prompt's tokens, for `Method.layout`.
    - ``QUERY_WINDOW``: queries of the prompt's last tokens.
    - ``PROBE_QUERIES``: queries of vectors that the model reads after the prompt
      (`Method.probes`).
    - ``CALIBRATION``: an artifact made from the model.
    """

    TOKEN_IDS = "token_ids"
    QUERY_WINDOW = "query_window"
    PROBE_QUERIES = "probe_queries"
    CALIBRATION = "calibration"


@dataclass(frozen=True)
class ModelShape:
    """The compressed part of a model, as one rank of it sees it.

    Args:
        model: folder or name of the model.
        layers: indices in the model of the L compressed layers, ascending.
        num_heads: query heads of a layer on this rank.
        num_kv_heads: KV heads of a layer on this rank (``H``).
        head_size: ``D``.
        dtype: of the cache.
        block_size: slots of a block (``N``).
        rank: which of the ranks this is; the ranks divide the KV heads of the model in order.
        num_ranks: tensor-parallel ranks.
        logit_scale: factor of the logits, once the layers are there; None before.
    """

    model: str
    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_size: int
    rank: int = 0
    num_ranks: int = 1
    logit_scale: float | None = None

    @property
    def geometry(self) -> SlabGeometry:
        return SlabGeometry(len(self.layers), self.num_kv_heads, self.block_size)

    @property
    def cell_bytes(self) -> int:
        return self.block_size * 2 * self.head_size * self.dtype.itemsize


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
    """What one request asks for; None where the server's configuration applies.

    Args:
        method: a registered name.
        keep: share of the compressed tokens that may be kept, (0, 1].
        threshold: cosine similarity above which two keys are merged.
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
    """One layer's cache of a prompt, dense.

    Args:
        keys: ``[H, G, D]``, the compressed part, after RoPE, as the cache holds them.
        values: ``[H, G, D]``.
        tail_keys: ``[H, n - G, D]``, keys of the raw tail, for methods that need
            `Signal.QUERY_WINDOW` or `Signal.PROBE_QUERIES`; else None.
        queries: ``[num_heads, w, D]``, after RoPE, for the same methods: of the last ``w`` prompt
            tokens, or of the method's ``w`` probes, at the positions that follow the prompt; else
            None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tail_keys: torch.Tensor | None = None
    queries: torch.Tensor | None = None


@dataclass(frozen=True)
class CodedRows:
    """Coded entries of one group of KV heads."""

    codec: GroupCodec
    codes: Codes


@dataclass(frozen=True)
class Segment:
    """What one layer keeps: for each KV head ``h`` a list item of ``m_h`` raw entries, and coded
    rows, if the method makes some.

    Args:
        keys: H tensors ``[m_h, D]``.
        values: H tensors ``[m_h, D]``.
        bias: H float32 tensors ``[m_h]``, added to the logits before the softmax.
        rows: one item for each group of KV heads, or none.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    bias: list[torch.Tensor]
    rows: list[CodedRows] = field(default_factory=list)

    @staticmethod
    def of(entries: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Segment:
        """Of raw entries alone: keys, values and bias of each KV head."""
        return Segment(*map(list, zip(*entries, strict=True)))

    @property
    def num_entries(self) -> list[int]:
        """Raw entries of each head."""
        return [k.shape[0] for k in self.keys]

    def num_cells(self, geometry: SlabGeometry, cell_bytes: int) -> int:
        """Cells that the layer takes."""
        coded = (
            -(-part.codes.num_rows // part.codec.layout.rows_per_cell(cell_bytes))
            for part in self.rows
        )
        return sum(map(geometry.cells, self.num_entries)) + sum(coded)

    def dense(self) -> Segment:
        """The same with every row decoded, rows first, in the data type of the raw entries."""
        if not self.rows:
            return self
        head_size, dtype = self.keys[0].shape[1], self.keys[0].dtype
        keys, values, bias = [], [], []
        for part in self.rows:
            k, v, b = code_rows.decode(part.codes, part.codec, head_size)
            keys += list(k.to(dtype))
            values += list(v.to(dtype))
            bias += [b] * len(k)
        return Segment(
            [torch.cat(pair) for pair in zip(keys, self.keys, strict=True)],
            [torch.cat(pair) for pair in zip(values, self.values, strict=True)],
            [torch.cat(pair) for pair in zip(bias, self.bias, strict=True)],
        )


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
        kv_cache: ``[L, B, H, N, 2 * D]``, the pool (`kvcompress_kernels.formats`); on a GPU
            ``[2, L, B, H, N, D]`` (`formats.gpu_pool`).
        bias: float32 ``[B, L, H, N]``, the side tensor.
        source: int32 ``[G / N]``, blocks of the prompt in token order.
        tail: int32 ``[ceil((n - G) / N)]``, blocks of the raw tail, which may hold more tokens
            than the prompt's.
        num_tokens: tokens of the prompt (``n``).
        slab: int32 ``[c]``, private blocks, disjoint from ``source``.
        options: the request's options.
        layout: see `PromptView`.
        queries: ``[L, num_heads, w, D]``, see `LayerView`.
    """

    kv_cache: torch.Tensor
    bias: torch.Tensor
    source: torch.Tensor
    tail: torch.Tensor
    num_tokens: int
    slab: torch.Tensor
    options: RequestOptions
    layout: TokenLayout | None
    geometry: SlabGeometry
    queries: torch.Tensor | None = None

    @property
    def num_cells(self) -> int:
        return len(self.slab) * self.geometry.cells_per_block


@dataclass(frozen=True)
class SlabUsage:
    """Where the segments of a prompt lie.

    Args:
        first_cell: int32 ``[L, H]``.
        num_entries: int32 ``[L, H]``, raw entries.
        num_cells: cells used, counted from cell 0.
        details: small numbers for the log (the threshold that was reached, for instance).
        first_code_cell: int32 ``[L, groups]``, where coded rows begin; None without any.
        num_rows: int32 ``[L, groups]``, coded rows.
    """

    first_cell: torch.Tensor
    num_entries: torch.Tensor
    num_cells: int
    details: dict[str, float] = field(default_factory=dict)
    first_code_cell: torch.Tensor | None = None
    num_rows: torch.Tensor | None = None
