"""Checks and measurements of the kernels that compress by score and to codes; for `measure.py`."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcompress_kernels import code_format, formats
from kvcompress_kernels.code_format import Counts, GroupCodec, SideCodec
from kvcompress_kernels.code_rows import code_rows
from kvcompress_kernels.code_rows import triton as encoding
from kvcompress_kernels.coded_attention import LayerCodecs, coded_attention
from kvcompress_kernels.coded_attention import reference as coded_reference
from kvcompress_kernels.segment_attention.triton import choose_num_splits
from kvcompress_kernels.select_merge import triton as selecting
from kvcompress_kernels.select_merge.api import select_merge
from kvcompress_kernels.window_scores import triton as scoring
from kvcompress_kernels.window_scores.api import window_scores

Say = Callable[[str], None]

# of 512 numbers; about 2.4 bits a number
_KEY_COUNTS, _VALUE_COUNTS = (8, 160, 200, 100), (0, 150, 250, 112)


class Prompt:
    """A prompt of normal keys and values in scattered blocks, queries, and room for a slab."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_tokens: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        *,
        num_queries: int = 32,
        ratio: int = 4,
    ) -> None:
        layers, heads, size = shape
        generator = torch.Generator(device).manual_seed(seed)
        count = num_tokens // block_size
        buffer = torch.empty(
            (layers, 2 * count + 1, heads, block_size, 2 * size), dtype=dtype, device=device
        )
        for block in buffer.split(1024, 1):
            block.normal_(generator=generator)
        self.kv_cache = formats.gpu_pool(buffer)
        self.bias = torch.full((2 * count + 1, layers, heads, block_size), math.nan, device=device)
        order = torch.randperm(2 * count + 1, generator=generator, device=device).int()
        self.source, self.slab = order[:count].clone(), order[count:].clone()
        self.tail = order[:0].clone()
        self.num_tokens = count * block_size
        self.num_cells = len(self.slab) * layers * heads
        queries = (layers, heads * ratio, num_queries, size)
        self.queries = torch.randn(queries, generator=generator, device=device).to(dtype)
        self.first = self.num_tokens - num_queries
        self.scale = size**-0.5

    def scores(self) -> tuple[torch.Tensor, torch.Tensor]:
        return scoring.window_scores(
            *(self.kv_cache, self.source, self.tail, self.num_tokens),
            *(self.queries, self.first, self.scale),
        )

    def kept(self, scores: torch.Tensor, share: float) -> torch.Tensor:
        """bool ``[L, H, G]``: the highest of each head."""
        count = int(share * self.num_tokens)
        least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
        return scores >= least


def random_codec(group_size: int, head_size: int, seed: int) -> GroupCodec:
    """A codec whose decoding matrices undo its encoding matrices on the channels that it keeps."""
    generator = torch.Generator().manual_seed(seed)
    size = group_size * head_size

    def side(counts: Counts) -> SideCodec:
        own = tuple(n * size // 512 for n in counts)
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator))[0][:, : sum(own)]
        spread = 0.5 + torch.rand(sum(own), generator=generator)
        mean = torch.randn(size, generator=generator)
        decode = (basis * spread).T.contiguous()
        return SideCodec((own[0], own[1], own[2], own[3]), mean, basis / spread, decode)

    return GroupCodec(side(_KEY_COUNTS), side(_VALUE_COUNTS))


def check_selection(
    options: argparse.Namespace, device: torch.device, seed: int, say: Say
) -> list[str]:
    """Attention against float64, and the tokens that take others in against the reference."""
    faults = []
    tokens = 32 if options.tiny else 1536
    for dtype in options.dtypes:
        size = 16 if options.tiny else options.head_size
        prompt = Prompt((1, 2, size), tokens, 16, dtype, device, seed, ratio=2)
        mass, scores = prompt.scores()
        host = [x.cpu() for x in (prompt.kv_cache, prompt.source, prompt.tail, prompt.queries)]
        exact = window_scores(
            *(*host[:3], prompt.num_tokens, host[3], prompt.first, prompt.scale), impl="reference"
        )
        seen = exact[0] > 1e-30
        error = float(((mass.cpu() - exact[0]).abs() / exact[0])[seen].max())
        say(f"  window scores D={size} {dtype}: relative error {error:.2e}")
        if not error < 1e-4:
            faults.append(f"window scores {dtype}: relative error {error:.2e}")
        kept, pool, bias = prompt.kept(scores, 0.25)[0], prompt.kv_cache.cpu(), prompt.bias.cpu()
        ours = select_merge(
            *(prompt.kv_cache, prompt.bias, 0, prompt.source, prompt.slab, kept, mass[0]),
            *(32, 0.5, 0, prompt.num_cells),
            impl="triton",
        )
        theirs = select_merge(
            *(pool, bias, 0, host[1], prompt.slab.cpu(), kept.cpu(), mass[0].cpu()),
            *(32, 0.5, 0, prompt.num_cells),
            impl="reference",
        )
        counts = torch.equal(ours[0].cpu(), theirs[0]) and torch.equal(ours[1].cpu(), theirs[1])
        same_keys = torch.equal(prompt.kv_cache[0].cpu(), pool[0])
        unit = torch.finfo(dtype).eps
        difference = float((prompt.kv_cache[1].cpu().float() - pool[1].float()).abs().max())
        say(
            f"  select and merge D={size} {dtype}: {theirs[1].tolist()} merged, counts and keys "
            f"{'the same' if counts and same_keys else 'DIFFER'}, values by {difference:.2e}"
        )
        if not (counts and same_keys and difference <= 16 * unit):
            faults.append(f"select and merge {dtype}: not what the reference does")
    return faults


class Coded:
    """Rows of a batch whose prompts are codes, in one layer of a pool."""

    def __init__(
        self,
        codecs: Sequence[GroupCodec],
        counts: Sequence[int],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        ratio: int,
        seed: int,
        encode: bool = True,
    ) -> None:
        heads, block_size, head_size = shape
        self.generator = torch.Generator(device).manual_seed(seed)
        self.codecs = LayerCodecs(codecs, heads, dtype)
        cell_bytes = block_size * 2 * head_size * dtype.itemsize
        rows_of = [codec.layout.rows_per_cell(cell_bytes) for codec in codecs]
        cells = [[-(-count // rows) for rows in rows_of] for count in counts]
        blocks = [-(-sum(own) // heads) for own in cells]
        width, batch = max(blocks), len(counts)

        def ints(values: Any) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device=device)

        total = batch * width + 1
        buffer = torch.empty((1, total, heads, block_size, 2 * head_size), dtype=dtype)
        self.kv_cache = formats.gpu_pool(buffer.to(device))
        # any bits are codes; scales are the first bytes of a cell
        self.kv_cache.zero_()
        order = torch.randperm(total - 1, generator=self.generator, device=device).int() + 1
        table = order.view(batch, width)
        self.num_bytes = sum(map(sum, cells)) * cell_bytes
        for row, own in enumerate(cells if encode else ()):
            first = 0
            for codec, num_cells in zip(codecs, own, strict=True):
                self.write(codec, counts[row], table[row], first)
                first += num_cells
        starts = [[0, *itertools.accumulate(own)][:-1] for own in cells]
        slots = torch.zeros(total, dtype=torch.int32, device=device)
        slots[table[:, 0].long()] = ints(range(1, batch + 1))
        query = torch.randn(
            (batch, heads * ratio, head_size), generator=self.generator, device=device
        )
        self.arguments: dict[str, Any] = {
            "query": query.to(dtype),
            "output": torch.empty_like(query),
            "log_sum": torch.empty(query.shape[:2], device=device),
            "kv_cache": self.kv_cache,
            "layer": 0,
            "block_table": table,
            "query_start_loc": ints(range(batch + 1)),
            "rows": ints(range(batch)),
            "slot_of_block": slots,
            "first_cell": ints([starts[0], *starts])[:, None].contiguous(),
            "num_rows": ints([[0] * len(codecs), *[[n] * len(codecs) for n in counts]])[
                :, None
            ].contiguous(),
            "scale": head_size**-0.5,
        }

    def write(self, codec: GroupCodec, count: int, slab: torch.Tensor, first_cell: int) -> None:
        z_keys, z_values = (
            torch.randn((count, sum(side)), generator=self.generator, device=slab.device)
            for side in (codec.layout.key_counts, codec.layout.value_counts)
        )
        encoding.code_rows(z_keys, z_values, None, codec.layout, self.kv_cache, slab, first_cell)

    def run(self, num_splits: int) -> None:
        coded_attention(
            **self.arguments,
            codecs=self.codecs,
            impl="triton",
            max_query_len=1,
            num_splits=num_splits,
        )


def check_codes(
    options: argparse.Namespace, device: torch.device, seed: int, say: Say
) -> list[str]:
    """Bytes of the reference, and attention to them against float64."""
    faults = []
    heads, size, count = (2, 32, 20) if options.tiny else (8, 128, 900)
    codecs = [random_codec(heads // 2, size, seed + group) for group in range(2)]
    for dtype in options.dtypes:
        batch = Coded(
            codecs, [count, count // 3], (heads, 16, size), dtype, device, ratio=2, seed=seed
        )
        layout, pool = codecs[0].layout, batch.kv_cache.cpu()
        z_keys, z_values = (
            torch.randn((count, sum(side)), generator=torch.Generator().manual_seed(seed))
            for side in (layout.key_counts, layout.value_counts)
        )
        slab = batch.arguments["block_table"][0]
        again = batch.kv_cache.clone()
        on_device = z_keys.to(device), z_values.to(device)
        code_rows(*on_device, None, layout, again, slab, 0, impl="triton")
        code_rows(z_keys, z_values, None, layout, pool, slab.cpu(), 0, impl="reference")
        integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        same = torch.equal(again.cpu().contiguous().view(integer), pool.contiguous().view(integer))
        batch.run(3)
        host = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in batch.arguments.items()
        }
        found = host["output"]
        exact = torch.empty(found.shape, dtype=torch.float64)
        host.update(output=exact, kv_cache=code_format.gpu_rows(host["kv_cache"]))
        host["log_sum"] = torch.empty(found.shape[:2], dtype=torch.float64)
        coded_reference.coded_attention(**host, codecs=codecs, compute_dtype=torch.float64)
        error = float((found - exact).abs().max())
        logs = float((batch.arguments["log_sum"].cpu() - host["log_sum"]).abs().max())
        allowed = 4 * torch.finfo(dtype).eps * float(exact.abs().max())
        say(
            f"  codes D={size} {dtype}: bytes {'the same' if same else 'DIFFER'}; attention to "
            f"them: error {error:.2e}, allowed {allowed:.2e}, of the logarithms {logs:.2e}"
        )
        if not same:
            faults.append(f"codes {dtype}: bytes differ")
        if not (error <= allowed and logs < 0.05):
            faults.append(f"attention to codes {dtype}: error {error:.2e}, {logs:.2e}")
    return faults


def measure_selection(
    options: argparse.Namespace, clock: Any, device: torch.device, say: Say
) -> list[str]:
    lines = []
    tokens, layers, queries = (32, 1, 4) if options.tiny else (32768, 4, 32)
    shape = (layers, options.num_kv_heads, options.head_size)
    prompt = Prompt(
        *(shape, tokens, options.block_size, options.dtypes[0], device, 1),
        num_queries=queries,
        ratio=2 if options.tiny else 4,
    )
    mass, scores = prompt.scores()
    kept = prompt.kept(scores, 0.25)

    def merge(bucket: int) -> Callable[[], Any]:
        return lambda: selecting.select_merge_layers(
            *(prompt.kv_cache, prompt.bias, range(layers), prompt.source, prompt.slab, kept, mass),
            *(bucket, 0.5, 0, prompt.num_cells),
        )

    for name, launch in (
        (f"scores by {queries} queries", prompt.scores),
        ("select a quarter", merge(0)),
        ("select a quarter and merge", merge(32)),
    ):
        if clock.is_over:
            lines.append(f"{name}: not measured: out of time")
        else:
            found = clock.measure([launch], repeats=5) / layers
            lines.append(f"{name}: {tokens} tokens: {found:.0f} us per layer")
        say(lines[-1])
    return lines


def measure_codes(
    options: argparse.Namespace, clock: Any, device: torch.device, copy: float, say: Say
) -> list[str]:
    """Encoding a prompt, and attention to codes of groups of heads and of single ones."""
    heads, size = options.num_kv_heads, options.head_size
    dtype, block_size = options.dtypes[0], options.block_size
    group = max(n for n in range(1, heads + 1) if heads % n == 0 and n * size <= 512)
    lines = [_measure_encode(options, clock, device, group)]
    say(lines[-1])
    contexts = [32] if options.tiny else options.contexts[:2]
    batches = [1] if options.tiny else options.batches
    for group_size, context, batch in itertools.product(sorted({1, group}), contexts, batches):
        what = f"codes, {group_size} heads in a group, {context} rows, batch {batch}"
        if clock.is_over:
            lines.append(f"{what}: not measured: out of time")
            continue
        codecs = [random_codec(group_size, size, g) for g in range(heads // group_size)]
        coded_batch = Coded(
            *(codecs, [context] * batch, (heads, block_size, size), dtype, device),
            ratio=4,
            seed=1,
            encode=False,
        )
        processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 2
        )
        splits = choose_num_splits(batch, len(codecs), processors)
        coded_batch.codecs.on_device(coded_batch.kv_cache)
        found = clock.measure([lambda one=coded_batch, n=splits: one.run(n)], repeats=5)
        rate = coded_batch.num_bytes / found * 1e6
        lines.append(f"{what}: {found:.1f} us, {rate / 1e9:.0f} GB/s, {rate / copy:.0%} of copy")
        say(lines[-1])
    return lines


def _measure_encode(
    options: argparse.Namespace, clock: Any, device: torch.device, group: int
) -> str:
    heads, size = options.num_kv_heads, options.head_size
    tokens = 32 if options.tiny else 32768
    prompt = Prompt((1, heads, size), tokens, options.block_size, options.dtypes[0], device, 1)
    codecs = [random_codec(group, size, g) for g in range(heads // group)]
    matrices = [encoding.EncodeMatrices.of(codec, device) for codec in codecs]

    def launch() -> None:
        cell = 0
        for index, (codec, own) in enumerate(zip(codecs, matrices, strict=True)):
            cell = encoding.encode_prompt(
                *(prompt.kv_cache, 0, prompt.source, index * group, codec, prompt.slab, cell),
                matrices=own,
            )

    return f"encode: {tokens} tokens: {clock.measure([launch], repeats=5):.0f} us per layer"
