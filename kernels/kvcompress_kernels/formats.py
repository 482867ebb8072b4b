"""Byte layouts of the paged KV pool and of the slab, in one place.

The pool of one KV-cache group is a 5-D view ``kv_cache[L, B, H, N, 2 * D]`` of vLLM's buffer:
``L`` layers, ``B`` blocks, ``H`` KV heads, ``N`` slots in a block (the block size), ``D`` head
size. The strides of ``L``, ``B`` and ``H`` are whatever vLLM negotiated and are always taken
from ``stride()``; the last two dimensions of one (layer, block, head) are contiguous. Those
``N * 2 * D`` elements are a *cell*:

    CPU cell (vLLM's ``vec`` layout)      | K transposed: [D, N] | V: [N, D] |

On a GPU the slots of a cell follow one another, each with its key and its value:

    GPU cell (vLLM's Triton and Flash)    | K 0 [D] | V 0 [D] | K 1 [D] | V 1 [D] | ...

There the pool is handed on as the 6-D view ``[2, L, B, H, N, D]`` that `gpu_pool` makes, keys
first. Its kernels take every stride but the last from ``stride()``, so that they read any order of
the dimensions in memory, and caches that keep keys and values apart.

A *slab* is a list of private blocks of one request, read as a linear memory of
``len(slab) * L * H`` cells that all layers and heads of that request share. Cell ``u`` is in block
``slab[u // (L * H)]``, at layer ``(u % (L * H)) // H``, head ``u % H``. A *segment* is what one
(layer, head) of the request holds after compression: ``num_entries`` entries in
``ceil(num_entries / N)`` consecutive cells from ``first_cell`` on; slots past the end hold garbage.

    cells   0 . . . . . . u . . . . . . . v . . . .
            | layer 0 h 0 | layer 0 h 1   | layer 0 h 2 ...

The bias of a raw entry, added to its logit before the softmax, lives in a side tensor
``bias[B, L, H, N]`` (float32), addressed by the cell's own block, layer and head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BIAS_DTYPE = torch.float32


@dataclass(frozen=True)
class SlabGeometry:
    """Sizes that fix how a slab is addressed; equal in scheduler, worker and kernels.

    Args:
        num_layers: layers of the KV-cache group (``L``).
        num_kv_heads: KV heads of one layer on this rank (``H``).
        block_size: slots of a block (``N``).
    """

    num_layers: int
    num_kv_heads: int
    block_size: int

    @property
    def cells_per_block(self) -> int:
        return self.num_layers * self.num_kv_heads

    def cells(self, num_entries: int) -> int:
        """Cells that a segment of ``num_entries`` entries takes."""
        return -(-num_entries // self.block_size)

    def blocks(self, num_cells: int) -> int:
        """Blocks that a slab of ``num_cells`` cells takes."""
        return -(-num_cells // self.cells_per_block)

    def locate(self, cell: int) -> tuple[int, int, int]:
        """``(index into the slab, layer, head)`` of a cell."""
        index, rest = divmod(cell, self.cells_per_block)
        layer, head = divmod(rest, self.num_kv_heads)
        return index, layer, head


def bias_bytes_per_block(num_layers: int, num_kv_heads: int, block_size: int) -> int:
    """Bytes of the side tensor that belong to one block of the pool."""
    return num_layers * num_kv_heads * block_size * BIAS_DTYPE.itemsize


def cell_keys(cells: torch.Tensor) -> torch.Tensor:
    """Keys of CPU cells as a view: ``[..., N, 2 * D] -> [..., D, N]`` (K is stored transposed)."""
    slots, width = cells.shape[-2:]
    head_size = width // 2
    flat = cells.flatten(-2)
    return flat[..., : head_size * slots].unflatten(-1, (head_size, slots))


def cell_values(cells: torch.Tensor) -> torch.Tensor:
    """Values of CPU cells as a view: ``[..., N, 2 * D] -> [..., N, D]``."""
    slots, width = cells.shape[-2:]
    head_size = width // 2
    flat = cells.flatten(-2)
    return flat[..., head_size * slots :].unflatten(-1, (slots, head_size))


def gather_prompt(
    kv_cache: torch.Tensor, layer: int, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy one layer's keys and values of whole blocks out of the pool.

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``.
        layer: index into ``L``.
        blocks: int ``[G / N]``, block ids in token order.

    Returns:
        keys and values, each ``[H, G, D]`` in the pool's dtype.
    """
    cells = kv_cache[layer].index_select(0, blocks.long())  # [G / N, H, N, 2 * D]
    keys = cell_keys(cells).transpose(-1, -2)  # [G / N, H, N, D]
    values = cell_values(cells)
    return (
        keys.transpose(0, 1).flatten(1, 2).contiguous(),
        values.transpose(0, 1).flatten(1, 2).contiguous(),
    )


def write_segment(
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    entry_bias: torch.Tensor,
) -> None:
    """Write the entries of one (layer, head) into consecutive cells of a slab.

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``, written.
        bias: float32 ``[B, L, H, N]``, written.
        slab: int ``[c]``, block ids.
        first_cell: cell of the first entry.
        keys: ``[m, D]``.
        values: ``[m, D]``.
        entry_bias: ``[m]``.
    """
    num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    geometry = SlabGeometry(num_layers, num_kv_heads, block_size)
    for start in range(0, keys.shape[0], block_size):
        index, layer, head = geometry.locate(first_cell + start // block_size)
        stop = min(start + block_size, keys.shape[0])
        block = int(slab[index])
        cell = kv_cache[layer, block, head]
        cell_keys(cell)[:, : stop - start] = keys[start:stop].T.to(cell.dtype)
        cell_values(cell)[: stop - start] = values[start:stop].to(cell.dtype)
        bias[block, layer, head, : stop - start] = entry_bias[start:stop].to(bias.dtype)


def read_segment(
    kv_cache: torch.Tensor,
    bias: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
    num_entries: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read back what `write_segment` wrote: ``([m, D], [m, D], [m])``, copies."""
    num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    geometry = SlabGeometry(num_layers, num_kv_heads, block_size)
    cell = first_cell + torch.arange(geometry.cells(num_entries))
    index, rest = cell // geometry.cells_per_block, cell % geometry.cells_per_block
    block, layer, head = slab.long()[index], rest // num_kv_heads, rest % num_kv_heads
    cells = kv_cache[layer, block, head]  # [cells, N, 2 * D], a copy
    return (
        cell_keys(cells).transpose(1, 2).flatten(0, 1)[:num_entries].contiguous(),
        cell_values(cells).flatten(0, 1)[:num_entries].contiguous(),
        bias[block, layer, head].flatten()[:num_entries],
    )


def gpu_pool(kv_cache: torch.Tensor, num_kv_heads: int | None = None) -> torch.Tensor:
    """View vLLM's GPU cache of a group as ``[2, L, B, H, N, D]``, keys first.

    Args:
        kv_cache: ``[L, B, H, N, 2 * D]``, keys and values of a slot side by side, or, with
            ``num_kv_heads``, ``[L, B, 2 * H, N, D]``, the heads of the keys before those of the
            values. Any strides.
        num_kv_heads: ``H``; only for the second form.

    Raises:
        ValueError: the shape is neither.
    """
    if num_kv_heads is None:
        if kv_cache.dim() != 5 or kv_cache.shape[4] % 2:
            raise ValueError(f"kv_cache: expected [L, B, H, N, 2 * D], got {list(kv_cache.shape)}")
        return kv_cache.unflatten(4, (2, -1)).movedim(4, 0)
    if kv_cache.dim() != 5 or kv_cache.shape[2] != 2 * num_kv_heads:
        raise ValueError(
            f"kv_cache: expected [L, B, 2 * H, N, D] with 2 * H = {2 * num_kv_heads}, got "
            f"{list(kv_cache.shape)}"
        )
    return kv_cache.unflatten(2, (2, num_kv_heads)).movedim(2, 0)


def cpu_cells(pool: torch.Tensor) -> torch.Tensor:
    """Copy a GPU pool ``[2, L, B, H, N, D]`` into CPU cells ``[L, B, H, N, 2 * D]``."""
    _, num_layers, num_blocks, num_kv_heads, block_size, head_size = pool.shape
    cells = pool.new_empty((num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size))
    cell_keys(cells).copy_(pool[0].transpose(-1, -2))
    cell_values(cells).copy_(pool[1])
    return cells


def copy_cpu_cells(cells: torch.Tensor, pool: torch.Tensor) -> None:
    """Copy CPU cells ``[L, B, H, N, 2 * D]`` into a GPU pool ``[2, L, B, H, N, D]``."""
    pool[0].copy_(cell_keys(cells).transpose(-1, -2))
    pool[1].copy_(cell_values(cells))


def gpu_gather_prompt(
    pool: torch.Tensor, layer: int, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_prompt` from a GPU pool ``[2, L, B, H, N, D]``: keys and values ``[H, G, D]``."""
    cells = pool[:, layer].index_select(1, blocks.long())  # [2, G / N, H, N, D]
    keys, values = cells.transpose(1, 2).flatten(2, 3).contiguous()
    return keys, values


def gpu_write_segment(
    pool: torch.Tensor,
    bias: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    entry_bias: torch.Tensor,
) -> None:
    """`write_segment` into a GPU pool ``[2, L, B, H, N, D]``; the other arguments are the same."""
    if keys.shape[0] == 0:
        return
    block, layer, head, slot = _gpu_places(pool, slab, first_cell, keys.shape[0])
    pool[0, layer, block, head, slot] = keys.to(pool.dtype)
    pool[1, layer, block, head, slot] = values.to(pool.dtype)
    bias[block, layer, head, slot] = entry_bias.to(bias.dtype)


def gpu_read_segment(
    pool: torch.Tensor,
    bias: torch.Tensor,
    slab: torch.Tensor,
    first_cell: int,
    num_entries: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read back what `gpu_write_segment` wrote: ``([m, D], [m, D], [m])``, copies."""
    block, layer, head, slot = _gpu_places(pool, slab, first_cell, num_entries)
    return (
        pool[0, layer, block, head, slot],
        pool[1, layer, block, head, slot],
        bias[block, layer, head, slot],
    )


def _gpu_places(
    pool: torch.Tensor, slab: torch.Tensor, first_cell: int, num_entries: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block, layer, head and slot of the entries of a segment, each int64 ``[m]``."""
    _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    entry = torch.arange(num_entries, device=pool.device)
    cell = first_cell + entry // block_size
    index, rest = cell // (num_layers * num_kv_heads), cell % (num_layers * num_kv_heads)
    return slab[index].long(), rest // num_kv_heads, rest % num_kv_heads, entry % block_size
