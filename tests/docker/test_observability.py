"""Prometheus scrapes a compressing server, and every query of the dashboard returns data.

Needs Prometheus, on PATH or from Debian's packages (``apt-get download``, unpacked, not installed).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml
from openai import OpenAI

from kvcompress_serving.server import free_port, serve

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

FLAGS = (
    "--enforce-eager",
    *("--max-model-len", "4096", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(200 << 20)),
    "--kv-compression=semanticache",
)
_LOAD_SECONDS = 45
_INTERVAL, _SPAN = "30s", "10m"
# what the load leaves at zero: nothing fails, and the pool is large enough
_MAY_BE_ZERO = {"Failed by reason", "Preemptions", "Running", "Waiting", "KV cache in use"}


@pytest.fixture(scope="module")
def binaries(tmp_path_factory):
    """Folder with ``prometheus`` and ``promtool``."""
    if found := shutil.which("prometheus"):
        return Path(found).parent
    if not shutil.which("apt-get"):
        pytest.skip("needs Prometheus on PATH, or apt-get to fetch it")
    folder = tmp_path_factory.mktemp("prometheus-package")
    subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, check=True, timeout=300)
    (package,) = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)
    return folder / "usr/bin"


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    log = tmp_path_factory.mktemp("observed") / "server.log"
    with serve(model_path, *FLAGS, log=log) as running:
        yield running


@contextlib.contextmanager
def _prometheus(binaries, config, folder):
    """Run Prometheus with a configuration; its URL."""
    port = free_port()
    command = [
        str(binaries / "prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "prometheus.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/-/ready").status_code == 200:
                    break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def prometheus(binaries, server, docker_folder, texts, tmp_path_factory):
    """Prometheus with the shipped configuration but for its target, after a load on the server."""
    folder = tmp_path_factory.mktemp("prometheus")
    shipped = docker_folder / "prometheus/prometheus.yml"
    config = yaml.safe_load(shipped.read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.split("//")[1]]
    rendered = folder / "prometheus.yml"
    rendered.write_text(yaml.safe_dump(config))
    with _prometheus(binaries, rendered, folder) as url:
        _load(server, texts)
        yield url


def _load(server, texts):
    """Long prompts, which are compressed, and short ones, which are not, for a while."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
    end = time.monotonic() + _LOAD_SECONDS

    def ask(worker):
        count = 0
        while time.monotonic() < end or count < 2:
            count += 1
            text = f"{worker} {count}\n{texts[: 9000 if count % 2 else 400]}"
            answer = client.completions.create(
                model=server.model,
                prompt=text,
                max_tokens=32,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage.completion_tokens == 32

    # more than the server runs at a time, so that some wait
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


def _get(url, route, **parameters):
    answer = httpx.get(f"{url}/api/v1/{route}", params=parameters, timeout=30).json()
    assert answer["status"] == "success", answer
    return answer["data"]


def _number(url, query):
    """Value of a query whose answer is one series."""
    (series,) = _get(url, "query", query=query)["result"]
    return float(series["value"][1])


def test_shipped_configuration_is_valid(binaries, docker_folder):
    config = docker_folder / "prometheus/prometheus.yml"
    command = [str(binaries / "promtool"), "check", "config", str(config)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_server_is_scraped(prometheus):
    (target,) = _get(prometheus, "targets")["activeTargets"]
    assert target["health"] == "up", target["lastError"]
    ((_, (_, up)),) = [
        (r["metric"], r["value"]) for r in _get(prometheus, "query", query="up")["result"]
    ]
    assert up == "1"


def test_every_query_of_the_dashboard_returns_data(prometheus, dashboard):
    end = time.time()
    problems = []
    for title, query in dashboard.queries(_INTERVAL, _SPAN):
        now = _get(prometheus, "query", query=query, time=end)["result"]
        over_time = _get(prometheus, "query_range", query=query, start=end - 40, end=end, step=2)[
            "result"
        ]
        values = [float(v) for series in over_time for _, v in series["values"]]
        if not now or not values:
            problems.append(f"{title}: nothing for {query}")
        elif not any(math.isfinite(value) for value in values):
            problems.append(f"{title}: no number for {query}")
        elif title not in _MAY_BE_ZERO and "failed" not in query and not any(values):
            problems.append(f"{title}: only zeros for {query}")
    assert not problems


def test_variables_have_values(prometheus, dashboard, server):
    found = {
        name: _get(prometheus, f"label/{label}/values", **{"match[]": selector})
        for name, (selector, label) in dashboard.label_queries().items()
    }
    assert found == {"model": [server.model], "instance": [server.url.split("//")[1]]}


def test_numbers_are_those_of_the_server(prometheus, dashboard, server):
    """Counters in Prometheus are the server's, and ratios on the dashboard follow from them."""
    deadline = time.monotonic() + 30
    names = ("requests_compressed_total", "blocks_freed_total", "entries_kept_total")
    while True:  # the engine core's files trail by a scrape
        metrics = server.metrics()
        stored = {name: _number(prometheus, f"sum(vllm_kvcompress:{name})") for name in names}
        expected = {name: metrics[f"vllm_kvcompress:{name}"] for name in names}
        if stored == expected or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert stored == expected
    assert all(stored.values())
    (kept,) = [q for t, q in dashboard.queries(_INTERVAL, _SPAN) if t == "Kept" and "increase" in q]
    share = _number(prometheus, kept)
    true = expected["entries_kept_total"] / metrics["vllm_kvcompress:prompt_tokens_in_total"]
    assert share == pytest.approx(true, rel=0.1)
    (reasons,) = [q for t, q in dashboard.queries("10m", _SPAN) if t == "Bypassed by reason"]
    found = {r["metric"].get("reason") for r in _get(prometheus, "query", query=reasons)["result"]}
    assert "short_prompt" in found
