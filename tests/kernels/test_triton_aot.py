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
    for label in ("decode", "decode after codes", "coded 1"):
        own = [job for job in decode if job.label == label]
        assert {job.shape.head_size for job in own} == {64, 80, 96, 112, 128, 192, 256}
        assert {1, 4, 7, 8, 12, 16} == {job.shape.ratio for job in own}
        assert {job.dtype for job in own} == {"bf16", "fp16"}
    for job in jobs:
        assert set(job.kernel.arg_names) == {*job.types, *job.constants}
    labels = {job.label for job in jobs}
    groups = {1, 2, 4, 5, 6, 8}
    assert labels >= {"decode", "decode unsplit", "decode after codes", "long query", "reduce"}
    assert labels >= {f"assign {chunk}" for chunk in triton_aot.CHUNKS} | {"merge"}
    assert labels >= {f"{name} {n}" for name in ("sums", "mass") for n in triton_aot.NUM_QUERIES}
    assert labels >= {"route", "write", "scales", "key planes", "value rows"}
    assert {label for label in labels if label.startswith("coded")} <= {
        f"coded {size}" for size in groups
    }


@pytest.mark.parametrize("label", ["coded 4", "decode after codes"])
def test_attention_to_codes_does_not_spill(label: str) -> None:
    job = next(
        job
        for job in triton_aot.jobs()
        if job.label == label and job.shape.name == "llama-3.1-8b" and job.block_size == 16
    )
    usage = triton_aot.compile_job(job, 90)
    assert usage.faults() == []
    assert usage.job.is_decode


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
@pytest.mark.timeout(7200)
def test_every_production_configuration() -> None:
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
