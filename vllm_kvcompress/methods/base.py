"""The one interface of all compression methods."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from kvcompress_kernels import code_format, formats
from kvcompress_kernels.code_format import Codes, GroupCodec, RowLayout
from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    Budget,
    LayerView,
    ModelShape,
    PagedPrompt,
    PromptView,
    Segment,
    Signal,
    SlabOverflowError,
    SlabUsage,
    TokenLayout,
)
from vllm_kvcompress.soft_tokens.model import SoftTokens


class Method(ABC):
    """Turns the cached keys and values of a prompt into fewer entries.

    One object serves the engine (`compress_into`), the simulation and the tests
    (`compress_prompt`); the two must agree. A method sees torch tensors, never vLLM's types.

    Class attributes:
        name: the name users write.
        needs: signals that the engine must collect for it.
        settings: fields of the configuration that it reads, beside those that the engine reads.
        size: what is left of the compressed tokens, in words.
        reclaims: False for methods that do not give blocks back (tests and diagnosis); the
            scheduler then plans them although nothing is gained.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Signal]] = frozenset()
    settings: ClassVar[tuple[str, ...]] = ()
    size: ClassVar[str] = "as before"
    reclaims: ClassVar[bool] = True

    def __init__(self, config: CompressionConfig) -> None:
        self.config = config

    def bind_tokenizer(self, tokenizer: Any) -> None:  # noqa: B027 - optional hook
        """See the model's tokenizer once, in the process that calls `layout`, before it does.

        Args:
            tokenizer: a transformers tokenizer.
        """

    def layout(self, token_ids: np.ndarray) -> TokenLayout | None:
        """Divide the tokens ``[0, G)``; for methods that need `Signal.TOKEN_IDS`.

        Args:
            token_ids: int64 ``[G]``.
        """
        return None

    @property
    def probes(self) -> SoftTokens | None:
        """What the model reads after a prompt, for methods that need `Signal.PROBE_QUERIES`; known
        once the model is bound."""
        return None

    @abstractmethod
    def budget(
        self,
        num_tokens: int,
        layout: TokenLayout | None,
        keep: float | None,
        geometry: SlabGeometry,
    ) -> Budget:
        """Room for ``num_tokens`` compressed tokens; a pure function, called by the scheduler
        before any key has been looked at.

        Raises:
            IncompressibleError: it would not get smaller.
        """

    def fit(self, prompt: PromptView) -> Any:
        """Settings with which all layers fit ``prompt.num_cells``; passed to `compress`."""
        return None

    @abstractmethod
    def compress(self, layer: LayerView, prompt: PromptView, settings: Any) -> Segment:
        """Compress one layer. The plain torch form, which defines the result."""

    def compress_prompt(self, prompt: PromptView) -> Iterator[Segment]:
        """Compress all layers, one after another."""
        settings = self.fit(prompt)
        for layer in prompt.layers:
            yield self.compress(layer, prompt, settings)

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        """Compress a prompt from its blocks into its slab. Methods with a kernel override this.

        Raises:
            SlabOverflowError: the entries did not fit; the source blocks are untouched.
        """
        geometry = prompt.geometry
        view = PromptView(
            layers=_PagedLayers(prompt),
            options=prompt.options,
            layout=prompt.layout,
            geometry=geometry,
            num_cells=prompt.num_cells,
        )
        writer = SegmentWriter(prompt, self.name)
        for layer, segment in enumerate(self.compress_prompt(view)):
            for head in range(geometry.num_kv_heads):
                writer.write_raw(
                    layer, head, segment.keys[head], segment.values[head], segment.bias[head]
                )
            for group, rows in enumerate(segment.rows):
                writer.write_rows(layer, group, rows.codes, rows.codec.layout)
        return writer.usage()

    def warm_up(self, prompt: PagedPrompt) -> SlabUsage:
        """Compress a prompt of no request, so that all that requests may need gets compiled.

        Its keys and values are noise, its layout has one chunk of ``max_chunk`` tokens at least.
        """
        return self.compress_into(prompt)

    def bind_model(self, shape: ModelShape) -> None:  # noqa: B027 - optional hook
        """See the model that is served, once, before anything else is asked of the method.

        Raises:
            ValueError: the method cannot serve this model; all reasons and the remedy.
        """

    def codecs(self) -> Sequence[Sequence[GroupCodec]]:
        """Codec of each layer and group of KV heads, for methods that make coded rows.

        Returns:
            L items, each with one codec for each group; nothing for other methods.
        """
        return ()


class SegmentWriter:
    """Lays segments down in the slab of a prompt one after another, and remembers where.

    Args:
        prompt: whose slab is written.
        name: of the method, for errors.
    """

    def __init__(self, prompt: PagedPrompt, name: str) -> None:
        self._prompt = prompt
        self._name = name
        self.num_cells = 0
        shape = (prompt.geometry.num_layers, prompt.geometry.num_kv_heads)
        self._first_cell = torch.zeros(shape, dtype=torch.int32)
        self._num_entries = torch.zeros(shape, dtype=torch.int32)
        self._first_code_cell = torch.zeros(shape, dtype=torch.int32)
        self._num_rows = torch.zeros(shape, dtype=torch.int32)
        self._num_groups = 0

    def _take(self, num_cells: int) -> int:
        """Reserve cells; the first of them."""
        first, self.num_cells = self.num_cells, self.num_cells + num_cells
        if self.num_cells > self._prompt.num_cells:
            raise SlabOverflowError(
                f"{self._name}: {self.num_cells} cells are needed, the slab has "
                f"{self._prompt.num_cells}"
            )
        return first

    def take_raw(self, layer: int, head: int, num_entries: int) -> int:
        """Reserve the cells of raw entries, for a kernel to write; the first of them."""
        first = self._take(self._prompt.geometry.cells(num_entries))
        self._first_cell[layer, head] = first
        self._num_entries[layer, head] = num_entries
        return first

    def take_rows(self, layer: int, group: int, num_rows: int, layout: RowLayout) -> int:
        """Reserve the cells of coded rows, for a kernel to write; the first of them."""
        pool = self._prompt.kv_cache
        # layers, blocks and heads stand in the same places in both forms of a pool
        cell_bytes = pool.numel() * pool.element_size() // math.prod(pool.shape[-5:-2])
        first = self._take(-(-num_rows // layout.rows_per_cell(cell_bytes)))
        self._first_code_cell[layer, group] = first
        self._num_rows[layer, group] = num_rows
        self._num_groups = max(self._num_groups, group + 1)
        return first

    def write_raw(
        self, layer: int, head: int, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
    ) -> None:
        """Write raw entries ``[m, D]``, ``[m, D]``, ``[m]``."""
        prompt = self._prompt
        first = self.take_raw(layer, head, keys.shape[0])
        formats.write_segment(prompt.kv_cache, prompt.bias, prompt.slab, first, keys, values, bias)

    def write_rows(self, layer: int, group: int, codes: Codes, layout: RowLayout) -> None:
        """Write coded rows."""
        first = self.take_rows(layer, group, codes.num_rows, layout)
        code_format.write_rows(self._prompt.kv_cache, self._prompt.slab, first, codes, layout)

    def usage(self, details: dict[str, float] | None = None) -> SlabUsage:
        """Where everything lies."""
        coded = self._num_groups > 0
        return SlabUsage(
            self._first_cell,
            self._num_entries,
            self.num_cells,
            details or {},
            self._first_code_cell[:, : self._num_groups] if coded else None,
            self._num_rows[:, : self._num_groups] if coded else None,
        )


class _PagedLayers(Sequence[LayerView]):
    """Layers of a paged prompt, gathered one at a time when they are asked for."""

    def __init__(self, prompt: PagedPrompt) -> None:
        self._prompt = prompt

    def __len__(self) -> int:
        return self._prompt.geometry.num_layers

    def __getitem__(self, index: int) -> LayerView:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        prompt = self._prompt
        keys, values = formats.gather_prompt(prompt.kv_cache, index, prompt.source)
        if prompt.queries is None:
            return LayerView(keys, values)
        tail_keys, _ = formats.gather_prompt(prompt.kv_cache, index, prompt.tail)
        num_tail = prompt.num_tokens - keys.shape[1]
        return LayerView(keys, values, tail_keys[:, :num_tail], prompt.queries[index])
