"""The real server with a real model: what a user can do over HTTP."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
import time

import httpx
import pytest
from openai import BadRequestError, OpenAI

from kvcompress_serving.server import ServerError, serve

pytestmark = pytest.mark.e2e

PREFIX = "vllm_kvcompress:"
FLAGS = (
    "--enforce-eager",
    *("--max-model-len", "4096", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(200 << 20)),
)


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    config = tmp_path_factory.mktemp("server") / "serve.yaml"
    config.write_text(
        "kv-compression: semanticache\nkv-compression-config:\n  min_prompt_tokens: 256\n"
    )
    log = config.with_name("server.log")
    with serve(model_path, *FLAGS, "--config", str(config), log=log) as running:
        yield running


@pytest.fixture
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def changes(server):
    before = server.samples()

    def changes(name, **labels):
        total = 0.0
        for (sample, found), value in server.samples().items():
            if sample == PREFIX + name and set(labels.items()) <= found:
                total += value - before.get((sample, found), 0.0)
        return total

    return changes


def samples_named(samples, name):
    return sum(value for (sample, _), value in samples.items() if sample == name)


def ask(client, server, prompt, **more):
    settings = {"max_tokens": 24, "temperature": 0, **more}
    return client.completions.create(model=server.model, prompt=prompt, **settings)


def test_activation_is_logged(server):
    log = server.log.read_text()
    assert "KV-cache compression is on: method 'semanticache', 30 layers x 3 KV heads" in log
    assert log.count("KV-cache compression is on") == 1


def test_completion_is_compressed_and_blocks_come_back(client, server, texts, changes):
    body = {"ignore_eos": True, "cache_salt": "completion"}
    stream = ask(client, server, texts[:6000], max_tokens=2000, stream=True, extra_body=body)
    prompt_blocks, pool = 0.0, 1
    usage = []
    # while it generates, vLLM's own gauge falls below what the prompt alone took; the metrics may
    # trail the stream by any time, so they are read until they show it, and the rest is not needed
    for _ in stream:
        samples = server.samples()
        usage.append(samples_named(samples, "vllm:kv_cache_usage_perc"))
        if not prompt_blocks and changes("requests_compressed_total") == 1:
            prompt_blocks = changes("prompt_tokens_in_total") / 32
            (pool,) = (
                int(dict(labels)["num_gpu_blocks"])
                for name, labels in samples
                if name == "vllm:cache_config_info"
            )
        if prompt_blocks and 0 < usage[-1] < 0.8 * prompt_blocks / pool:
            break
    else:
        pytest.fail(f"usage never fell below {prompt_blocks} of {pool} blocks: {usage}")
    stream.close()
    assert all(0 <= value <= 1 for value in usage)
    assert changes("requests_compressed_total") == 1
    assert changes("blocks_freed_total") >= 15
    assert 0 < changes("entries_kept_total") < changes("prompt_tokens_in_total")
    assert changes("compression_seconds_count") == 1


def test_chat_streams(client, server, texts, changes):
    messages = [{"role": "user", "content": texts[:5000] + "\n\nWhat is this about?"}]
    stream = client.chat.completions.create(
        model=server.model, messages=messages, max_tokens=24, temperature=0, stream=True
    )
    text = "".join(e.choices[0].delta.content or "" for e in stream if e.choices)
    assert text.strip()
    assert changes("requests_compressed_total") == 1


def test_one_request_opts_out(client, server, texts, changes):
    body = {"vllm_xargs": {"kv_compression": "none"}, "cache_salt": "opt-out"}
    ask(client, server, texts[:4000], extra_body=body)
    client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": texts[:4000]}],
        max_tokens=20,
        extra_body=body,
    )
    assert changes("requests_compressed_total") == 0
    assert changes("requests_bypassed_total", reason="opted_out") == 2


def test_one_request_sets_its_budget(client, server, texts, changes):
    for keep in (0.5, 0.25):
        before = changes("entries_kept_total"), changes("prompt_tokens_in_total")
        body = {"vllm_xargs": {"kv_compression_keep": keep, "kv_compression_threshold": 0.95}}
        ask(client, server, texts[:6000], extra_body=body)
        entries = changes("entries_kept_total") - before[0]
        assert entries <= keep * (changes("prompt_tokens_in_total") - before[1])
        assert entries > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("xargs", "word"),
    [
        ({"kv_compression": "semanticach"}, "did you mean 'semanticache'"),
        ({"kv_compression_kep": 0.5}, "did you mean 'kv_compression_keep'"),
        ({"kv_compression_keep": 3}, "kv_compression_keep = 3"),
        ({"kv_compression_keep": "much"}, "kv_compression_keep = 'much'"),
        ({"kv_compression_keep": [1, 2]}, "kv_compression_keep = [1, 2]"),
    ],
)
def test_wrong_values_are_http_400(client, server, xargs, word, stream):
    body = {"vllm_xargs": xargs}
    with pytest.raises(BadRequestError, match="vllm_xargs") as error:
        ask(client, server, "Hello", extra_body=body, stream=stream)
    assert word in str(error.value)
    with pytest.raises(BadRequestError) as error:
        client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Hello"}],
            extra_body=body,
            stream=stream,
        )
    assert word in str(error.value)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_odd_requests_are_answered(client, server, texts, changes):
    long = texts[10_000:13_000]
    with pytest.raises(BadRequestError, match="non-empty"):
        ask(client, server, "")
    empty = client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": ""}], max_tokens=4
    )
    assert empty.choices[0].finish_reason in ("length", "stop")
    assert len(ask(client, server, long, n=4, temperature=0.7, max_tokens=20).choices) == 4
    assert len(ask(client, server, long, max_tokens=1).choices) == 1
    echoed = ask(client, server, long, echo=True, logprobs=1, max_tokens=20).choices[0]
    assert echoed.text.startswith(long[:500])
    assert len(echoed.logprobs.tokens) > 500
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = ask(client, server, long + "\nIs this about nature? ", extra_body=choice)
    assert answer.choices[0].text in ("yes", "no")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    reply = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": long + "\nHow many animals?"}],
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    text = reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length" or isinstance(json.loads(text)["n"], int)
    with pytest.raises(BadRequestError, match=r"maximum context length|max_model_len|too long"):
        ask(client, server, texts[:40_000])
    assert changes("requests_failed_total") == 0


def test_concurrency_and_closed_connections(client, server, texts):
    """Answers of surviving requests are those of the same requests alone; nothing stays behind."""

    def one(index):
        if index % 3 == 2:
            stream = ask(client, server, texts[index * 900 : index * 900 + 4000], stream=True)
            next(iter(stream))
            stream.close()
            return None
        body = {"ignore_eos": True}
        prompt = texts[index * 900 : index * 900 + 4000]
        return len(ask(client, server, prompt, extra_body=body).choices[0].text) > 0

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(one, range(9)))
    assert answers == [True, True, None] * 3
    deadline = time.monotonic() + 20
    while server.metrics()["vllm:num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.2)
    ask(client, server, "One more, so that the gauges are set again.")
    metrics = server.metrics()
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert metrics[f"{PREFIX}slab_blocks"] == 0


def test_multi_turn_chat_hits_the_first_turns_prefix(client, server, texts):
    question = {"role": "user", "content": texts[20_000:24_000] + "\nSummarize."}
    first = client.chat.completions.create(
        model=server.model, messages=[question], max_tokens=30, temperature=0
    )
    turns = [
        question,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And in one word?"},
    ]
    before = server.metrics()["vllm:prefix_cache_hits_total"]
    client.chat.completions.create(model=server.model, messages=turns, max_tokens=20, temperature=0)
    assert server.metrics()["vllm:prefix_cache_hits_total"] - before >= 500


def test_metrics_are_declared(server):
    text = httpx.get(f"{server.url}/metrics").text
    for name, kind in (
        ("requests_compressed", "counter"),
        ("requests_bypassed", "counter"),
        ("blocks_freed", "counter"),
        ("prompt_tokens_in", "counter"),
        ("entries_kept", "counter"),
        ("compression_seconds", "histogram"),
        ("slab_blocks", "gauge"),
    ):
        total = "_total" if kind == "counter" else ""
        assert f"# TYPE {PREFIX}{name}{total} {kind}" in text, name


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--kv-compression=semanticach",), "did you mean 'semanticache'"),
        (
            ("--kv-compression=semanticache", "--kv-compression-config", '{"treshold": 1}'),
            "did you mean 'threshold'",
        ),
    ],
)
def test_a_wrong_flag_stops_the_start(model_path, tmp_path, flags, word):
    with (
        pytest.raises(ServerError) as error,
        serve(model_path, *FLAGS, *flags, log=tmp_path / "log"),
    ):
        pass
    assert word in str(error.value)


@pytest.mark.slow
def test_verify_command(model_path):
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kvcompress", "verify", "--model", str(model_path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["ok"]
    assert result["failures"] == []
    assert result["blocks_freed"] == result["blocks_before"] - result["blocks_after"] > 0
    assert 0 < result["entries_kept"] < result["prompt_tokens"]
    assert result["needle_found"]


def test_doctor_command():
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kvcompress", "doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "CPU kernels" in done.stdout
