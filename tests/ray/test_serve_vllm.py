"""``vllm-kvcompress ray serve``: two real servers, one of which is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from kvcompress_serving import processes
from kvcompress_serving.server import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

START_SECONDS = 900


def by_replica(url: str, name: str) -> dict[str, float]:
    """A metric of each replica, summed over its other labels."""
    found: dict[str, float] = {}
    text = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                replica = sample.labels["replica"]
                found[replica] = found.get(replica, 0.0) + sample.value
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(1)


@pytest.fixture
def served(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[tuple[str, int]]:
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm_kvcompress", "ray", "serve", str(tiny_model())),
        *("--replicas", "2", "--cpus", "0.5", "--port", str(port), "--logs", str(tmp_path)),
        *("--served-model-name", "model", "--kv-compression", "semanticache"),
        *("--kv-compression-config", '{"min_prompt_tokens": 64}', "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "2048"),
        *("--chat-template", "{{ messages[0].content }}"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
    ]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    process = processes.start(command, tmp_path / "ray.log", environment)
    url = f"http://127.0.0.1:{port}"
    started: set[int] = set()
    try:
        wait_for(
            lambda: (
                process.poll() is not None or len(by_replica(url, "vllm:num_requests_running")) == 2
            ),
            START_SECONDS,
        )
        assert process.poll() is None, processes.tail(tmp_path / "ray.log")
        yield url, process.pid
        started = processes.descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, processes.tail(tmp_path / "ray.log")
        wait_for(lambda: not any(map(_runs, started)), 60)
    finally:
        processes.stop(process)


def test_a_replica_dies_and_the_other_goes_on(served: tuple[str, int], texts: str) -> None:
    url, root = served
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2, timeout=300)
    assert [model.id for model in client.models.list()] == ["model"]
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200

    def ask(place: int, **more: object) -> str:
        start = 400 * (place % 20)
        return (
            client.completions.create(
                model="model",
                prompt=texts[start : start + 2000],
                max_tokens=24,
                temperature=0,
                extra_body={"ignore_eos": True, **more},
            )
            .choices[0]
            .text
        )

    answers = {place: ask(place) for place in range(12)}
    compressed = by_replica(url, "vllm_kvcompress:requests_compressed_total")
    assert len(compressed) == 2
    assert min(compressed.values()) > 0
    assert sum(compressed.values()) == 12
    ask(0, vllm_xargs={"kv_compression": "none"})
    assert sum(by_replica(url, "vllm_kvcompress:requests_bypassed_total").values()) == 1
    wrong = httpx.post(
        f"{url}/v1/completions",
        json={"model": "model", "prompt": "x", "vllm_xargs": {"kv_compression_keep": 7}},
        timeout=60,
    )
    assert wrong.status_code == 400

    stream = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": texts[:1500]}],
        max_tokens=24,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = [event for event in stream if event.choices]
    assert len(pieces) >= 20

    victim = next(pid for pid in sorted(processes.descendants(root)) if _is_server(pid))
    engine = processes.descendants(victim)
    assert engine
    stop, failures, done = threading.Event(), [], []

    def keep_asking() -> None:
        place = 0
        while not stop.is_set():
            place += 1
            try:
                done.append((place % 12, ask(place % 12)))
            except Exception as error:  # noqa: BLE001 - any failure is what is looked for
                failures.append(repr(error))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        time.sleep(2)
        os.kill(victim, signal.SIGKILL)
        before = set(compressed)
        wait_for(
            lambda: (
                len(now := set(by_replica(url, "vllm:num_requests_running"))) == 2
                and len(now - before) == 1
            ),
            START_SECONDS,
        )
    finally:
        stop.set()
        asking.join()
    wait_for(lambda: not any(map(_runs, engine)), 60)
    # what the killed server was answering is lost to it, and the client asks again
    assert not failures
    assert len(done) > 5
    assert all(text == answers[place] for place, text in done)


def _runs(pid: int) -> bool:
    """Whether a process is there and is no zombie, which its new parent may leave for a while."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def _is_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return len(arguments) > 2 and arguments[1].endswith(b"/vllm") and arguments[2] == b"serve"
    return False
