"""Times our attention kernels against vLLM's own CPU attention kernel at the same length.

``python -m kvcompress_serving.bench_op [--out FILE]``. All kernels run in one process and take
turns, on the same number of threads, each bound to a core, under the OpenMP runtime that vLLM's
CPU worker preloads. Ours reads entries of compressed segments with their biases, and coded rows of
about 2.5 bits per number with groups of KV heads of several sizes; vLLM's reads a plain prompt.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from kvcompress_kernels.code_format import Counts, GroupCodec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# cores of the restarted process, where a bound main thread no longer sees them itself
_BOUND = "KVCOMPRESS_BENCH_BOUND"
# largest tolerated difference from the reference, for values drawn from a standard normal
TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}
# median over fastest tenth beyond which the medians are not to be trusted
MAX_DISTURBANCE = 1.25
# channels by width of a group of 192 numbers: 2.5 bits per number with all that a row has
KEY_COUNTS = (4, 60, 70, 40)
VALUE_COUNTS = (0, 60, 80, 40)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvcompress_serving.bench_op", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/op.json"))
    parser.add_argument("--batch", type=int, default=8, help="rows, one query each")
    parser.add_argument("--entries", type=int, default=8192, help="entries of a row per head")
    parser.add_argument("--num-layers", type=int, default=30)
    parser.add_argument("--num-kv-heads", type=int, default=3)
    parser.add_argument("--gqa-ratio", type=int, default=3, help="query heads per KV head")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--group-sizes",
        type=int,
        nargs="*",
        help="KV heads that share a transform of coded rows; 1 and all up to 4, if not given",
    )
    arguments = parser.parse_args(argv)
    if arguments.group_sizes is None:
        whole = arguments.num_kv_heads if arguments.num_kv_heads <= 4 else 2
        arguments.group_sizes = sorted({1, whole})
    if wrong := [g for g in arguments.group_sizes if g < 1 or arguments.num_kv_heads % g]:
        parser.error(f"--group-sizes: {wrong} do not divide --num-kv-heads")
    if arguments.entries % arguments.block_size:
        parser.error("--entries must be a multiple of --block-size")
    return arguments


def find_libiomp() -> str | None:
    """The OpenMP runtime that vLLM's CPU worker preloads, if this environment has it."""
    path = Path(sys.prefix) / "lib" / "libiomp5.so"
    return str(path) if path.exists() else None


def restart_bound(threads: int) -> None:
    """Run this program anew with the OpenMP runtime preloaded and its threads bound to cores."""
    if _BOUND in os.environ:
        return
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:threads]]
    if len(cores) < threads:
        raise SystemExit(f"--threads {threads}: this process may use {len(cores)} cores only")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), _BOUND: ",".join(cores)}
    if library := find_libiomp():
        environment["LD_PRELOAD"] = f"{library}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
        # not OMP_PROC_BIND: torch's own libgomp, loaded as well, would obey it first and leave
        # the preloaded runtime a single core
        environment["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{','.join(cores)}]"
    else:
        environment["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in cores)
        environment["OMP_PROC_BIND"] = "close"
    command = [sys.executable, "-m", "kvcompress_serving.bench_op", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


class Workload:
    """One pool of ``num_layers`` layers that both kernels read.

    The pool is ``[L, B, H, N, 2 * D]``. As vLLM reads it, a row is a prompt of ``entries`` tokens;
    as ours reads it, the same blocks are a slab of segments of ``entries`` entries for each layer
    and head, followed by a raw tail of one token in a block of its own.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        a = arguments
        generator = torch.Generator().manual_seed(0)
        self.layers = a.num_layers
        self.scale = a.head_size**-0.5
        self.num_kv_heads = a.num_kv_heads
        self.dtype = DTYPES[a.dtype]
        blocks_per_row = a.entries // a.block_size
        num_blocks = a.batch * (blocks_per_row + 1) + 1
        cell = (a.num_kv_heads, a.block_size, 2 * a.head_size)
        one_layer = torch.randn(num_blocks, *cell, generator=generator).to(self.dtype)
        self.kv_cache = torch.empty(a.num_layers, num_blocks, *cell, dtype=self.dtype)
        for layer in range(a.num_layers):
            self.kv_cache[layer] = one_layer
        shape = (num_blocks, a.num_layers, a.num_kv_heads, a.block_size)
        self.bias = torch.randn(shape, generator=generator)
        num_heads = a.num_kv_heads * a.gqa_ratio
        self.query = torch.randn(a.batch, num_heads, a.head_size, generator=generator)
        self.query = self.query.to(self.dtype)
        self.output = torch.zeros_like(self.query)
        order = torch.randperm(num_blocks - 1, generator=generator)[: a.batch * blocks_per_row]
        free = torch.ones(num_blocks, dtype=torch.bool)
        free[order] = False
        tails = free.nonzero()[: a.batch]
        self.block_table = torch.cat([order.view(a.batch, -1), tails], dim=1).int()
        self.query_start_loc = torch.arange(a.batch + 1, dtype=torch.int32)
        self.rows = torch.arange(a.batch, dtype=torch.int32)
        self.seq_lens = torch.full((a.batch,), a.entries + 1, dtype=torch.int32)
        self.stock_seq_lens = torch.full((a.batch,), a.entries, dtype=torch.int32)
        self.slot_of_block = torch.zeros(num_blocks, dtype=torch.int32)
        self.slot_of_block[self.block_table[:, 0].long()] = self.rows + 1
        self.stateless = torch.zeros(num_blocks, dtype=torch.int32)
        self.gap_end = torch.full((a.batch + 1,), a.entries, dtype=torch.int32)
        cells = torch.arange(a.num_layers * a.num_kv_heads, dtype=torch.int32) * blocks_per_row
        state = (a.batch + 1, a.num_layers, a.num_kv_heads)
        self.first_cell = cells.view(1, *state[1:]).expand(state).contiguous()
        self.num_entries = torch.full(state, a.entries, dtype=torch.int32)
        element = self.kv_cache.element_size()
        self.bytes_read = a.batch * a.num_kv_heads * a.entries * 2 * a.head_size * element
        self._prepare_stock(num_heads, a)

    def _prepare_stock(self, num_heads: int, a: argparse.Namespace) -> None:
        from vllm import _custom_ops

        self._custom_ops = _custom_ops
        self.isa = "vec" if a.block_size % 32 == 0 and a.head_size % 32 == 0 else "vec16"
        self.scheduler_metadata = _custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=a.batch,
            num_heads=num_heads,
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_size,
            seq_lens=self.stock_seq_lens,
            dtype=self.dtype,
            query_start_loc=self.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

    def run_ours(self, layer: int, impl: Literal["cpu", "reference"] = "cpu") -> None:
        from kvcompress_kernels.segment_attention import segment_attention

        segment_attention(
            self.query,
            self.output,
            self.kv_cache,
            self.bias,
            layer,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.rows,
            self.slot_of_block,
            self.gap_end,
            self.first_cell,
            self.num_entries,
            self.scale,
            impl=impl,
        )

    def run_ours_stateless(self, layer: int) -> None:
        """Ours over the plain prompt that `run_stock` reads."""
        with_state = self.slot_of_block, self.seq_lens
        self.slot_of_block, self.seq_lens = self.stateless, self.stock_seq_lens
        try:
            self.run_ours(layer)
        finally:
            self.slot_of_block, self.seq_lens = with_state

    def run_stock(self, layer: int) -> None:
        pool = self.kv_cache[layer]
        blocks, heads, slots, width = pool.shape
        key_cache, value_cache = pool.view(blocks, heads, 2 * slots, width // 2).chunk(2, dim=2)
        self._custom_ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=self.output,
            query_start_loc=self.query_start_loc,
            seq_lens=self.stock_seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.block_table,
            softcap=0,
            scheduler_metadata=self.scheduler_metadata,
            s_aux=None,
        )

    def result_of(self, run: Callable[..., None], *arguments: object) -> torch.Tensor:
        self.output.fill_(float("nan"))
        run(*arguments)
        return self.output.float()


class CodedWorkload:
    """The batch of a `Workload` with coded rows in the place of its entries.

    A row is ``entries`` coded rows for each layer and group of KV heads, and a raw tail of one
    token in a block of its own.
    """

    def __init__(self, arguments: argparse.Namespace, base: Workload, group_size: int) -> None:
        from kvcompress_kernels.code_rows import code_rows
        from kvcompress_kernels.coded_attention import LayerCodecs

        a = arguments
        self.base, self.group_size = base, group_size
        generator = torch.Generator().manual_seed(1)
        codec = _random_codec(group_size, a.head_size, generator)
        num_groups = a.num_kv_heads // group_size
        self.codecs = LayerCodecs([codec] * num_groups, a.num_kv_heads, base.dtype)
        cell_bytes = a.block_size * 2 * a.head_size * base.dtype.itemsize
        segment = -(-a.entries // codec.layout.rows_per_cell(cell_bytes))
        slab = -(-segment * num_groups // a.num_kv_heads)  # blocks of a row
        num_blocks = a.batch * (slab + 1) + 1
        shape = (a.num_layers, num_blocks, a.num_kv_heads, a.block_size, 2 * a.head_size)
        self.kv_cache = torch.zeros(shape, dtype=base.dtype)
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        self.block_table = order.view(a.batch, slab + 1).int()
        cells = torch.arange(a.num_layers * num_groups, dtype=torch.int32) * segment
        state = (a.batch + 1, a.num_layers, num_groups)
        self.first_cell = cells.view(1, *state[1:]).expand(state).contiguous()
        self.num_rows = torch.full(state, a.entries, dtype=torch.int32)
        z_keys = torch.randn(a.entries, codec.keys.num_channels, generator=generator)
        z_values = torch.randn(a.entries, codec.values.num_channels, generator=generator)
        for row in range(a.batch):
            for cell in cells.tolist():
                code_rows(
                    z_keys,
                    z_values,
                    None,
                    codec.layout,
                    self.kv_cache,
                    self.block_table[row],
                    cell,
                )
        tail = torch.randn(a.batch, *shape[2:], generator=generator).to(base.dtype)
        self.kv_cache[:, self.block_table[:, -1].long()] = tail
        self.bias = torch.zeros(num_blocks, *shape[:1], *shape[2:4])
        self.slot_of_block = torch.zeros(num_blocks, dtype=torch.int32)
        self.slot_of_block[self.block_table[:, 0].long()] = base.rows + 1
        self.gap_end = torch.full((a.batch + 1,), slab * a.block_size, dtype=torch.int32)
        self.seq_lens = torch.full((a.batch,), slab * a.block_size + 1, dtype=torch.int32)
        self.no_entries = torch.zeros(a.batch + 1, a.num_layers, a.num_kv_heads, dtype=torch.int32)
        self.partial_output = torch.zeros(base.query.shape)
        self.partial_log_sum = torch.zeros(base.query.shape[:2])
        self.bytes_per_token = num_groups * codec.layout.row_bits / 8
        self.bits_per_number = codec.layout.row_bits / (2 * group_size * a.head_size)

    def run(self, layer: int, impl: Literal["cpu", "reference"] = "cpu") -> None:
        from kvcompress_kernels.coded_attention import coded_attention
        from kvcompress_kernels.segment_attention import segment_attention

        base = self.base
        coded_attention(
            base.query,
            self.partial_output,
            self.partial_log_sum,
            self.kv_cache,
            layer,
            self.block_table,
            base.query_start_loc,
            base.rows,
            self.slot_of_block,
            self.first_cell,
            self.num_rows,
            self.codecs,
            base.scale,
            impl=impl,
        )
        segment_attention(
            base.query,
            base.output,
            self.kv_cache,
            self.bias,
            layer,
            self.block_table,
            self.seq_lens,
            base.query_start_loc,
            base.rows,
            self.slot_of_block,
            self.gap_end,
            self.no_entries,
            self.no_entries,
            base.scale,
            partial_output=self.partial_output,
            partial_log_sum=self.partial_log_sum,
            impl=impl,
        )


def _random_codec(group_size: int, head_size: int, generator: torch.Generator) -> GroupCodec:
    from kvcompress_kernels.code_format import GroupCodec, SideCodec

    size = group_size * head_size

    def side(shares: Counts) -> SideCodec:
        eight, four, two, one = (round(share * size / 192) for share in shares)
        counts = (eight, four, two, one)
        channels = sum(counts)
        decode = torch.randn(channels, size, generator=generator) / size**0.5
        # small, so that the tolerance suits outputs of all kernels
        mean = 0.02 * torch.randn(size, generator=generator)
        return SideCodec(counts, mean, decode.T.contiguous(), decode)

    return GroupCodec(side(KEY_COUNTS), side(VALUE_COUNTS))


def check(workload: Workload, coded: list[CodedWorkload], tolerance: float) -> float:
    """Largest difference of ours from the reference and, without state, from vLLM's kernel.

    Raises:
        SystemExit: it exceeds ``tolerance``.
    """
    layer = workload.layers // 2
    pairs: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
        ((workload.run_ours, layer), (workload.run_ours, layer, "reference")),
        ((workload.run_ours_stateless, layer), (workload.run_stock, layer)),
    ]
    pairs += [((other.run, layer), (other.run, layer, "reference")) for other in coded]
    error = 0.0
    for ours, theirs in pairs:
        difference = workload.result_of(*ours) - workload.result_of(*theirs)
        error = max(error, difference.abs().nan_to_num(nan=float("inf")).max().item())
    if error > tolerance:
        raise SystemExit(
            f"no ratio: the result is off by {error:.3g}, tolerated are {tolerance:.3g}"
        )
    return error


def milliseconds(run: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    run(*arguments)
    return (time.perf_counter() - start) * 1e3


def measure(workload: Workload, coded: list[CodedWorkload], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contender and of plain memory traffic, round by round."""
    # as much as the kernels read, fresh memory each round like the layers of the pool
    width = workload.bytes_read // 4
    memory = torch.zeros(4, width, dtype=torch.float32)
    target = torch.zeros(width, dtype=torch.float32)
    times: dict[str, list[float]] = {"ours": [], "vllm": [], "read": [], "copy": []}
    times.update({f"coded_{other.group_size}": [] for other in coded})
    for i in range(rounds + 3):
        layer = i % workload.layers
        sample = {
            "ours": milliseconds(workload.run_ours, layer),
            "vllm": milliseconds(workload.run_stock, layer),
            "read": milliseconds(memory[i % 4].sum),
            "copy": milliseconds(target.copy_, memory[i % 4]),
        }
        for other in coded:
            sample[f"coded_{other.group_size}"] = milliseconds(other.run, layer)
        if i >= 3:  # the first rounds warm up threads and pages
            for name, value in sample.items():
                times[name].append(value)
    return times


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    import vllm

    from kvcompress_kernels import build

    torch.set_num_threads(arguments.threads)
    workload = Workload(arguments)
    coded = [CodedWorkload(arguments, workload, size) for size in arguments.group_sizes]
    error = check(workload, coded, TOLERANCE[arguments.dtype])
    times = measure(workload, coded, arguments.rounds)
    median = {name: statistics.median(values) for name, values in times.items()}
    # what the machine does when nothing else runs on it
    quiet = {name: statistics.quantiles(values, n=10)[0] for name, values in times.items()}
    gigabytes = workload.bytes_read / 1e9
    return {
        "ratio_vs_vllm": median["vllm"] / median["ours"],
        "ratio_quiet": quiet["vllm"] / quiet["ours"],
        "disturbance": max(median[name] / quiet[name] for name in ("ours", "vllm")),
        "ours_ms": median["ours"],
        "vllm_ms": median["vllm"],
        "ours_quiet_ms": quiet["ours"],
        "vllm_quiet_ms": quiet["vllm"],
        "ours_gb_s": gigabytes / median["ours"] * 1e3,
        "vllm_gb_s": gigabytes / median["vllm"] * 1e3,
        "read_gb_s": gigabytes / median["read"] * 1e3,
        "copy_gb_s": 2 * gigabytes / median["copy"] * 1e3,
        "coded": [
            {
                "group_size": other.group_size,
                "ratio_vs_vllm": median["vllm"] / median[name],
                "ratio_vs_ours": median["ours"] / median[name],
                "ratio_quiet_vs_vllm": quiet["vllm"] / quiet[name],
                "ratio_quiet_vs_ours": quiet["ours"] / quiet[name],
                "ms": median[name],
                "quiet_ms": quiet[name],
                "bits_per_number": other.bits_per_number,
                "bytes_per_token": other.bytes_per_token,
            }
            for other in coded
            for name in [f"coded_{other.group_size}"]
        ],
        "max_error": error,
        "threads": torch.get_num_threads(),
        "openmp": "libiomp5" if "libiomp5" in os.environ.get("LD_PRELOAD", "") else "libgomp",
        "isa": build.cpu_capability(),
        "vllm_isa": workload.isa,
        "batch": arguments.batch,
        "entries": arguments.entries,
        "num_layers": arguments.num_layers,
        "num_kv_heads": arguments.num_kv_heads,
        "num_heads": arguments.num_kv_heads * arguments.gqa_ratio,
        "head_size": arguments.head_size,
        "block_size": arguments.block_size,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "cpu": cpu_name(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    arguments = parse_arguments()
    restart_bound(arguments.threads)
    result = report(arguments)
    print(f"{'':18}{'median ms':>12}{'quiet ms':>12}{'GB/s':>8}")
    for name, label in (("ours", "segment_attention"), ("vllm", "vLLM")):
        median, quiet = result[f"{name}_ms"], result[f"{name}_quiet_ms"]
        print(f"{label:18}{median:12.3f}{quiet:12.3f}{result[f'{name}_gb_s']:8.1f}")
    for row in result["coded"]:
        label = f"coded, groups of {row['group_size']}"
        read = row["bytes_per_token"] * result["batch"] * result["entries"] / row["ms"] / 1e6
        print(f"{label:18}{row['ms']:12.3f}{row['quiet_ms']:12.3f}{read:8.1f}")
    for name in ("read", "copy"):
        print(f"{'plain ' + name:42}{result[f'{name}_gb_s']:8.1f}")
    print(
        f"ratio {result['ratio_vs_vllm']:.2f} of the medians, {result['ratio_quiet']:.2f} of the "
        f"fastest tenth (larger is better); largest error {result['max_error']:.2g}"
    )
    for row in result["coded"]:
        print(
            f"coded at {row['bits_per_number']:.2f} bits in groups of {row['group_size']}: ratio "
            f"{row['ratio_vs_vllm']:.2f} ({row['ratio_quiet_vs_vllm']:.2f}) of vLLM's, "
            f"{row['ratio_vs_ours']:.2f} ({row['ratio_quiet_vs_ours']:.2f}) of ours on raw entries"
        )
    if result["disturbance"] > MAX_DISTURBANCE:
        print(
            f"medians are {result['disturbance']:.1f} times the fastest tenth: something else uses "
            "these cores, and the medians mean little",
            file=sys.stderr,
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
