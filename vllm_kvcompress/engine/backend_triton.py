"""GPU attention with compressed rows: our Triton kernel over vLLM's Triton or FlashAttention.

The *host* is the backend that vLLM would have used; both lay out a slot as its key followed by its
value. Which rows have state is known on the host by request id, and on the device by
``slot_of_block``:

    eager, piecewise graphs   no row with state: the host, untouched. Otherwise the host for all
                              rows, with the compressed ones cut to their queries, then our kernel
                              for the compressed ones.
    full graphs (decode)      our kernel for all rows. A graph is replayed whatever the rows are, so
                              the kernel looks them up: rows without state are ordinary paged
                              attention, padded rows have no query.

A captured launch reads the tables of `DeviceState`, vLLM's own input buffers and the split buffers,
all of which stay where they are and are written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kvcompress_kernels.coded_attention.api import coded_attention
from kvcompress_kernels.segment_attention.api import segment_attention
from vllm_kvcompress.engine.protocol import ATTRIBUTE
from vllm_kvcompress.engine.spec import CompressedFullAttentionSpec, compressed_spec
from vllm_kvcompress.engine.state import LayerState

if TYPE_CHECKING:
    from kvcompress_kernels.segment_attention.triton import Workspace

STARTS = f"{ATTRIBUTE}_starts"
"""Where the first tokens of a batch's rows ride on the host's metadata: int32 ``[R + 1]`` on the
CPU, to find queries in a batch without waiting for the device."""

_NUM_PROCESSORS_WITHOUT_GPU = 4
"""Stands for the multiprocessors under Triton's interpreter, so that keys are split there too."""


@dataclass(frozen=True)
class CompressedRows:
    """Rows that our kernel computes; rides on the host's metadata under `ATTRIBUTE`.

    Args:
        rows: int32 ``[K]``.
        block_table: int32 ``[R, W]``.
        seq_lens: int32 ``[R]``, the true ones.
        query_start_loc: int32 ``[R + 1]``.
        num_tokens: the rows' queries are before this token of the batch.
        max_query_len: of the rows.
        workspace: where the keys are split; None: they are not.
        has_other_rows: whether the host has anything to do.
    """

    rows: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_tokens: int
    max_query_len: int
    workspace: Workspace | None
    has_other_rows: bool


class SplitBuffers:
    """Memory for the partial results of split keys, one piece for batches of every size.

    A batch of few rows is split into many parts and one of many rows into few, so both need about
    as much.

    Args:
        max_num_rows: most rows of a batch.
        num_heads: query heads on this rank.
        num_kv_heads: KV heads on this rank.
        head_size: ``D``.
        device: of the pool.
    """

    def __init__(
        self,
        max_num_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device,
    ) -> None:
        self._shape = (num_heads, head_size)
        self._num_kv_heads = num_kv_heads
        self._num_processors = num_processors(device)
        self._capacity = self._most_parts(max_num_rows, num_kv_heads, self._num_processors)
        numbers = self._capacity * num_heads
        self._partial = torch.empty((numbers, head_size), dtype=torch.float32, device=device)
        self._stats = torch.empty((numbers, 2), dtype=torch.float32, device=device)

    @staticmethod
    def _most_parts(max_num_rows: int, num_kv_heads: int, num_processors: int) -> int:
        from kvcompress_kernels.segment_attention.triton import choose_num_splits

        return max(
            rows * choose_num_splits(rows, num_kv_heads, num_processors)
            for rows in range(1, max_num_rows + 1)
        )

    @classmethod
    def num_bytes(cls, vllm_config: VllmConfig, device: torch.device) -> int:
        """Bytes that the buffers of a model will take."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        num_heads = model.get_num_attention_heads(parallel)
        parts = cls._most_parts(
            vllm_config.scheduler_config.max_num_seqs,
            model.get_num_kv_heads(parallel),
            num_processors(device),
        )
        return parts * num_heads * (model.get_head_size() + 2) * torch.float32.itemsize

    def workspace(self, num_tokens: int, num_rows: int) -> Workspace | None:
        """For ``num_rows`` rows whose queries are among the first ``num_tokens`` tokens."""
        from kvcompress_kernels.segment_attention.triton import Workspace, choose_num_splits

        num_heads, head_size = self._shape
        splits = choose_num_splits(num_rows, self._num_kv_heads, self._num_processors)
        while splits * num_tokens > self._capacity:
            splits //= 2
        if splits < 2:
            return None
        size = num_tokens * num_heads * splits
        shape = (num_tokens, num_heads, splits)
        return Workspace(
            self._partial[:size].view(*shape, head_size), self._stats[:size].view(*shape, 2)
        )


def num_processors(device: torch.device) -> int:
    """Multiprocessors, by which keys are split."""
    if device.type != "cuda":
        return _NUM_PROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Backend:
    """Mix-in over a host's backend, whose name it keeps."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return compressed_spec(super().customize_spec(spec))  # type: ignore[misc]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """The number of splits follows the batch."""
        return False


class _Builder:
    """Mix-in over a host's metadata builder: finds the compressed rows of each batch."""

    supports_update_block_table: bool = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        context = vllm_config.compilation_config.static_forward_context
        self._impl = context[layer_names[0]].impl
        if not isinstance(kv_cache_spec, CompressedFullAttentionSpec):
            return
        max_num_rows = vllm_config.scheduler_config.max_num_seqs
        self._all_rows = torch.arange(max_num_rows, dtype=torch.int32, device=device)
        self._buffers = SplitBuffers(
            max_num_rows,
            self._impl.num_heads,
            self._impl.num_kv_heads,
            self._impl.head_size,
            device,
        )

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Batches of one query each, at most: longer queries take tilings of their own."""
        host = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        if not isinstance(kv_cache_spec, CompressedFullAttentionSpec):
            return host
        ours = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return min(host, ours, key=lambda support: support.value)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]
        # without a pool, graphs are captured to measure their memory
        if self._impl.compression is not None:
            setattr(metadata, ATTRIBUTE, self._every_row(common_attn_metadata))
        return metadata

    def _every_row(self, common: CommonAttentionMetadata) -> CompressedRows:
        """All rows of a decode batch, in nothing but memory that stays where it is."""
        assert common.max_query_len == 1, "get_cudagraph_support says single-token decode"
        return CompressedRows(
            rows=self._all_rows[: common.num_reqs],
            block_table=common.block_table_tensor,
            seq_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            num_tokens=common.num_actual_tokens,
            max_query_len=1,
            workspace=self._buffers.workspace(common.num_actual_tokens, common.num_reqs),
            has_other_rows=False,
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        metadata = self._build(common_prefix_len, common_attn_metadata, fast_build)
        setattr(metadata, STARTS, common_attn_metadata.query_start_loc_cpu)
        return metadata

    def _build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool
    ) -> Any:
        host = super().build  # type: ignore[misc]
        compression: LayerState | None = self._impl.compression
        indices = compression.state.compressed_rows() if compression is not None else []
        if not indices:
            return host(common_prefix_len, common, fast_build)
        starts = common.query_start_loc_cpu.tolist()
        rows = async_tensor_h2d(indices, device=common.seq_lens.device, dtype=torch.int32)
        # a compressed row is as long as its queries for the host, whose result is overwritten
        at = rows.long()
        query_lens = common.query_start_loc.diff().index_select(0, at)
        host_seq_lens = common.seq_lens.index_copy(0, at, query_lens.to(common.seq_lens.dtype))
        metadata = host(common_prefix_len, common.replace(seq_lens=host_seq_lens), fast_build)
        num_tokens = starts[indices[-1] + 1]
        compressed = CompressedRows(
            rows=rows,
            block_table=common.block_table_tensor,
            seq_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            num_tokens=num_tokens,
            max_query_len=max(starts[row + 1] - starts[row] for row in indices),
            workspace=self._buffers.workspace(num_tokens, len(indices)),
            has_other_rows=starts[-1] > sum(starts[row + 1] - starts[row] for row in indices),
        )
        setattr(metadata, ATTRIBUTE, compressed)
        return metadata


class _Impl:
    """Mix-in over a host's attention: ours for the compressed rows."""

    compression: ClassVar[LayerState | None] = None
    """Set on the instances of compressible layers once the KV cache exists."""

    has_gpu_cells: ClassVar[bool] = True
    """How the cells of the pool are laid out (`kvcompress_kernels.formats`)."""

    scale: float

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Our kernel writes the dtype of the queries."""
        return False

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        starts: torch.Tensor | None = getattr(attn_metadata, STARTS, None)
        if self.compression is not None and starts is not None:
            self.compression.state.queries.record(self.compression.layer, query, starts)
        compressed: CompressedRows | None = getattr(attn_metadata, ATTRIBUTE, None)
        if compressed is None or compressed.has_other_rows:
            super().forward(  # type: ignore[misc]
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if compressed is not None:
            assert self.compression is not None
            attend(query, output, compressed, self.compression, self.scale)
        return output


def attend(
    query: torch.Tensor,
    output: torch.Tensor,
    compressed: CompressedRows,
    compression: LayerState,
    scale: float,
) -> None:
    """Attention of the rows that our kernel computes.

    Args:
        query: ``[num_tokens, num_heads, D]`` of the batch.
        output: as ``query``; written for the rows' tokens.
    """
    state = compression.state
    query, output = query[: compressed.num_tokens], output[: compressed.num_tokens]
    partial_output, partial_log_sum = _attend_to_codes(query, compressed, compression, scale)
    segment_attention(
        query=query,
        output=output,
        kv_cache=state.kv_cache,
        bias=state.bias,
        layer=compression.layer,
        block_table=compressed.block_table,
        seq_lens=compressed.seq_lens,
        query_start_loc=compressed.query_start_loc,
        rows=compressed.rows,
        slot_of_block=state.slot_of_block,
        gap_end=state.gap_end,
        first_cell=state.first_cell,
        num_entries=state.num_entries,
        scale=scale,
        impl="triton",
        partial_output=partial_output,
        partial_log_sum=partial_log_sum,
        max_query_len=compressed.max_query_len,
        workspace=compressed.workspace,
    )


def _attend_to_codes(
    query: torch.Tensor, compressed: CompressedRows, compression: LayerState, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Attention over coded rows alone, and the logarithms of its sums; None without any.

    Its memory is allocated here, in a graph's own pool while one is captured.
    """
    state = compression.state
    if not state.codecs:
        return None, None
    from kvcompress_kernels.segment_attention.triton import choose_num_splits

    codecs = state.codecs[compression.layer]
    output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    log_sum = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    coded_attention(
        query=query,
        output=output,
        log_sum=log_sum,
        kv_cache=state.kv_cache,
        layer=compression.layer,
        block_table=compressed.block_table,
        query_start_loc=compressed.query_start_loc,
        rows=compressed.rows,
        slot_of_block=state.slot_of_block,
        first_cell=state.first_code_cell,
        num_rows=state.num_rows,
        codecs=codecs,
        scale=scale,
        impl="triton",
        max_query_len=compressed.max_query_len,
        num_splits=choose_num_splits(
            compressed.rows.numel() * compressed.max_query_len,
            len(codecs.groups),
            num_processors(query.device),
        ),
    )
    return output, log_sum


class CompressionTritonBuilder(_Builder, TritonAttentionMetadataBuilder):
    """Over vLLM's Triton attention."""


class CompressionTritonImpl(_Impl, TritonAttentionImpl):
    """Over vLLM's Triton attention."""


class CompressionTritonBackend(_Backend, TritonAttentionBackend):
    """Takes the place of ``TRITON_ATTN`` while the layers of an engine choose theirs."""

    @staticmethod
    def get_impl_cls() -> type[CompressionTritonImpl]:
        return CompressionTritonImpl

    @staticmethod
    def get_builder_cls() -> type[CompressionTritonBuilder]:
        return CompressionTritonBuilder


class CompressionFlashBuilder(_Builder, FlashAttentionMetadataBuilder):
    """Over FlashAttention."""


class CompressionFlashImpl(_Impl, FlashAttentionImpl):
    """Over FlashAttention."""


class CompressionFlashBackend(_Backend, FlashAttentionBackend):
    """Takes the place of ``FLASH_ATTN`` while the layers of an engine choose theirs."""

    @staticmethod
    def get_impl_cls() -> type[CompressionFlashImpl]:
        return CompressionFlashImpl

    @staticmethod
    def get_builder_cls() -> type[CompressionFlashBuilder]:
        return CompressionFlashBuilder
