"""Benchmarks with real servers and engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from kvcompress_serving.benchmark.cli import app
from kvcompress_serving.benchmark.results import Run, summarize
from kvcompress_serving.processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_more_requests_fit_the_pool_with_compression(model_path, tmp_path):
    pytest.importorskip("matplotlib")
    out, text = tmp_path / "memory.json", tmp_path / "memory.md"
    options = [
        *("memory", "--model", str(model_path), "--row", "semanticache"),
        *("--prompt-tokens", "1500", "--output-tokens", "96", "--concurrency", "6"),
        *("--pool-prompts", "3.4", "--rounds", "1", "--expect-compression", "required"),
        *("--out", str(out), "--markdown", str(text), "--server-flags", "--enforce-eager"),
    ]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    run = Run.load(out)
    stock, none, ours = summarize(run.measurements)
    assert (stock.row, none.row, ours.row) == ("stock", "none", "semanticache")
    for line in (stock, none):
        assert line.values["compressed"].median == 0
        assert line.values["cache_mib"] == line.values["cache_full_mib"]
        assert line.values["peak_running"].median <= 4
    assert ours.values["compressed"].median >= 3
    assert ours.values["peak_running"].median >= stock.values["peak_running"].median
    assert ours.gains["cache_mib"].median > 1.15
    assert 10 < ours.values["kept_percent"].median < 60
    assert ours.values["compress_ms"].median > 0
    assert stock.values["resident_mib"].median > 300
    # the same bytes are the same number of tokens but for blocks and the bias beside them
    tokens = [line.values["pool_tokens"].median for line in (stock, none, ours)]
    assert min(tokens) > 0.9 * max(tokens)
    assert run.provenance["model"]["name"] == model_path.name
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert "![memory.svg](memory.svg)" in text.read_text()


def test_an_offline_run_that_should_compress_and_does_not_fails(tiny_model, tmp_path):
    out = tmp_path / "offline.json"
    options = [
        *("offline", "--model", str(tiny_model()), "--requests", "4", "--output-tokens", "24"),
        *("--row", "semanticache:min_prompt_tokens=128", "--row", "lazy=semanticache"),
        *("--prompt-tokens", "300", "--rounds", "1", "--expect-compression", "required"),
        *("--out", str(out), "--no-plots"),
    ]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 1, result.output
    run = Run.load(out)
    compressed = {m.row: m.values["compressed"] for m in run.measurements}
    assert compressed == {
        "stock": 0,
        "none": 0,
        "semanticache:min_prompt_tokens=128": 4,
        "lazy": 0,
    }
    (problem,) = run.problems
    assert problem.startswith("lazy, ")
    assert "short_prompt 4" in problem
    assert problem in " ".join(result.output.split())


def test_an_interrupt_leaves_nothing_behind(tiny_model, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "kvcompress_serving.benchmark", "latency", "--no-plots"]
    process = subprocess.Popen(
        [*command, "--model", str(tiny_model()), "--out", str(tmp_path / "out.json")],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not (children := descendants(process.pid)):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        time.sleep(5)
        children |= descendants(process.pid)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert "Traceback" not in output
    assert not [pid for pid in children if _alive(pid)]
    assert not list(scratch.glob("vllm-kvcompress-bench-*"))
    assert not (tmp_path / "out.json").exists()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
