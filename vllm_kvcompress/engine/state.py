"""Compression state on the device: persistent tables that the attention kernels read.

The slab's first block is private to its request, so its id is the key: ``slot_of_block`` turns the
first entry of a block-table row into a slot of the other tables; slot 0 means "not compressed".
The tables are allocated once and only ever written in place, which is what CUDA-graph replay needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcompress_kernels import formats
from kvcompress_kernels.code_format import GroupCodec
from kvcompress_kernels.coded_attention.api import LayerCodecs
from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.core import SlabUsage
from vllm_kvcompress.engine.protocol import Observation


class Batch(Protocol):
    """The batch of this step, and the block lists of requests, as a model runner keeps them."""

    @property
    def request_ids(self) -> Sequence[str]:
        """Requests of this step, by row."""

    def row_of(self, request_id: str) -> int:
        """Row of a request of this step."""

    def rewrite(self, request_id: str, block_ids: list[int]) -> None:
        """Replace the first blocks of a request; called before the runner looks at the step."""


@dataclass(frozen=True)
class LayerState:
    """What one attention layer needs to find its segments.

    Args:
        layer: index of the layer in ``DeviceState.kv_cache``.
        state: the tables, shared by all layers.
    """

    layer: int
    state: DeviceState


class DeviceState:
    """Tables of one KV-cache group on one rank.

    Args:
        kv_cache: the pool: ``[L, B, H, N, 2 * D]`` of CPU cells, or ``[2, L, B, H, N, D]``
            (`formats.gpu_pool`).
        max_num_requests: compressed requests at any time.
        batch: of the model runner.
        codecs: of each layer, for methods that make coded rows; nothing for others.

    Attributes:
        bias: float32 ``[B, L, H, N]``.
        slot_of_block: int32 ``[B]``.
        gap_end: int32 ``[S]``, tokens before it are in the segment.
        first_cell: int32 ``[S, L, H]``.
        num_entries: int32 ``[S, L, H]``.
        first_code_cell: int32 ``[S, L, groups]``.
        num_rows: int32 ``[S, L, groups]``.
        codecs: the same codecs as the kernel takes them.
        queries: what is kept of prompts that are not compressed yet.
    """

    def __init__(
        self,
        kv_cache: torch.Tensor,
        max_num_requests: int,
        batch: Batch,
        codecs: Sequence[Sequence[GroupCodec]] = (),
    ) -> None:
        num_layers, num_blocks, num_kv_heads, block_size, _ = kv_cache.shape[-5:]
        self.kv_cache = kv_cache
        self._block_dim = kv_cache.dim() - 4
        self.geometry = SlabGeometry(num_layers, num_kv_heads, block_size)

        def table(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=kv_cache.device)

        num_slots = max_num_requests + 1
        self.bias = torch.zeros(
            (num_blocks, num_layers, num_kv_heads, block_size),
            dtype=formats.BIAS_DTYPE,
            device=kv_cache.device,
        )
        self.slot_of_block = table(num_blocks)
        self.gap_end = table(num_slots)
        self.first_cell = table(num_slots, num_layers, num_kv_heads)
        self.num_entries = table(num_slots, num_layers, num_kv_heads)
        num_groups = len(codecs[0]) if codecs else 0
        self.first_code_cell = table(num_slots, num_layers, num_groups)
        self.num_rows = table(num_slots, num_layers, num_groups)
        self.codecs = [LayerCodecs(layer, num_kv_heads, kv_cache.dtype) for layer in codecs]
        self.queries = QueryWindows(num_layers, batch.row_of)
        self._batch = batch
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._requests: dict[str, tuple[int, tuple[int, ...]]] = {}

    @property
    def num_requests(self) -> int:
        """Requests with state now."""
        return len(self._requests)

    def compressed_rows(self) -> list[int]:
        """Rows of this step that have state, without a look at the device."""
        if not self._requests:
            return []
        return [row for row, name in enumerate(self._batch.request_ids) if name in self._requests]

    def add(self, request_id: str, slab: Sequence[int], gap_end: int, usage: SlabUsage) -> None:
        """Enter a freshly compressed request, whose segments lie in the blocks ``slab``."""
        assert request_id not in self._requests, f"{request_id} is compressed already"
        slot = self._free_slots.pop()
        self._requests[request_id] = (slot, tuple(slab))
        self.gap_end[slot] = gap_end
        self.first_cell[slot].copy_(usage.first_cell)
        self.num_entries[slot].copy_(usage.num_entries)
        if usage.num_rows is not None:
            assert usage.first_code_cell is not None
            self.first_code_cell[slot].copy_(usage.first_code_cell)
            self.num_rows[slot].copy_(usage.num_rows)
        self.slot_of_block[slab[0]] = slot

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine (its plan may have failed)."""
        self.queries.release(request_id)
        slot, slab = self._requests.pop(request_id, (0, ()))
        if slot:
            self.slot_of_block[slab[0]] = 0
            self._free_slots.append(slot)
            self.wipe(slab)

    def wipe(self, slab: Sequence[int]) -> None:
        """Clear blocks that go back to the pool, if codes may be in them.

        Read as numbers, codes may be NaN, and vLLM's kernels multiply the slots of a block that no
        token has filled yet by zero instead of leaving them out.
        """
        if self.codecs:
            self.clear(slab)

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros, in all layers."""
        at = torch.tensor(blocks, device=self.kv_cache.device)
        self.kv_cache.index_fill_(self._block_dim, at, 0)

    def fill_with_noise(self, blocks: Sequence[int]) -> None:
        """Fill blocks with numbers as keys and values may have, in all layers."""
        for block in blocks:
            self.kv_cache.select(self._block_dim, block).normal_()

    def copy(self, block: int, to: int) -> None:
        """Copy one block to another, in all layers."""
        self.kv_cache.select(self._block_dim, to).copy_(
            self.kv_cache.select(self._block_dim, block)
        )

    @contextmanager
    def observing(self, queries: QueryWindows) -> Iterator[None]:
        """Let the layers hand their queries to ``queries`` meanwhile."""
        usual, self.queries = self.queries, queries
        try:
            yield
        finally:
            self.queries = usual


class QueryWindows:
    """The last queries of prompts that are being computed.

    Args:
        num_layers: ``L``.
        row_of: row of a request in the batch of this step.
    """

    def __init__(self, num_layers: int, row_of: Callable[[str], int]) -> None:
        self._num_layers = num_layers
        self._row_of = row_of
        self._windows: dict[str, _Window] = {}
        self._step: list[Observation] = []

    @property
    def num_requests(self) -> int:
        """Requests with queries kept."""
        return len(self._windows)

    def begin_step(self, observations: Sequence[Observation]) -> None:
        """Take the orders of a step."""
        self._step = list(observations)

    def record(self, layer: int, query: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """Keep what the step's orders name.

        Args:
            layer: index into ``L``.
            query: ``[num_tokens, num_heads, D]`` of one layer in this step.
            query_start_loc: int32 ``[R + 1]``, first token of each row.
        """
        for order in self._step:
            window = self._windows.get(order.request_id)
            if window is None or (window.first, window.end) != (order.first, order.end):
                assert order.start == order.first, f"queries of {order.request_id} are missing"
                shape = (self._num_layers, query.shape[1], order.end - order.first, query.shape[2])
                window = _Window(order.first, order.end, query.new_empty(shape))
                self._windows[order.request_id] = window
            token = int(query_start_loc[self._row_of(order.request_id)]) + order.offset
            part = query[token : token + order.stop - order.start]
            start = order.start - order.first
            window.queries[layer, :, start : start + part.shape[0]] = part.transpose(0, 1)

    def take(self, request_id: str) -> torch.Tensor | None:
        """Queries ``[L, num_heads, w, D]`` of a request, which is forgotten."""
        window = self._windows.pop(request_id, None)
        return None if window is None else window.queries

    def release(self, request_id: str) -> None:
        self._windows.pop(request_id, None)


@dataclass(frozen=True)
class _Window:
    """Queries of the tokens ``[first, end)`` of one request: ``[L, num_heads, w, D]``."""

    first: int
    end: int
    queries: torch.Tensor


def stack_layers(views: Sequence[torch.Tensor], head_major: bool = True) -> torch.Tensor:
    """One ``[L, B, H, N, C]`` view over the ``[B, H, N, C]`` caches of a group's layers.

    Args:
        head_major: whether the slots of a KV head have to follow one another.

    Raises:
        ValueError: the layers do not lie at equal distances in one buffer, or a block's
            (slot, content) interior is not contiguous although it has to be.
    """
    first = views[0]
    storage = first.untyped_storage().data_ptr()
    offsets = [view.storage_offset() for view in views]
    step = offsets[1] - offsets[0] if len(views) > 1 else first[:, 0, 0, 0].numel()
    regular = all(
        view.untyped_storage().data_ptr() == storage
        and view.shape == first.shape
        and view.stride() == first.stride()
        and offset == offsets[0] + index * step
        for index, (view, offset) in enumerate(zip(views, offsets, strict=True))
    )
    if not regular or step <= 0:
        raise ValueError(
            "--kv-compression needs the KV caches of a group at equal distances in one buffer; "
            f"layer offsets are {offsets[:4]}..."
        )
    if head_major and first.stride()[2:] != (first.shape[3], 1):
        raise ValueError(
            "--kv-compression needs a head-major KV-cache layout (LBHNC or BLHNC); the strides of "
            f"a layer are {first.stride()}"
        )
    return first.as_strided(
        (len(views), *first.shape), (step, *first.stride()), first.storage_offset()
    )
