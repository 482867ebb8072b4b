"""Compression state on the device: persistent tables that the attention kernels read.

The slab's first block is private to its request, so its id is the key: ``slot_of_block`` turns the
first entry of a block-table row into a slot of the other tables; slot 0 means "not compressed".
The tables are allocated once and only ever written in place, which is what CUDA-graph replay needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompress_kernels import formats
from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.core import SlabUsage


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
        kv_cache: ``[L, B, H, N, 2 * D]``, the pool.
        max_num_requests: compressed requests at any time.

    Attributes:
        bias: float32 ``[B, L, H, N]``.
        slot_of_block: int32 ``[B]``.
        gap_end: int32 ``[S]``, tokens before it are in the segment.
        first_cell: int32 ``[S, L, H]``.
        num_entries: int32 ``[S, L, H]``.
    """

    def __init__(self, kv_cache: torch.Tensor, max_num_requests: int) -> None:
        num_layers, num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
        self.kv_cache = kv_cache
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
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._requests: dict[str, tuple[int, int]] = {}

    @property
    def num_requests(self) -> int:
        """Requests with state now."""
        return len(self._requests)

    def add(self, request_id: str, first_block: int, gap_end: int, usage: SlabUsage) -> None:
        """Enter a freshly compressed request."""
        assert request_id not in self._requests, f"{request_id} is compressed already"
        slot = self._free_slots.pop()
        self._requests[request_id] = (slot, first_block)
        self.gap_end[slot] = gap_end
        self.first_cell[slot].copy_(usage.first_cell)
        self.num_entries[slot].copy_(usage.num_entries)
        self.slot_of_block[first_block] = slot

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine (its plan may have failed)."""
        slot, first_block = self._requests.pop(request_id, (0, 0))
        if slot:
            self.slot_of_block[first_block] = 0
            self._free_slots.append(slot)


def stack_layers(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """One ``[L, B, H, N, C]`` view over the ``[B, H, N, C]`` caches of a group's layers.

    Raises:
        ValueError: the layers do not lie at equal distances in one buffer, or a block's
            (slot, content) interior is not contiguous.
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
    if first.stride()[2:] != (first.shape[3], 1):
        raise ValueError(
            "--kv-compression needs a head-major KV-cache layout (LBHNC or BLHNC); the strides of "
            f"a layer are {first.stride()}"
        )
    return first.as_strided(
        (len(views), *first.shape), (step, *first.stride()), first.storage_offset()
    )
