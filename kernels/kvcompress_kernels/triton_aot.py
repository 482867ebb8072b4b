"""Compiles the Triton kernels ahead of time: ``python -m kvcompress_kernels.triton_aot``; no GPU.

Every kernel is compiled in every production configuration for sm_80 (A100), sm_90 (H100, H200) and
sm_100 (B200), with the compiler and the tools that come with Triton. The table has for each binary
its registers, the bytes that spill from them (the stack frame, which these kernels use for nothing
else), its shared memory, and how many of its programs fit a multiprocessor. Exits with 1 if the
decode kernel spills or a kernel needs more shared memory than a program may have.

What is compiled is what is launched: sizes come from the functions that the launches use. Shapes
are those of models that are served with vLLM, but for head size 112, for which none was chosen.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcompress_kernels.cluster_merge import triton as cluster_merge
from kvcompress_kernels.code_rows import triton as code_rows
from kvcompress_kernels.coded_attention import triton as coded_attention
from kvcompress_kernels.segment_attention import triton as segment_attention
from kvcompress_kernels.select_merge import triton as select_merge
from kvcompress_kernels.window_scores import triton as window_scores

ARCHITECTURES = (80, 90, 100)
# CUDA C++ Programming Guide, technical specifications per compute capability: bytes of shared
# memory that a program may have and that a multiprocessor has
_PROGRAM_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_MULTIPROCESSOR_SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
_REGISTERS, _THREADS, _PROGRAMS, _RESERVED_SHARED = 65536, 2048, 32, 1024

_DTYPES = {"bf16": "*bf16", "fp16": "*fp16"}
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """Attention of one model on one rank; ``ratio`` query heads share a KV head."""

    name: str
    num_layers: int
    num_kv_heads: int
    ratio: int
    head_size: int


SHAPES = (
    Shape("qwen2.5-0.5b", 24, 2, 7, 64),
    Shape("phi-2", 32, 32, 1, 80),
    Shape("phi-3-mini", 32, 32, 1, 96),
    Shape("head-size-112", 24, 4, 4, 112),
    Shape("llama-3.1-8b", 32, 8, 4, 128),
    Shape("qwen2.5-7b", 28, 4, 7, 128),
    Shape("llama-3.1-70b/tp8", 80, 1, 8, 128),
    Shape("glm-4-9b", 40, 2, 16, 128),
    Shape("nemotron-4-340b", 96, 8, 12, 192),
    Shape("gemma-7b", 28, 16, 1, 256),
)
BLOCK_SIZES = (16, 64)
NUM_SPLITS = 16
LONG_QUERY = 512
# config `max_chunk`: its default and its largest value
CHUNKS = (64, 128)
# config `observed_queries`: its default and its largest value
NUM_QUERIES = (32, 256)
# numbers of a group that calibration takes for one transform, at most
LARGEST_GROUP = 512


@dataclass(frozen=True)
class Job:
    """One kernel in one configuration."""

    label: str
    kernel: Any
    shape: Shape
    block_size: int
    dtype: str
    types: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every generated token waits for it."""
        return self.label.startswith(("decode", "coded"))


def jobs() -> Iterator[Job]:
    """All production configurations; architectures apart."""
    configurations = list(itertools.product(_DTYPES, SHAPES, BLOCK_SIZES))
    for dtype, shape, block_size in configurations:
        yield from _attention_jobs(shape, block_size, dtype)
    for dtype, shape, block_size in configurations:
        yield from _cluster_jobs(shape, block_size, dtype)
    # run once per prompt: one type and one block size say enough
    for shape in SHAPES:
        yield from _selection_jobs(shape, BLOCK_SIZES[0], "bf16")
        yield from _encode_jobs(shape, "bf16")
    for dtype, shape in itertools.product(_DTYPES, SHAPES):
        for group_size in sorted({1, _largest_group(shape)}):
            yield from _coded_attention_jobs(shape, dtype, group_size)


def _attention_jobs(shape: Shape, block_size: int, dtype: str) -> Iterator[Job]:
    element = _DTYPES[dtype]
    block_d = max(16, triton.next_power_of_2(shape.head_size))
    kinds = [
        ("decode", shape.ratio, NUM_SPLITS, False),
        ("decode unsplit", shape.ratio, 1, False),
        ("decode after codes", shape.ratio, NUM_SPLITS, True),
        ("decode unsplit after codes", shape.ratio, 1, True),
        ("long query", shape.ratio * LONG_QUERY, 1, False),
    ]
    for label, num_lanes, num_splits, has_partial in kinds:
        tiling = segment_attention.choose_tiling(shape.head_size, num_lanes, num_splits)
        types: dict[str, Any] = {
            **dict.fromkeys(("query_ptr", "output_ptr", "key_ptr", "value_ptr"), element),
            **dict.fromkeys(("bias_ptr", "partial_ptr", "stats_ptr"), "*fp32"),
            **dict.fromkeys(("partial_output_ptr", "partial_log_sum_ptr"), "*fp32"),
            **dict.fromkeys(
                (
                    "block_table_ptr",
                    "seq_lens_ptr",
                    "query_start_ptr",
                    "rows_ptr",
                    "slot_of_block_ptr",
                    "gap_end_ptr",
                    "first_cell_ptr",
                    "num_entries_ptr",
                ),
                "*i32",
            ),
            "scale": "fp32",
            "layer": "i32",
            "query_tiles": "i32",
            "table_stride": "i32",
            "QUERY_STRIDES": ("i32", "i32"),
            "OUTPUT_STRIDES": ("i32", "i32"),
            "CACHE_STRIDES": ("i64", "i32", "i32", "i32"),
            "BIAS_STRIDES": ("i32", "i32", "i32"),
            "PARTIAL_STRIDES": ("i32", "i32"),
            "LOG_SUM_STRIDES": ("i32", "i32"),
        }
        constants = {
            "NUM_LAYERS": shape.num_layers,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "RATIO": shape.ratio,
            "BLOCK_SIZE": block_size,
            "HEAD_SIZE": shape.head_size,
            "BLOCK_D": block_d,
            "BLOCK_M": tiling.block_m,
            "TILE": tiling.tile,
            "NUM_SPLITS": num_splits,
            "HAS_PARTIAL": has_partial,
        }
        yield Job(
            label,
            segment_attention.attend_kernel,
            shape,
            block_size,
            dtype,
            types,
            constants,
            tiling.num_warps,
            tiling.num_stages,
            tiling.max_registers,
        )
    if block_size == BLOCK_SIZES[0]:
        yield Job(
            "reduce",
            segment_attention.reduce_kernel,
            shape,
            block_size,
            dtype,
            {
                "output_ptr": element,
                "partial_ptr": "*fp32",
                "stats_ptr": "*fp32",
                "query_start_ptr": "*i32",
                "rows_ptr": "*i32",
                "max_query_len": "i32",
                "OUTPUT_STRIDES": ("i32", "i32"),
            },
            {
                "NUM_HEADS": shape.num_kv_heads * shape.ratio,
                "HEAD_SIZE": shape.head_size,
                "BLOCK_D": block_d,
                "NUM_SPLITS": NUM_SPLITS,
                "CHUNK": segment_attention.reduce_chunk(NUM_SPLITS),
            },
            num_warps=4,
            num_stages=3,
        )


def _cluster_jobs(shape: Shape, block_size: int, dtype: str) -> Iterator[Job]:
    element = _DTYPES[dtype]
    block_d = max(16, triton.next_power_of_2(shape.head_size))
    common = {
        "BLOCK_SIZE": block_size,
        "HEAD_SIZE": shape.head_size,
        "BLOCK_D": block_d,
    }
    pointers = ("source_ptr", "chunk_start_ptr", "chunk_length_ptr", "counts_ptr")
    for longest in CHUNKS:
        yield Job(
            f"assign {longest}",
            cluster_merge.assign_kernel,
            shape,
            block_size,
            dtype,
            {
                "key_ptr": element,
                **dict.fromkeys((*pointers, "owner_ptr", "span_ptr"), "*i32"),
                "threshold_ptr": "*fp64",
                "first_layer": "i32",
                "num_tokens": "i32",
                "CACHE_STRIDES": ("i64", "i32", "i32", "i32"),
            },
            {**common, "MAX_LENGTH": longest, "EVERYTHING": False, "COUNT_ONLY": False},
            num_warps=cluster_merge.assign_warps(longest, block_d),
            num_stages=3,
        )
    indices = ("source_ptr", "slab_ptr", "owner_ptr", "span_ptr", "entry_ptr", "first_cell_ptr")
    yield Job(
        "merge",
        cluster_merge.merge_kernel,
        shape,
        block_size,
        dtype,
        {
            "key_ptr": element,
            "value_ptr": element,
            "bias_ptr": "*fp32",
            **dict.fromkeys((*indices, "next_cell_ptr"), "*i32"),
            "log_ptr": "*fp32",
            "first_layer": "i32",
            "num_tokens": "i32",
            "num_cells": "i32",
            "CACHE_STRIDES": ("i64", "i32", "i32", "i32"),
            "BIAS_STRIDES": ("i32", "i32", "i32"),
        },
        {
            **common,
            "NUM_LAYERS": shape.num_layers,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "TOKENS": cluster_merge.MERGE_TOKENS,
        },
        num_warps=4,
        num_stages=3,
    )


def _selection_jobs(shape: Shape, block_size: int, dtype: str) -> Iterator[Job]:
    element = _DTYPES[dtype]
    common = {
        "BLOCK_SIZE": block_size,
        "HEAD_SIZE": shape.head_size,
        "BLOCK_D": max(16, triton.next_power_of_2(shape.head_size)),
    }
    strides = {"CACHE_STRIDES": ("i64", "i32", "i32", "i32")}
    counts = ("num_tokens", "num_scored", "first_position", "num_queries")
    for num_queries in NUM_QUERIES:
        block_m, tile = window_scores.choose_tiling(shape.head_size, shape.ratio * num_queries)
        constants = {
            **common,
            "RATIO": shape.ratio,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "BLOCK_M": block_m,
            "TILE": tile,
        }
        for label, kernel, floats in (
            ("sums", window_scores.sums_kernel, ("stats_ptr",)),
            ("mass", window_scores.mass_kernel, ("log_sum_ptr", "mass_ptr", "score_ptr")),
        ):
            types: dict[str, Any] = {
                **dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), element),
                **dict.fromkeys(floats, "*fp32"),
                "table_ptr": "*i32",
                **dict.fromkeys(counts, "i32"),
                "scale": "fp32",
                **strides,
            }
            yield _job(
                f"{label} {num_queries}", kernel, shape, block_size, dtype, types, constants, 4
            )
    pointers = {
        **dict.fromkeys(("key_ptr", "value_ptr"), element),
        **dict.fromkeys(("bias_ptr", "mass_ptr", "weight_ptr"), "*fp32"),
        "kept_ptr": "*u8",
        **dict.fromkeys(("source_ptr", "slab_ptr", "target_ptr", "entry_ptr"), "*i32"),
        **dict.fromkeys(("first_cell_ptr", "next_cell_ptr"), "*i32"),
    }
    numbers = ("first_layer", "num_tokens", "bucket", "tiles_per_bucket", "num_cells")
    types = {
        **pointers,
        **dict.fromkeys(numbers, "i32"),
        "alpha": "fp32",
        **strides,
        "BIAS_STRIDES": ("i32", "i32", "i32"),
    }
    route = {
        **common, "TOKENS": select_merge.ROUTE_TOKENS, "CANDIDATES": select_merge.CANDIDATES
    }  # fmt: skip
    yield _job("route", select_merge.route_kernel, shape, block_size, dtype, types, route, 2)
    write = {
        **common,
        "NUM_LAYERS": shape.num_layers,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "TOKENS": select_merge.MERGE_TOKENS,
        "MERGE": True,
    }
    yield _job("write", select_merge.merge_kernel, shape, block_size, dtype, types, write, 4)


_BYTE_STRIDES = ("i64",) * 5


def _cells(shape: Shape) -> dict[str, int]:
    """How kernels find bytes of cells: blocks may have any size."""
    half = 2 * shape.head_size
    return {"NUM_LAYERS": shape.num_layers, "NUM_KV_HEADS": shape.num_kv_heads, "HALF": half}


def _encode_jobs(shape: Shape, dtype: str) -> Iterator[Job]:
    block_size = BLOCK_SIZES[0]
    numbers = ("num_rows", "rows_per_cell", "first_cell", "value_bytes", "z_stride")
    encode: dict[str, Any] = {
        **dict.fromkeys(("z_ptr", "z_keys_ptr", "z_values_ptr", "bias_ptr"), "*fp32"),
        **dict.fromkeys(("numbers_ptr", "slab_ptr", "tiles_ptr"), "*i32"),
        "threshold_ptr": "*fp32",
        "scales_ptr": "*fp16",
        **dict.fromkeys((*numbers, "key_stride", "value_stride"), "i32"),
        "CACHE_STRIDES": _BYTE_STRIDES,
    }
    rows = {**_cells(shape), "ROWS": code_rows.ROWS}
    for label, kernel, constants in (
        ("scales", code_rows.scales_kernel, {**rows, "CHUNK": 64}),
        ("key planes", code_rows.keys_kernel, {**rows, "TILE": code_rows.TILE}),
        ("value rows", code_rows.values_kernel, {**rows, "TILE": code_rows.TILE}),
    ):
        types = {**encode, "cache_ptr": "*fp16" if label == "scales" else "*u8"}
        yield _job(label, kernel, shape, block_size, dtype, types, constants, 4)


def _largest_group(shape: Shape) -> int:
    """KV heads that share a transform."""
    sizes = range(1, shape.num_kv_heads + 1)
    fitting = [
        n for n in sizes if shape.num_kv_heads % n == 0 and n * shape.head_size <= LARGEST_GROUP
    ]
    return max(fitting, default=1)


def _coded_attention_jobs(shape: Shape, dtype: str, group_size: int) -> Iterator[Job]:
    element, block_size = _DTYPES[dtype], BLOCK_SIZES[0]
    channels = group_size * shape.head_size
    key_tiles = triton.cdiv(channels, coded_attention.KEY_TILE) + 3
    value_width = triton.next_power_of_2(channels)
    tiling = coded_attention.choose_tiling(group_size * shape.ratio, value_width)
    floats = ("folded_ptr", "shift_ptr", "levels_ptr", "partial_ptr", "stats_ptr", "mean_ptr")
    tables = (
        *("numbers_ptr", "key_tiles_ptr", "value_channels_ptr", "block_table_ptr", "rows_ptr"),
        *("query_start_ptr", "slot_of_block_ptr", "first_cell_ptr", "num_rows_ptr"),
    )
    types: dict[str, Any] = {
        **dict.fromkeys(("query_ptr", "fold_ptr", "unfold_ptr"), element),
        **dict.fromkeys((*floats, "output_ptr", "log_sum_ptr"), "*fp32"),
        "cache_ptr": "*u8",
        "scale_ptr": "*fp16",
        **dict.fromkeys(tables, "*i32"),
        "scale": "fp32",
        **dict.fromkeys(("layer", "max_query_len", "table_stride"), "i32"),
        "BYTE_STRIDES": _BYTE_STRIDES,
        **dict.fromkeys(("QUERY_STRIDES", "OUTPUT_STRIDES", "LOG_SUM_STRIDES"), ("i32", "i32")),
    }
    attend = {
        **_cells(shape),
        "NUM_GROUPS": shape.num_kv_heads // group_size,
        "RATIO": shape.ratio,
        "KEY_TILES": key_tiles,
        "VALUE_WIDTH": value_width,
        "BLOCK_M": tiling.block_m,
        "TILE": tiling.tile,
        "KEY_TILE": coded_attention.KEY_TILE,
        "NUM_SPLITS": NUM_SPLITS,
        "DTYPE": coded_attention.DTYPES[_TORCH_DTYPES[dtype]],
    }
    yield _job(
        f"coded {group_size}",
        coded_attention.attend_kernel,
        shape,
        block_size,
        dtype,
        types,
        attend,
        tiling.num_warps,
        tiling.max_registers,
    )
    heads = {
        "RATIO": shape.ratio,
        "NUM_HEADS": shape.num_kv_heads * shape.ratio,
        "HEAD_SIZE": shape.head_size,
        "BLOCK_D": max(16, triton.next_power_of_2(shape.head_size)),
        "CHUNK": coded_attention.CHUNK,
    }
    fold = {**heads, "KEY_WIDTH": key_tiles * coded_attention.KEY_TILE}
    label = f"fold {group_size}"
    yield _job(label, coded_attention.fold_kernel, shape, block_size, dtype, types, fold, 4)
    unfold = {
        **heads, "VALUE_WIDTH": value_width, "NUM_SPLITS": NUM_SPLITS, "BLOCK_SPLITS": NUM_SPLITS
    }  # fmt: skip
    label = f"unfold {group_size}"
    yield _job(label, coded_attention.unfold_kernel, shape, block_size, dtype, types, unfold, 4)


def _job(
    label: str,
    kernel: Any,
    shape: Shape,
    block_size: int,
    dtype: str,
    types: dict[str, Any],
    constants: dict[str, Any],
    num_warps: int,
    max_registers: int | None = None,
) -> Job:
    """A job whose types are those that the kernel has of the given ones, in its order."""
    own = {name: types[name] for name in kernel.arg_names if name not in constants}
    return Job(label, kernel, shape, block_size, dtype, own, constants, num_warps, 3, max_registers)


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel; bytes."""

    job: Job
    arch: int
    registers: int
    spilled: int
    shared: int

    @property
    def programs(self) -> int:
        """Programs that fit a multiprocessor."""
        threads = 32 * self.job.num_warps
        # registers are given out to warps in units of 256
        per_warp = -(-self.registers * 32 // 256) * 256
        return min(
            _REGISTERS // (per_warp * self.job.num_warps),
            _MULTIPROCESSOR_SHARED[self.arch] // (self.shared + _RESERVED_SHARED),
            _THREADS // threads,
            _PROGRAMS,
        )

    def faults(self) -> list[str]:
        found = []
        if self.job.is_decode and self.spilled:
            found.append(f"{self.spilled} bytes spilled")
        if self.shared > _PROGRAM_SHARED[self.arch]:
            found.append(f"shared memory above {_PROGRAM_SHARED[self.arch]} bytes")
        return found


def compile_job(job: Job, arch: int, **options: Any) -> Usage:
    """Compile for ``sm_<arch>`` and read the resources from the binary.

    Args:
        options: more of Triton's compiler options, for instance ``maxnreg``.
    """
    types = {name: job.types.get(name, "constexpr") for name in job.kernel.arg_names}
    chosen = {
        "num_warps": job.num_warps,
        "num_stages": job.num_stages,
        "maxnreg": job.max_registers,
    }
    assert {name for name, kind in types.items() if kind == "constexpr"} == set(job.constants)
    compiled = triton.compile(
        ASTSource(job.kernel, types, job.constants, _divisible(types)),
        target=GPUTarget("cuda", arch, 32),
        options={**chosen, **options},
    )
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"cuobjdump: expected REG and STACK, got {listing!r}")
    return Usage(job, arch, int(found[1]), int(found[2]), compiled.metadata.shared)


def _divisible(types: dict[str, Any]) -> dict[tuple[int, ...], Any]:
    """Arguments that the launcher knows to be multiples of 16: pointers and strides."""
    sixteen = [["tt.divisibility", 16]]
    found: dict[tuple[int, ...], Any] = {}
    for index, kind in enumerate(types.values()):
        if isinstance(kind, tuple):
            found.update({(index, place): sixteen for place in range(len(kind))})
        elif kind.startswith("*"):
            found[(index,)] = sixteen
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvcompress_kernels.triton_aot", description=__doc__)
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES)
    parser.add_argument("--kernel", action="append", help="label or the first word of it")
    parser.add_argument("--shape", action="append", choices=[shape.name for shape in SHAPES])
    parser.add_argument("--dtype", action="append", choices=_DTYPES)
    parser.add_argument("--block-size", type=int, action="append", choices=BLOCK_SIZES)
    options = parser.parse_args(argv)
    if not isinstance(segment_attention.attend_kernel, triton.runtime.jit.JITFunction):
        parser.error("TRITON_INTERPRET is set: there is nothing to compile")
    chosen = [
        job
        for job in jobs()
        if (not options.kernel or {job.label, job.label.split()[0]} & set(options.kernel))
        and (not options.shape or job.shape.name in options.shape)
        and (not options.dtype or job.dtype in options.dtype)
        and (not options.block_size or job.block_size in options.block_size)
    ]
    if not chosen:
        parser.error("no kernel is left")
    write = sys.stdout.write
    write(
        f"{'kernel':<27}{'shape':<18}{'D':>4}{'ratio':>6}{'N':>4} {'type':<5}{'sm':>4}{'warps':>6}"
        f"{'regs':>6}{'spill':>6}{'shared':>8}{'limit':>8}{'per SM':>7}\n"
    )
    faulty = 0
    for job, arch in itertools.product(chosen, options.arch or ARCHITECTURES):
        usage = compile_job(job, arch)
        faults = usage.faults()
        faulty += bool(faults)
        shape = job.shape
        write(
            f"{job.label:<27}{shape.name:<18}{shape.head_size:>4}{shape.ratio:>6}"
            f"{job.block_size:>4} {job.dtype:<5}{arch:>4}{job.num_warps:>6}{usage.registers:>6}"
            f"{usage.spilled:>6}{usage.shared:>8}{_PROGRAM_SHARED[arch]:>8}{usage.programs:>7}"
            f"{'  FAULT: ' + ', '.join(faults) if faults else ''}\n"
        )
        sys.stdout.flush()
    count = len(chosen) * len(options.arch or ARCHITECTURES)
    write(f"{count} kernels compiled with Triton {triton.__version__}, {faulty} with a fault\n")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
