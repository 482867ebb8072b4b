"""Ahead-of-time compilation of the Triton kernels: what it covers, and that it notices faults."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

triton_aot: Any = pytest.importorskip("kvcompress_kernels.triton_aot")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled under Triton's interpreter", allow_module_level=True)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcompress_kernels.triton_aot", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def decode_job() -> Any:
    return next(
        job
        for job in triton_aot.jobs()
        if job.label == "decode" and job.shape.name == "llama-3.1-8b" and job.block_size == 16
    )


def test_the_configurations_cover_what_is_supported() -> None:
    jobs = list(triton_aot.jobs())
    decode = [job for job in jobs if job.is_decode]
    assert {job.shape.head_size for job in decode} == {64, 80, 96, 112, 128, 192, 256}
    assert {1, 4, 7, 8, 12, 16} == {job.shape.ratio for job in decode}
    assert {job.dtype for job in decode} == {"bf16", "fp16"}
    for job in jobs:
        assert set(job.kernel.arg_names) == {*job.types, *job.constants}
    labels = {job.label for job in jobs}
    assert labels == {"decode", "decode unsplit", "long query", "reduce", "merge"} | {
        f"assign {chunk}" for chunk in triton_aot.CHUNKS
    }


@pytest.mark.parametrize("arch", triton_aot.ARCHITECTURES)
def test_decode_does_not_spill(arch: int) -> None:
    usage = triton_aot.compile_job(decode_job(), arch)
    assert usage.faults() == []
    assert 32 <= usage.registers <= 255
    assert usage.shared >= 2 * 64 * 128 * 2  # a tile of keys and one of values
    assert usage.programs >= 2


def test_a_spill_is_a_fault() -> None:
    usage = triton_aot.compile_job(decode_job(), 90, maxnreg=48)
    assert usage.registers <= 48
    assert usage.spilled > 0
    assert usage.faults() == [f"{usage.spilled} bytes spilled"]


def test_too_much_shared_memory_is_a_fault() -> None:
    usage = triton_aot.Usage(decode_job(), 80, 100, 0, 170_000)
    assert usage.faults() == ["shared memory above 166912 bytes"]


def test_the_script_prints_a_table() -> None:
    result = run("--kernel", "reduce", "--shape", "llama-3.1-8b", "--dtype", "bf16", "--arch", "80")
    assert result.returncode == 0, result.stderr
    header, row, summary = result.stdout.splitlines()
    assert header.split()[:7] == ["kernel", "shape", "D", "ratio", "N", "type", "sm"]
    assert row.split()[:7] == ["reduce", "llama-3.1-8b", "128", "4", "16", "bf16", "80"]
    assert summary.startswith("1 kernels compiled with Triton")


def test_the_script_refuses_a_selection_of_nothing() -> None:
    result = run("--kernel", "nonesuch")
    assert result.returncode == 2
    assert "no kernel is left" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_every_production_configuration() -> None:
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
