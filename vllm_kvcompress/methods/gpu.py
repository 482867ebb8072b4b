"""The methods that work on the GPU pool ``[2, L, B, H, N, D]`` (`kvcompress_kernels.formats`).

They decide what their namesakes decide and differ in how a prompt gets from its blocks into its
slab: SemantiCache by Triton kernels, the others by plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvcompress_kernels import formats
from kvcompress_kernels.cluster_merge import api
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    LayerView,
    PagedPrompt,
    PromptView,
    Segment,
    SlabOverflowError,
    SlabUsage,
)
from vllm_kvcompress.methods.base import Method
from vllm_kvcompress.methods.none import NoCompression
from vllm_kvcompress.methods.relocate import Relocate
from vllm_kvcompress.methods.semanticache import Rung, SemantiCache

MIN_CAPABILITY = 80
"""Oldest compute capability that the GPU kernels are compiled for in the tests (8.0, A100)."""


class GpuSemantiCache(SemantiCache):
    """SemantiCache by the Triton kernels: all layers in one go, the host waits once per rung."""

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        # imported on demand: installations for the CPU have no Triton
        from kvcompress_kernels.cluster_merge import triton

        layout = prompt.layout
        assert layout is not None, "the engine provides a layout to methods that need token ids"
        geometry, device = prompt.geometry, prompt.kv_cache.device
        triton.check_device(prompt.kv_cache)
        room = self._room(prompt.options, layout, geometry, prompt.num_cells)

        def sample(rung: Rung, stride: int) -> np.ndarray:
            ids = torch.tensor(rung.chunk_ids(layout))
            counts = api.cluster_count(
                prompt.kv_cache, prompt.source, ids, rung.threshold, stride, impl="triton"
            )
            return counts.cpu().numpy()

        def run(rung: Rung) -> SlabUsage | None:
            chunks = triton.find_chunks(torch.tensor(rung.chunk_ids(layout)), device)
            num_entries, first_cell, next_cell = triton.cluster_merge_layers(
                prompt.kv_cache,
                prompt.bias,
                range(geometry.num_layers),
                prompt.source,
                prompt.slab,
                chunks,
                rung.threshold,
                0,
                room.cells,
            )
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


_METHODS: dict[str, Callable[[CompressionConfig], Method]] = {
    "none": NoCompression,
    "relocate": GpuRelocate,
    "semanticache": GpuSemantiCache,
}


def gpu_method_names() -> tuple[str, ...]:
    return tuple(_METHODS)


def why_not_on_gpus(name: str) -> str | None:
    """Why a method does not run on GPUs; None where it does."""
    if name in _METHODS:
        return None
    if "aatc" in name:
        reason = "it makes coded rows, which have no GPU kernel yet"
    else:
        reason = "its kernels are for CPUs only"
    names = ", ".join(f"'{other}'" for other in _METHODS)
    return f"method '{name}' on a GPU: {reason}; use one of {names}"


def create_gpu_method(config: CompressionConfig) -> Method:
    """Make the method of a configuration for the GPU pool.

    Raises:
        ValueError: it has no form for GPUs.
    """
    if reason := why_not_on_gpus(config.method):
        raise ValueError(reason)
    return _METHODS[config.method](config)
