"""A prompt in both forms that methods work on, paged and dense, with queries that score it."""

from __future__ import annotations

import math

import torch

from kvcompress_kernels.formats import SlabGeometry, cell_keys, cell_values, read_segment
from vllm_kvcompress.core import LayerView, PagedPrompt, PromptView, RequestOptions
from vllm_kvcompress.methods.selecting import Selecting


class Case:
    """One prompt in both forms: paged in a poisoned pool, and dense.

    Args:
        keys: ``[L, H, n, D]``.
        values: ``[L, H, n, D]``.
        queries: ``[L, num_heads, w, D]``.
        num_compressed: ``G``.
        keep: of the request.
        num_blocks: of the slab; the method's budget when None.
    """

    def __init__(
        self,
        method: Selecting,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: torch.Tensor,
        num_compressed: int,
        keep: float | None,
        num_blocks: int | None = None,
        block_size: int = 16,
    ) -> None:
        layers, heads, tokens, size = keys.shape
        self.method, self.keys, self.values = method, keys, values
        geometry = SlabGeometry(layers, heads, block_size)
        if num_blocks is None:
            num_blocks = method.budget(num_compressed, None, keep, geometry).num_blocks
        count, gap = -(-tokens // block_size), num_compressed // block_size
        shape = (layers, count + num_blocks, heads, block_size, 2 * size)
        kv_cache = torch.full(shape, math.nan, dtype=keys.dtype)
        for i in range(count):
            stop = min(block_size, tokens - i * block_size)
            of = slice(i * block_size, i * block_size + stop)
            cells = kv_cache[:, num_blocks + i]
            cell_keys(cells)[..., :stop] = keys[:, :, of].transpose(-1, -2)
            cell_values(cells)[..., :stop, :] = values[:, :, of]
        options = RequestOptions(method.name, keep)
        blocks = torch.arange(num_blocks, num_blocks + count, dtype=torch.int32)
        self.paged = PagedPrompt(
            kv_cache=kv_cache,
            bias=torch.full((count + num_blocks, layers, heads, block_size), math.nan),
            source=blocks[:gap].clone(),
            tail=blocks[gap:].clone(),
            num_tokens=tokens,
            slab=torch.arange(num_blocks, dtype=torch.int32).flip(0),
            options=options,
            layout=None,
            geometry=geometry,
            queries=queries,
        )
        views = [
            LayerView(k[:, :num_compressed], v[:, :num_compressed], k[:, num_compressed:], q)
            for k, v, q in zip(keys, values, queries, strict=True)
        ]
        self.dense = PromptView(views, options, None, geometry, self.paged.num_cells)

    def read(self, usage) -> list[tuple[torch.Tensor, ...]]:
        cells, counts = usage.first_cell.flatten().tolist(), usage.num_entries.flatten().tolist()
        paged = self.paged
        return [
            read_segment(paged.kv_cache, paged.bias, paged.slab, cell, count)
            for cell, count in zip(cells, counts, strict=True)
        ]

    def run(self) -> list[tuple[torch.Tensor, ...]]:
        """Entries of each layer and head, from the kernels."""
        return self.read(self.method.compress_into(self.paged))

    def run_dense(self) -> list[tuple[torch.Tensor, ...]]:
        return [
            head
            for segment in self.method.compress_prompt(self.dense)
            for head in zip(segment.keys, segment.values, segment.bias, strict=True)
        ]


def make_case(
    method: Selecting,
    *,
    blocks: int = 10,
    tail: int = 5,
    layers: int = 2,
    heads: int = 2,
    group: int = 3,
    num_queries: int = 8,
    size: int = 32,
    keep: float | None = 0.25,
    num_blocks: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    tokens = 16 * blocks + tail
    slow = torch.randn(2, layers, heads, tokens // 8 + 1, size, generator=generator)
    noise = 0.7 * torch.randn(2, layers, heads, tokens, size, generator=generator)
    keys, values = (slow.repeat_interleave(8, 3)[..., :tokens, :] + noise).to(dtype)
    queries = 2 * torch.randn(layers, heads * group, num_queries, size, generator=generator)
    return Case(method, keys, values, queries.to(dtype), 16 * blocks, keep, num_blocks)


def positions(entry_keys: torch.Tensor, keys: torch.Tensor) -> list[int]:
    """Tokens that some entries are; every key occurs once."""
    return [int((keys == key).all(-1).nonzero()) for key in entry_keys]


def is_settled(method: Selecting, scores: torch.Tensor, keep: float) -> bool:
    """Whether the choice stays the same for scores that are a little different."""
    kept = method.choose(scores, keep)
    generator = torch.Generator().manual_seed(0)
    changes = 1 + 1e-5 * torch.randn(6, *scores.shape, generator=generator)
    return all(torch.equal(method.choose(scores * change, keep), kept) for change in changes)
