"""Checks the Triton kernels on a CUDA device against float64, then measures them.

Started by ``run.sh``. Nothing is measured unless every check holds. Data are drawn anew in every
run; ``--seed`` repeats one. With ``--tiny`` and Triton's interpreter it runs on the CPU in sizes
that prove the script, not the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kvcompress_kernels import formats
from kvcompress_kernels.cluster_merge import triton as cluster
from kvcompress_kernels.cluster_merge.api import MERGE_ALL, cluster_merge
from kvcompress_kernels.segment_attention import segment_attention
from kvcompress_kernels.segment_attention import triton as attention

sys.path.insert(0, str(Path(__file__).parent))
from measure_methods import (
    check_codes,
    check_selection,
    measure_codes,
    measure_selection,
)
from xformers_peer import Peer

Row = tuple[tuple[int, ...] | None, int, int]  # entries by KV head or None, tail, query length


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# ---- numerics -----------------------------------------------------------------------------------


def make_pool(
    shape: Sequence[int], layout: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A pool ``[2, L, B, H, N, D]`` of NaN in the order of dimensions that ``layout`` names."""
    L, B, H, N, D = shape
    if layout == "heads apart":
        buffer = torch.full((L, B, 2 * H, N, D), math.nan, dtype=dtype, device=device)
        return formats.gpu_pool(buffer, num_kv_heads=H)
    sizes = dict(zip("LBHNC", (L, B, H, N, 2 * D), strict=True))
    buffer = torch.full([sizes[i] for i in layout], math.nan, dtype=dtype, device=device)
    return formats.gpu_pool(buffer.permute(*(layout.index(i) for i in "LBHNC")))


class Batch:
    """Rows in scattered blocks of a pool that is NaN wherever no row has anything."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        dtype: torch.dtype,
        head_size: int,
        ratio: int,
        block_size: int,
        layout: str,
        device: torch.device,
        seed: int,
    ) -> None:
        self.rows, self.dtype, self.ratio, self.device = rows, dtype, ratio, device
        self.generator = torch.Generator(device).manual_seed(seed)
        heads = next((len(row[0]) for row in rows if row[0] is not None), 2)
        geometry = formats.SlabGeometry(2, heads, block_size)
        plans = []
        for number, (entries, tail, _) in enumerate(rows):
            cells = [geometry.cells(count) for count in entries or ()]
            starts = list(itertools.accumulate(cells, initial=number))
            slab = geometry.blocks(starts[-1]) if entries is not None else 0
            gap = slab + number % 3 if entries is not None else 0
            plans.append((starts, slab, gap, geometry.cells(tail)))
        width = max(gap + tail for _, _, gap, tail in plans) + 1
        blocks = sum(slab + tail for _, slab, _, tail in plans) + 3
        shape = (2, blocks, heads, block_size, head_size)
        self.kv_cache = make_pool(shape, layout, dtype, device)
        self.bias = torch.full((blocks, 2, heads, block_size), math.nan, device=device)
        lengths = [row[2] for row in rows]
        self.query = self.normal(sum(lengths) + 2, heads * ratio, head_size)
        self.query_start_loc = self.ints(list(itertools.accumulate(lengths, initial=0)))
        order = torch.randperm(blocks - 1, generator=self.generator, device=device) + 1
        free = iter(order.tolist())
        slots = len(rows) + 1
        self.block_table = torch.zeros((len(rows), width), dtype=torch.int32, device=device)
        self.seq_lens = self.ints([0] * len(rows))
        self.slot_of_block = self.ints([0] * blocks)
        self.gap_end = self.ints([block_size] * slots)
        self.first_cell = torch.full((slots, 2, heads), 3, dtype=torch.int32, device=device)
        self.num_entries = torch.full_like(self.first_cell, 5)
        self.scale = head_size**-0.5
        self.contents: list[list[tuple[torch.Tensor, ...]]] = []
        for number, ((entries, tail, _), (starts, slab, gap, count)) in enumerate(
            zip(rows, plans, strict=True)
        ):
            table = self.block_table[number]
            table[:slab] = self.ints([next(free) for _ in range(slab)])
            table[gap : gap + count] = self.ints([next(free) for _ in range(count)])
            self.seq_lens[number] = gap * block_size + tail
            if entries is not None:
                self.slot_of_block[table[0]] = number + 1
                self.gap_end[number + 1] = gap * block_size
                self.first_cell[number + 1, 1] = self.ints(starts[:-1])
                self.num_entries[number + 1, 1] = self.ints(list(entries))
            self.contents.append(
                [
                    self.fill(entries[h] if entries else 0, tail, h, table, gap, starts)
                    for h in range(heads)
                ]
            )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def fill(
        self, count: int, tail: int, head: int, table: torch.Tensor, gap: int, starts: list[int]
    ) -> tuple[torch.Tensor, ...]:
        keys, values = self.normal(2, count + tail, self.query.shape[2])
        bias = torch.zeros(count + tail, device=self.device)
        bias[:count] = 2 * torch.randn(count, generator=self.generator, device=self.device)
        if count:
            formats.gpu_write_segment(
                self.kv_cache,
                self.bias,
                table,
                starts[head],
                keys[:count],
                values[:count],
                bias[:count],
            )
        position = torch.arange(tail, device=self.device)
        size = self.kv_cache.shape[4]
        blocks = table[gap + position // size].long()
        self.kv_cache[0, 1, blocks, head, position % size] = keys[count:]
        self.kv_cache[1, 1, blocks, head, position % size] = values[count:]
        return keys, values, bias

    def arguments(self) -> dict[str, Any]:
        names = ("query", "kv_cache", "bias", "block_table", "seq_lens", "query_start_loc")
        names += ("slot_of_block", "gap_end", "first_cell", "num_entries", "scale")
        return {
            **{name: getattr(self, name) for name in names},
            "layer": 1,
            "rows": self.ints(list(range(len(self.rows)))),
            "output": torch.full_like(self.query, math.nan),
        }

    def run(self, num_rows: int, num_splits: int) -> torch.Tensor:
        """Output of all tokens; those of the rows from ``num_rows`` on stay NaN."""
        arguments = self.arguments()
        arguments["rows"] = arguments["rows"][:num_rows]
        tokens, heads, size = self.query.shape
        workspace = attention.allocate_workspace(tokens, heads, size, num_splits, self.device)
        workspace.partial.fill_(math.nan)
        segment_attention(
            **arguments,
            impl="triton",
            max_query_len=max(row[2] for row in self.rows[:num_rows]),
            workspace=workspace,
        )
        return arguments["output"]

    def expected(self, compute: Callable[..., torch.Tensor]) -> torch.Tensor:
        """``compute(query, keys, values, mask, scale)`` of what was written, not of the pool."""
        heads = []
        for number, (_, tail, query_len) in enumerate(self.rows):
            start = int(self.query_start_loc[number])
            row = []
            for head, (keys, values, bias) in enumerate(self.contents[number]):
                mask = bias.repeat(query_len, 1)
                order = torch.arange(tail, device=self.device) - (tail - query_len)
                query = torch.arange(query_len, device=self.device)
                hidden = torch.zeros_like(mask, dtype=torch.bool)
                hidden[:, len(keys) - tail :] = order[None, :] > query[:, None]
                mask = mask.masked_fill(hidden, -math.inf)
                lanes = self.query[start : start + query_len].unflatten(1, (-1, self.ratio))
                # [ratio, q, D]
                row.append(compute(lanes[:, head].transpose(0, 1), keys, values, mask, self.scale))
            heads.append(torch.cat(row).transpose(0, 1))
        return torch.cat(heads)


def eager(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Plain torch, every step in ``dtype``."""

    def compute(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        logits = query.to(dtype) @ keys.to(dtype).T * scale + mask.to(dtype)
        return logits.softmax(-1) @ values.to(dtype)

    return compute


def sdpa(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """torch's own fused attention with the biases as its mask: a second opinion."""
    expand = (1, query.shape[0], -1, -1)
    return F.scaled_dot_product_attention(
        query[None],
        keys[None, None].expand(*expand),
        values[None, None].expand(*expand),
        attn_mask=mask.to(query.dtype)[None, None],
        scale=scale,
    )[0]


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).abs().nan_to_num(nan=math.inf).max())


def check_attention(options: argparse.Namespace, device: torch.device, seed: int) -> list[str]:
    faults = []
    long = 60 if options.tiny else 3000
    rows: list[Row] = [
        ((long, long // 3), 3, 1),
        (None, long + 7, 1),
        ((0, 1), 1, 1),
        (None, 1, 1),
        ((65, 0), 37, 5),
        (None, 41, 6),
    ]
    decode_rows = 4
    cases = [
        (64, 1, 16, "LBHNC"),
        (80, 7, 48, "BLHNC"),
        (96, 2, 32, "LBNHC"),
        (128, 4, 64, "LBHNC"),
        (128, 16, 16, "heads apart"),
        (256, 8, 64, "BLHNC"),
    ]
    if options.tiny:
        cases = cases[1:2]
    for (size, ratio, block_size, layout), dtype in itertools.product(cases, options.dtypes):
        batch = Batch(
            rows,
            dtype=dtype,
            head_size=size,
            ratio=ratio,
            block_size=block_size,
            layout=layout,
            device=device,
            seed=seed,
        )
        exact = batch.expected(eager(torch.float64))
        unit = torch.finfo(dtype).eps * float(exact.abs().max())
        allowed = error(batch.expected(eager(dtype)), exact) + unit
        peer = error(batch.expected(sdpa), exact)
        # the decode rows alone, with and without splits, then all rows, in the tiling of long ones
        for rows_run, num_splits in ((decode_rows, 5), (decode_rows, 1), (len(rows), 1)):
            tokens = int(batch.query_start_loc[rows_run])
            found = error(batch.run(rows_run, num_splits)[:tokens], exact[:tokens])
            say(
                f"  attention D={size} ratio={ratio} N={block_size} {layout} {dtype} "
                f"rows={rows_run} splits={num_splits}: error {found:.2e}, eager and a unit "
                f"{allowed:.2e}, torch SDPA {peer:.2e}"
            )
            if not found <= allowed:
                faults.append(f"attention D={size} {dtype}: error {found:.2e} above {allowed:.2e}")
    return faults


def check_graph(options: argparse.Namespace, device: torch.device, seed: int) -> list[str]:
    """Replays a captured launch after the tables have changed in place."""
    if device.type != "cuda":
        say("  CUDA graph: not on this device")
        return []
    dtype = options.dtypes[0]
    batch = Batch(
        [((700, 90), 20, 1), (None, 333, 1), ((5, 400), 64, 1)],
        dtype=dtype,
        head_size=128,
        ratio=4,
        block_size=16,
        layout="LBHNC",
        device=device,
        seed=seed,
    )
    tokens, heads, size = batch.query.shape
    workspace = attention.allocate_workspace(tokens, heads, size, 8, device)
    call = {**batch.arguments(), "impl": "triton", "max_query_len": 1, "workspace": workspace}
    segment_attention(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        segment_attention(**call)
    batch.num_entries[1, 1] = batch.ints([301, 2])
    batch.seq_lens -= batch.ints([9, 30, 0])
    batch.query.mul_(1.5)
    graph.replay()
    replayed = call["output"].clone()
    call["output"].fill_(math.nan)
    segment_attention(**call)
    same = torch.equal(replayed[:3], call["output"][:3])
    say(f"  CUDA graph: replay after a change of the tables is {'the same' if same else 'WRONG'}")
    return [] if same else ["a replayed CUDA graph did not read the changed tables"]


def random_chunks(num_tokens: int, longest: int, generator: torch.Generator) -> torch.Tensor:
    """Chunk ids of chunks of 1 to ``longest`` tokens, a kept token after each."""
    lengths = torch.randint(1, longest + 1, (num_tokens,), generator=generator).tolist()
    ids: list[int] = []
    for number, length in enumerate(lengths):
        ids += [number] * length + [-1]
        if len(ids) >= num_tokens:
            break
    return torch.tensor(ids[:num_tokens], dtype=torch.int32)


class Prompt:
    """A prompt of clustered keys in scattered blocks, and a slab for it."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_tokens: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        L, H, D = shape
        generator = torch.Generator().manual_seed(seed)
        count = num_tokens // block_size
        order = torch.randperm(2 * count + 1, generator=generator).int()
        self.source = order[:count].to(device)
        self.slab = order[count:].to(device)
        self.kv_cache = make_pool((L, 2 * count + 1, H, block_size, D), "LBHNC", dtype, device)
        self.bias = torch.full((2 * count + 1, L, H, block_size), math.nan, device=device)
        self.num_cells = len(self.slab) * L * H
        # keys around a few directions, so that thresholds divide them
        centres = torch.randn(L, H, 6, D, generator=generator)
        for block in self.source.tolist():
            choice = torch.randint(6, (L, H, block_size), generator=generator)
            noise = 0.5 * torch.randn(L, H, block_size, D, generator=generator)
            keys = torch.gather(centres, 2, choice[..., None].expand(-1, -1, -1, D)) + noise
            self.kv_cache[0, :, block] = keys.to(device, dtype)
            values = torch.randn(L, H, block_size, D, generator=generator)
            self.kv_cache[1, :, block] = values.to(device, dtype)
        self.chunk_ids = random_chunks(num_tokens, 64, generator)


def check_cluster(options: argparse.Namespace, device: torch.device, seed: int) -> list[str]:
    """The bits of the reference, which decides cosines in float64 on the CPU."""
    faults = []
    tokens = 96 if options.tiny else 1536
    sizes = (64,) if options.tiny else (64, 128)
    for size, dtype in itertools.product(sizes, options.dtypes):
        for threshold in (0.7, 0.85, MERGE_ALL):
            prompt = Prompt((2, 2, size), tokens, 16, dtype, device, seed)
            pool, bias = prompt.kv_cache.cpu(), prompt.bias.cpu()
            source, slab = prompt.source.cpu(), prompt.slab.cpu()
            same, cell, other_cell = True, 0, 0
            for layer in range(2):
                tail = (prompt.chunk_ids, threshold)
                counts, cell = cluster_merge(
                    prompt.kv_cache,
                    prompt.bias,
                    layer,
                    prompt.source,
                    prompt.slab,
                    *tail,
                    cell,
                    prompt.num_cells,
                    impl="triton",
                )
                expected, other_cell = cluster_merge(
                    pool,
                    bias,
                    layer,
                    source,
                    slab,
                    *tail,
                    other_cell,
                    prompt.num_cells,
                    impl="reference",
                )
                same &= torch.equal(counts.cpu(), expected) and cell == other_cell
            integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
            ours = prompt.kv_cache.cpu().contiguous().view(integer)
            same &= torch.equal(ours, pool.contiguous().view(integer))
            same &= torch.equal(prompt.bias.cpu().view(torch.int32), bias.view(torch.int32))
            say(
                f"  clusters D={size} {dtype} threshold={threshold}: {counts.tolist()} of "
                f"{tokens} tokens, bits {'the same' if same else 'DIFFER'}"
            )
            if not same:
                faults.append(f"clusters D={size} {dtype} threshold={threshold}: bits differ")
    return faults


# ---- an unbiased kernel to compare with ---------------------------------------------------------


@triton.jit
def plain_decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    partial_ptr,
    stats_ptr,
    block_table_ptr,
    seq_lens_ptr,
    scale,
    table_stride,
    block_stride,
    head_stride,
    slot_stride,
    NUM_KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Paged split-KV decode without biases, states and segments; grid (rows, heads, splits)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + row)
    num_tiles = tl.cdiv(seq_len, TILE)
    per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    lane = tl.arange(0, 16)
    dimension = tl.arange(0, HEAD_SIZE)
    lane_mask = (lane < RATIO)[:, None]
    at = ((row * NUM_KV_HEADS + head) * RATIO + lane).to(tl.int64)
    query = tl.load(
        query_ptr + at[:, None] * HEAD_SIZE + dimension[None, :], mask=lane_mask, other=0.0
    )
    accumulator = tl.zeros([16, HEAD_SIZE], tl.float32)
    maximum = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    for tile in range(split * per_split, tl.minimum((split + 1) * per_split, num_tiles)):
        position = tile * TILE + tl.arange(0, TILE)
        mask = position < seq_len
        block = tl.load(
            block_table_ptr + row.to(tl.int64) * table_stride + position // BLOCK_SIZE,
            mask=mask,
            other=0,
        ).to(tl.int64)
        offset = block * block_stride + head * head_stride + (position % BLOCK_SIZE) * slot_stride
        pointer = offset[:, None] + dimension[None, :]
        keys = tl.load(key_ptr + pointer, mask=mask[:, None], other=0.0)
        values = tl.load(value_ptr + pointer, mask=mask[:, None], other=0.0)
        logits = tl.dot(query, tl.trans(keys)) * (scale * 1.4426950408889634)
        logits = tl.where(mask[None, :], logits, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction + tl.sum(weights, axis=1)
        accumulator = tl.dot(weights.to(values.dtype), values, accumulator * correction[:, None])
        maximum = new_maximum
    part = at * NUM_SPLITS + split
    tl.store(stats_ptr + part * 2, maximum, mask=lane < RATIO)
    tl.store(stats_ptr + part * 2 + 1, total, mask=lane < RATIO)
    target = partial_ptr + part[:, None] * HEAD_SIZE + dimension[None, :]
    tl.store(target, accumulator, mask=lane_mask)


# ---- measurements -------------------------------------------------------------------------------


class Clock:
    """Time of a launch: replays of a CUDA graph of many; on the CPU one call."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.deadline = device, time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def measure(self, launches: Sequence[Callable[[], Any]], repeats: int = 9) -> float:
        """Median microseconds of one of ``launches``, which take turns."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            for launch in launches:
                launch()
            return (time.perf_counter() - start) / len(launches) * 1e6
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        graph.replay()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(launches))
        return statistics.median(times)


def measure_copy(clock: Clock, device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a copy, read and written bytes together."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    microseconds = clock.measure([lambda: target.copy_(source)] * 4)
    return 2 * num_bytes / microseconds * 1e6


@dataclasses.dataclass(frozen=True)
class Case:
    context: int
    batch: int
    ratio: int
    kept: float


class Decode:
    """One layer's cache, as much as the cases need, and launches on different parts of it."""

    TAIL = 128

    def __init__(self, options: argparse.Namespace, device: torch.device, num_bytes: int) -> None:
        self.device, self.dtype = device, options.dtypes[0]
        self.heads, self.head_size = options.num_kv_heads, options.head_size
        self.block_size = options.block_size
        self.block_bytes = self.heads * self.block_size * 2 * self.head_size * self.dtype.itemsize
        blocks = num_bytes // self.block_bytes
        shape = (1, blocks, self.heads, self.block_size, 2 * self.head_size)
        self.buffer = torch.empty(shape, dtype=self.dtype, device=device)
        for block in self.buffer[0].split(4096):
            block.normal_()
        self.pool = formats.gpu_pool(self.buffer)
        self.bias = torch.empty((blocks, 1, self.heads, self.block_size), device=device)
        self.bias.uniform_(0, 3)
        # more than the L2 cache of any of these devices; on the CPU enough for a second part
        self.cache_bytes = 2**27 if device.type == "cuda" else 2**18

    def entries(self, case: Case) -> int:
        return max(self.block_size, int(case.context * case.kept) - self.TAIL)

    def keys(self, case: Case) -> int:
        return self.entries(case) + self.TAIL

    def blocks(self, case: Case) -> int:
        """Blocks of one row."""
        return -(-self.entries(case) // self.block_size) + -(-self.TAIL // self.block_size)

    def fits(self, case: Case) -> bool:
        return case.batch * self.blocks(case) + 1 <= self.pool.shape[2]

    def parts(self, case: Case) -> int:
        """Launches that read different blocks, so that the L2 cache holds none of what is read."""
        per_launch = case.batch * self.blocks(case)
        wanted = max(1, self.cache_bytes // (per_launch * self.block_bytes))
        return int(min(wanted, (self.pool.shape[2] - 1) // per_launch, 64))

    def num_bytes(self, case: Case) -> int:
        """Bytes that a launch must move: entries with their biases, tail, queries and output."""
        per_key = 2 * self.head_size * self.dtype.itemsize
        keys = case.batch * self.heads * (self.keys(case) * per_key + 4 * self.entries(case))
        queries = 2 * case.batch * self.heads * case.ratio * self.head_size * self.dtype.itemsize
        return keys + queries

    def workspace(self, case: Case) -> attention.Workspace:
        multiprocessors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count
            if self.device.type == "cuda"
            else 2
        )
        splits = attention.choose_num_splits(case.batch, self.heads, multiprocessors)
        heads = self.heads * case.ratio
        return attention.allocate_workspace(
            case.batch, heads, self.head_size, max(2, splits), self.device
        )

    def query(self, case: Case) -> torch.Tensor:
        shape = (case.batch, self.heads * case.ratio, self.head_size)
        return torch.randn(shape, device=self.device).to(self.dtype)

    def tables(self, case: Case) -> Iterator[torch.Tensor]:
        count = self.parts(case) * case.batch * self.blocks(case)
        order = torch.randperm(self.pool.shape[2] - 1, device=self.device)[:count].int() + 1
        yield from order.view(self.parts(case), case.batch, self.blocks(case))

    def ours(self, case: Case) -> list[Callable[[], torch.Tensor]]:
        workspace, query = self.workspace(case), self.query(case)
        slab = self.blocks(case) - -(-self.TAIL // self.block_size)
        slots = case.batch + 1

        def ints(values: Any) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device=self.device)

        def launch(arguments: dict[str, Any]) -> torch.Tensor:
            segment_attention(**arguments)
            return arguments["output"]

        cells = -(-self.entries(case) // self.block_size)
        first_cell = ints([[[h * cells for h in range(self.heads)]]] * slots)
        num_entries = ints([[[self.entries(case)] * self.heads]] * slots)
        launches = []
        for table in self.tables(case):
            slot_of_block = torch.zeros(self.pool.shape[2], dtype=torch.int32, device=self.device)
            slot_of_block[table[:, 0].long()] = ints(range(1, slots))
            arguments: dict[str, Any] = {
                "query": query,
                "output": torch.empty_like(query),
                "kv_cache": self.pool,
                "bias": self.bias,
                "layer": 0,
                "block_table": table,
                "seq_lens": ints([slab * self.block_size + self.TAIL] * case.batch),
                "query_start_loc": ints(range(slots)),
                "rows": ints(range(case.batch)),
                "slot_of_block": slot_of_block,
                "gap_end": ints([slab * self.block_size] * slots),
                "first_cell": first_cell,
                "num_entries": num_entries,
                "scale": self.head_size**-0.5,
                "impl": "triton",
                "max_query_len": 1,
                "workspace": workspace,
            }
            launches.append(lambda arguments=arguments: launch(arguments))
        return launches

    def plain(self, case: Case) -> list[Callable[[], torch.Tensor]]:
        """The unbiased kernel on as many raw keys."""
        workspace, query = self.workspace(case), self.query(case)
        output = torch.empty_like(query)
        lengths = torch.full((case.batch,), self.keys(case), dtype=torch.int32, device=self.device)
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=self.device)
        rows = starts[:-1].clone()
        tiling = attention.choose_tiling(self.head_size, case.ratio, workspace.num_splits)
        heads = self.heads * case.ratio

        def launch(table: torch.Tensor) -> torch.Tensor:
            keys, values = self.pool[0, 0], self.pool[1, 0]
            plain_decode_kernel[(case.batch, self.heads, workspace.num_splits)](
                query,
                keys,
                values,
                workspace.partial,
                workspace.stats,
                table,
                lengths,
                self.head_size**-0.5,
                table.stride(0),
                *keys.stride()[:3],
                NUM_KV_HEADS=self.heads,
                RATIO=case.ratio,
                BLOCK_SIZE=self.block_size,
                HEAD_SIZE=self.head_size,
                TILE=tiling.tile,
                NUM_SPLITS=workspace.num_splits,
                num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
                maxnreg=tiling.max_registers,
            )
            attention.reduce_kernel[(case.batch, heads)](
                output,
                workspace.partial,
                workspace.stats,
                starts,
                rows,
                1,
                output.stride()[:2],
                NUM_HEADS=heads,
                HEAD_SIZE=self.head_size,
                BLOCK_D=self.head_size,
                NUM_SPLITS=workspace.num_splits,
                CHUNK=attention.reduce_chunk(workspace.num_splits),
                num_warps=4,
            )
            return output

        return [lambda table=table: launch(table) for table in self.tables(case)]

    def sdpa(self, case: Case) -> list[Callable[[], torch.Tensor]]:
        """torch's attention, on contiguous keys and values of the same number."""
        query = self.query(case)[:, :, None]
        flat = self.buffer.view(-1)
        shape = (case.batch, self.heads, self.keys(case), self.head_size)
        size = math.prod(shape)
        launches = []
        for part in range(max(1, min(self.parts(case), flat.numel() // (2 * size)))):
            keys, values = (
                flat[(2 * part + i) * size : (2 * part + i + 1) * size].view(shape)
                for i in range(2)
            )
            launches.append(
                lambda keys=keys, values=values: F.scaled_dot_product_attention(
                    query, keys, values, enable_gqa=True
                )
            )
        return launches

    def check(self, case: Case) -> list[str]:
        """Whether what is timed computes what it should: first row and head, against float64."""
        tables = list(self.tables(case))
        self.tables = lambda _: iter(tables)  # type: ignore[method-assign]
        query, table = self.query(case), tables[0][0]
        self.query = lambda _: query  # type: ignore[method-assign]
        ours, plain = self.ours(case)[0](), self.plain(case)[0]()
        del self.tables, self.query
        cells = self.pool[:, 0, table.long(), 0]  # [2, blocks, N, D]
        keys, values = cells.flatten(1, 2)[:, : self.keys(case)]
        no_bias = torch.zeros(1, len(keys), device=self.device)
        lanes = query[0, : case.ratio, None]
        exact = eager(torch.float64)(lanes, keys, values, no_bias, self.head_size**-0.5)
        wrong = {"the unbiased kernel": error(plain[0, : case.ratio, None], exact)}

        entries = formats.gpu_read_segment(self.pool, self.bias, table, 0, self.entries(case))
        tail = self.pool[:, 0, table[-(-self.entries(case) // self.block_size) :].long(), 0]
        tail_keys, tail_values = tail.flatten(1, 2)[:, : self.TAIL]
        bias = torch.cat([entries[2], torch.zeros(self.TAIL, device=self.device)])
        keys = torch.cat([entries[0], tail_keys])
        values = torch.cat([entries[1], tail_values])
        exact = eager(torch.float64)(lanes, keys, values, bias[None], self.head_size**-0.5)
        wrong["the kernel"] = error(ours[0, : case.ratio, None], exact)
        for what, difference in wrong.items():
            say(f"  {what} as it is timed: error {difference:.2e}")
        return [f"{what} as it is timed: {d:.2e}" for what, d in wrong.items() if not d < 1e-2]

    def xformers(self, case: Case, peer: Peer) -> dict[str, list[Callable[[], torch.Tensor]]]:
        """xformers' split-K decode: unbiased over pages, and with biases over keys in a row."""
        query, keys = self.query(case), self.keys(case)
        scale = self.head_size**-0.5
        # the same memory, the heads of a slot together
        slots = self.buffer.view(-1, self.block_size, self.heads, 2, self.head_size)
        paged = [
            peer.paged(query, slots[..., 0, :], slots[..., 1, :], table, [keys] * case.batch, scale)
            for table in self.tables(case)
        ]
        count = keys // 8 * 8  # rows of biases are to be aligned
        shape = (case.batch, count, self.heads, self.head_size)
        size = math.prod(shape)
        flat = self.buffer.view(-1)
        in_a_row = [flat[i * size : (i + 1) * size].view(shape) for i in range(2)]
        bias = torch.rand((case.batch, self.heads, count), device=self.device)
        return {"paged": paged, "with bias": [peer.biased(query, *in_a_row, bias, scale)] * 4}


def measure_xformers(clock: Clock, decode: Decode, case: Case) -> list[str]:
    """A line for each way that xformers' kernel runs, or one that says why it does not."""
    try:
        launches = decode.xformers(case, Peer())
        for choices in launches.values():
            choices[0]()
    except Exception as reason:  # noqa: BLE001 - whatever it is, it becomes a line of the table
        first = str(reason).strip().splitlines()
        lines = [f"xformers does not run: {type(reason).__name__}: {first[0] if first else ''}"]
        say(lines[0])
        return lines
    ours = clock.measure(decode.ours(case))
    lines = []
    for name, choices in launches.items():
        theirs = clock.measure(choices)
        lines.append(
            f"xformers split-K {name}, {case}: {theirs:.1f} us, ours/theirs {ours / theirs:.3f}"
        )
        say(lines[-1])
    return lines


def measure_decode(
    options: argparse.Namespace, clock: Clock, decode: Decode, copy: float
) -> list[str]:
    lines = [
        f"{'context':>8}{'batch':>6}{'GQA':>4}{'kept':>6}{'us':>10}{'GB/s':>8}{'of copy':>8}"
        f"{'plain us':>10}{'ours/plain':>11}{'SDPA us':>10}{'ours/SDPA':>10}"
    ]
    say(lines[0])
    cases = [
        Case(*case)
        for case in itertools.product(
            options.contexts, options.batches, options.ratios, (1.0, 0.5, 0.25, 0.1)
        )
    ]
    for case in cases:
        head = f"{case.context:>8}{case.batch:>6}{case.ratio:>4}{case.kept:>6.0%}"
        if not decode.fits(case):
            lines.append(f"{head}  not measured: the cache does not fit the device")
        elif clock.is_over:
            lines.append(f"{head}  not measured: out of time")
        else:
            ours = clock.measure(decode.ours(case))
            plain = clock.measure(decode.plain(case))
            peer = clock.measure(decode.sdpa(case))
            rate = decode.num_bytes(case) / ours * 1e6
            lines.append(
                f"{head}{ours:>10.1f}{rate / 1e9:>8.0f}{rate / copy:>8.0%}{plain:>10.1f}"
                f"{ours / plain:>11.3f}{peer:>10.1f}{ours / peer:>10.3f}"
            )
        say(lines[-1])
    case = cases[len(cases) // 2]
    if decode.fits(case):
        lines += measure_xformers(clock, decode, case)
    return lines


def sweep(options: argparse.Namespace, clock: Clock, decode: Decode) -> list[str]:
    """Other tilings and numbers of splits in the case that the target names, fastest first."""
    case = Case(options.contexts[len(options.contexts) // 2], options.batches[-2], 4, 0.5)
    num_splits = decode.workspace(case).num_splits
    tilings = [attention.choose_tiling(decode.head_size, case.ratio, num_splits)]
    choices: list[tuple[int, int, int]] = [(32, 4, 3), (64, 4, 3)]
    if not options.tiny:
        choices = list(itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 5)))
    tilings += [attention.Tiling(16, *choice) for choice in choices]
    settings = [(tilings[0], splits) for splits in (4, 8, 16, 32, 64)]
    settings += [(tiling, num_splits) for tiling in tilings]
    chosen = attention.choose_tiling, attention.choose_num_splits
    found = []
    try:
        for tiling, splits in settings:
            if clock.is_over:
                break
            attention.choose_tiling = lambda *_, tiling=tiling: tiling
            attention.choose_num_splits = lambda *_, splits=splits: splits
            try:
                found.append((clock.measure(decode.ours(case)), f"{tiling}, {splits} splits"))
            except triton.runtime.errors.OutOfResources as reason:
                found.append((math.inf, f"{tiling}, {splits} splits: {reason}"))
    finally:
        attention.choose_tiling, attention.choose_num_splits = chosen
    return [str(case), *(f"{time:>10.1f} us  {setting}" for time, setting in sorted(found))]


def measure_cluster(options: argparse.Namespace, clock: Clock, device: torch.device) -> list[str]:
    lines = []
    tokens, layers = (96, 1) if options.tiny else (32768, 4)
    shape = (layers, options.num_kv_heads, options.head_size)
    prompt = Prompt(shape, tokens, options.block_size, options.dtypes[0], device, 1)
    chunks = cluster.find_chunks(prompt.chunk_ids, device)
    for threshold in (0.7, 0.85):
        if clock.is_over:
            return [*lines, f"clusters, threshold {threshold}: not measured: out of time"]

        def launch(threshold: float = threshold) -> torch.Tensor:
            return cluster.cluster_merge_layers(
                prompt.kv_cache,
                prompt.bias,
                range(layers),
                prompt.source,
                prompt.slab,
                chunks,
                threshold,
                0,
                prompt.num_cells,
            )[0]

        kept = launch().float().mean().item() / tokens
        microseconds = clock.measure([launch], repeats=5)
        rate = tokens * layers / microseconds
        lines.append(
            f"clusters, threshold {threshold}: {tokens} tokens, {layers} layers, "
            f"{options.num_kv_heads} KV heads, D={options.head_size}, kept {kept:.0%}: "
            f"{microseconds / layers:.0f} us per layer, {rate:.2f} M tokens * layers per second"
        )
        say(lines[-1])
    return lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of the data; default: drawn anew and printed")
    parser.add_argument("--seconds", type=float, default=290, help="rows after it are left out")
    parser.add_argument("--block-size", type=int, default=16, help="slots of a block; vLLM has 16")
    parser.add_argument("--sweep", action="store_true", help="time other tilings and splits, too")
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter")
    options = parser.parse_args(argv)
    options.dtypes = [torch.float16] if options.tiny else [torch.bfloat16, torch.float16]
    options.contexts = [256] if options.tiny else [8192, 32768, 131072]
    options.batches = [1, 2] if options.tiny else [1, 8, 32]
    options.ratios = [4] if options.tiny else [4, 8]
    options.num_kv_heads, options.head_size = (2, 64) if options.tiny else (8, 128)
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    interpreted = not isinstance(attention.attend_kernel, triton.runtime.jit.JITFunction)
    if not torch.cuda.is_available() and not interpreted:
        say("error: no CUDA device; this script checks and measures the kernels on one")
        return 2
    start = time.monotonic()
    device = torch.device("cpu" if interpreted else "cuda")
    clock = Clock(device, options.seconds)
    seed = options.seed if options.seed is not None else time.time_ns() % 2**31
    torch.manual_seed(seed)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted"
    title = f"{name}, torch {torch.__version__}, Triton {triton.__version__}, seed {seed}"
    say(title)
    say("checks")
    faults = check_attention(options, device, seed)
    faults += check_graph(options, device, seed)
    faults += check_cluster(options, device, seed)
    faults += check_selection(options, device, seed, say)
    faults += check_codes(options, device, seed, say)
    if faults:
        say("FAILED, nothing is measured:\n  " + "\n  ".join(faults))
        return 1
    if options.checks_only:
        return 0

    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 2**22
    copy = measure_copy(clock, device, int(min(2**30, free // 8)))
    largest = Case(options.contexts[-1], options.batches[-1], 1, 1.0)
    per_key = options.num_kv_heads * 2 * options.head_size * options.dtypes[0].itemsize
    wanted = (largest.context + 4096) * largest.batch * per_key
    # a fifth for block tables, workspaces, biases and what torch keeps
    decode = Decode(options, device, int(min(wanted, free * 4 // 5)))
    faults = decode.check(Case(options.contexts[0], 1, options.ratios[0], 0.5))
    if faults:
        say("FAILED, nothing is measured:\n  " + "\n  ".join(faults))
        return 1
    say("measurements")
    table = measure_decode(options, clock, decode, copy)
    extra = sweep(options, clock, decode) if options.sweep else []
    del decode
    # the decode table may take all the time but what the others need
    clock.deadline += 40
    table += measure_cluster(options, clock, device)
    table += measure_selection(options, clock, device, say)
    table += measure_codes(options, clock, device, copy, say)
    say()
    say(f"{title}, N={options.block_size}, D={options.head_size}, {options.dtypes[0]}")
    say(f"copy: {copy / 1e9:.0f} GB/s (read and written)")
    for line in [*table, *extra]:
        say(line)
    say(f"{time.monotonic() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
