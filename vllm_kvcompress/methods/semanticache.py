"""SemantiCache: merges similar keys inside semantic chunks (arXiv 2603.14303)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from kvcompress_kernels.cluster_merge import api, reference
from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.core import (
    KEPT,
    Budget,
    IncompressibleError,
    LayerView,
    PagedPrompt,
    PromptView,
    RequestOptions,
    Segment,
    Signal,
    SlabOverflowError,
    SlabUsage,
    TokenLayout,
)
from vllm_kvcompress.methods.base import Method
from vllm_kvcompress.methods.delimiters import DelimiterTable

_STEP = 0.05
_SAMPLE_STRIDE = 8
_SAMPLE_MARGIN = 1.02

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Rung:
    """One setting of the ladder that is climbed down until a prompt fits.

    Args:
        threshold: cosine similarity above which two keys of a chunk merge.
        loose: whether delimiters are merged too (`TokenLayout.loose_chunk_ids`).
    """

    threshold: float
    loose: bool

    def chunk_ids(self, layout: TokenLayout) -> np.ndarray:
        return layout.loose_chunk_ids if self.loose else layout.chunk_ids


@dataclass(frozen=True)
class Fit:
    """Settings with which a prompt fits: the rung, and how many full passes finding it took."""

    rung: Rung
    attempts: int


@dataclass(frozen=True)
class _Room:
    """What all segments of a prompt together may take: entries (``keep``) and cells (the slab)."""

    entries_per_head: int
    cells: int
    geometry: SlabGeometry

    @property
    def entries(self) -> int:
        return self.entries_per_head * self.geometry.cells_per_block

    def holds(self, entries: float, cells: int) -> bool:
        return entries <= self.entries and cells <= self.cells


class SemantiCache(Method):
    """Clusters the keys of each chunk of text and keeps one mean key and value per cluster.

    Delimiters (punctuation, spaces, line ends) are kept as they are and cut the prompt into
    chunks. Inside a chunk each KV head is clustered on its own: the first free token becomes a
    seed, and later tokens whose keys are more similar to it than the threshold join it. A cluster
    of ``s`` tokens becomes one entry, the plain mean of its keys (after RoPE) and values, with bias
    ``log s``, so that it draws the attention that ``s`` equal tokens would.

    The prompt must fit a share of its tokens (``keep``). The configured threshold is tried first;
    where it keeps too much, it is lowered in steps of 0.05, and in the end the *loose* layout is
    used, in which delimiters are merged like other tokens. The last rung merges every loose chunk
    whole, which always fits what `budget` accepted. `SlabUsage.details` says which rung it was.

    Reads from the configuration: ``threshold``, ``max_keep``, ``max_chunk``, ``num_sink_tokens``.

    Based on SemantiCache (arXiv 2603.14303). Choices that the paper leaves open: clusters per KV
    head and layer; chunks are cut at ``max_chunk`` tokens; the first tokens are kept; a token is a
    delimiter by its text (`delimiters`), in more scripts than the paper names; the budget.

    **Limits**: merging loses what told the merged tokens apart; names, numbers and needles deep in
    the prompt may no longer be found word by word, whatever the average loss says. With delimiters
    kept, no threshold goes below the share of delimiters plus chunks, a fifth (English prose) to a
    third (source code) of the tokens; smaller budgets merge across sentences. Keys are merged
    after RoPE, so that a cluster's positions are averaged as well. Only the prompt is compressed,
    never what is generated.
    """

    name = "semanticache"
    needs = frozenset({Signal.TOKEN_IDS})
    settings = ("threshold", "max_keep", "max_chunk", "num_sink_tokens")
    size = "up to max_keep of the entries, by content"

    delimiters: DelimiterTable | None = None

    def bind_tokenizer(self, tokenizer: Any) -> None:
        self.delimiters = DelimiterTable.from_tokenizer(tokenizer)

    def layout(self, token_ids: np.ndarray) -> TokenLayout:
        """Chunks of the tokens; see `Method.layout`.

        Raises:
            RuntimeError: there is no table of delimiters yet (`bind_tokenizer`).
        """
        if self.delimiters is None:
            raise RuntimeError("semanticache: bind_tokenizer() must be called before layout()")
        sinks = np.arange(len(token_ids)) < self.config.num_sink_tokens
        return TokenLayout(
            chunk_ids=self._chunk(sinks | self.delimiters.classify(token_ids)),
            loose_chunk_ids=self._chunk(sinks),
        )

    def _chunk(self, kept: np.ndarray) -> np.ndarray:
        """Number the runs of tokens that are not kept, each cut at ``max_chunk`` tokens."""
        index = np.arange(len(kept))
        last_kept = np.maximum.accumulate(np.where(kept, index, -1))
        starts = ~kept & ((index - last_kept - 1) % self.config.max_chunk == 0)
        return np.where(kept, KEPT, np.cumsum(starts) - 1).astype(np.int32)

    def _entries_per_head(self, num_tokens: int, keep: float | None) -> int:
        return int((self.config.max_keep if keep is None else keep) * num_tokens)

    def budget(
        self,
        num_tokens: int,
        layout: TokenLayout | None,
        keep: float | None,
        geometry: SlabGeometry,
    ) -> Budget:
        """Blocks in which ``keep * num_tokens`` entries per layer and head fit on average.

        A block has one cell for each layer and head, and a segment of ``m`` entries takes at most
        ``(m + N - 1) / N`` cells, so ``(average + N - 1) / N`` blocks hold them however unevenly
        the entries are spread.
        """
        assert layout is not None
        entries = self._entries_per_head(num_tokens, keep)
        floor = TokenLayout.floor(layout.loose_chunk_ids)
        if floor > entries:
            raise IncompressibleError(
                "no_room",
                f"{self.name}: {num_tokens} tokens in chunks of at most {self.config.max_chunk} "
                f"need {floor} entries, {entries} are allowed",
            )
        num_blocks = geometry.cells(entries + geometry.block_size - 1)
        source_blocks = geometry.cells(num_tokens)
        if num_blocks >= source_blocks:
            raise IncompressibleError(
                "no_room",
                f"{self.name}: {entries} entries of {num_tokens} tokens take {num_blocks} blocks, "
                f"no fewer than the {source_blocks} of the prompt",
            )
        return Budget(num_blocks)

    def fit(self, prompt: PromptView) -> Fit:
        layout = _required(prompt.layout)
        room = self._room(prompt.options, layout, prompt.geometry, prompt.num_cells)

        def sample(rung: Rung, stride: int) -> np.ndarray:
            ids = torch.tensor(rung.chunk_ids(layout))
            return np.stack(
                [
                    reference.count(layer.keys, ids, rung.threshold, stride).numpy()
                    for layer in prompt.layers
                ]
            )

        def run(rung: Rung) -> bool | None:
            kept = int((rung.chunk_ids(layout) == KEPT).sum())
            entries = sample(rung, 1) + kept
            cells = int((-(-entries // prompt.geometry.block_size)).sum())
            return True if room.holds(int(entries.sum()), cells) else None

        return self._climb(prompt.options, layout, room, run, sample)[1]

    def compress(self, layer: LayerView, prompt: PromptView, settings: Fit) -> Segment:
        rung = settings.rung
        ids = torch.tensor(rung.chunk_ids(_required(prompt.layout)))
        seeds = reference.assign(layer.keys, ids, rung.threshold)
        heads = zip(layer.keys, layer.values, seeds, strict=True)
        return Segment.of(reference.merge(*head) for head in heads)

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        layout = _required(prompt.layout)
        geometry = prompt.geometry
        room = self._room(prompt.options, layout, geometry, prompt.num_cells)

        def sample(rung: Rung, stride: int) -> np.ndarray:
            ids = torch.tensor(rung.chunk_ids(layout))
            counts = api.cluster_count(prompt.kv_cache, prompt.source, ids, rung.threshold, stride)
            return counts.numpy()

        def run(rung: Rung) -> SlabUsage | None:
            ids = torch.tensor(rung.chunk_ids(layout))
            first_cell = torch.zeros(geometry.num_layers, geometry.num_kv_heads, dtype=torch.int32)
            num_entries = torch.zeros_like(first_cell)
            cell = entries = 0
            for layer in range(geometry.num_layers):
                counts, next_cell = api.cluster_merge(
                    prompt.kv_cache,
                    prompt.bias,
                    layer,
                    prompt.source,
                    prompt.slab,
                    ids,
                    rung.threshold,
                    cell,
                    room.cells,
                )
                entries += int(counts.sum())
                if not room.holds(entries, next_cell):
                    return None
                cells = (counts + geometry.block_size - 1) // geometry.block_size
                first_cell[layer] = cell + torch.cumsum(cells, 0) - cells
                num_entries[layer] = counts
                cell = next_cell
            return SlabUsage(first_cell, num_entries, cell)

        usage, fit = self._climb(prompt.options, layout, room, run, sample)
        usage.details.update(
            threshold=fit.rung.threshold, loose=float(fit.rung.loose), attempts=float(fit.attempts)
        )
        return usage

    def _room(
        self, options: RequestOptions, layout: TokenLayout, geometry: SlabGeometry, num_cells: int
    ) -> _Room:
        per_head = self._entries_per_head(len(layout.chunk_ids), options.keep)
        return _Room(per_head, num_cells, geometry)

    def _climb(
        self,
        options: RequestOptions,
        layout: TokenLayout,
        room: _Room,
        run: Callable[[Rung], _Result | None],
        sample: Callable[[Rung, int], np.ndarray],
    ) -> tuple[_Result, Fit]:
        """Find the first rung that fits and run it.

        One pass where the configured threshold fits. Otherwise clusters are counted in a sample
        of the chunks to choose where to go on, and the rungs from there are tried in order.

        Args:
            run: compress all layers; None if they do not fit.
            sample: int ``[L, H]``, clusters in every n-th chunk.

        Raises:
            SlabOverflowError: not even the last rung fits (the slab is smaller than planned).
        """
        attempts = 0
        for loose in (False, True):
            rungs = self._ladder(options, loose)
            if TokenLayout.floor(rungs[0].chunk_ids(layout)) > room.entries_per_head:
                continue
            begin = 0
            if not loose:
                attempts += 1
                if (result := run(rungs[0])) is not None:
                    return result, Fit(rungs[0], attempts)
                begin = 1
            # the last loose rung needs no estimate, it is the last resort
            end = len(rungs) - 1 if loose else len(rungs)
            for rung in rungs[self._first_likely(rungs, begin, end, layout, room, sample) :]:
                attempts += 1
                if (result := run(rung)) is not None:
                    return result, Fit(rung, attempts)
        raise SlabOverflowError(
            f"{self.name}: {len(layout.chunk_ids)} tokens do not fit {room.entries} entries in "
            f"{room.cells} cells"
        )

    def _ladder(self, options: RequestOptions, loose: bool) -> list[Rung]:
        top = self.config.threshold if options.threshold is None else options.threshold
        steps = (round(top - k * _STEP, 10) for k in range(1, int(top / _STEP) + 1))
        thresholds = [top, *(t for t in steps if t > 0.0), 0.0]
        if loose:
            thresholds.append(api.MERGE_ALL)
        return [Rung(threshold, loose) for threshold in thresholds]

    def _first_likely(
        self,
        rungs: list[Rung],
        begin: int,
        end: int,
        layout: TokenLayout,
        room: _Room,
        sample: Callable[[Rung, int], np.ndarray],
    ) -> int:
        """First of ``rungs[begin:end]`` that fits by its sampled counts, by bisection; else
        ``end``."""
        ids = rungs[0].chunk_ids(layout)
        kept = int((ids == KEPT).sum())
        sampled = int(((ids != KEPT) & (ids % _SAMPLE_STRIDE == 0)).sum())
        scale = _SAMPLE_MARGIN * (len(ids) - kept) / max(sampled, 1)
        while begin < end:
            middle = (begin + end) // 2
            entries = kept + scale * sample(rungs[middle], _SAMPLE_STRIDE)
            cells = int(np.ceil(entries / room.geometry.block_size).sum())
            if room.holds(float(entries.sum()), cells):
                end = middle
            else:
                begin = middle + 1
        return begin


def _required(layout: TokenLayout | None) -> TokenLayout:
    assert layout is not None, "the engine provides a layout to methods that need token ids"
    return layout
