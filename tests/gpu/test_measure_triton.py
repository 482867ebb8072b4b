"""``tests/gpu/run.sh`` without a GPU: that it runs, checks before it measures, and refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("run.sh")


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    variables = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [str(SCRIPT), *options],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_checks_then_measures_under_the_interpreter() -> None:
    result = run("--tiny", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    checks, _, table = result.stdout.partition("measurements\n")
    assert checks.count("attention D=") == 3
    assert checks.count("bits the same") == 3
    assert checks.count("as it is timed: error") == 2
    rows = [line.split() for line in table.splitlines() if line.split()[1:3] == ["2", "4"]]
    assert [row[3] for row in rows] == ["100%", "50%", "25%", "10%"] * 2  # as measured, at the end
    assert all(float(number) > 0 for row in rows for number in (row[4], row[7], row[9]))
    assert table.count("clusters, threshold") == 4
    # checked before, and measured last and at the end
    for what in ("window scores D=", "counts and keys the same", "bytes the same"):
        assert checks.count(what) == 1
    for what in ("scores by 4 queries", "select a quarter and merge", "encode: 32 tokens"):
        assert table.count(what) == 2
    assert table.count("codes, ") == 4
    for name in ("paged", "with bias"):
        peers = [line for line in table.splitlines() if f"xformers split-K {name}" in line]
        assert [float(line.split()[-1]) > 0 for line in peers] == [True] * 2


@pytest.mark.slow
def test_a_wrong_kernel_is_not_measured() -> None:
    code = (
        "import runpy, sys, torch\n"
        "from kvcompress_kernels.segment_attention import triton as kernel\n"
        "right = kernel.segment_attention\n"
        "def wrong(query, output, *rest, **options):\n"
        "    right(query, output, *rest, **options)\n"
        "    output[..., 0] += 1\n"
        "kernel.segment_attention = wrong\n"
        "sys.argv = ['measure.py', '--tiny']\n"
        f"runpy.run_path({str(SCRIPT.with_name('measure.py'))!r}, run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAILED, nothing is measured" in result.stdout
    assert "measurements" not in result.stdout


def test_without_a_device_it_says_so() -> None:
    result = run(CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "no CUDA device" in result.stdout
