"""`select_merge`: routing bit by bit, merged values against float64, and where everything lands."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import ORDERS, assert_same_bits, make_pool

from kvcompress_kernels.formats import SlabGeometry, cell_keys, cell_values, read_segment
from kvcompress_kernels.select_merge import reference
from kvcompress_kernels.select_merge.api import select_merge

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


pytestmark = pytest.mark.usefixtures("one_thread")


class Prompt:
    """A prompt in scattered blocks of a poisoned pool, a slab for it, and what is kept of it.

    Args:
        keys: ``[L, H, G, D]``.
        values: ``[L, H, G, D]``.
        kept: bool ``[L, H, G]``.
        mass: float32 ``[L, H, G]``.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: torch.Tensor,
        mass: torch.Tensor,
        block_size: int = 16,
        *,
        dtype: torch.dtype = torch.float32,
        order: str = "layers first",
        seed: int = 0,
    ) -> None:
        layers, heads, tokens, size = keys.shape
        count = tokens // block_size
        self.geometry = SlabGeometry(layers, heads, block_size)
        shuffled = torch.randperm(2 * count + 3, generator=torch.Generator().manual_seed(seed))
        self.source = shuffled[:count].int()
        self.slab = shuffled[count : 2 * count + 1].int()
        shape = (layers, 2 * count + 3, heads, block_size, 2 * size)
        self.kv_cache = make_pool(shape, dtype, order)
        self.bias = torch.full((shape[1], layers, heads, block_size), math.nan)
        self.keys, self.values = keys.to(dtype), values.to(dtype)
        self.kept, self.mass = kept, mass
        for i, block in enumerate(self.source.tolist()):
            tokens_of = slice(i * block_size, (i + 1) * block_size)
            cells = self.kv_cache[:, block]
            cell_keys(cells).copy_(self.keys[:, :, tokens_of].transpose(-1, -2))
            cell_values(cells).copy_(self.values[:, :, tokens_of])

    @property
    def num_cells(self) -> int:
        return len(self.slab) * self.geometry.cells_per_block

    def run(self, impl: str = "cpu", bucket: int = 32, alpha: float = 0.5, **room: int):
        """Compress all layers in a copy of the pool.

        Returns:
            pool, bias, counts of entries ``[L, H]`` and of merged tokens ``[L, H]``, last cell.
        """
        kv_cache = torch.empty_strided(
            self.kv_cache.shape, self.kv_cache.stride(), dtype=self.kv_cache.dtype
        ).copy_(self.kv_cache)
        bias = self.bias.clone()
        cell, counts, merged = room.get("first_cell", 0), [], []
        num_cells = room.get("num_cells", self.num_cells)
        for layer in range(self.geometry.num_layers):
            entries, moved, cell = select_merge(
                kv_cache,
                bias,
                layer,
                self.source,
                self.slab,
                self.kept[layer],
                self.mass[layer],
                bucket,
                alpha,
                cell,
                num_cells,
                impl=impl,
            )
            counts.append(entries)
            merged.append(moved)
            if cell > num_cells:
                break
        return kv_cache, bias, torch.stack(counts), torch.stack(merged), cell

    def read(self, result) -> list[list[tuple[torch.Tensor, ...]]]:
        """Entries of each layer and head."""
        kv_cache, bias, counts, _, _ = result
        cell, layers = 0, []
        for row in counts.tolist():
            layers.append([])
            for count in row:
                layers[-1].append(read_segment(kv_cache, bias, self.slab, cell, count))
                cell += self.geometry.cells(count)
        return layers


def make_prompt(
    *,
    dtype: torch.dtype = torch.float32,
    size: int = 16,
    block_size: int = 16,
    heads: int = 2,
    blocks: int = 6,
    layers: int = 2,
    keep: float = 0.3,
    spread: float = 0.5,
    order: str = "layers first",
    seed: int = 0,
) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, heads, blocks * block_size)
    slow = torch.randn(2, *shape[:2], shape[2] // 8 + 1, size, generator=generator)
    noise = spread * torch.randn(2, *shape, size, generator=generator)
    keys, values = slow.repeat_interleave(8, 3)[..., : shape[2], :] + noise
    kept = torch.rand(shape, generator=generator) < keep
    mass = torch.rand(shape, generator=generator) ** 8
    return Prompt(keys, values, kept, mass, block_size, dtype=dtype, order=order, seed=seed)


def assert_right(prompt: Prompt, bucket: int, alpha: float) -> None:
    result = prompt.run("cpu", bucket, alpha)
    theirs = prompt.run("reference", bucket, alpha)
    assert torch.equal(result[2], theirs[2])
    assert torch.equal(result[3], theirs[3])
    assert result[4] == theirs[4]
    assert_same_bits(result[0][:, prompt.source.long()], prompt.kv_cache[:, prompt.source.long()])
    plain = prompt.read(theirs)
    eps = torch.finfo(torch.float32).eps
    for layer, heads in enumerate(prompt.read(result)):
        keys, values, kept = prompt.keys[layer], prompt.values[layer], prompt.kept[layer]
        target = reference.route(keys, kept, bucket or 2)
        if not bucket:
            target.fill_(reference.NOWHERE)
        mass = prompt.mass[layer].double().clamp(min=reference.MIN_MASS)
        exact, log_growth, moved = reference.merge(values.double(), kept, target, mass, 1.0)
        exact_bias, growth = alpha * log_growth.double(), log_growth.double().exp()
        for head, (k, v, b) in enumerate(heads):
            mine = kept[head]
            assert_same_bits(k, keys[head][mine])
            assert_same_bits(k, plain[layer][head][0])
            into = target[head][moved[head]]
            taking = torch.zeros_like(mine)
            taking[into] = True
            still = ~taking[mine]
            assert_same_bits(v[still], values[head][mine][still])
            assert (b[still] == 0).all()
            # A gate is a cosine, rounded in proportion to 1, and counts as its token's mass does.
            offered = torch.zeros_like(mass[head]).index_add_(0, into, mass[head][moved[head]])
            doubt = 16 * eps * (1 + offered / (mass[head] * growth[head]))[mine]
            largest = values[head].double().abs().max() if mine.any() else torch.tensor(0.0)
            allowed_value = largest * (2 * doubt + torch.finfo(v.dtype).eps)
            assert ((v.double() - exact[head][mine]).abs() <= allowed_value[:, None]).all()
            assert ((b.double() - exact_bias[head][mine]).abs() <= alpha * doubt).all()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(ORDERS),
    size=st.sampled_from([16, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([16, 32, 48, 128]),
    heads=st.integers(1, 3),
    blocks=st.integers(1, 6),
    bucket=st.sampled_from([0, 2, 5, 16, 20, 32, 33, 64, 500, 1024]),
    keep=st.sampled_from([0.0, 0.03, 0.1, 0.3, 0.9, 1.0]),
    spread=st.sampled_from([0.0, 0.1, 0.5, 3.0]),
    alpha=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_kernel_against_reference(
    dtype, order, size, block_size, heads, blocks, bucket, keep, spread, alpha, seed
):
    prompt = make_prompt(
        dtype=dtype,
        order=order,
        size=size,
        block_size=block_size,
        heads=heads,
        blocks=blocks,
        keep=keep,
        spread=spread,
        seed=seed,
    )
    assert_right(prompt, bucket, alpha)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_go_to_the_lowest(dtype):
    prompt = make_prompt(dtype=dtype, spread=0.0, keep=0.4, size=64)
    target = reference.route(prompt.keys[0], prompt.kept[0], 8)
    found = target != reference.NOWHERE
    assert found.any()
    first = prompt.kept[0].unflatten(1, (-1, 8)).int().argmax(-1) + torch.arange(0, 96, 8)
    assert torch.equal(target[found], first.repeat_interleave(8, 1)[found])
    assert_right(prompt, 8, 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_nearly_equal_keys_are_told_apart(dtype, step):
    # candidates whose similarities differ by less than float32 can say, all around the token
    prompt = make_prompt(dtype=dtype, spread=0.0, keep=0.5, size=64, blocks=4)
    unit = torch.finfo(dtype).eps
    flips = torch.randint(-step, step + 1, prompt.keys.shape, generator=torch.Generator())
    keys = (prompt.keys.double() * (1 + unit * flips)).to(dtype)
    near = Prompt(keys, prompt.values, prompt.kept, prompt.mass, dtype=dtype)
    assert_right(near, 32, 0.5)


def one_bucket(
    keys: list[list[float]], values: list[list[float]], kept: list[int], mass: list[float]
) -> Prompt:
    """One layer, one head, D = 16, 16 tokens; those not given are kept and point elsewhere."""
    all_keys = torch.zeros(1, 1, 16, 16)
    all_values = torch.zeros(1, 1, 16, 16)
    all_keys[..., 15] = all_values[..., 15] = 1.0
    chosen = torch.ones(1, 1, 16, dtype=torch.bool)
    masses = torch.ones(1, 1, 16)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        all_keys[0, 0, i] = all_values[0, 0, i] = 0.0
        all_keys[0, 0, i, : len(key)] = torch.tensor(key)
        all_values[0, 0, i, : len(value)] = torch.tensor(value)
        chosen[0, 0, i] = i in kept
        masses[0, 0, i] = mass[i]
    return Prompt(all_keys, all_values, chosen, masses)


def test_hand_computed_example():
    # 1 goes to 0 (gate 1), 3 to 2 (gate 0.6), 4 to 2 as well (its value is opposed: gate 0);
    # what counts is the angle: 0 is nearer to 1 than the longer key 2 is
    prompt = one_bucket(
        keys=[[1, 1], [1, 0.9], [10, 0], [3, 0.1], [1, 0]],
        values=[[2, 0], [4, 0], [0, 5], [4, 3], [0, -1]],
        kept=[0, 2],
        mass=[0.5, 0.25, 1.0, 0.5, 7.0],
    )
    result = prompt.run("cpu", 16, 0.5)
    assert result[2].item() == 13
    assert result[3].item() == 2
    keys, values, bias = prompt.read(result)[0][0]
    assert_same_bits(keys[:2], prompt.keys[0, 0, [0, 2]])
    expected = torch.tensor([[8 / 3, 0.0], [0.3 * 4 / 1.3, (5 + 0.3 * 3) / 1.3]])
    torch.testing.assert_close(values[:2, :2], expected)
    torch.testing.assert_close(bias[:2], 0.5 * torch.tensor([1.5, 1.3]).log())
    assert_same_bits(values[2:], prompt.values[0, 0, 5:])
    assert (bias[2:] == 0).all()
    assert_right(prompt, 16, 0.5)


def test_buckets_are_closed():
    # the same keys everywhere; only the second bucket of four keeps a token
    prompt = make_prompt(layers=1, heads=1, blocks=2, spread=0.0)
    prompt.kept[...] = False
    prompt.kept[0, 0, 9] = True
    target = reference.route(prompt.keys[0], prompt.kept[0], 8)[0]
    assert target.tolist() == [-1] * 8 + [9, -1] + [9] * 6 + [-1] * 16
    result = prompt.run("cpu", 8)
    assert (result[2].item(), result[3].item()) == (1, 7)
    assert_right(prompt, 8, 0.5)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_tokens_without_attention(impl):
    # masses of zero count as a little: the mean is plain and the ratio finite
    prompt = one_bucket([[1], [1]], [[2], [4]], kept=[0], mass=[0.0, 0.0])
    _, values, bias = prompt.read(prompt.run(impl, 16, 1.0))[0][0]
    assert values[0, 0].item() == pytest.approx(3.0)
    assert bias[0].item() == pytest.approx(math.log(2.0), rel=1e-5)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_keys_without_direction_attract_nothing(bad, impl):
    prompt = one_bucket(
        [[bad, 1 if bad else 0], [0.5, -1], [-1, 1]], [[1], [1], [1]], kept=[0, 2], mass=[1] * 3
    )
    target = reference.route(prompt.keys[0], prompt.kept[0], 16)[0]
    # the rest of the bucket is at a right angle, and token 2 points away
    assert target[1].item() == 3
    keys, values, _ = prompt.read(prompt.run(impl, 16))[0][0]
    assert_same_bits(keys[0], prompt.keys[0, 0, 0])
    assert_same_bits(values[0], prompt.values[0, 0, 0])


@pytest.mark.parametrize("exponent", [-140, -76, -75, -40, 40, 60, 62, 110])
def test_routing_does_not_depend_on_scale(exponent):
    # few bits, so that scaling down to denormal numbers is exact
    prompt = make_prompt(size=32, spread=0.7)
    prompt = Prompt(prompt.keys.mul(2).round(), prompt.values, prompt.kept, prompt.mass)
    scaled = Prompt(prompt.keys * 2.0**exponent, prompt.values, prompt.kept, prompt.mass)
    assert torch.equal(
        reference.route(scaled.keys[0], scaled.kept[0], 32),
        reference.route(prompt.keys[0], prompt.kept[0], 32),
    )
    assert_right(scaled, 32, 0.5)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_alone_are_copied_bit_by_bit(dtype, impl):
    prompt = make_prompt(dtype=dtype, layers=1, heads=1, blocks=1, keep=1.0)
    odd = torch.tensor([-0.0, torch.finfo(dtype).smallest_normal / 2, torch.finfo(dtype).max])
    cell = prompt.kv_cache[0, int(prompt.source[0]), 0]
    cell.view(-1)[:150] = odd.to(dtype).repeat(50)
    cell.view(-1)[300] = math.nan
    kv_cache, bias, counts, merged, _ = prompt.run(impl)
    assert (counts.item(), merged.item()) == (16, 0)
    slab = int(prompt.slab[0])
    assert_same_bits(kv_cache[0, slab], kv_cache[0, int(prompt.source[0])])
    assert torch.equal(bias[slab], torch.zeros(1, 1, 16))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_overflow_writes_nothing(impl):
    prompt = make_prompt(heads=3, layers=1)
    _, _, counts, _, cells = prompt.run("cpu")
    assert cells == sum(-(-count // 16) for count in counts.flatten().tolist())
    assert prompt.run(impl, num_cells=cells)[4] == cells
    late = prompt.run(impl, first_cell=2, num_cells=cells + 1)
    assert late[4] == cells + 2
    assert torch.equal(late[2], counts)
    assert (late[3] == 0).all()
    assert_same_bits(late[0], prompt.kv_cache)
    assert_same_bits(late[1], prompt.bias)


def test_nothing_is_written_outside_the_segments():
    prompt = make_prompt(layers=1, blocks=4)
    kv_cache, bias, counts, _, cells = prompt.run("cpu", first_cell=1)
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


def test_result_does_not_depend_on_the_number_of_threads():
    prompt = make_prompt(blocks=40, heads=3)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(prompt.run())
    finally:
        torch.set_num_threads(threads)
    for kv_cache, bias, counts, merged, _ in results[1:]:
        assert_same_bits(kv_cache, results[0][0])
        assert_same_bits(bias, results[0][1])
        assert torch.equal(counts, results[0][2])
        assert torch.equal(merged, results[0][3])


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_empty_prompt(impl):
    prompt = make_prompt()
    empty = torch.zeros(0, dtype=torch.int32)
    counts, merged, cell = select_merge(
        prompt.kv_cache,
        prompt.bias,
        0,
        empty,
        empty,
        torch.zeros(2, 0, dtype=torch.bool),
        torch.zeros(2, 0),
        32,
        0.5,
        0,
        0,
        impl=impl,
    )
    assert (counts.tolist(), merged.tolist(), cell) == ([0, 0], [0, 0], 0)


BAD = {
    "last two dimensions": {"kv_cache": torch.zeros(1, 4, 2, 16, 64)[..., ::2]},
    "float32 .L, B, H": {"kv_cache": torch.zeros(1, 4, 2, 16, 32, dtype=torch.float64)},
    "N and D multiples of 16": {"kv_cache": torch.zeros(1, 4, 2, 8, 32)},
    "D at most 256": {"kv_cache": torch.zeros(1, 4, 2, 16, 544)},
    r"layer: expected 0 to L - 1 = 0, got 1": {"layer": 1},
    r"bias: expected float32 \[B, L, H, N\] = \[4, 1, 2, 16\]": {"bias": torch.zeros(4, 2, 16)},
    r"source: expected block ids from 0 to B - 1 = 3": {"source": torch.tensor([0, 4]).int()},
    r"slab: expected contiguous int32 \[c\]": {"slab": torch.tensor([2, 3])},
    r"kept: expected contiguous torch.bool \[H, G\] = \[2, 32\]": {
        "kept": torch.ones(2, 16, dtype=torch.bool)
    },
    r"kept: .* got torch.int32": {"kept": torch.ones(2, 32, dtype=torch.int32)},
    r"mass: expected contiguous torch.float32": {"mass": torch.ones(2, 32).double()},
    r"mass: .* with strides": {"mass": torch.ones(32, 2).T},
    r"bucket: expected 0 or 2 to 1024, got 1$": {"bucket": 1},
    r"bucket: expected 0 or 2 to 1024, got 1025": {"bucket": 1025},
    r"bucket: expected 0 or 2 to 1024, got -32": {"bucket": -32},
    r"alpha: expected a finite number of at least 0, got -0.5": {"alpha": -0.5},
    r"alpha: expected a finite number of at least 0, got nan": {"alpha": math.nan},
    r"num_cells: expected 0 to c \* L \* H = 4, got 5": {"num_cells": 5},
    r"first_cell: expected 0 to num_cells = 4, got 5": {"first_cell": 5},
    r"unknown impl 'gpu'; expected one of 'cpu', 'reference'": {"impl": "gpu"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    arguments = {
        "kv_cache": torch.zeros(1, 4, 2, 16, 32),
        "bias": torch.zeros(4, 1, 2, 16),
        "layer": 0,
        "source": torch.tensor([0, 1]).int(),
        "slab": torch.tensor([2, 3]).int(),
        "kept": torch.ones(2, 32, dtype=torch.bool),
        "mass": torch.ones(2, 32),
        "bucket": 32,
        "alpha": 0.5,
        "first_cell": 0,
        "num_cells": 4,
    }
    select_merge(**arguments)
    with pytest.raises(ValueError, match=message):
        select_merge(**{**arguments, **BAD[message]})
