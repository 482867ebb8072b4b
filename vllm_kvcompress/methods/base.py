"""The one interface of all compression methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from kvcompress_kernels import formats
from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    Budget,
    LayerView,
    PagedPrompt,
    PromptView,
    Segment,
    Signal,
    SlabOverflowError,
    SlabUsage,
    TokenLayout,
)


class Method(ABC):
    """Turns the cached keys and values of a prompt into fewer entries.

    One object serves the engine (`compress_into`), the simulation and the tests
    (`compress_prompt`); the two must agree. A method sees torch tensors, never vLLM's types.

    Class attributes:
        name: the name users write.
        needs: signals that the engine must collect for it.
        reclaims: False for methods that do not give blocks back (tests and diagnosis); the
            scheduler then plans them although nothing is gained.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Signal]] = frozenset()
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
        shape = (geometry.num_layers, geometry.num_kv_heads)
        first_cell = torch.zeros(shape, dtype=torch.int32)
        num_entries = torch.zeros(shape, dtype=torch.int32)
        cell = 0
        for index, segment in enumerate(self.compress_prompt(view)):
            for head, count in enumerate(segment.num_entries):
                first_cell[index, head] = cell
                num_entries[index, head] = count
                if cell + geometry.cells(count) > prompt.num_cells:
                    raise SlabOverflowError(
                        f"{self.name}: layer {index} head {head} is past {prompt.num_cells} cells"
                    )
                formats.write_segment(
                    prompt.kv_cache,
                    prompt.bias,
                    prompt.slab,
                    cell,
                    segment.keys[head],
                    segment.values[head],
                    segment.bias[head],
                )
                cell += geometry.cells(count)
        return SlabUsage(first_cell, num_entries, cell)


class _PagedLayers(Sequence[LayerView]):
    """Layers of a paged prompt, gathered one at a time when they are asked for."""

    def __init__(self, prompt: PagedPrompt) -> None:
        self._prompt = prompt

    def __len__(self) -> int:
        return self._prompt.geometry.num_layers

    def __getitem__(self, index: int) -> LayerView:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        keys, values = formats.gather_prompt(self._prompt.kv_cache, index, self._prompt.source)
        return LayerView(keys, values)
