"""`window_scores`: attention of the last queries over paged tokens, against float64 and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress_kernels.formats import cell_keys, cell_values
from kvcompress_kernels.window_scores import reference
from kvcompress_kernels.window_scores.api import window_scores

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


pytestmark = pytest.mark.usefixtures("one_thread")


class Prompt:
    """A prompt in scattered blocks of a pool whose other slots are NaN.

    Args:
        keys: ``[L, H, n, D]``.
        queries: ``[L, num_heads, w, D]``.
        num_scored: ``G``.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: torch.Tensor,
        num_scored: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        blocks_first: bool = False,
        seed: int = 0,
    ) -> None:
        layers, heads, self.num_tokens, size = keys.shape
        self.keys, self.values = keys.to(dtype), values.to(dtype)
        self.queries = queries.to(dtype)
        self.num_scored = num_scored
        count = -(-self.num_tokens // block_size)
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randperm(count + 2, generator=generator)[:count].int()
        self.source = blocks[: num_scored // block_size].clone()
        self.tail = blocks[num_scored // block_size :].clone()
        shape = (layers, count + 2, heads, block_size, 2 * size)
        if blocks_first:
            buffer = torch.full((count + 2, layers + 1, *shape[2:]), math.nan, dtype=dtype)
            self.kv_cache = buffer[:, 1:].transpose(0, 1)
        else:
            self.kv_cache = torch.full(shape, math.nan, dtype=dtype)
        for i, block in enumerate(blocks.tolist()):
            stop = min(block_size, self.num_tokens - i * block_size)
            tokens = slice(i * block_size, i * block_size + stop)
            cells = self.kv_cache[:, block]
            cell_keys(cells)[..., :stop] = self.keys[:, :, tokens].transpose(-1, -2)
            cell_values(cells)[..., :stop, :] = self.values[:, :, tokens]

    def run(
        self, impl: str = "cpu", first_position: int | None = None, scale: float = 0.125
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if first_position is None:
            first_position = self.num_tokens - self.queries.shape[2]
        return window_scores(
            self.kv_cache,
            self.source,
            self.tail,
            self.num_tokens,
            self.queries,
            first_position,
            scale,
            impl=impl,
        )

    def dense(
        self, dtype: torch.dtype, first_position: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from the dense tensors, every step in ``dtype``."""
        masses, scores = [], []
        for keys, values, queries in zip(self.keys, self.values, self.queries, strict=True):
            mass = reference.attention_mass(queries, keys, first_position, scale, dtype)
            masses.append(mass[:, : self.num_scored])
            scores.append(reference.weigh(masses[-1], values[:, : self.num_scored], dtype))
        return torch.stack(masses), torch.stack(scores)


def make_prompt(
    *,
    dtype: torch.dtype = torch.float32,
    size: int = 64,
    block_size: int = 32,
    heads: int = 2,
    group: int = 3,
    num_queries: int = 8,
    blocks: int = 3,
    tail: int = 20,
    layers: int = 2,
    seed: int = 0,
    **kwargs: bool,
) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    tokens = blocks * block_size + tail
    keys, values = torch.randn(2, layers, heads, tokens, size, generator=generator)
    queries = torch.randn(layers, heads * group, num_queries, size, generator=generator)
    return Prompt(
        keys, values, queries, blocks * block_size, block_size, dtype, seed=seed, **kwargs
    )


def assert_right(prompt: Prompt, first_position: int, scale: float) -> None:
    ours = prompt.run("cpu", first_position, scale)
    theirs = prompt.run("reference", first_position, scale)
    exact = prompt.dense(torch.float64, first_position, scale)
    # a logit is rounded in proportion to |q| |k|, which is the relative error of its exponential
    norms = [x.double().norm(dim=-1).max().item() for x in (prompt.queries, prompt.keys)]
    allowed = 4 * torch.finfo(torch.float32).eps * (8 + scale * math.prod(norms))
    for kernel, plain, high in zip(ours, theirs, exact, strict=True):
        assert torch.equal(plain, high.float())
        assert kernel.dtype == torch.float32
        # relative to each token's own score, which is what decides which of two is kept
        seen = high > 1e-30
        assert ((kernel.double() - high).abs()[seen] <= allowed * high[seen]).all()
        assert (kernel[~seen] < 1e-29).all()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([16, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([16, 32, 48, 128]),
    heads=st.integers(1, 3),
    group=st.integers(1, 16),
    num_queries=st.integers(1, 40),
    blocks=st.integers(1, 4),
    tail=st.integers(0, 300),
    blocks_first=st.booleans(),
    scale=st.sampled_from([0.05, 0.125, 1.0]),
    seed=st.integers(0, 1000),
)
def test_kernel_against_float64(
    dtype, size, block_size, heads, group, num_queries, blocks, tail, blocks_first, scale, seed
):
    prompt = make_prompt(
        dtype=dtype,
        size=size,
        block_size=block_size,
        heads=heads,
        group=group,
        num_queries=min(num_queries, blocks * block_size + tail),
        blocks=blocks,
        tail=tail,
        blocks_first=blocks_first,
        seed=seed,
    )
    assert_right(prompt, prompt.num_tokens - prompt.queries.shape[2], scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32])
def test_every_residue_of_the_block_size(dtype, block_size):
    for tail in range(block_size + 1):
        prompt = make_prompt(
            dtype=dtype, block_size=block_size, tail=tail, size=16, layers=1, num_queries=5
        )
        assert_right(prompt, prompt.num_tokens - 5, 0.25)


@pytest.mark.parametrize("first_position", [0, 40, 90, 116, 117, 1000])
def test_queries_at_any_position(first_position):
    # the prompt has 116 tokens: queries past its end see all of it
    prompt = make_prompt()
    assert_right(prompt, first_position, 0.125)
    if first_position >= 115:
        everything = prompt.run("cpu", 10_000)[0]
        assert torch.equal(prompt.run("cpu", first_position)[0], everything)


def test_hand_computed_example():
    # two KV heads of two query heads, one query at the last of 17 tokens, one of them in the tail
    keys = torch.zeros(1, 2, 17, 16)
    keys[0, 0, 3, 0] = keys[0, 1, 16, 0] = math.log(4.0)
    values = torch.zeros(1, 2, 17, 16)
    values[0, :, :, 1], values[0, :, :, 2] = 3.0, -4.0
    queries = torch.zeros(1, 4, 1, 16)
    queries[0, :, 0, 0] = torch.tensor([1.0, 0.0, 1.0, 2.0])
    prompt = Prompt(keys, values, queries, 16, 16, torch.float32)
    mass, scores = prompt.run(scale=1.0)
    first = torch.full((16,), 1 / 20 + 1 / 17)
    first[3] = 4 / 20 + 1 / 17
    expected = torch.stack([first, torch.full((16,), 1 / 20 + 1 / 32)])
    torch.testing.assert_close(mass[0], expected)
    torch.testing.assert_close(scores[0], 5 * expected)


def test_mass_of_all_tokens_is_that_of_the_queries():
    prompt = make_prompt(tail=0, num_queries=32, group=2)
    mass, _ = prompt.run()
    torch.testing.assert_close(mass.sum(-1), torch.full((2, 2), 64.0))


def test_future_tokens_get_nothing():
    prompt = make_prompt(tail=0, num_queries=2)
    mass, _ = prompt.run("cpu", 49)
    assert (mass[..., :51] > 0).all()
    assert (mass[..., 51:] == 0).all()


def test_logits_of_any_size():
    prompt = make_prompt(size=16)
    big = Prompt(prompt.keys * 30, prompt.values, prompt.queries * 30, 96, 32, torch.float32)
    mass, scores = big.run(scale=1.0)
    assert mass.isfinite().all()
    assert scores.isfinite().all()
    torch.testing.assert_close(mass, big.run("reference", scale=1.0)[0], rtol=1e-2, atol=1e-4)


def test_result_does_not_depend_on_the_number_of_threads():
    prompt = make_prompt(layers=3, heads=3, blocks=8, num_queries=32)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(prompt.run())
    finally:
        torch.set_num_threads(threads)
    for mass, scores in results[1:]:
        assert torch.equal(mass, results[0][0])
        assert torch.equal(scores, results[0][1])


def test_the_pool_is_only_read():
    prompt = make_prompt(dtype=torch.bfloat16)
    before = prompt.kv_cache.clone()
    prompt.run()
    assert torch.equal(prompt.kv_cache.view(torch.int16), before.view(torch.int16))


def int32(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32)


BAD = {
    "last two dimensions": {"kv_cache": torch.zeros(2, 4, 2, 16, 64)[..., ::2]},
    "float32 .L, B, H": {"kv_cache": torch.zeros(2, 4, 2, 16, 32, dtype=torch.float64)},
    "N and D multiples of 16": {"kv_cache": torch.zeros(2, 4, 2, 8, 32)},
    "D at most 256": {"kv_cache": torch.zeros(2, 4, 2, 16, 544)},
    r"source: expected block ids from 0 to B - 1 = 3": {"source": int32(0, 4)},
    r"source: expected contiguous int32 \[G / N\]": {"source": torch.tensor([0, 1])},
    r"tail: expected block ids from 0 to B - 1 = 3, got ids from -1 to -1": {"tail": int32(-1)},
    r"tail: expected contiguous int32": {"tail": int32(2)[None]},
    r"num_tokens: .* 33 to 48, got 32": {"num_tokens": 32},
    r"num_tokens: .* 33 to 48, got 49": {"num_tokens": 49},
    r"num_tokens: .* 32 to 32, got 40": {"tail": int32()},
    r"queries: expected contiguous torch.float32": {"queries": torch.zeros(2, 4, 3, 16).half()},
    r"a multiple of 2, at least 1, 16": {"queries": torch.zeros(2, 3, 3, 16)},
    r"queries: .* got torch.float32 \[2, 4, 0, 16\]": {"queries": torch.zeros(2, 4, 0, 16)},
    r"queries: .* strides": {"queries": torch.zeros(2, 3, 4, 16).transpose(1, 2)},
    r"first_position: expected at least 0, got -1": {"first_position": -1},
    r"scale: expected a finite number above 0, got 0.0": {"scale": 0.0},
    r"scale: expected a finite number above 0, got nan": {"scale": math.nan},
    r"unknown impl 'gpu'; expected one of 'cpu', 'reference'": {"impl": "gpu"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    arguments = {
        "kv_cache": torch.zeros(2, 4, 2, 16, 32),
        "source": int32(0, 1),
        "tail": int32(2),
        "num_tokens": 40,
        "queries": torch.zeros(2, 4, 3, 16),
        "first_position": 37,
        "scale": 0.25,
    }
    window_scores(**arguments)
    with pytest.raises(ValueError, match=message):
        window_scores(**{**arguments, **BAD[message]})
