"""Tools, schemas and closed connections: what grammars and clients ask for holds."""

from __future__ import annotations

import contextlib
import time
from typing import Literal

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from kvcompress_serving.server import serve

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    "--kv-compression=semanticache",
    "--enforce-eager",
    *("--max-model-len", "4096", "--max-num-seqs", "4", "--max-num-batched-tokens", "512"),
    *("--kv-cache-memory-bytes", str(200 << 20)),
    # a grammar that allows any white space lets a small model write nothing else
    *(
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    ),
)
COMPRESSED = "vllm_kvcompress:requests_compressed_total"
OPT_OUT = {"vllm_xargs": {"kv_compression": "none"}}


class Observation(BaseModel):
    """Arguments of the tool, and schema of structured answers; every part of it is bounded."""

    model_config = ConfigDict(extra="forbid")

    animal: Literal["pigeon", "dog", "horse", "cattle", "other"]
    count: int = Field(ge=0, le=99)
    wild: bool
    places: list[Literal["island", "continent", "sea"]] = Field(min_length=1, max_length=3)


TOOL = {
    "type": "function",
    "function": {
        "name": "note_observation",
        "description": "Notes an observation of animals in the text.",
        "parameters": Observation.model_json_schema(),
        "strict": True,
    },
}


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    log = tmp_path_factory.mktemp("features") / "server.log"
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serve(model_path, *FLAGS, *tools, log=log) as running:
        yield running


@pytest.fixture
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def no_blanks(model_path):
    """Bias against white space, which the grammars of tool calls allow without end."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    numbers = range(tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[number] for number in numbers], skip_special_tokens=False)
    return {str(n): -100 for n, text in zip(numbers, texts, strict=True) if text.isspace()}


def question(texts, start):
    text = texts[start : start + 5000]
    return [{"role": "user", "content": f"{text}\n\nNote one observation from the text."}]


def num_compressed(server):
    return server.metrics().get(COMPRESSED, 0)


@pytest.mark.parametrize("body", [{}, OPT_OUT], ids=["compressed", "opted out"])
@pytest.mark.parametrize("choice", ["named", "required"])
def test_tool_calls(client, server, texts, no_blanks, choice, body):
    """Arguments follow the tool's schema, with compression and for a request without it."""
    named = {"type": "function", "function": {"name": "note_observation"}}
    before = num_compressed(server)
    reply = client.chat.completions.create(
        model=server.model,
        messages=question(texts, 3000),
        tools=[TOOL],
        tool_choice=named if choice == "named" else "required",
        parallel_tool_calls=False,
        logit_bias=no_blanks,
        max_tokens=120,
        temperature=0,
        extra_body=body,
    )
    calls = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason in ("stop", "tool_calls")
    assert calls
    for call in calls:
        assert call.function.name == "note_observation"
        Observation.model_validate_json(call.function.arguments)
    assert num_compressed(server) - before == (0 if body else 1)


def test_a_streamed_tool_call(client, server, texts, no_blanks):
    stream = client.chat.completions.create(
        model=server.model,
        messages=question(texts, 9000),
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "note_observation"}},
        logit_bias=no_blanks,
        max_tokens=120,
        temperature=0,
        stream=True,
    )
    parts = [c for event in stream for x in event.choices for c in x.delta.tool_calls or ()]
    Observation.model_validate_json("".join(part.function.arguments or "" for part in parts))


def test_free_choice_of_tools_is_answered(client, server, texts):
    """Without a grammar a small model may write anything; the parser still has to answer."""
    reply = client.chat.completions.create(
        model=server.model,
        messages=question(texts, 15_000),
        tools=[TOOL],
        tool_choice="auto",
        max_tokens=64,
        temperature=0,
    )
    assert reply.choices[0].message.content or reply.choices[0].message.tool_calls


@pytest.mark.parametrize("body", [{}, OPT_OUT], ids=["compressed", "opted out"])
@pytest.mark.parametrize("start", range(0, 50_000, 10_000))
def test_structured_outputs(client, server, texts, start, body):
    before = num_compressed(server)
    schema = {"name": "observation", "schema": Observation.model_json_schema(), "strict": True}
    reply = client.chat.completions.create(
        model=server.model,
        messages=question(texts, start),
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=120,
        temperature=0,
        extra_body=body,
    )
    assert reply.choices[0].finish_reason == "stop"
    Observation.model_validate_json(reply.choices[0].message.content)
    assert num_compressed(server) - before == (0 if body else 1)


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_nothing_held(client, server):
    wait_for(lambda: server.metrics()["vllm:num_requests_running"] == 0)
    # the gauges are set in steps
    client.completions.create(model=server.model, prompt="One more.", max_tokens=4)
    wait_for(lambda: server.metrics()["vllm:kv_cache_usage_perc"] == 0)
    assert server.metrics()["vllm_kvcompress:slab_blocks"] == 0


def stream(server, texts, start):
    body = {
        "model": server.model,
        "prompt": texts[start : start + 14_000],
        "max_tokens": 600,
        "ignore_eos": True,
        "stream": True,
    }
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)


def test_connections_closed_while_decoding(client, server, texts):
    before = num_compressed(server)
    for start in (60_000, 80_000):
        with stream(server, texts, start) as answer:
            lines = (line for line in answer.iter_lines() if line)
            for _ in range(20):
                next(lines)
            wait_for(lambda: server.metrics()["vllm_kvcompress:slab_blocks"] > 0)
    assert num_compressed(server) - before == 2
    check_nothing_held(client, server)


def test_connections_closed_while_prefilling(client, server, texts):
    """A prompt of several chunks, abandoned in the middle of them."""
    before = server.metrics()
    for start in (100_000, 120_000):
        with contextlib.suppress(httpx.ReadTimeout), httpx.Client(timeout=0.7) as http:
            body = {"model": server.model, "prompt": texts[start : start + 14_000]}
            http.post(f"{server.url}/v1/completions", json={**body, "max_tokens": 600})
    check_nothing_held(client, server)
    after = server.metrics()
    assert after[COMPRESSED] == before[COMPRESSED]
    name = "vllm:generation_tokens_total"
    assert after[name] - before[name] <= 8
