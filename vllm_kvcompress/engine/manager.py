"""Block lists of compressed requests.

The list of a running request keeps its length: block ``i`` still stands for tokens
``[i * block_size, (i + 1) * block_size)``. What a compression changes is who stands in front:

    before   [ b0 b1 b2 b3 b4 b5 b6 b7 | b8 b9 ]   b: blocks of the request, maybe shared, hashed
    after    [ s0 s1  0  0  0  0  0  0 | b8 b9 ]   s: slab, private and never hashed; 0: null block
               |--------- gap --------|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request


@dataclass
class CompressedState:
    """Compression of one request as the scheduler knows it.

    Args:
        sequence: of the plan that made it.
        num_slab_blocks: slab blocks in the list now.
        num_gap_blocks: length of the gap in blocks, slab included.
    """

    sequence: int
    num_slab_blocks: int
    num_gap_blocks: int


class CompressedManager(FullAttentionManager):
    """Full-attention block manager that can put a slab in front of a request's block list."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compressed: dict[str, CompressedState] = {}
        self._released: list[str] = []

    @property
    def has_positionally_stable_blocks(self) -> bool:
        return False

    @property
    def num_slab_blocks(self) -> int:
        """Slab blocks of all requests."""
        return sum(state.num_slab_blocks for state in self.compressed.values())

    def num_exclusive_blocks(self, request_id: str, num_gap_blocks: int) -> int:
        """How many of the first blocks would come back: those that no other request holds."""
        blocks = self.req_to_blocks[request_id][:num_gap_blocks]
        return sum(block.ref_cnt == 1 for block in blocks)

    def is_published(self, request_id: str, token: int) -> bool:
        """Whether the block of this token is in the prefix cache: vLLM enters a block when the
        step that fills it is scheduled, before it has run."""
        block = self.req_to_blocks[request_id][token // self.block_size]
        return block.block_hash is not None

    def begin(
        self, request_id: str, sequence: int, num_gap_blocks: int, num_slab_blocks: int
    ) -> tuple[list[KVCacheBlock], list[KVCacheBlock], list[KVCacheBlock]]:
        """Replace the first ``num_gap_blocks`` blocks by a fresh slab and null blocks.

        Returns:
            The old blocks, which stay allocated until the caller frees them or `rollback` puts
            them back; the slab; and the blocks behind it, which stay as they are.
        """
        assert request_id not in self.compressed
        assert 0 < num_slab_blocks <= num_gap_blocks
        blocks = self.req_to_blocks[request_id]
        assert len(blocks) >= num_gap_blocks
        old = blocks[:num_gap_blocks]
        slab = self.block_pool.get_new_blocks(num_slab_blocks)
        blocks[:num_gap_blocks] = [
            *slab,
            *[self._null_block] * (num_gap_blocks - num_slab_blocks),
        ]
        self.compressed[request_id] = CompressedState(sequence, num_slab_blocks, num_gap_blocks)
        return old, slab, blocks[num_gap_blocks:]

    def commit(self, request_id: str, sequence: int, num_used_blocks: int) -> int:
        """Give back the slab blocks past ``num_used_blocks``.

        Returns:
            How many came back; 0 when the request has gone or was planned anew meanwhile.
        """
        state = self.compressed.get(request_id)
        if state is None or state.sequence != sequence:
            return 0
        assert 0 < num_used_blocks <= state.num_slab_blocks
        blocks = self.req_to_blocks[request_id]
        unused = blocks[num_used_blocks : state.num_slab_blocks]
        blocks[num_used_blocks : state.num_slab_blocks] = [self._null_block] * len(unused)
        state.num_slab_blocks = num_used_blocks
        self.block_pool.free_blocks(reversed(unused))
        return len(unused)

    def rollback(self, request_id: str, sequence: int, old: Sequence[KVCacheBlock]) -> bool:
        """Put the old blocks back and give back the slab.

        Returns:
            False when the request has gone meanwhile: the old blocks are still the caller's.
        """
        state = self.compressed.get(request_id)
        if state is None or state.sequence != sequence:
            return False
        blocks = self.req_to_blocks[request_id]
        slab = blocks[: state.num_slab_blocks]
        blocks[: state.num_gap_blocks] = list(old)
        del self.compressed[request_id]
        self.block_pool.free_blocks(reversed(slab))
        return True

    def take_released(self) -> list[str]:
        """Compressed requests whose blocks were freed since the last call."""
        released, self._released = self._released, []
        return released

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Publish full blocks for prefix caching, unless the request is compressed: what it
        computes from then on comes from approximate attention and must not reach others."""
        if request.request_id not in self.compressed:
            super().cache_blocks(request, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        if self.compressed.pop(request_id, None) is not None:
            self._released.append(request_id)
        return super().pop_blocks_for_free(request_id)
