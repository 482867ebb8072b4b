"""`cluster_merge` in Triton, under Triton's interpreter: the bits of the reference.

`test_triton_interpreter` runs this module in a process of its own.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton_interpreter
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvcompress_kernels import formats
from kvcompress_kernels.cluster_merge.api import MERGE_ALL, cluster_count, cluster_merge

triton_interpreter.require()
kernel: Any = pytest.importorskip("kvcompress_kernels.cluster_merge.triton")
cpu: Any = triton_interpreter.load_module("test_cluster_merge")
number_chunks, clustered, assert_same_bits = (
    cpu.number_chunks,
    cpu.clustered,
    cpu.assert_same_bits,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = ["LBHNC", "BLHNC", "LBNHC", "heads apart"]


class Prompt(cpu.Prompt):  # type: ignore[misc, name-defined]
    """The prompts of the CPU tests in a GPU pool, which is poisoned wherever nothing is."""

    def __init__(
        self, keys: torch.Tensor, block_size: int, *, layout: str = "LBHNC", **kwargs: Any
    ):
        super().__init__(keys, block_size, **kwargs)
        L, B, H, N, width = self.kv_cache.shape
        dtype = self.kv_cache.dtype
        if layout == "heads apart":
            pool = formats.gpu_pool(
                torch.full((L, B, 2 * H, N, width // 2), math.nan, dtype=dtype), H
            )
        else:
            order = ["LBHNC".index(letter) for letter in layout]
            buffer = torch.full([self.kv_cache.shape[i] for i in order], math.nan, dtype=dtype)
            pool = formats.gpu_pool(buffer.permute(*(order.index(i) for i in range(5))))
        formats.copy_cpu_cells(self.kv_cache, pool)
        self.kv_cache = pool

    def copy(self) -> torch.Tensor:
        pool = torch.empty_strided(
            self.kv_cache.shape, self.kv_cache.stride(), dtype=self.kv_cache.dtype
        )
        return pool.copy_(self.kv_cache)

    def run(self, impl: str, chunk_ids: torch.Tensor, threshold: float, **kwargs: int) -> Any:
        """Compress all layers in a copy of the pool."""
        kv_cache, bias = self.copy(), self.bias.clone()
        cell, counts = kwargs.get("first_cell", 0), []
        num_cells = kwargs.get("num_cells", self.num_cells)
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
                num_cells,
                impl=impl,
            )
            counts.append(entries)
            if cell > num_cells:
                break
        return kv_cache, bias, torch.stack(counts), cell

    def run_layers(self, chunk_ids: torch.Tensor, threshold: float, **kwargs: int) -> Any:
        kv_cache, bias = self.copy(), self.bias.clone()
        chunks = kernel.find_chunks(chunk_ids, torch.device("cpu"))
        counts, first_cell, next_cell = kernel.cluster_merge_layers(
            kv_cache,
            bias,
            range(self.geometry.num_layers),
            self.source,
            self.slab,
            chunks,
            threshold,
            kwargs.get("first_cell", 0),
            kwargs.get("num_cells", self.num_cells),
        )
        return kv_cache, bias, counts, int(next_cell), first_cell


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[3] == theirs[3]
    assert torch.equal(ours[2], theirs[2])
    assert_same_bits(ours[0], theirs[0])
    assert_same_bits(ours[1], theirs[1])


def assert_impls_agree(prompt: Prompt, chunk_ids: torch.Tensor, threshold: float) -> torch.Tensor:
    theirs = prompt.run("reference", chunk_ids, threshold)
    assert_same(prompt.run("triton", chunk_ids, threshold), theirs)
    together = prompt.run_layers(chunk_ids, threshold)
    assert_same(together, theirs)
    cells = -(-theirs[2] // prompt.geometry.block_size)
    ends = torch.cumsum(cells.flatten(), 0).view(cells.shape)
    assert torch.equal(together[4], (ends - cells).int())
    return theirs[2]


def one_chunk(rows: list[list[float]]) -> tuple[Prompt, torch.Tensor]:
    """One layer, one head, D = 16; the rows form one chunk, the rest of the block is kept."""
    keys = torch.zeros(1, 1, 16, 16)
    keys[0, 0, :, 15] = 1.0
    for i, row in enumerate(rows):
        keys[0, 0, i] = 0.0
        keys[0, 0, i, : len(row)] = torch.tensor(row)
    return Prompt(keys, 16), number_chunks([len(rows)], 16)


# shrinking would take longer than a test may
@settings(max_examples=8, deadline=None, database=None, phases=[Phase.generate])
@given(
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    size=st.sampled_from([16, 48, 64, 80, 128]),
    block_size=st.sampled_from([16, 48]),
    heads=st.integers(1, 2),
    blocks=st.integers(1, 2),
    lengths=st.lists(st.integers(-4, 70), min_size=1, max_size=12),
    threshold=st.sampled_from([MERGE_ALL, 0.0, 0.3, 0.5, 0.75, 0.9, 0.999999]),
    spread=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_bits_of_the_reference(
    dtype: torch.dtype,
    layout: str,
    size: int,
    block_size: int,
    heads: int,
    blocks: int,
    lengths: list[int],
    threshold: float,
    spread: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = blocks * block_size
    keys = clustered((2, heads, tokens, size), generator, spread)
    prompt = Prompt(keys, block_size, dtype=dtype, layout=layout, seed=seed)
    assert_impls_agree(prompt, number_chunks(lengths, tokens), threshold)


@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1:])]
)
def test_thresholds_at_the_cosines_themselves(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    prompt = Prompt(clustered((1, 1, 32, 64), generator, 0.5), 32, dtype=dtype)
    chunk_ids = number_chunks([32], 32)
    keys = prompt.keys[0, 0].double()
    cosines = torch.nn.functional.cosine_similarity(keys[:1], keys[1:])
    for cosine in cosines[cosines > 0][:2].tolist():
        for threshold in (math.nextafter(cosine, 0), cosine, math.nextafter(cosine, 1)):
            assert_impls_agree(prompt, chunk_ids, threshold)


def test_threshold_is_strict() -> None:
    prompt, chunk_ids = one_chunk([[1, 0, 0, 0], [1, 1, 1, 1]])  # cosine exactly 0.5
    assert assert_impls_agree(prompt, chunk_ids, 0.5).item() == 16
    assert assert_impls_agree(prompt, chunk_ids, math.nextafter(0.5, 0)).item() == 15


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("threshold", [0.0, 0.7])
def test_keys_without_direction_merge_with_nothing(bad: float, threshold: float) -> None:
    prompt, chunk_ids = one_chunk([[1.0, 0], [bad, 0], [1.0, 0], [bad, 0], [2.0, 0]])
    assert assert_impls_agree(prompt, chunk_ids, threshold).item() == 16 - 2


def test_the_mean_of_negative_zeros_is_one() -> None:
    """Tokens between the members of a cluster add nothing, not even a positive zero."""
    prompt, chunk_ids = one_chunk([[1.0, -0.0], [0.0, 0.0, 1.0], [1.0, -0.0]])
    assert assert_impls_agree(prompt, chunk_ids, 0.5).item() == 15
    kv_cache = prompt.run("triton", chunk_ids, 0.5)[0]
    mean = kv_cache[0, 0, int(prompt.slab[0]), 0, 0, 1]
    assert mean == 0
    assert torch.signbit(mean)


def test_merge_all_takes_any_key() -> None:
    prompt, chunk_ids = one_chunk([[1.0], [0.0], [-1.0], [3.0e38], [1e-45]])
    assert assert_impls_agree(prompt, chunk_ids, MERGE_ALL).item() == 16 - 4


@pytest.mark.parametrize("exponent", [-140, -74, -40, 40, 61, 110])
def test_cosines_do_not_depend_on_scale(exponent: int) -> None:
    generator = torch.Generator().manual_seed(1)
    # few bits, so that scaling down to denormal numbers is exact
    keys = clustered((1, 1, 32, 16), generator, 0.7).mul(2).round()
    chunk_ids = number_chunks([14, -4, 14], 32)
    expected = Prompt(keys, 32).run("reference", chunk_ids, 0.6)[2]
    assert 6 < expected.item() < 30
    scaled = Prompt(keys * 2.0**exponent, 32)
    assert torch.equal(assert_impls_agree(scaled, chunk_ids, 0.6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_tokens_are_copied_bit_by_bit(dtype: torch.dtype) -> None:
    prompt = Prompt(torch.eye(32)[None, None], 32, dtype=dtype)
    odd = torch.tensor([-0.0, torch.finfo(dtype).smallest_normal / 2, torch.finfo(dtype).max])
    cells = prompt.kv_cache[:, 0, int(prompt.source[0]), 0]  # [2, N, D]
    # a row of keys has one odd number only, so that no two rows have the same direction
    odds = odd.to(dtype).repeat(11)[:32]
    cells.copy_(
        torch.where(
            cells == 0, torch.stack([odds[:, None].expand(32, 32), odds.expand(32, 32)]), cells
        )
    )
    cells[1, 3, 5] = math.nan
    kv_cache, bias, counts, _ = prompt.run("triton", number_chunks([32], 32), 0.999)
    assert counts.item() == 32
    assert_same_bits(kv_cache[:, 0, int(prompt.slab[0])], kv_cache[:, 0, int(prompt.source[0])])
    assert torch.equal(bias[int(prompt.slab[0])], torch.zeros(1, 1, 32))


def test_the_longest_chunk() -> None:
    prompt = Prompt(clustered((1, 1, 160, 16), torch.Generator().manual_seed(3), 0.3), 32)
    assert_impls_agree(prompt, number_chunks([5, 128, -3, 20], 160), 0.8)
    with pytest.raises(ValueError, match="at most 128 tokens with impl='triton', got one of 129"):
        prompt.run("triton", number_chunks([129], 160), 0.8)


def test_overflow_writes_nothing() -> None:
    prompt = Prompt(clustered((2, 2, 64, 16), torch.Generator().manual_seed(4), 0.5), 16)
    chunk_ids = number_chunks([20] * 3, 64)
    full = prompt.run("reference", chunk_ids, 0.7)
    cells = full[3]
    assert_same(prompt.run_layers(chunk_ids, 0.7, num_cells=cells), full)
    for run in (
        prompt.run_layers(chunk_ids, 0.7, num_cells=cells - 1),
        prompt.run_layers(chunk_ids, 0.7, first_cell=1, num_cells=cells),
    ):
        assert_same_bits(run[0], prompt.kv_cache)
        assert_same_bits(run[1], prompt.bias)
        assert torch.equal(run[2], full[2])
    one = Prompt(prompt.keys[:1], 16)
    late = one.run("triton", chunk_ids, 0.7, first_cell=3, num_cells=3)
    assert late[3] == 3 + int((-(-full[2][0] // 16)).sum())
    assert_same_bits(late[0], one.kv_cache)


def test_nothing_is_written_outside_the_segments() -> None:
    prompt = Prompt(clustered((1, 2, 64, 16), torch.Generator().manual_seed(5), 0.4), 16)
    kv_cache, bias, counts, cells = prompt.run(
        "triton", number_chunks([30, -2, 32], 64), 0.7, first_cell=1
    )
    # remove what belongs to the two segments; the pool must then be what it was
    cell = 1
    for count in counts.flatten().tolist():
        nothing = torch.full((count, 16), math.nan)
        formats.gpu_write_segment(
            kv_cache, bias, prompt.slab, cell, nothing, nothing, nothing[:, 0]
        )
        cell += prompt.geometry.cells(count)
    assert cell == cells
    assert torch.equal(kv_cache.isnan(), prompt.kv_cache.isnan())
    assert bias.isnan().all()


def test_count_is_what_the_reference_counts() -> None:
    prompt = Prompt(clustered((2, 2, 128, 32), torch.Generator().manual_seed(6), 0.4), 32)
    chunk_ids = number_chunks([7, -1, 12, 30, -2, 1, 40, -3, 20], 128)
    for stride in (1, 2, 100):
        counts = [
            cluster_count(prompt.kv_cache, prompt.source, chunk_ids, 0.8, stride, impl)
            for impl in ("triton", "reference")
        ]
        assert torch.equal(*counts)
    assert cluster_count(
        prompt.kv_cache, prompt.source, number_chunks([], 128), 0.8, impl="triton"
    ).tolist() == [[0, 0], [0, 0]]


def test_extreme_layouts() -> None:
    prompt = Prompt(torch.ones(1, 2, 32, 16), 16)
    kept = number_chunks([], 32)
    assert prompt.run("triton", kept, 0.5)[2].tolist() == [[32, 32]]
    alone = torch.arange(32, dtype=torch.int32)
    assert prompt.run("triton", alone, 0.5)[2].tolist() == [[32, 32]]
    assert prompt.run("triton", number_chunks([32], 32), 0.5)[2].tolist() == [[1, 1]]
    empty = torch.zeros(0, dtype=torch.int32)
    counts, cell = cluster_merge(
        prompt.kv_cache, prompt.bias, 0, empty, empty, empty, 0.5, 0, 0, impl="triton"
    )
    assert (counts.tolist(), cell) == ([0, 0], 0)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_cells_that_are_not_of_a_gpu_are_refused(impl: Any) -> None:
    ids = torch.zeros(32, dtype=torch.int32)
    source = torch.tensor([0, 1], dtype=torch.int32)
    pool = torch.zeros(2, 1, 4, 1, 16, 16)
    assert cluster_count(pool, source, ids, 0.5, impl=impl).tolist() == [[1]] or impl
    for wrong in (pool[:1], pool.double(), pool[..., :8], pool.mT.contiguous().mT):
        with pytest.raises(ValueError, match=r"\[2, L, B, H, N, D\] \(formats.gpu_pool makes it"):
            cluster_count(wrong, source, ids, 0.5, impl=impl)
    if impl == "triton":
        with pytest.raises(ValueError, match=r"\[2, L, B, H, N, D\]"):
            cluster_count(torch.zeros(1, 4, 1, 16, 32), source, ids, 0.5, impl=impl)


def test_written_segments_are_read_back() -> None:
    """The two functions that every other test here relies on, against plain indexing."""
    pool = torch.zeros(2, 2, 5, 3, 16, 16)
    bias = torch.zeros(5, 2, 3, 16)
    slab = torch.tensor([4, 2], dtype=torch.int32)
    keys, values = torch.randn(2, 40, 16)
    formats.gpu_write_segment(pool, bias, slab, 4, keys, values, torch.arange(40.0))
    # cells 4, 5, 6: block 4, layer 1, heads 1 and 2; block 2, layer 0, head 0
    assert torch.equal(pool[0, 1, 4, 1], keys[:16])
    assert torch.equal(pool[1, 1, 4, 2], values[16:32])
    assert torch.equal(pool[0, 0, 2, 0, :8], keys[32:])
    assert torch.equal(bias[2, 0, 0, :8], torch.arange(32.0, 40.0))
    assert pool[0, 0, 2, 0, 8:].abs().sum() == 0
    read = formats.gpu_read_segment(pool, bias, slab, 4, 40)
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)
    gathered = formats.gpu_gather_prompt(pool, 1, torch.tensor([4, 2]))
    assert gathered[0].shape == (3, 32, 16)
    assert torch.equal(gathered[0][1, :16], keys[:16])
    assert torch.equal(gathered[1][2, :16], values[16:32])
