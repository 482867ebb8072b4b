"""The demo as a user runs it, and as a user interrupts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcompress_serving.processes import descendants

pytestmark = pytest.mark.e2e


def demo(model: Path, log: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvcompress_serving.demo", "--log", str(log), *arguments],
        env={**os.environ, "KVC_MODEL": str(model), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_with(text: str) -> list[str]:
    """Command lines of living processes that contain a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if text in command and state != "Z":
            found.append(command)
    return found


def alive(pids: set[int]) -> set[int]:
    living = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            living.add(pid)
    return living


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_demo_leaves_no_process(model_path, tmp_path, how):
    log = tmp_path / "server.log"
    process = demo(model_path, log)
    deadline = time.monotonic() + 120
    while "EngineCore" not in (log.read_text() if log.exists() else ""):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    started = descendants(process.pid)
    assert started
    process.send_signal(how)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "the server has been stopped" in output
    assert not alive(started)


@pytest.mark.slow
def test_demo(model_path, tmp_path):
    process = demo(model_path, tmp_path / "server.log")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    for row in (
        "prompt tokens",
        "entries kept",
        "blocks after prefill",
        "blocks while answering",
        "pool usage",
        "time to first token",
        "time per output token",
    ):
        assert row in output
    assert not processes_with(str(tmp_path))
