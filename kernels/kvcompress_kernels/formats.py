"""Byte layouts of the paged KV pool and of the slab, in one place.

The pool of one KV-cache group is a 5-D view ``kv_cache[L, B, H, N, 2 * D]`` of vLLM's buffer:
``L`` layers, ``B`` blocks, ``H`` KV heads, ``N`` slots in a block (the block size), ``D`` head
size. The strides of ``L``, ``B`` and ``H`` are whatever vLLM negotiated and are always taken
from ``stride()``; the last two dimensions of one (layer, block, head) are contiguous. Those
``N * 2 * D`` elements are a *cell*:

    CPU cell (vLLM's ``vec`` layout)      | K transposed: [D, N] | V: [N, D] |

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
    num_layers, _, num_kv_heads, block_size, width = kv_cache.shape
    geometry = SlabGeometry(num_layers, num_kv_heads, block_size)
    keys, values, biases = [], [], []
    for u in range(first_cell, first_cell + geometry.cells(num_entries)):
        index, layer, head = geometry.locate(u)
        block = int(slab[index])
        cell = kv_cache[layer, block, head]
        keys.append(cell_keys(cell).T)
        values.append(cell_values(cell))
        biases.append(bias[block, layer, head])
    if not keys:
        empty = kv_cache.new_empty((0, width // 2))
        return empty, empty, bias.new_empty(0)
    return (
        torch.cat(keys)[:num_entries].clone(),
        torch.cat(values)[:num_entries].clone(),
        torch.cat(biases)[:num_entries].clone(),
    )
