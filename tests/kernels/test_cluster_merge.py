"""`cluster_merge`: the C++ kernel gives the bits of the reference, and the reference is right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import ORDERS, assert_same_bits, make_pool

from kvcompress_kernels.cluster_merge import reference
from kvcompress_kernels.cluster_merge.api import MERGE_ALL, cluster_count, cluster_merge
from kvcompress_kernels.formats import SlabGeometry, cell_keys, cell_values, read_segment

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


pytestmark = pytest.mark.usefixtures("one_thread")


def clustered(shape: tuple[int, ...], generator: torch.Generator, spread: float) -> torch.Tensor:
    """Random keys ``[..., G, D]`` around a few directions, so that thresholds divide them."""
    *lead, tokens, size = shape
    centres = torch.randn(*lead, 4, size, generator=generator)
    choice = torch.randint(4, (*lead, tokens), generator=generator)
    keys = torch.gather(centres, -2, choice[..., None].expand(*lead, tokens, size))
    return keys + spread * torch.randn(shape, generator=generator)


class Prompt:
    """A prompt in scattered blocks of a poisoned pool, and a slab for it."""

    def __init__(
        self,
        keys: torch.Tensor,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        order: str = "layers first",
        seed: int = 0,
    ) -> None:
        layers, heads, tokens, size = keys.shape
        generator = torch.Generator().manual_seed(seed)
        count = tokens // block_size
        self.geometry = SlabGeometry(layers, heads, block_size)
        shuffled = torch.randperm(2 * count + 3, generator=generator).int()
        self.source, self.slab = shuffled[:count].clone(), shuffled[count : 2 * count + 1].clone()
        shape = (layers, 2 * count + 3, heads, block_size, 2 * size)
        self.kv_cache = make_pool(shape, dtype, order)
        self.bias = torch.full((shape[1], layers, heads, block_size), math.nan)
        self.keys = keys.to(dtype)
        self.values = torch.randn(keys.shape, generator=generator).to(dtype)
        for i, block in enumerate(self.source.tolist()):
            tokens_of = slice(i * block_size, (i + 1) * block_size)
            cells = self.kv_cache[:, block]
            cell_keys(cells).copy_(self.keys[:, :, tokens_of].transpose(-1, -2))
            cell_values(cells).copy_(self.values[:, :, tokens_of])

    @property
    def num_cells(self) -> int:
        return len(self.slab) * self.geometry.cells_per_block

    def run(self, impl: str, chunk_ids: torch.Tensor, threshold: float, **kwargs: int):
        """Compress all layers in a copy of the pool."""
        kv_cache = torch.empty_strided(
            self.kv_cache.shape, self.kv_cache.stride(), dtype=self.kv_cache.dtype
        ).copy_(self.kv_cache)
        bias = self.bias.clone()
        cell, counts = kwargs.get("first_cell", 0), []
        for layer in range(self.geometry.num_layers):
            entries, cell = cluster_merge(
                kv_cache,
                bias,
                layer,
                self.source,
                self.slab,
                chunk_ids,
                threshold,
                cell,
                kwargs.get("num_cells", self.num_cells),
                impl=impl,
            )
            counts.append(entries)
            if cell > kwargs.get("num_cells", self.num_cells):
                break
        return kv_cache, bias, torch.stack(counts), cell


def assert_impls_agree(prompt: Prompt, chunk_ids: torch.Tensor, threshold: float) -> torch.Tensor:
    ours = prompt.run("cpu", chunk_ids, threshold)
    theirs = prompt.run("reference", chunk_ids, threshold)
    assert ours[3] == theirs[3]
    assert torch.equal(ours[2], theirs[2])
    assert_same_bits(ours[0], theirs[0])
    assert_same_bits(ours[1], theirs[1])
    assert_same_bits(ours[0][:, prompt.source.long()], prompt.kv_cache[:, prompt.source.long()])
    return ours[2]


def number_chunks(lengths: list[int], num_tokens: int) -> torch.Tensor:
    """Chunk ids from run lengths: positive ones are chunks, negative ones kept tokens."""
    ids: list[int] = []
    number = 0
    for length in lengths:
        ids += [number] * length if length > 0 else [-1] * -length
        number += length > 0
    ids += [-1] * (num_tokens - len(ids))
    return torch.tensor(ids[:num_tokens], dtype=torch.int32)


def one_chunk(rows: list[list[float]], block_size: int = 16) -> tuple[Prompt, torch.Tensor]:
    """One layer, one head, D = 16; the rows form one chunk, the rest of the block is kept."""
    keys = torch.zeros(1, 1, block_size, 16)
    keys[0, 0, :, 15] = 1.0
    for i, row in enumerate(rows):
        keys[0, 0, i] = 0.0
        keys[0, 0, i, : len(row)] = torch.tensor(row)
    return Prompt(keys, block_size), number_chunks([len(rows)], block_size)


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(ORDERS),
    size=st.sampled_from([16, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([16, 32, 48]),
    heads=st.integers(1, 3),
    blocks=st.integers(1, 5),
    lengths=st.lists(st.integers(-4, 70), min_size=1, max_size=30),
    threshold=st.sampled_from([MERGE_ALL, 0.0, 0.3, 0.5, 0.75, 0.9, 0.999999]),
    spread=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    seed=st.integers(0, 1000),
)
def test_kernel_gives_the_bits_of_the_reference(
    dtype, order, size, block_size, heads, blocks, lengths, threshold, spread, seed
):
    generator = torch.Generator().manual_seed(seed)
    tokens = blocks * block_size
    keys = clustered((2, heads, tokens, size), generator, spread)
    prompt = Prompt(keys, block_size, dtype=dtype, order=order, seed=seed)
    assert_impls_agree(prompt, number_chunks(lengths, tokens), threshold)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 256])
def test_thresholds_at_the_cosines_themselves(dtype, size):
    generator = torch.Generator().manual_seed(size)
    prompt = Prompt(clustered((1, 2, 64, size), generator, 0.5), 32, dtype=dtype)
    chunk_ids = number_chunks([64], 64)
    keys = prompt.keys[0, 0].double()
    cosines = torch.nn.functional.cosine_similarity(keys[:1], keys[1:])
    for cosine in cosines[cosines > 0][:4].tolist():
        for threshold in (math.nextafter(cosine, 0), cosine, math.nextafter(cosine, 1)):
            assert_impls_agree(prompt, chunk_ids, threshold)


def test_threshold_is_strict():
    prompt, chunk_ids = one_chunk([[1, 0, 0, 0], [1, 1, 1, 1]])  # cosine exactly 0.5
    assert assert_impls_agree(prompt, chunk_ids, 0.5).item() == 16
    assert assert_impls_agree(prompt, chunk_ids, math.nextafter(0.5, 0)).item() == 15


def test_hand_computed_example():
    # token 0 takes 2 and 3 (cosine 0.8), token 1 takes 4; 5 is similar to 3 but 3 is no seed
    rows = [[5, 0, 0], [0, 0, 2], [4, 3, 0], [4, -3, 0], [0, 1, 7], [2, -9, 0]]
    prompt, chunk_ids = one_chunk(rows)
    kv_cache, bias, counts, cell = prompt.run("cpu", chunk_ids, 0.75)
    assert (counts.item(), cell) == (13, 1)
    keys, values, biases = read_segment(kv_cache, bias, prompt.slab, 0, 13)
    expected = torch.tensor([[13 / 3, 0, 0], [0, 0.5, 4.5], [2, -9, 0]])
    torch.testing.assert_close(keys[:3, :3], expected)
    torch.testing.assert_close(values[0], prompt.values[0, 0, [0, 2, 3]].mean(0))
    torch.testing.assert_close(biases[:4], torch.tensor([3.0, 2.0, 1.0, 1.0]).log())
    assert_same_bits(keys[3:], prompt.keys[0, 0, 6:])
    assert_same_bits(values[2:], prompt.values[0, 0, 5:])
    assert_impls_agree(prompt, chunk_ids, 0.75)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("threshold", [0.0, 0.7])
def test_keys_without_direction_merge_with_nothing(bad, threshold):
    rows = [[1.0, 0], [bad, 0], [1.0, 0], [bad, 0], [2.0, 0]]
    prompt, chunk_ids = one_chunk(rows)
    assert assert_impls_agree(prompt, chunk_ids, threshold).item() == 16 - 2


def test_merge_all_takes_any_key():
    rows = [[1.0], [0.0], [-1.0], [3.0e38], [1e-45]]
    prompt, chunk_ids = one_chunk(rows)
    assert assert_impls_agree(prompt, chunk_ids, MERGE_ALL).item() == 16 - 4


@pytest.mark.parametrize("exponent", [-140, -76, -75, -74, -40, 40, 60, 61, 62, 110])
def test_cosines_do_not_depend_on_scale(exponent):
    generator = torch.Generator().manual_seed(1)
    # few bits, so that scaling down to denormal numbers is exact
    keys = clustered((1, 2, 64, 32), generator, 0.7).mul(2).round()
    chunk_ids = number_chunks([30, -4, 30], 64)
    expected = Prompt(keys, 32).run("cpu", chunk_ids, 0.6)[2]
    scaled = Prompt(keys * 2.0**exponent, 32)
    assert 10 < expected.float().mean() < 40
    assert torch.equal(assert_impls_agree(scaled, chunk_ids, 0.6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_tokens_are_copied_bit_by_bit(dtype):
    prompt = Prompt(torch.eye(32)[None, None], 32, dtype=dtype)
    odd = torch.tensor([-0.0, torch.finfo(dtype).smallest_normal / 2, torch.finfo(dtype).max])
    for view in (cell_keys, cell_values):
        cell = view(prompt.kv_cache[0, int(prompt.source[0]), 0])
        cell.copy_(torch.where(cell == 0, odd.to(dtype).repeat(11)[:32], cell))
    prompt.kv_cache[0, int(prompt.source[0]), 0].view(-1)[5] = math.nan
    kv_cache, bias, counts, _ = prompt.run("cpu", number_chunks([32], 32), 0.999)
    assert counts.item() == 32
    assert_same_bits(kv_cache[0, int(prompt.slab[0])], kv_cache[0, int(prompt.source[0])])
    assert torch.equal(bias[int(prompt.slab[0])], torch.zeros(1, 1, 32))


def test_chunks_longer_than_a_task_of_the_kernel():
    prompt = Prompt(clustered((1, 2, 640, 16), torch.Generator().manual_seed(3), 0.3), 32)
    assert_impls_agree(prompt, number_chunks([5, 500, -3, 100], 640), 0.8)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_overflow_writes_nothing(impl):
    prompt = Prompt(clustered((1, 3, 128, 16), torch.Generator().manual_seed(4), 0.5), 16)
    chunk_ids = number_chunks([20] * 6, 128)
    kv_cache, _, counts, cells = prompt.run("cpu", chunk_ids, 0.7)
    assert cells == sum(-(-count // 16) for count in counts.flatten().tolist())

    fits = prompt.run(impl, chunk_ids, 0.7, num_cells=cells)
    assert_same_bits(fits[0], kv_cache)
    late = prompt.run(impl, chunk_ids, 0.7, first_cell=2, num_cells=cells + 1)
    assert late[3] == cells + 2
    assert torch.equal(late[2], counts)
    assert_same_bits(late[0], prompt.kv_cache)
    assert_same_bits(late[1], prompt.bias)


def test_nothing_is_written_outside_the_segments():
    prompt = Prompt(clustered((1, 2, 64, 16), torch.Generator().manual_seed(5), 0.4), 16)
    kv_cache, bias, counts, cells = prompt.run(
        "cpu", number_chunks([30, -2, 32], 64), 0.7, first_cell=1
    )
    # remove what belongs to the two segments; the pool must then be what it was
    cell = 1
    for count in counts.flatten().tolist():
        for start in range(0, count, 16):
            index, layer, head = prompt.geometry.locate(cell)
            where = kv_cache[layer, int(prompt.slab[index]), head]
            stop = min(16, count - start)
            cell_keys(where)[:, :stop] = math.nan
            cell_values(where)[:stop] = math.nan
            bias[int(prompt.slab[index]), layer, head, :stop] = math.nan
            cell += 1
    assert cell == cells
    assert torch.equal(kv_cache.isnan(), prompt.kv_cache.isnan())
    assert bias.isnan().all()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_count_is_what_merging_gives(impl):
    prompt = Prompt(clustered((2, 3, 256, 32), torch.Generator().manual_seed(6), 0.4), 32)
    lengths = [7, -1, 12, 30, -2, 1, 64, -3, 40, 20]
    chunk_ids = number_chunks(lengths, 256)
    kept = int((chunk_ids < 0).sum())
    counts = prompt.run("cpu", chunk_ids, 0.8)[2]
    for stride in (1, 2, 3, 100):
        found = cluster_count(prompt.kv_cache, prompt.source, chunk_ids, 0.8, stride, impl)
        sampled = (chunk_ids >= 0) & (chunk_ids % stride == 0)
        for keys, layer_counts in zip(prompt.keys, found.tolist(), strict=True):
            seeds = reference.assign(keys, chunk_ids, 0.8)
            assert layer_counts == [len(set(head[sampled].tolist())) for head in seeds]
        if stride == 1:
            assert torch.equal(found + kept, counts)


def test_result_does_not_depend_on_the_number_of_threads():
    prompt = Prompt(clustered((1, 3, 1024, 32), torch.Generator().manual_seed(7), 0.4), 32)
    chunk_ids = number_chunks([9, -1] * 100, 1024)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(prompt.run("cpu", chunk_ids, 0.7))
    finally:
        torch.set_num_threads(threads)
    for kv_cache, bias, counts, _ in results[1:]:
        assert_same_bits(kv_cache, results[0][0])
        assert_same_bits(bias, results[0][1])
        assert torch.equal(counts, results[0][2])


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_extreme_layouts(impl):
    prompt = Prompt(torch.ones(1, 2, 32, 16), 16)
    kept = number_chunks([], 32)
    assert prompt.run(impl, kept, 0.5)[2].tolist() == [[32, 32]]
    assert prompt.run(impl, torch.arange(32, dtype=torch.int32), 0.5)[2].tolist() == [[32, 32]]
    assert prompt.run(impl, number_chunks([32], 32), 0.5)[2].tolist() == [[1, 1]]
    empty = torch.zeros(0, dtype=torch.int32)
    counts, cell = cluster_merge(
        prompt.kv_cache, prompt.bias, 0, empty, empty, empty, 0.5, 0, 0, impl=impl
    )
    assert (counts.tolist(), cell) == ([0, 0], 0)
    assert cluster_count(prompt.kv_cache, empty, empty, 0.5, impl=impl).tolist() == [[0, 0]]


ids = number_chunks([4, -1, 27], 32)

BAD = {
    "last two dimensions": {"kv_cache": torch.zeros(1, 4, 1, 16, 64)[..., ::2]},
    "float32 .L, B, H": {"kv_cache": torch.zeros(1, 4, 1, 16, 32, dtype=torch.float64)},
    "N and D multiples of 16": {"kv_cache": torch.zeros(1, 4, 1, 8, 32)},
    "D at most 256": {"kv_cache": torch.zeros(1, 4, 1, 16, 544)},
    r"layer: expected 0 to L - 1 = 0, got 1": {"layer": 1},
    r"bias: expected float32 \[B, L, H, N\] = \[4, 1, 1, 16\]": {"bias": torch.zeros(4, 1, 16)},
    r"source: expected block ids from 0 to B - 1 = 3": {"source": torch.tensor([0, 4]).int()},
    r"slab: expected contiguous int32 \[c\]": {"slab": torch.tensor([2, 3])},
    r"chunk_ids: expected contiguous int32 \[G\] = \[32\]": {"chunk_ids": ids[:16]},
    r"numbered 0, 1, 2": {"chunk_ids": torch.where(ids == 1, 2, ids)},
    r"consecutive tokens": {"chunk_ids": torch.where(ids == 1, 0, ids)},
    r"threshold: expected 0 up to but not 1, or -1.0, got 1.0": {"threshold": 1.0},
    r"threshold: expected 0 up to but not 1, or -1.0, got nan": {"threshold": math.nan},
    r"threshold: expected 0 up to but not 1, or -1.0, got -0.5": {"threshold": -0.5},
    r"num_cells: expected 0 to c \* L \* H = 2, got 3": {"num_cells": 3},
    r"first_cell: expected 0 to num_cells = 2, got 3": {"first_cell": 3},
    r"unknown impl 'gpu'; expected one of 'cpu', 'reference'": {"impl": "gpu"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    arguments = {
        "kv_cache": torch.zeros(1, 4, 1, 16, 32),
        "bias": torch.zeros(4, 1, 1, 16),
        "layer": 0,
        "source": torch.tensor([0, 1]).int(),
        "slab": torch.tensor([2, 3]).int(),
        "chunk_ids": ids,
        "threshold": 0.7,
        "first_cell": 0,
        "num_cells": 2,
    }
    cluster_merge(**arguments)
    with pytest.raises(ValueError, match=message):
        cluster_merge(**{**arguments, **BAD[message]})


def test_bad_stride():
    with pytest.raises(ValueError, match="stride: expected at least 1, got 0"):
        cluster_count(torch.zeros(1, 2, 1, 32, 32), torch.zeros(1).int(), ids, 0.5, 0)
