"""True bytes of a compressed prompt: everything that the engine's pool gives up for it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcompress_kernels.formats import BIAS_DTYPE, SlabGeometry
from kvcompress_serving.evaluation.peers import CacheType
from vllm_kvcompress.simulation import CompressedPrompt


@dataclass(frozen=True)
class CacheShape:
    """What fixes the size of a cache.

    Args:
        num_layers: layers, ``L``.
        num_kv_heads: KV heads of a layer, ``H``.
        head_size: ``D``.
        block_size: slots of a block, ``N``.
        itemsize: bytes of one element of the cache that is accounted for; 2 for bfloat16, whatever
            data type the simulation computes in.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    itemsize: int = 2

    @property
    def geometry(self) -> SlabGeometry:
        return SlabGeometry(self.num_layers, self.num_kv_heads, self.block_size)

    @property
    def slot_bytes(self) -> int:
        """Key and value of one token in one layer and head, as stock vLLM keeps them."""
        return 2 * self.head_size * self.itemsize

    @property
    def compressed_slot_bytes(self) -> int:
        """The same in a pool with the plugin, which reserves a bias for every slot."""
        return self.slot_bytes + BIAS_DTYPE.itemsize


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of one prompt's cache.

    Args:
        segments: cells of the slab, filled or not, with their bias.
        tail: raw tokens after the compressed part, with the bias that is reserved for them.
        raw: the same prompt in stock vLLM.
        num_tokens: tokens of the prompt.
        blocks: blocks held after compression: the slab's and the tail's.
        raw_blocks: blocks of the prompt before it.
    """

    segments: int
    tail: int
    raw: int
    num_tokens: int
    blocks: int
    raw_blocks: int

    @property
    def kept(self) -> int:
        return self.segments + self.tail

    @property
    def ratio(self) -> float:
        """Bytes kept per byte of the raw cache."""
        return self.kept / self.raw

    @property
    def per_token(self) -> float:
        """Bytes kept per prompt token, all layers and heads."""
        return self.kept / self.num_tokens

    @property
    def blocks_ratio(self) -> float:
        return self.blocks / self.raw_blocks


def full_bytes(num_tokens: int, shape: CacheShape) -> CacheBytes:
    """The cache of stock vLLM, nothing compressed."""
    width = shape.geometry.cells_per_block
    raw = num_tokens * width * shape.slot_bytes
    blocks = shape.geometry.cells(num_tokens)
    return CacheBytes(0, raw, raw, num_tokens, blocks, blocks)


def peer_bytes(kind: CacheType, num_tokens: int, shape: CacheShape) -> CacheBytes:
    """A prompt in a cache of vLLM's own type; blocks are those of a pool of raw ones of the same
    bytes, rounded up."""
    full = full_bytes(num_tokens, shape)
    kept = num_tokens * kind.bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.slot_bytes)
    blocks = -(-full.blocks * kept // full.raw)
    return CacheBytes(0, kept, full.raw, num_tokens, blocks, full.raw_blocks)


def true_bytes(compressed: CompressedPrompt, num_tokens: int, shape: CacheShape) -> CacheBytes:
    """What a compressed prompt takes.

    Args:
        compressed: as the simulation returned it, before anything was fed, its cells counted for
            a cache of this data type.
        num_tokens: tokens of the prompt.
        shape: of the cache.
    """
    geometry = shape.geometry
    num_tail = num_tokens - compressed.gap_end
    return CacheBytes(
        segments=compressed.num_cells * shape.block_size * shape.compressed_slot_bytes,
        tail=num_tail * geometry.cells_per_block * shape.compressed_slot_bytes,
        raw=num_tokens * geometry.cells_per_block * shape.slot_bytes,
        num_tokens=num_tokens,
        blocks=geometry.blocks(compressed.num_cells) + geometry.cells(num_tail),
        raw_blocks=geometry.cells(num_tokens),
    )


def kept_share(compressed: CompressedPrompt, num_tokens: int) -> float:
    """Entries, raw or coded, and raw tail tokens per prompt token, mean over layers and heads."""
    entries = float(compressed.num_entries().double().mean())
    return (entries + num_tokens - compressed.gap_end) / num_tokens
