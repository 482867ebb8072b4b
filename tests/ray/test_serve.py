"""The Ray Serve application with stand-ins for ``vllm serve``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from kvcompress_serving import processes
from kvcompress_serving.ray_app import DEPLOYMENT, Replica, Settings, merge_metrics
from kvcompress_serving.server import Server, free_port

STAND_IN = str(Path(__file__).with_name("stand_in_server.py"))


def test_settings_of_a_command_line() -> None:
    settings = Settings.model_validate(
        {
            "model": "m",
            "flags": "--kv-compression semanticache --kv-compression-config '{\"threshold\": 0.9}'",
            "num_replicas": "2",
            "max_replicas": "4",
        }
    )
    assert settings.flags[1::2] == ("semanticache", '{"threshold": 0.9}')
    options = settings.options()
    assert options["name"] == DEPLOYMENT
    assert options["autoscaling_config"]["min_replicas"] == 2
    assert options["autoscaling_config"]["max_replicas"] == 4
    assert "num_replicas" not in options
    assert Settings(model="m", num_replicas=3).options()["num_replicas"] == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"flags": ("--port=1", "--host", "0.0.0.0")}, "flags cannot have --host, --port"),
        ({"num_replicas": 3, "max_replicas": 2}, "max_replicas = 2 is below num_replicas = 3"),
        ({"target_ongoing_requests": 500}, "above max_ongoing_requests"),
        ({"replicas": 2}, "replicas"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate({"model": "m", **wrong})


def test_merged_metrics_keep_every_sample() -> None:
    text = (
        "# HELP n_total N.\n# TYPE n_total counter\n"
        'n_total{reason="a"} 1.0\nn_total{reason="b"} 2.0\n'
        "# HELP s_seconds S.\n# TYPE s_seconds histogram\n"
        's_seconds_bucket{le="1.0"} 1.0\ns_seconds_bucket{le="+Inf"} 2.0\n'
        "s_seconds_count 2.0\ns_seconds_sum 3.0\n"
    )
    merged = merge_metrics({"one": text, "two": text.replace(" 2.0", " 5.0")}).decode()
    assert merged.count("# TYPE") == 2
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(merged)
        for sample in family.samples
    }
    assert len(found) == 12
    assert found["n_total", (("reason", "b"), ("replica", "one"))] == 2
    assert found["n_total", (("reason", "b"), ("replica", "two"))] == 5
    assert found["s_seconds_bucket", (("le", "+Inf"), ("replica", "two"))] == 5


@contextlib.contextmanager
def start(*arguments: str, log: Path, **more: object) -> Iterator[Server]:
    """In place of ``vllm serve``."""
    port = free_port()
    process = processes.start([sys.executable, STAND_IN, str(port)], log, os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/health").raise_for_status()
                break
            time.sleep(0.1)
        yield Server(url, "model", log, process.pid)
    finally:
        processes.stop(process)


@pytest.fixture(scope="module")
def url(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import cloudpickle
    from ray import serve

    # replicas cannot import this module
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    port = free_port()
    settings = Settings(
        model="m",
        num_replicas=2,
        num_cpus=0.1,
        health_seconds=1,
        logs=str(tmp_path_factory.mktemp("logs")),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Replica.options(**settings.options()).bind(settings, start))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def pids(url: str) -> dict[str, int]:
    """Process of each replica's server, from the metrics of all."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        sample.labels["replica"]: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:busy"
    }


def wait_for(condition, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


@pytest.mark.slow
def test_requests_reach_all_replicas_unchanged(url: str) -> None:
    wait_for(lambda: len(pids(url)) == 2)
    answers = [httpx.get(f"{url}/v1/models?a=1&b=%20", timeout=30).json() for _ in range(30)]
    assert {answer["path"] for answer in answers} == {"/v1/models?a=1&b=%20"}
    assert {answer["pid"] for answer in answers} == set(pids(url).values())
    body = {"prompt": "é", "vllm_xargs": {"kv_compression": "none"}}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["body"] == body
    wrong = httpx.post(f"{url}/v1/completions", json={"wrong": True}, timeout=30)
    assert (wrong.status_code, wrong.json()) == (400, {"error": "wrong"})
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200


@pytest.mark.slow
def test_answers_are_streamed(url: str) -> None:
    received = []
    body = {"stream": True, "pieces": 4}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
        assert reply.headers["content-type"] == "text/event-stream"
        for line in reply.iter_lines():
            if line.startswith("data: "):
                received.append((time.time(), float(line.split()[2])))
    assert len(received) == 4
    # each piece arrives before the last is sent
    assert all(here < received[-1][1] for here, _ in received[:2])


@pytest.mark.slow
def test_a_connection_that_is_closed_ends_at_the_server(url: str) -> None:
    def closed() -> float:
        text = httpx.get(f"{url}/metrics", timeout=30).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vllm:closed_total"
        )

    before = closed()
    body = {"stream": True, "pieces": 100}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
        next(reply.iter_lines())
    wait_for(lambda: closed() == before + 1)


@pytest.mark.slow
def test_a_replica_whose_server_dies_is_replaced_while_others_answer(url: str) -> None:
    before = wait_for(lambda: len(pids(url)) == 2 and pids(url))
    name, pid = next(iter(before.items()))
    os.kill(pid, signal.SIGKILL)

    def replaced() -> bool:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=30)
        if answer.status_code != 503:  # once at most, until the replica is known to be gone
            assert answer.status_code == 200
        else:
            refused.append(answer.headers["retry-after"])
        return len(pids(url)) == 2 and name not in pids(url)

    refused: list[str] = []
    wait_for(replaced)
    assert len(refused) <= 1
    assert set(pids(url)) - set(before)
