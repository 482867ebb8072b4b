"""The methods that work on the GPU pool ``[2, L, B, H, N, D]`` (`kvcompress_kernels.formats`).

They decide what their namesakes decide and differ in how a prompt gets from its blocks into its
slab: by Triton kernels, relocation by plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcompress_kernels import formats
from kvcompress_kernels.cluster_merge import api
from kvcompress_kernels.code_format import GroupCodec
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    LayerView,
    PagedPrompt,
    PromptView,
    Segment,
    SlabOverflowError,
    SlabUsage,
)
from vllm_kvcompress.methods.aatc import AATC
from vllm_kvcompress.methods.base import Method, SegmentWriter
from vllm_kvcompress.methods.composed import Composed
from vllm_kvcompress.methods.metasoft import MetaSoft
from vllm_kvcompress.methods.none import NoCompression
from vllm_kvcompress.methods.relocate import Relocate
from vllm_kvcompress.methods.selecting import Selecting
from vllm_kvcompress.methods.selkv import SelKV
from vllm_kvcompress.methods.semanticache import Rung, SemantiCache

if TYPE_CHECKING:
    from kvcompress_kernels.code_rows.triton import EncodeMatrices

MIN_CAPABILITY = 80
"""Oldest compute capability that the GPU kernels are compiled for in the tests (8.0, A100)."""


class GpuSemantiCache(SemantiCache):
    """SemantiCache by the Triton kernels: all layers in one go, the host waits once per rung."""

    def warm_up(self, prompt: PagedPrompt) -> SlabUsage:
        for threshold in (self.config.threshold, api.MERGE_ALL):
            rung = Rung(threshold, loose=True)
            self._count(prompt, rung, stride=1)
            self._merge(prompt, rung, prompt.num_cells)
        return self.compress_into(prompt)

    def _count(self, prompt: PagedPrompt, rung: Rung, stride: int) -> torch.Tensor:
        """See `cluster_merge.triton.cluster_count`."""
        from kvcompress_kernels.cluster_merge import triton

        assert prompt.layout is not None
        ids = torch.tensor(rung.chunk_ids(prompt.layout))
        # one compiled kernel for all prompts, whatever their longest chunk
        longest = self.config.max_chunk
        return triton.cluster_count(
            prompt.kv_cache, prompt.source, ids, rung.threshold, stride, longest
        )

    def _merge(
        self, prompt: PagedPrompt, rung: Rung, num_cells: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `cluster_merge.triton.cluster_merge_layers`; all layers."""
        from kvcompress_kernels.cluster_merge import triton

        assert prompt.layout is not None
        ids = torch.tensor(rung.chunk_ids(prompt.layout))
        longest = self.config.max_chunk
        return triton.cluster_merge_layers(
            prompt.kv_cache,
            prompt.bias,
            range(prompt.geometry.num_layers),
            prompt.source,
            prompt.slab,
            triton.find_chunks(ids, prompt.kv_cache.device, longest=longest),
            rung.threshold,
            0,
            num_cells,
        )

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        # imported on demand: installations for the CPU have no Triton
        from kvcompress_kernels.triton_cells import check_device

        layout = prompt.layout
        assert layout is not None, "the engine provides a layout to methods that need token ids"
        check_device(prompt.kv_cache)
        room = self._room(prompt.options, layout, prompt.geometry, prompt.num_cells)

        def sample(rung: Rung, stride: int) -> np.ndarray:
            return self._count(prompt, rung, stride).cpu().numpy()

        def run(rung: Rung) -> SlabUsage | None:
            num_entries, first_cell, next_cell = self._merge(prompt, rung, room.cells)
            total = num_entries.sum(dtype=torch.int64)
            entries, cells = torch.stack([total, next_cell.long()]).tolist()
            if not room.holds(entries, cells):
                return None
            return SlabUsage(first_cell, num_entries, cells)

        usage, fit = self._climb(prompt.options, layout, room, run, sample)
        usage.details.update(
            threshold=fit.rung.threshold, loose=float(fit.rung.loose), attempts=float(fit.attempts)
        )
        return usage


class _GpuSelecting(Selecting):
    """Attention of the observed queries and the choice's way into the slab by the Triton kernels;
    all layers in one go."""

    def _window_scores(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # imported on demand: installations for the CPU have no Triton
        from kvcompress_kernels.triton_cells import check_device
        from kvcompress_kernels.window_scores import triton

        check_device(arguments[0])
        # not by the public door, whose checks of numbers wait for the device
        return triton.window_scores(*arguments)

    def _merge(
        self,
        prompt: PagedPrompt,
        kept: torch.Tensor,
        mass: torch.Tensor,
        bucket: int = 0,
        alpha: float = 0.0,
    ) -> tuple[SlabUsage, torch.Tensor]:
        """Write what is kept, bool ``[L, H, G]``; and numbers of merged tokens, ``[L, H]``."""
        from kvcompress_kernels.select_merge import triton

        first_cell, num_entries, num_cells = self._place(kept, prompt)
        _, num_merged, _, _ = triton.select_merge_layers(
            prompt.kv_cache,
            prompt.bias,
            range(prompt.geometry.num_layers),
            prompt.source,
            prompt.slab,
            kept,
            mass,
            bucket,
            alpha,
            0,
            prompt.num_cells,
        )
        return SlabUsage(first_cell, num_entries, num_cells), num_merged


class GpuSelKV(_GpuSelecting, SelKV):
    """SelKV by the Triton kernels; the host waits twice."""

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        mass, scores = self._paged_attention(prompt)
        kept = self.choose(scores, prompt.options.keep)
        usage, num_merged = self._merge(prompt, kept, mass, self._bucket, self.config.alpha)
        merged, entries = torch.stack([num_merged.sum(), usage.num_entries.sum()]).tolist()
        usage.details["merged"] = merged / max(kept.numel() - entries, 1)
        return usage


class GpuMetaSoft(_GpuSelecting, MetaSoft):
    """Meta-Soft by the Triton kernels, without flow."""

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        assert self._flow is None, "create_gpu_method() refuses the flow"
        mass, _ = self._paged_attention(prompt)
        usage, _ = self._merge(prompt, self.choose(mass, prompt.options.keep), mass)
        return usage


class _Encoder:
    """Encoding matrices on the device, by layer and group; each is brought there once."""

    def __init__(self, codecs: Callable[[], Sequence[Sequence[GroupCodec]]]) -> None:
        self._codecs = codecs
        self._matrices: dict[tuple[int, int], EncodeMatrices] = {}

    def matrices(self, layer: int, group: int, device: torch.device) -> EncodeMatrices:
        from kvcompress_kernels.code_rows.triton import EncodeMatrices

        if (layer, group) not in self._matrices:
            codec = self._codecs()[layer][group]
            self._matrices[layer, group] = EncodeMatrices.of(codec, device)
        return self._matrices[layer, group]


class _GpuWriter(SegmentWriter):
    """Lays segments down in a GPU pool."""

    def write_raw(
        self, layer: int, head: int, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
    ) -> None:
        prompt = self._prompt
        first = self.take_raw(layer, head, keys.shape[0])
        formats.gpu_write_segment(
            prompt.kv_cache, prompt.bias, prompt.slab, first, keys, values, bias
        )


class GpuAATC(AATC):
    """AATC by the Triton kernels."""

    def __init__(self, config: CompressionConfig) -> None:
        super().__init__(config)
        self._encoder = _Encoder(self.codecs)

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        from kvcompress_kernels.code_rows import triton
        from kvcompress_kernels.triton_cells import check_device

        geometry, device = prompt.geometry, prompt.kv_cache.device
        check_device(prompt.kv_cache)
        num_tokens = len(prompt.source) * geometry.block_size
        num_sinks = self._num_sinks(num_tokens)
        blocks = prompt.source[: geometry.cells(num_sinks)]
        bias = torch.zeros(num_sinks, device=device)
        writer = _GpuWriter(prompt, self.name)
        for layer, codecs in enumerate(self.codecs()):
            keys, values = formats.gpu_gather_prompt(prompt.kv_cache, layer, blocks)
            for head in range(geometry.num_kv_heads):
                writer.write_raw(
                    layer, head, keys[head, :num_sinks], values[head, :num_sinks], bias
                )
            size = geometry.num_kv_heads // len(codecs)
            for group, codec in enumerate(codecs):
                triton.encode_prompt(
                    prompt.kv_cache,
                    layer,
                    prompt.source,
                    group * size,
                    codec,
                    prompt.slab,
                    writer.take_rows(layer, group, num_tokens - num_sinks, codec.layout),
                    start=num_sinks,
                    matrices=self._encoder.matrices(layer, group, device),
                )
        return writer.usage()


class GpuComposed(Composed):
    """Two methods after one another, by the Triton kernels.

    Args:
        config: of both.
        first: for the GPU pool.
    """

    def __init__(self, config: CompressionConfig, first: Method) -> None:
        super().__init__(config, first)
        self._encoder = _Encoder(self.codecs)

    def warm_up(self, prompt: PagedPrompt) -> SlabUsage:
        usage = self._code_entries(prompt, self._first.warm_up(prompt))
        # of a short prompt the entries may have stayed raw
        pool = prompt.kv_cache
        noise = torch.randn((1, pool.shape[-1]), device=pool.device).to(pool.dtype)
        bias = torch.zeros(1, device=pool.device)
        for layer, codecs in enumerate(self.codecs()):
            for head in range(len(codecs)):
                self._code(prompt, layer, head, (noise, noise, bias), 0)
        return usage

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        return self._code_entries(prompt, self._first.compress_into(prompt))

    def _code_entries(self, prompt: PagedPrompt, usage: SlabUsage) -> SlabUsage:
        """Code in place what the first method has written."""
        writer = _GpuWriter(prompt, self.name)
        places = zip(usage.first_cell.tolist(), usage.num_entries.tolist(), strict=True)
        for layer, (first_cells, counts) in enumerate(places):
            # see `Composed.compress_into` for why this may overwrite the entries
            heads = [
                formats.gpu_read_segment(prompt.kv_cache, prompt.bias, prompt.slab, *place)
                for place in zip(first_cells, counts, strict=True)
            ]
            for head, entries in enumerate(heads):
                self._write(writer, prompt, layer, head, entries)
        return writer.usage(usage.details)

    def _write(
        self,
        writer: _GpuWriter,
        prompt: PagedPrompt,
        layer: int,
        head: int,
        entries: tuple[torch.Tensor, ...],
    ) -> None:
        keys, values, bias = entries
        codec = self.codecs()[layer][head]
        raw = self._num_raw(len(keys), codec, prompt.geometry)
        writer.write_raw(layer, head, keys[:raw], values[:raw], bias[:raw])
        first_cell = writer.take_rows(layer, head, len(keys) - raw, codec.layout)
        # the biases at an address that kernels are compiled for
        rest = keys[raw:], values[raw:], bias[raw:].clone()
        self._code(prompt, layer, head, rest, first_cell)

    def _code(
        self,
        prompt: PagedPrompt,
        layer: int,
        head: int,
        entries: tuple[torch.Tensor, ...],
        first_cell: int,
    ) -> None:
        from kvcompress_kernels.code_rows import triton

        keys, values, bias = entries
        matrices = self._encoder.matrices(layer, head, keys.device)
        triton.code_rows(
            *matrices.transform(keys[None], values[None]),
            bias,
            self.codecs()[layer][head].layout,
            prompt.kv_cache,
            prompt.slab,
            first_cell,
        )


class GpuRelocate(Relocate):
    """Relocation in plain torch."""

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        return compress_plainly(self, prompt)


def compress_plainly(method: Method, prompt: PagedPrompt) -> SlabUsage:
    """The plain torch form of a method without coded rows, from the GPU pool into the slab.

    Raises:
        SlabOverflowError: the entries did not fit; the source blocks are untouched.
    """
    geometry = prompt.geometry
    view = PromptView(
        layers=_GpuLayers(prompt),
        options=prompt.options,
        layout=prompt.layout,
        geometry=geometry,
        num_cells=prompt.num_cells,
    )
    first_cell = torch.zeros((geometry.num_layers, geometry.num_kv_heads), dtype=torch.int32)
    num_entries = torch.zeros_like(first_cell)
    cell = 0
    for layer, segment in enumerate(method.compress_prompt(view)):
        cell = _write(method, prompt, segment, cell, first_cell[layer], num_entries[layer])
    return SlabUsage(first_cell, num_entries, cell)


def _write(
    method: Method,
    prompt: PagedPrompt,
    segment: Segment,
    cell: int,
    first_cell: torch.Tensor,
    num_entries: torch.Tensor,
) -> int:
    """Write one layer's segments from ``cell`` on and note where; the cell after the last one."""
    assert not segment.rows, f"{method.name} makes coded rows"
    for head, count in enumerate(segment.num_entries):
        first_cell[head], num_entries[head] = cell, count
        end = cell + prompt.geometry.cells(count)
        if end > prompt.num_cells:
            raise SlabOverflowError(
                f"{method.name}: {end} cells are needed, the slab has {prompt.num_cells}"
            )
        formats.gpu_write_segment(
            prompt.kv_cache,
            prompt.bias,
            prompt.slab,
            cell,
            segment.keys[head],
            segment.values[head],
            segment.bias[head],
        )
        cell = end
    return cell


class _GpuLayers(Sequence[LayerView]):
    """Layers of a prompt in the GPU pool, gathered one at a time when they are asked for."""

    def __init__(self, prompt: PagedPrompt) -> None:
        self._prompt = prompt

    def __len__(self) -> int:
        return self._prompt.geometry.num_layers

    def __getitem__(self, index: int) -> LayerView:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        prompt = self._prompt
        return LayerView(*formats.gpu_gather_prompt(prompt.kv_cache, index, prompt.source))


def _composed(first: str) -> Callable[[CompressionConfig], Method]:
    return lambda config: GpuComposed(config, _METHODS[first](config))


_METHODS: dict[str, Callable[[CompressionConfig], Method]] = {
    "none": NoCompression,
    "relocate": GpuRelocate,
    "semanticache": GpuSemantiCache,
    "selkv": GpuSelKV,
    "metasoft": GpuMetaSoft,
    "aatc": GpuAATC,
    "semanticache+aatc": _composed("semanticache"),
    "selkv+aatc": _composed("selkv"),
    "metasoft+aatc": _composed("metasoft"),
}


def why_not_on_gpus(config: CompressionConfig) -> str | None:
    """Why a method does not run on GPUs as it is configured; None where it does."""
    if config.method not in _METHODS:
        names = ", ".join(f"'{other}'" for other in _METHODS)
        return f"method '{config.method}' on a GPU: it has no kernels there; use one of {names}"
    if config.method.startswith("metasoft") and config.flow != "none":
        return (
            f"flow '{config.flow}' on a GPU: the kernels there drop tokens without it; set flow to "
            "'none'"
        )
    return None


def create_gpu_method(config: CompressionConfig) -> Method:
    """Make the method of a configuration for the GPU pool.

    Raises:
        ValueError: it has no form for GPUs.
    """
    if reason := why_not_on_gpus(config):
        raise ValueError(reason)
    return _METHODS[config.method](config)
