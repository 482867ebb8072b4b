"""`window_scores` in Triton, under Triton's interpreter: against float64, blind to garbage.

`test_triton_interpreter` runs this module in a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton_interpreter
from pools import GPU_LAYOUTS, gpu_pool

from kvcompress_kernels.window_scores.api import window_scores

triton_interpreter.require()
kernel: Any = pytest.importorskip("kvcompress_kernels.window_scores.triton")
cpu: Any = triton_interpreter.load_module("test_window_scores")


def make_prompt(*, layout: str = "LBHNC", **kwargs: Any) -> Any:
    """A prompt of the CPU tests in a GPU pool, which is NaN wherever no token is."""
    prompt = cpu.make_prompt(**kwargs)
    prompt.kv_cache = gpu_pool(prompt.kv_cache, layout)
    return prompt


def assert_right(prompt: Any, first_position: int | None = None, scale: float = 0.125) -> None:
    cpu.assert_right(OnGpu(prompt), first_position or prompt.num_tokens - 5, scale)


class OnGpu:
    """Runs the Triton kernel where the CPU tests run the C++ one."""

    def __init__(self, prompt: Any) -> None:
        self._prompt = prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prompt, name)

    def run(self, impl: str, *rest: Any) -> Any:
        return self._prompt.run("triton" if impl == "cpu" else impl, *rest)


@pytest.mark.parametrize(
    ("dtype", "size", "block_size", "group", "num_queries"),
    [
        (torch.float32, 64, 16, 1, 5),
        (torch.bfloat16, 80, 48, 7, 3),
        (torch.float16, 32, 32, 4, 33),
        pytest.param(torch.bfloat16, 128, 32, 4, 64, marks=pytest.mark.slow),
        pytest.param(torch.float32, 256, 64, 2, 64, marks=pytest.mark.slow),
    ],
)
def test_kernel_against_float64(
    dtype: torch.dtype, size: int, block_size: int, group: int, num_queries: int
) -> None:
    prompt = make_prompt(
        dtype=dtype,
        size=size,
        block_size=block_size,
        group=group,
        num_queries=num_queries,
        blocks=2,
        tail=21,
        layers=1,
    )
    assert_right(prompt, prompt.num_tokens - num_queries)


@pytest.mark.parametrize("layout", GPU_LAYOUTS[-3:])
def test_layouts_do_not_matter(layout: str) -> None:
    shape = {"dtype": torch.float16, "size": 32, "blocks": 2}
    ours = make_prompt(layout=layout, **shape).run("triton")
    assert all(map(torch.equal, ours, make_prompt(**shape).run("triton")))
    assert_right(make_prompt(layout=layout, **shape))


@pytest.mark.parametrize("first_position", [1, 115, 1000])
def test_queries_at_any_position(first_position: int) -> None:
    assert_right(make_prompt(size=16), first_position)


def test_tails_around_a_block() -> None:
    for tail in (0, 1, 15, 16):
        assert_right(make_prompt(block_size=16, tail=tail, size=16, layers=1, num_queries=5))


@pytest.mark.slow
def test_many_parts() -> None:
    """More tokens than one part of the sums has, and a last part that is not full."""
    prompt = make_prompt(size=16, heads=1, group=2, layers=1, blocks=130, block_size=32, tail=5)
    assert prompt.num_tokens > 2 * kernel._PART_TOKENS
    assert_right(prompt)


def test_parts_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PART_TOKENS", 20)
    assert_right(make_prompt(size=16, layers=1))
    # tokens that only the first query's part sees
    assert_right(make_prompt(size=16, layers=1, num_queries=40), 3)


def test_the_same_bits_every_time_and_nothing_is_written() -> None:
    prompt = make_prompt(dtype=torch.bfloat16, size=16)
    before = prompt.kv_cache.clone()
    first, second = prompt.run("triton"), prompt.run("triton")
    assert all(map(torch.equal, first, second))
    assert torch.equal(prompt.kv_cache.view(torch.int16), before.view(torch.int16))


def test_bad_arguments() -> None:
    prompt = make_prompt(size=16)
    cells = cpu.make_prompt(size=16).kv_cache
    with pytest.raises(ValueError, match=r"expected bfloat16, float16 or float32 \[2, L, B, H"):
        window_scores(
            cells, prompt.source, prompt.tail, prompt.num_tokens, prompt.queries, 0, 1.0, "triton"
        )
    prompt.queries = prompt.queries[..., :8]
    with pytest.raises(ValueError, match="queries: expected contiguous"):
        prompt.run("triton")
