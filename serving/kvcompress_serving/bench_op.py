"""Times `segment_attention` against vLLM's own CPU attention kernel at the same length.

``python -m kvcompress_serving.bench_op [--out FILE]``. Both kernels run in one process and take
turns, on the same number of threads, each bound to a core, under the OpenMP runtime that vLLM's
CPU worker preloads. Ours reads entries of compressed segments with their biases, vLLM's reads a
plain prompt.
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
from typing import Any, Literal

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# cores of the restarted process, where a bound main thread no longer sees them itself
_BOUND = "KVCOMPRESS_BENCH_BOUND"
# largest tolerated difference from the reference, for values drawn from a standard normal
TOLERANCE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}
# median over fastest tenth beyond which the medians are not to be trusted
MAX_DISTURBANCE = 1.25


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
    arguments = parser.parse_args(argv)
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


def check(workload: Workload, tolerance: float) -> float:
    """Largest difference of ours from the reference and, without state, from vLLM's kernel.

    Raises:
        SystemExit: it exceeds ``tolerance``.
    """
    layer = workload.layers // 2
    error = 0.0
    for ours, theirs in (
        ((workload.run_ours, layer), (workload.run_ours, layer, "reference")),
        ((workload.run_ours_stateless, layer), (workload.run_stock, layer)),
    ):
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


def measure(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contender and of plain memory traffic, round by round."""
    # as much as the kernels read, fresh memory each round like the layers of the pool
    width = workload.bytes_read // 4
    memory = torch.zeros(4, width, dtype=torch.float32)
    target = torch.zeros(width, dtype=torch.float32)
    times: dict[str, list[float]] = {"ours": [], "vllm": [], "read": [], "copy": []}
    for i in range(rounds + 3):
        layer = i % workload.layers
        sample = {
            "ours": milliseconds(workload.run_ours, layer),
            "vllm": milliseconds(workload.run_stock, layer),
            "read": milliseconds(memory[i % 4].sum),
            "copy": milliseconds(target.copy_, memory[i % 4]),
        }
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
    error = check(workload, TOLERANCE[arguments.dtype])
    times = measure(workload, arguments.rounds)
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
    for name in ("read", "copy"):
        print(f"{'plain ' + name:42}{result[f'{name}_gb_s']:8.1f}")
    print(
        f"ratio {result['ratio_vs_vllm']:.2f} of the medians, {result['ratio_quiet']:.2f} of the "
        f"fastest tenth (larger is better); largest error {result['max_error']:.2g}"
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
