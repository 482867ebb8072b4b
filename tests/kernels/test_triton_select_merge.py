"""`select_merge` in Triton, under Triton's interpreter: routes of the reference, values by float64.

`test_triton_interpreter` runs this module in a process of its own.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton_interpreter
from pools import GPU_LAYOUTS, assert_same_bits, gpu_pool

from kvcompress_kernels import formats
from kvcompress_kernels.select_merge import reference
from kvcompress_kernels.select_merge.api import select_merge

triton_interpreter.require()
kernel: Any = pytest.importorskip("kvcompress_kernels.select_merge.triton")
cpu: Any = triton_interpreter.load_module("test_select_merge")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class OnGpu:
    """A prompt of the CPU tests whose kernel runs on a GPU pool.

    The results come back in CPU cells, where the CPU tests read them.
    """

    def __init__(self, prompt: Any, layout: str = "LBHNC", *, together: bool = False) -> None:
        self._prompt = prompt
        self._layout = layout
        self._together = together

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prompt, name)

    def run(
        self, impl: str = "cpu", bucket: int = 32, alpha: float = 0.5, **room: int
    ) -> tuple[Any, ...]:
        if impl == "reference":
            return self._prompt.run(impl, bucket, alpha, **room)
        gpu = self._copy()
        if self._together:
            results = self._run_layers(gpu, bucket, alpha, **room)
        else:
            results = self._run(gpu, bucket, alpha, **room)
        return (formats.cpu_cells(gpu), *results)

    def _copy(self) -> torch.Tensor:
        return gpu_pool(self._prompt.kv_cache, self._layout)

    def _run(
        self,
        gpu: torch.Tensor,
        bucket: int,
        alpha: float,
        first_cell: int = 0,
        num_cells: int | None = None,
    ) -> tuple[Any, ...]:
        prompt, bias, cell, counts, merged = self._prompt, self.bias.clone(), first_cell, [], []
        room = prompt.num_cells if num_cells is None else num_cells
        for layer in range(prompt.geometry.num_layers):
            choice = (prompt.kept[layer], prompt.mass[layer], bucket, alpha)
            entries, moved, cell = select_merge(
                gpu, bias, layer, prompt.source, prompt.slab, *choice, cell, room, impl="triton"
            )
            counts.append(entries)
            merged.append(moved)
        return bias, torch.stack(counts), torch.stack(merged), cell

    def _run_layers(
        self,
        gpu: torch.Tensor,
        bucket: int,
        alpha: float,
        first_cell: int = 0,
        num_cells: int | None = None,
    ) -> tuple[Any, ...]:
        prompt, bias = self._prompt, self.bias.clone()
        entries, merged, first_cells, cell = kernel.select_merge_layers(
            gpu,
            bias,
            range(prompt.geometry.num_layers),
            prompt.source,
            prompt.slab,
            prompt.kept,
            prompt.mass,
            bucket,
            alpha,
            first_cell,
            prompt.num_cells if num_cells is None else num_cells,
        )
        cells = -(-entries // prompt.geometry.block_size)
        ends = torch.cumsum(cells.flatten(), 0).view(cells.shape)
        assert torch.equal(first_cells, (first_cell + ends - cells).int())
        return bias, entries, merged, int(cell)


def make(layout: str = "LBHNC", **shape: Any) -> OnGpu:
    return OnGpu(cpu.make_prompt(**shape), layout)


@pytest.mark.parametrize(
    ("dtype", "size", "block_size", "blocks", "bucket", "keep"),
    [
        (torch.bfloat16, 48, 16, 2, 32, 0.3),
        pytest.param(torch.float16, 80, 48, 1, 20, 0.1, marks=pytest.mark.slow),
        (torch.float32, 16, 16, 5, 40, 0.5),
    ],
)
def test_kernel_against_reference(
    dtype: torch.dtype, size: int, block_size: int, blocks: int, bucket: int, keep: float
) -> None:
    prompt = make(dtype=dtype, size=size, block_size=block_size, blocks=blocks, keep=keep, layers=1)
    cpu.assert_right(prompt, bucket, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bucket", [0, 2, 5, 33, 500, 1024])
@pytest.mark.parametrize("keep", [0.0, 0.03, 0.9, 1.0])
def test_any_bucket_and_share(dtype: torch.dtype, bucket: int, keep: float) -> None:
    cpu.assert_right(make(dtype=dtype, size=48, blocks=6, keep=keep), bucket, 1.0)


@pytest.mark.parametrize("keep", [0.0, 1.0])
@pytest.mark.parametrize("bucket", [0, 32])
def test_all_or_nothing(keep: float, bucket: int) -> None:
    cpu.assert_right(make(dtype=torch.bfloat16, blocks=2, layers=1, keep=keep), bucket, 0.5)


@pytest.mark.parametrize("layout", GPU_LAYOUTS[-3:-1])
def test_layouts_do_not_matter(layout: str) -> None:
    shape = {"dtype": torch.float16, "blocks": 2, "layers": 1}
    ours, plain = make(layout, **shape).run(), make(**shape).run()
    for one, other in zip(ours[2:], plain[2:], strict=True):
        assert one == other if isinstance(one, int) else torch.equal(one, other)
    assert_same_bits(ours[0], plain[0])
    assert_same_bits(ours[1], plain[1])


def test_all_layers_together() -> None:
    prompt = cpu.make_prompt(layers=2, blocks=2)
    ours, theirs = OnGpu(prompt, together=True).run(), OnGpu(prompt).run()
    assert torch.equal(ours[2], theirs[2])
    assert torch.equal(ours[3], theirs[3])
    assert ours[4] == theirs[4]
    assert_same_bits(ours[0], theirs[0])
    assert_same_bits(ours[1], theirs[1])


def test_equal_keys_go_to_the_lowest() -> None:
    cpu.assert_right(make(spread=0.0, keep=0.4, blocks=2, layers=1), 8, 0.5)


def test_nearly_equal_keys_are_told_apart() -> None:
    plain = cpu.make_prompt(dtype=torch.float32, spread=0.0, keep=0.5, blocks=2, layers=1)
    unit = torch.finfo(torch.float32).eps
    flips = torch.randint(-1, 2, plain.keys.shape, generator=torch.Generator())
    keys = (plain.keys.double() * (1 + unit * flips)).float()
    near = cpu.Prompt(keys, plain.values, plain.kept, plain.mass)
    cpu.assert_right(OnGpu(near), 32, 0.5)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf])
def test_keys_without_direction_attract_nothing(bad: float) -> None:
    plain = cpu.one_bucket(
        [[bad, 1 if bad else 0], [0.5, -1], [-1, 1]], [[1], [1], [1]], kept=[0, 2], mass=[1] * 3
    )
    prompt = OnGpu(plain)
    keys, values, _ = plain.read(prompt.run(bucket=16))[0][0]
    assert_same_bits(keys[0], plain.keys[0, 0, 0])
    assert_same_bits(values[0], plain.values[0, 0, 0])
    assert prompt.run(bucket=16)[3].tolist() == plain.run("reference", 16)[3].tolist()


def test_tokens_without_attention() -> None:
    plain = cpu.one_bucket([[1], [1]], [[2], [4]], kept=[0], mass=[0.0, 0.0])
    _, values, bias = plain.read(OnGpu(plain).run(bucket=16, alpha=1.0))[0][0]
    assert values[0, 0].item() == pytest.approx(3.0)
    assert bias[0].item() == pytest.approx(math.log(2.0), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_alone_are_copied_bit_by_bit(dtype: torch.dtype) -> None:
    plain = cpu.make_prompt(dtype=dtype, layers=1, heads=1, blocks=1, keep=1.0)
    odd = torch.tensor([-0.0, torch.finfo(dtype).smallest_normal / 2, torch.finfo(dtype).max])
    cell = plain.kv_cache[0, int(plain.source[0]), 0]
    cell.view(-1)[:150] = odd.to(dtype).repeat(50)
    cell.view(-1)[300] = math.nan
    kv_cache, bias, counts, merged, _ = OnGpu(plain).run()
    assert (counts.item(), merged.item()) == (16, 0)
    slab = int(plain.slab[0])
    assert_same_bits(kv_cache[0, slab], kv_cache[0, int(plain.source[0])])
    assert torch.equal(bias[slab], torch.zeros(1, 1, 16))


@pytest.mark.parametrize("together", [False, True])
def test_overflow_writes_nothing(together: bool) -> None:
    plain = cpu.make_prompt(heads=2, layers=1, blocks=2)
    prompt = OnGpu(plain, together=together)
    counts, cells = plain.run("reference")[2], plain.run("reference")[4]
    assert prompt.run(num_cells=cells)[4] == cells
    late = prompt.run(first_cell=2, num_cells=cells + 1)
    assert late[4] == cells + 2
    assert torch.equal(late[2], counts)
    assert (late[3] == 0).all()
    assert_same_bits(late[0], plain.kv_cache)
    assert_same_bits(late[1], plain.bias)


def test_nothing_is_written_outside_the_segments() -> None:
    plain = cpu.make_prompt(layers=1, blocks=2)
    kv_cache, bias, counts, _, cells = OnGpu(plain).run(first_cell=1)
    cell = 1
    for count in counts.flatten().tolist():
        nothing = torch.full((count, 16), math.nan)
        formats.write_segment(kv_cache, bias, plain.slab, cell, nothing, nothing, nothing[:, 0])
        cell += plain.geometry.cells(count)
    assert cell == cells
    assert torch.equal(kv_cache.isnan(), plain.kv_cache.isnan())
    assert bias.isnan().all()


def test_an_empty_prompt() -> None:
    prompt = make()
    empty = torch.zeros(0, dtype=torch.int32)
    kept, mass = torch.zeros(2, 0, dtype=torch.bool), torch.zeros(2, 0)
    gpu = prompt._copy()
    counts, merged, cell = select_merge(
        gpu, prompt.bias, 0, empty, empty, kept, mass, 32, 0.5, 0, 0, impl="triton"
    )
    assert (counts.tolist(), merged.tolist(), cell) == ([0, 0], [0, 0], 0)


def test_bad_arguments() -> None:
    prompt = make()
    cells = prompt._prompt.kv_cache
    choice = (prompt.kept[0], prompt.mass[0], 32, 0.5)
    rest = (0, prompt.source, prompt.slab, *choice, 0, prompt.num_cells)
    with pytest.raises(ValueError, match=r"expected bfloat16, float16 or float32 \[2, L, B, H"):
        select_merge(cells, prompt.bias, *rest, impl="triton")
    with pytest.raises(ValueError, match="expected one of 'cpu', 'reference', 'triton'"):
        select_merge(cells, prompt.bias, *rest, impl="gpu")
    assert reference.NOWHERE == -1
