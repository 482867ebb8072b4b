"""CPU attention with compressed rows.

A batch without compressed rows takes vLLM's own path, untouched. In a batch with some, vLLM's
kernel still computes every other row; ours then writes the rows that have a segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kvcompress_kernels.coded_attention.api import coded_attention
from kvcompress_kernels.segment_attention.api import segment_attention
from vllm_kvcompress.engine.spec import compressed_spec
from vllm_kvcompress.engine.state import LayerState

logger = init_logger("vllm.kvcompress.backend")


class CompressionCPUBackend(CPUAttentionBackend):
    """Takes the place of ``CPU_ATTN`` while compression is on, under the same name."""

    @staticmethod
    def get_impl_cls() -> type[CompressionCPUImpl]:
        return CompressionCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CompressionCPUMetadataBuilder]:
        return CompressionCPUMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return compressed_spec(super().customize_spec(spec))


@dataclass
class CompressionCPUMetadata(CPUAttentionMetadata):
    """Metadata of a batch with compressed rows.

    The inherited fields describe the batch for vLLM's kernel, in which a compressed row is as
    long as its queries only, since its result is overwritten.

    Args:
        compressed_rows: int32 ``[K]``, rows that our kernel computes.
        true_seq_lens: int32 ``[num_reqs]``.
        has_other_rows: whether vLLM's kernel has anything to do.
    """

    compressed_rows: torch.Tensor = field(kw_only=True)
    true_seq_lens: torch.Tensor = field(kw_only=True)
    has_other_rows: bool = field(kw_only=True)


class CompressionCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Finds the compressed rows of each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.isa: str
        if self.isa == "amx":
            # the tiled AMX cells are not the layout that segments are written in
            logger.warning(
                "attention runs on AVX-512 and not on this processor's AMX, whose layout of the "
                "cache the kernels of compressed rows do not read; prefills take longer"
            )
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)
        if self.isa not in ("vec", "vec16"):
            raise ValueError(
                f"--kv-compression on CPU supports x86-64 only; vLLM uses the '{self.isa}' "
                "attention kernels here. Start without --kv-compression."
            )
        context = self.vllm_config.compilation_config.static_forward_context
        self._impl = context[self.layer_names[0]].impl

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        compression: LayerState | None = self._impl.compression
        rows = _compressed_rows(compression, common_attn_metadata)
        if len(rows) == 0:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        starts = common_attn_metadata.query_start_loc
        seq_lens = common_attn_metadata.seq_lens
        host_seq_lens = seq_lens.clone()
        host_seq_lens[rows] = (starts[1:] - starts[:-1])[rows].to(seq_lens.dtype)
        metadata = super().build(
            common_prefix_len, common_attn_metadata.replace(seq_lens=host_seq_lens), fast_build
        )
        return CompressionCPUMetadata(
            **{f.name: getattr(metadata, f.name) for f in fields(CPUAttentionMetadata)},
            compressed_rows=torch.from_numpy(rows.astype(np.int32)),
            true_seq_lens=seq_lens,
            has_other_rows=len(rows) < common_attn_metadata.num_reqs,
        )


def _compressed_rows(
    compression: LayerState | None, common_attn_metadata: CommonAttentionMetadata
) -> np.ndarray:
    """Rows whose first block is a slab."""
    num_reqs = common_attn_metadata.num_reqs
    if compression is None or compression.state.num_requests == 0:
        return np.empty(0, dtype=np.int64)
    first_blocks = common_attn_metadata.block_table_tensor[:num_reqs, 0].numpy()
    slots = compression.state.slot_of_block.numpy()[first_blocks]
    return np.flatnonzero(slots)


class CompressionCPUImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, and ours for compressed rows."""

    compression: ClassVar[LayerState | None] = None
    """Set on the instances of compressible layers once the KV cache exists."""

    has_gpu_cells: ClassVar[bool] = False
    """How the cells of the pool are laid out (`kvcompress_kernels.formats`)."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        compression = self.compression
        if compression is not None and attn_metadata is not None:
            queries = compression.state.queries
            queries.record(compression.layer, query, attn_metadata.query_start_loc)
        host = super().forward
        rest = (layer, query, key, value, kv_cache, attn_metadata, output)
        if not isinstance(attn_metadata, CompressionCPUMetadata):
            return host(*rest, output_scale, output_block_scale)
        if attn_metadata.has_other_rows:
            host(*rest, output_scale, output_block_scale)
        assert compression is not None
        _attend(query, output, attn_metadata, compression, self.scale)
        return output


def _attend(
    query: torch.Tensor,
    output: torch.Tensor,
    metadata: CompressionCPUMetadata,
    compression: LayerState,
    scale: float,
) -> None:
    """Attention of the compressed rows: over their coded rows, if any, then over the rest."""
    state = compression.state
    partial_output = partial_log_sum = None
    if state.codecs:
        partial_output = torch.empty(query.shape, dtype=torch.float32)
        partial_log_sum = torch.empty(query.shape[:2], dtype=torch.float32)
        coded_attention(
            query=query,
            output=partial_output,
            log_sum=partial_log_sum,
            kv_cache=state.kv_cache,
            layer=compression.layer,
            block_table=metadata.block_table,
            query_start_loc=metadata.query_start_loc,
            rows=metadata.compressed_rows,
            slot_of_block=state.slot_of_block,
            first_cell=state.first_code_cell,
            num_rows=state.num_rows,
            codecs=state.codecs[compression.layer],
            scale=scale,
        )
    segment_attention(
        query=query,
        output=output,
        kv_cache=state.kv_cache,
        bias=state.bias,
        layer=compression.layer,
        block_table=metadata.block_table,
        seq_lens=metadata.true_seq_lens,
        query_start_loc=metadata.query_start_loc,
        rows=metadata.compressed_rows,
        slot_of_block=state.slot_of_block,
        gap_end=state.gap_end,
        first_cell=state.first_cell,
        num_entries=state.num_entries,
        scale=scale,
        partial_output=partial_output,
        partial_log_sum=partial_log_sum,
    )
