"""SemantiCache: layouts, budgets that hold, the ladder, and one result for both forms."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvcompress_kernels.cluster_merge import api
from kvcompress_kernels.formats import SlabGeometry, cell_keys, cell_values, read_segment
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    KEPT,
    IncompressibleError,
    LayerView,
    PagedPrompt,
    PromptView,
    RequestOptions,
    SlabOverflowError,
    TokenLayout,
)
from vllm_kvcompress.methods.delimiters import DelimiterTable
from vllm_kvcompress.methods.semanticache import SemantiCache

DELIMITER, WORD = 0, 1


pytestmark = pytest.mark.usefixtures("one_thread")


def make_method(**settings_: object) -> SemantiCache:
    """A method whose tokens are `DELIMITER` and `WORD`."""
    method = SemantiCache(CompressionConfig(method="semanticache", **settings_))
    method.delimiters = DelimiterTable(np.array([True, False]), {})
    return method


def prose(num_tokens: int, seed: int = 0, longest: int = 12) -> np.ndarray:
    """Token ids: words in runs of 1 to ``longest``, one delimiter after each."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, num_tokens + 1)
    return np.concatenate([[WORD] * n + [DELIMITER] for n in lengths])[:num_tokens]


def cached(shape: tuple[int, int, int, int], seed: int, spread: float) -> tuple[torch.Tensor, ...]:
    """Keys and values ``[L, H, G, D]``; neighbours are similar, the more the smaller ``spread``."""
    layers, heads, tokens, size = shape
    generator = torch.Generator().manual_seed(seed)
    slow = torch.randn(layers, heads, tokens // 8 + 1, size, generator=generator)
    noise = spread * torch.randn(shape, generator=generator)
    return slow.repeat_interleave(8, 2)[:, :, :tokens] + noise, torch.randn(
        shape, generator=generator
    )


class Case:
    """One prompt in both forms: paged in a poisoned pool, and dense."""

    def __init__(
        self,
        method: SemantiCache,
        layout: TokenLayout,
        keys: torch.Tensor,
        values: torch.Tensor,
        num_blocks: int,
        keep: float,
        threshold: float,
        block_size: int = 16,
    ) -> None:
        layers, heads, tokens, size = keys.shape
        count = tokens // block_size
        self.method, self.layout = method, layout
        geometry = SlabGeometry(layers, heads, block_size)
        kv_cache = torch.full((layers, count + num_blocks, heads, block_size, 2 * size), math.nan)
        for i in range(count):
            cells = kv_cache[:, num_blocks + i]
            of = slice(i * block_size, (i + 1) * block_size)
            cell_keys(cells).copy_(keys[:, :, of].transpose(-1, -2))
            cell_values(cells).copy_(values[:, :, of])
        options = RequestOptions("semanticache", keep, threshold)
        self.paged = PagedPrompt(
            kv_cache=kv_cache,
            bias=torch.full((count + num_blocks, layers, heads, block_size), math.nan),
            source=torch.arange(num_blocks, num_blocks + count, dtype=torch.int32),
            tail=torch.empty(0, dtype=torch.int32),
            num_tokens=count * block_size,
            slab=torch.arange(num_blocks, dtype=torch.int32).flip(0),
            options=options,
            layout=layout,
            geometry=geometry,
        )
        views = [LayerView(k, v) for k, v in zip(keys, values, strict=True)]
        self.dense = PromptView(views, options, layout, geometry, self.paged.num_cells)

    def read(self, usage) -> list[tuple[torch.Tensor, ...]]:
        cells, counts = usage.first_cell.flatten().tolist(), usage.num_entries.flatten().tolist()
        paged = self.paged
        return [
            read_segment(paged.kv_cache, paged.bias, paged.slab, cell, count)
            for cell, count in zip(cells, counts, strict=True)
        ]


def assert_valid(layout: TokenLayout, max_chunk: int) -> None:
    for chunk_ids in (layout.chunk_ids, layout.loose_chunk_ids):
        assert chunk_ids.dtype == np.int32
        inside = chunk_ids[chunk_ids != KEPT]
        numbers, lengths = np.unique(inside, return_counts=True)
        assert np.array_equal(numbers, np.arange(len(numbers)))
        assert np.all(lengths <= max_chunk)
        assert np.all(np.diff(inside) >= 0)
        places = np.flatnonzero(chunk_ids != KEPT)
        assert np.all(np.diff(places)[np.diff(inside) == 0] == 1)  # chunks are consecutive tokens


def test_layout_by_hand():
    method = make_method(max_chunk=3, num_sink_tokens=2)
    ids = np.array([WORD, WORD, WORD, DELIMITER, DELIMITER, *[WORD] * 7, DELIMITER, WORD])
    layout = method.layout(ids)
    assert layout.chunk_ids.tolist() == [-1, -1, 0, -1, -1, 1, 1, 1, 2, 2, 2, 3, -1, 4]
    assert layout.loose_chunk_ids.tolist() == [-1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert TokenLayout.floor(layout.chunk_ids) == 5 + 5


def test_layout_needs_a_tokenizer():
    method = SemantiCache(CompressionConfig(method="semanticache"))
    with pytest.raises(RuntimeError, match="bind_tokenizer"):
        method.layout(np.array([WORD]))


@given(
    ids=st.lists(st.sampled_from([DELIMITER, WORD, WORD, WORD, 7]), max_size=400),
    max_chunk=st.integers(2, 128),
    sinks=st.integers(0, 20),
)
def test_layouts_are_valid(ids, max_chunk, sinks):
    method = make_method(max_chunk=max_chunk, num_sink_tokens=sinks)
    token_ids = np.array(ids, np.int64)
    layout = method.layout(token_ids)
    assert_valid(layout, max_chunk)
    kept = (token_ids == DELIMITER) | (np.arange(len(ids)) < sinks)
    assert np.array_equal(layout.chunk_ids == KEPT, kept)
    assert np.array_equal(layout.loose_chunk_ids == KEPT, np.arange(len(ids)) < sinks)


TEXTS = {
    "no delimiter": "a" * 20_000,
    "base64": base64.b64encode(np.random.default_rng(0).bytes(6000)).decode(),
    "minified json": json.dumps(
        [{"id": i, "name": f"n{i}"} for i in range(300)], separators=(",", ":")
    ),
    "chinese": "吾輩は猫である。名前はまだ無い。どこで生れたか、とんと見当がつかぬ。" * 40,
    "chinese without marks": "吾輩は猫である名前はまだ無い" * 80,
    "thai": "ภาษาไทยไม่มีเว้นวรรค" * 60,
    "korean": "한국어 문장은 띄어쓰기가 있습니다. " * 60,
    "emoji": "🙂👩‍👩‍👧🇪🇺" * 200,
    "code": "for (int i = 0; i < n; ++i) { if (x[i]) { y += x[i]; } }\n\n" * 60,
    "only delimiters": ".,;:!?\n\n \t" * 300,
}


@pytest.mark.parametrize("name", TEXTS)
def test_any_text_can_be_divided_and_compressed(name, model_path: Path):
    method = SemantiCache(CompressionConfig(method="semanticache"))
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    method.bind_tokenizer(tokenizer)
    ids = np.array(tokenizer.encode(TEXTS[name]), np.int64)
    ids = ids[: len(ids) // 16 * 16]
    layout = method.layout(ids)
    assert_valid(layout, method.config.max_chunk)
    geometry = SlabGeometry(1, 1, 16)
    blocks = method.budget(len(ids), layout, 0.3, geometry).num_blocks
    keys, values = cached((1, 1, len(ids), 16), 0, 0.3)
    usage = method.compress_into(Case(method, layout, keys, values, blocks, 0.3, 0.75).paged)
    assert 0 < usage.num_entries.item() <= 0.3 * len(ids)


@settings(max_examples=40, deadline=None)
@given(
    keep=st.floats(0.02, 1.0, exclude_min=True),
    blocks=st.integers(4, 32),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    longest=st.sampled_from([1, 5, 40, 1000]),
    spread=st.sampled_from([0.0, 0.3, 1.0, 100.0]),
    threshold=st.sampled_from([0.4, 0.75, 0.97]),
    seed=st.integers(0, 100),
)
def test_every_accepted_budget_is_met(
    keep, blocks, layers, heads, longest, spread, threshold, seed
):
    method = make_method()
    tokens = 16 * blocks
    layout = method.layout(prose(tokens, seed, longest))
    geometry = SlabGeometry(layers, heads, 16)
    try:
        budget = method.budget(tokens, layout, keep, geometry)
    except IncompressibleError:
        assume(False)
    assert budget.num_blocks < blocks
    keys, values = cached((layers, heads, tokens, 16), seed, spread)
    # heads of very different lengths: one of them never merges before the last rung
    keys[0, 0] = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(seed))
    case = Case(method, layout, keys, values, budget.num_blocks, keep, threshold)
    source = case.paged.kv_cache[:, budget.num_blocks :].clone()
    usage = method.compress_into(case.paged)
    assert usage.num_entries.float().mean().item() <= keep * tokens
    assert usage.num_cells <= case.paged.num_cells
    assert torch.equal(case.paged.kv_cache[:, budget.num_blocks :], source)

    # the plain form takes the same decisions and gives the same entries
    entries = case.read(usage)
    segments = list(method.compress_prompt(case.dense))
    dense = [
        head
        for segment in segments
        for head in zip(segment.keys, segment.values, segment.bias, strict=True)
    ]
    for ours, theirs in zip(entries, dense, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        # every token is in exactly one entry
        assert abs(ours[2].double().exp().sum().item() - tokens) < 1e-3 * tokens


@pytest.mark.parametrize(("keep", "blocks"), [(0.6, 97), (0.5, 81), (0.1, 17)])
def test_budget_by_hand(keep, blocks):
    # 2,560 tokens: 1,536 entries and up to 15 unused slots of the last cell, 16 to a block
    layout = make_method().layout(prose(2560))
    budget = make_method().budget(2560, layout, keep, SlabGeometry(4, 3, 16))
    assert budget.num_blocks == blocks
    assert budget.num_blocks == math.ceil((keep * 2560 + 15) / 16)


def test_budget_without_keep_is_that_of_the_configuration():
    method = make_method(max_keep=0.25)
    layout = method.layout(prose(1600))
    geometry = SlabGeometry(2, 2, 16)
    assert method.budget(1600, layout, None, geometry) == method.budget(
        1600, layout, 0.25, geometry
    )


@pytest.mark.parametrize(
    ("tokens", "keep"),
    [(0, 0.5), (16, 0.5), (32, 0.5), (1600, 1.0), (1600, 0.995), (160, 0.021), (64, 0.06)],
)
def test_budgets_that_save_nothing_are_refused(tokens, keep):
    method = make_method()
    with pytest.raises(IncompressibleError) as caught:
        method.budget(tokens, method.layout(prose(tokens)), keep, SlabGeometry(2, 2, 16))
    assert caught.value.reason == "no_room"


def test_one_pass_where_the_threshold_fits(monkeypatch):
    monkeypatch.setattr(api, "cluster_count", None)
    method = make_method()
    layout = method.layout(prose(320))
    keys, values = cached((2, 2, 320, 16), 0, 0.1)
    usage = method.compress_into(Case(method, layout, keys, values, 13, 0.6, 0.75).paged)
    assert usage.details == {"threshold": 0.75, "loose": 0.0, "attempts": 1.0}


@pytest.mark.parametrize(
    ("keep", "spread", "loose", "below"),
    [(0.45, 0.65, 0.0, 0.75), (0.12, 0.3, 1.0, 0.76), (0.03, 100.0, 1.0, -0.9)],
)
def test_the_ladder_is_climbed_as_far_as_needed(keep, spread, loose, below):
    method = make_method()
    layout = method.layout(prose(1600))
    geometry = SlabGeometry(2, 2, 16)
    keys, values = cached((2, 2, 1600, 16), 0, spread)
    blocks = method.budget(1600, layout, keep, geometry).num_blocks
    usage = method.compress_into(Case(method, layout, keys, values, blocks, keep, 0.75).paged)
    assert usage.details["loose"] == loose
    assert usage.details["threshold"] < below
    # what is allowed is used, unless the next rung already keeps less
    assert usage.num_entries.float().mean() <= keep * 1600


def test_counts_fall_along_the_ladder():
    method = make_method()
    layout = method.layout(prose(1600))
    keys, values = cached((1, 2, 1600, 16), 0, 0.5)
    paged = Case(method, layout, keys, values, 1, 0.6, 0.75).paged
    for ids in (layout.chunk_ids, layout.loose_chunk_ids):
        counts = [
            api.cluster_count(paged.kv_cache, paged.source, torch.from_numpy(ids), t).sum().item()
            for t in (0.95, 0.85, 0.75, 0.6, 0.45, 0.3, 0.15, 0.0, api.MERGE_ALL)
        ]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 2 * (ids.max() + 1)


@pytest.mark.parametrize("form", ["paged", "dense"])
def test_a_slab_that_is_too_small_is_an_error(form):
    method = make_method()
    layout = method.layout(prose(320))
    keys, values = cached((2, 2, 320, 16), 0, 0.3)
    case = Case(method, layout, keys, values, 0, 0.6, 0.75)
    before = case.paged.kv_cache.clone()
    run = {
        "paged": lambda: method.compress_into(case.paged),
        "dense": lambda: list(method.compress_prompt(case.dense)),
    }
    with pytest.raises(SlabOverflowError, match="320 tokens do not fit"):
        run[form]()
    assert torch.equal(case.paged.kv_cache, before)


def test_prompts_of_delimiters_are_compressed_loosely():
    method = make_method()
    layout = method.layout(np.full(640, DELIMITER))
    assert TokenLayout.floor(layout.chunk_ids) == 640
    keys, values = cached((1, 2, 640, 16), 0, 0.1)
    blocks = method.budget(640, layout, 0.5, SlabGeometry(1, 2, 16)).num_blocks
    usage = method.compress_into(Case(method, layout, keys, values, blocks, 0.5, 0.75).paged)
    assert usage.details == {"threshold": 0.75, "loose": 1.0, "attempts": 1.0}
    assert usage.num_entries.float().mean() < 0.5 * 640


def test_sinks_and_delimiters_survive_bit_by_bit():
    method = make_method(num_sink_tokens=5)
    token_ids = prose(320)
    layout = method.layout(token_ids)
    keys, values = cached((1, 1, 320, 16), 0, 0.3)
    case = Case(method, layout, keys, values, 13, 0.6, 0.5)
    usage = method.compress_into(case.paged)
    assert usage.details["loose"] == 0.0
    entry_keys, entry_values, bias = case.read(usage)[0]
    rows = {tuple(row.tolist()): i for i, row in enumerate(entry_keys)}
    for token in np.flatnonzero(layout.chunk_ids == KEPT):
        entry = rows[tuple(keys[0, 0, token].tolist())]
        assert torch.equal(entry_values[entry], values[0, 0, token])
        assert bias[entry] == 0.0
