"""Two methods after one another: the first chooses or merges entries, the second codes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvcompress_kernels import formats
from kvcompress_kernels.code_format import GroupCodec
from kvcompress_kernels.code_rows import api as code_rows
from kvcompress_kernels.code_rows import reference
from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    Budget,
    CodedRows,
    LayerView,
    ModelShape,
    PagedPrompt,
    PromptView,
    Segment,
    SlabUsage,
    TokenLayout,
)
from vllm_kvcompress.methods.aatc import AATC
from vllm_kvcompress.methods.base import Method, SegmentWriter
from vllm_kvcompress.soft_tokens.model import SoftTokens


class Composed(Method):
    """Keeps or merges tokens as the first method does, then codes what is left as `AATC` does.

    The entries of every KV head are coded on their own, since each head has its own entries, and
    carry their bias. The first tokens stay raw. A head whose entries would not take fewer cells
    coded than raw keeps them raw.

    The slab is planned for the raw entries of the first method, which are written first and then
    coded in place; what that makes free goes back to the pool right after the step.

    Reads from the configuration what both methods read.

    Args:
        config: of both.
        first: makes raw entries, the first tokens first.
    """

    def __init__(self, config: CompressionConfig, first: Method) -> None:
        super().__init__(config)
        self._first = first
        self._coder = AATC(config, with_bias=True)
        self.name = f"{first.name}+{self._coder.name}"  # type: ignore[misc]
        self.needs = first.needs | self._coder.needs  # type: ignore[misc]
        self.settings = tuple(dict.fromkeys((*first.settings, *self._coder.settings)))  # type: ignore[misc]
        self.size = f"{first.size}, coded"  # type: ignore[misc]

    def bind_tokenizer(self, tokenizer: Any) -> None:
        self._first.bind_tokenizer(tokenizer)

    def bind_model(self, shape: ModelShape) -> None:
        self._first.bind_model(shape)
        self._coder.bind_model(shape)
        self._cell_bytes = shape.cell_bytes

    def codecs(self) -> Sequence[Sequence[GroupCodec]]:
        return self._coder.codecs()

    @property
    def probes(self) -> SoftTokens | None:
        return self._first.probes

    def layout(self, token_ids: np.ndarray) -> TokenLayout | None:
        return self._first.layout(token_ids)

    def budget(
        self,
        num_tokens: int,
        layout: TokenLayout | None,
        keep: float | None,
        geometry: SlabGeometry,
    ) -> Budget:
        return self._first.budget(num_tokens, layout, keep, geometry)

    def compress_prompt(self, prompt: PromptView) -> Iterator[Segment]:
        for segment, codecs in zip(self._first.compress_prompt(prompt), self.codecs(), strict=True):
            yield self._coded(segment, codecs, prompt.geometry)

    def compress(self, layer: LayerView, prompt: PromptView, settings: Any) -> Segment:
        raise AssertionError("the two methods go through the layers together")

    def _coded(
        self, segment: Segment, codecs: Sequence[GroupCodec], geometry: SlabGeometry
    ) -> Segment:
        coded = Segment([], [], [])
        heads = zip(segment.keys, segment.values, segment.bias, codecs, strict=True)
        for keys, values, bias, codec in heads:
            raw = self._num_raw(len(keys), codec, geometry)
            coded.keys.append(keys[:raw])
            coded.values.append(values[:raw])
            coded.bias.append(bias[:raw])
            rows = reference.encode(keys[None, raw:], values[None, raw:], codec, bias[raw:])
            coded.rows.append(CodedRows(codec, rows))
        return coded

    def _num_raw(self, num_entries: int, codec: GroupCodec, geometry: SlabGeometry) -> int:
        """Entries of a head that stay raw."""
        num_sinks = min(self.config.num_sink_tokens, num_entries)
        rows_per_cell = codec.layout.rows_per_cell(self._cell_bytes)
        coded_cells = geometry.cells(num_sinks) + -(-(num_entries - num_sinks) // rows_per_cell)
        return num_sinks if coded_cells < geometry.cells(num_entries) else num_entries

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        usage = self._first.compress_into(prompt)
        geometry = prompt.geometry
        writer = SegmentWriter(prompt, self.name)
        for layer, codecs in enumerate(self.codecs()):
            # the coded layer takes no more cells than the raw one, so what it overwrites has been
            # read: entries of this layer or of one before it
            heads = [
                formats.read_segment(
                    prompt.kv_cache,
                    prompt.bias,
                    prompt.slab,
                    int(usage.first_cell[layer, head]),
                    int(usage.num_entries[layer, head]),
                )
                for head in range(geometry.num_kv_heads)
            ]
            for head, ((keys, values, bias), codec) in enumerate(zip(heads, codecs, strict=True)):
                raw = self._num_raw(len(keys), codec, geometry)
                writer.write_raw(layer, head, keys[:raw], values[:raw], bias[:raw])
                first = writer.take_rows(layer, head, len(keys) - raw, codec.layout)
                code_rows.encode_rows(
                    keys[None, raw:],
                    values[None, raw:],
                    bias[raw:],
                    codec,
                    prompt.kv_cache,
                    prompt.slab,
                    first,
                )
        return writer.usage(usage.details)
