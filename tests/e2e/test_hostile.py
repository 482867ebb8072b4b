"""Whatever is sent or configured, the answer is a bounded message; the engine stays alive."""

from __future__ import annotations

import contextlib
import io
import json

import httpx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcompress_serving.server import serve
from vllm_kvcompress.config import OPTION_KEYS, CompressionConfig

FLAGS = (
    "--kv-compression=semanticache",
    "--enforce-eager",
    *("--max-model-len", "2048", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)
PATHS = {
    "/v1/completions": '"prompt": "Hello"',
    "/v1/chat/completions": '"messages": [{"role": "user", "content": "Hello"}]',
}
LONGEST_ERROR = 2000


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    log = tmp_path_factory.mktemp("hostile") / "server.log"
    with serve(model_path, *FLAGS, log=log) as running:
        yield running


def send(server, path, xargs, stream=False):
    """A request with ``vllm_xargs`` as raw JSON text, which may hold what no library would send."""
    more = f'"model": "model", "max_tokens": 2, "stream": {json.dumps(stream)}'
    body = f'{{{PATHS[path]}, {more}, "vllm_xargs": {xargs}}}'
    headers = {"content-type": "application/json"}
    return httpx.post(server.url + path, content=body.encode(), headers=headers, timeout=60)


def check(answer):
    """Answered or refused, and neither a failure inside a stream nor a message without end."""
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text[:500]
    if answer.status_code == 200:
        assert '"error"' not in answer.text
    else:
        assert len(answer.text) < LONGEST_ERROR


def check_alive(server):
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    for path in PATHS:
        assert send(server, path, '{"kv_compression": "none"}').status_code == 200


def nested(depth):
    return "[" * depth + "]" * depth


OURS = {
    "NaN": '{"kv_compression_keep": NaN}',
    "infinity": '{"kv_compression_threshold": -Infinity}',
    "float past the largest": '{"kv_compression_keep": 1e400}',
    "negative": '{"kv_compression_keep": -0.5}',
    "largest integer": f'{{"kv_compression_keep": {2**64 - 1}}}',
    "number as method": '{"kv_compression": 3}',
    "list as method": '{"kv_compression": ["semanticache"]}',
    "long list": json.dumps({"kv_compression": [1] * 100_000}),
    "long value": json.dumps({"kv_compression": "s" * 1_000_000}),
    "long key": json.dumps({"kv_compression" + "s" * 1_000_000: 1}),
    "quotes": json.dumps({"kv_compression\"\n\\'{}%s<b>": "\"\n\\'" * 50}),
    "right to left": json.dumps({"kv_compression\u202e": "\u0645\u0631\u062d\u0628\u0627"}),
    "emoji": json.dumps({"kv_compression": "\U0001f389" * 100}, ensure_ascii=False),
    "zero byte": '{"kv_compression": "\\u0000"}',
    "half a surrogate pair": '{"kv_compression": "\\ud800", "kv_compression\\udfff": 1}',
    "upper case": '{"kv_compression": "SEMANTICACHE"}',
    "near keys": '{"kv_compression_": 1, "kv_compression-keep": 1, "kv_compressions": 1}',
    "another method of the plugin": '{"kv_compression": "relocate"}',
    "setting of the server": '{"kv_compression_window": 3}',
    "many keys of ours": json.dumps({f"kv_compression_{n}": n for n in range(100_000)}),
}
VLLMS = {
    "null value": '{"kv_compression": null}',
    "object value": '{"kv_compression": {"method": "none"}}',
    "object in a list": '{"kv_compression_keep": [{"a": [1]}]}',
    "not an object": '["kv_compression"]',
    "text": '"kv_compression"',
    "number": "NaN",
    "not JSON": "{kv_compression: none}",
    "nested": f'{{"kv_compression": {nested(500)}}}',
    "nested past the parser": f'{{"kv_compression": {nested(100_000)}}}',
    "big integer": f'{{"kv_compression_keep": 1{"0" * 400}}}',
    "integer past the parser": f'{{"kv_compression_keep": 1{"0" * 6000}}}',
}
FINE = {
    "null": "null",
    "empty": "{}",
    "the same key twice": '{"kv_compression": "nonsense", "kv_compression": "none"}',
    "not ours": '{"kv-compression": NaN, "KV_COMPRESSION": 3, " kv_compression": "x", "": []}',
    "many keys of others": json.dumps({f"k{n}": n for n in range(100_000)}),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", [*OURS, *VLLMS, *FINE])
def test_hostile_options(server, name):
    xargs = {**OURS, **VLLMS, **FINE}[name]
    for path in PATHS:
        for stream in (False, True):
            answer = send(server, path, xargs, stream)
            check(answer)
            if name in FINE:
                assert answer.status_code == 200, answer.text[:500]
            else:
                assert answer.status_code in (400, 422), answer.text[:500]
            if name in OURS:
                error = answer.json()["error"]
                assert error["message"].startswith("invalid vllm_xargs: ")
                assert error["param"] == "vllm_xargs"
    check_alive(server)


_scalars = st.text(max_size=30) | st.integers() | st.floats() | st.booleans() | st.none()
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_near = st.sampled_from([*OPTION_KEYS, "kv_compression_", "kv_compression.keep", "kv", "x"])


@pytest.mark.e2e
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(_near | st.text(), _scalars | _values, max_size=4) | _values,
    st.sampled_from(list(PATHS)),
    st.booleans(),
)
def test_any_options(server, xargs, path, stream):
    check(send(server, path, json.dumps(xargs), stream))


@pytest.mark.e2e
def test_alive_after_any_options(server):
    check_alive(server)
    log = server.log.read_text(errors="replace")
    assert "EngineDeadError" not in log
    assert "Traceback" not in log


@pytest.mark.e2e
def test_prompts_are_not_logged(server, texts):
    """Neither those that are compressed, nor those left alone, nor those refused."""
    marker = "xylophonequartz"
    prompt = f"{marker} {texts[:4000]} {marker}"
    before = server.metrics()
    for xargs in ({}, {"kv_compression": "none"}, {"kv_compression_keep": 7}):
        more = {"model": "model", "max_tokens": 20, "ignore_eos": True, "vllm_xargs": xargs}
        messages = [{"role": "user", "content": prompt}]
        bodies = {
            "/v1/completions": {**more, "prompt": prompt},
            "/v1/chat/completions": {**more, "messages": messages},
        }
        for path, body in bodies.items():
            answer = httpx.post(server.url + path, json=body, timeout=60)
            assert answer.status_code == (400 if "kv_compression_keep" in xargs else 200)
            check(answer)
    name = "vllm_kvcompress:requests_compressed_total"
    assert server.metrics()[name] - before.get(name, 0) == 2
    log = server.log.read_text(errors="replace")
    assert "POST /v1/completions" in log
    assert marker not in log
    assert texts[1000:1030] not in log


@pytest.fixture(scope="module")
def start(tiny_model):
    """Function that goes from a command line as far as the engine's configuration.

    ``--worker-cls a.b`` is refused together with compression, so that no start gets further than
    that and valid settings too end in a message.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ("--model", str(tiny_model()), "--max-model-len", "256", "--worker-cls", "a.b")

    def create(flags):
        namespace = parser.parse_args([*common, *flags])
        AsyncEngineArgs.from_cli_args(namespace).create_engine_config()

    def start(*flags):
        """The message with which the start ends."""
        with (
            contextlib.redirect_stderr(io.StringIO()) as stderr,
            pytest.raises((SystemExit, ValueError)) as ending,
        ):
            create(flags)
        if isinstance(ending.value, SystemExit):
            assert ending.value.code == 2
            return stderr.getvalue()
        return str(ending.value)

    return start


_fields = st.sampled_from([*CompressionConfig.model_fields, "", "treshold", "a.b"])
_objects = st.dictionaries(_fields | st.text(), _scalars | _values, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.text() | _values.map(json.dumps) | _objects.map(json.dumps), st.booleans())
def test_any_config_flag(start, text, joined):
    # vLLM's parser looks for the value of a nested flag ("-a.b") behind it without asking whether
    # there is one
    assume(joined or not (text.startswith("-") and "." in text))
    flag = "--kv-compression-config"
    flags = [f"{flag}={text}"] if joined else [flag, text]
    message = start("--kv-compression=semanticache", *flags)
    assert flag in message or "kv_compression" in message or "--kv-compression" in message


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "NaN", "[]", '"x"', "{}{}", "-1", "--kv-compression", '{"\\ud800": 1}', "%s"],
)
def test_odd_config_flags(start, text):
    assert "kv" in start("--kv-compression=semanticache", f"--kv-compression-config={text}")


@pytest.mark.parametrize("value", [nested(100_000), "1" + "0" * 6000], ids=["nested", "digits"])
def test_config_flags_past_the_parser(start, value):
    message = start("--kv-compression-config", f'{{"window": {value}}}')
    assert "--kv-compression-config" in message


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_method_flag(start, text):
    message = start(f"--kv-compression={text}")
    assert "kv_compression" in message or "--kv-compression" in message


_python = st.recursive(
    _scalars
    | st.binary(max_size=5)
    | st.sampled_from([object(), {1}, 1j])
    | st.builds(pow, st.just(10), st.just(5000)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_scalars, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(_fields | _scalars, _python, max_size=8)
    | _python.filter(lambda value: value is not None)
)
def test_any_additional_config(tiny_model, value):
    """In Python anything may stand there: keys that are no text, numbers that cannot be shown."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(tiny_model()),
        max_model_len=256,
        worker_cls="a.b",
        additional_config={"kv_compression": value},
    )
    with pytest.raises(ValueError, match=r"kv_compression|--kv-compression") as error:
        args.create_engine_config()
    assert len(str(error.value)) < LONGEST_ERROR


def test_additional_config_that_is_nested_without_end():
    from vllm_kvcompress.config import parse_config

    value = []
    for _ in range(100_000):
        value = [value]
    for raw in (value, {"method": value}, {"method": "none", "window": value, "x": value}):
        with pytest.raises(ValueError, match="too large to show"):
            parse_config(raw)
    while value:
        value = value.pop()
