"""The configuration model and the per-request values: what is accepted, and what errors say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_kvcompress.config import (
    OPTION_KEYS,
    CompressionConfig,
    method_names,
    parse_config,
    request_options,
)
from vllm_kvcompress.core import RequestOptions
from vllm_kvcompress.methods.registry import create_method

CONFIG = parse_config("semanticache")


def test_name_and_object_are_the_same():
    assert parse_config("semanticache") == parse_config({"method": "semanticache"})


def test_it_is_frozen():
    with pytest.raises(ValidationError):
        CONFIG.threshold = 0.5


@pytest.mark.parametrize("method", method_names())
def test_every_method_can_be_made_and_has_its_name(method):
    assert create_method(parse_config(method)).name == method


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("semanticach", ["method = 'semanticach'", "did you mean 'semanticache'", "'relocate'"]),
        ({"method": "semanticache", "treshold": 0.5}, ["treshold = 0.5", "mean 'threshold'"]),
        ({"method": "semanticache", "threshold": 1.5}, ["threshold = 1.5", "above 0", "below 1"]),
        ({"method": "semanticache", "threshold": "0.5"}, ["threshold = '0.5'", "a number"]),
        ({"method": "semanticache", "window": 6.5}, ["window = 6.5", "an integer at least 0"]),
        ({"method": "semanticache", "window": True}, ["window = True", "an integer"]),
        ({"method": "semanticache", "max_keep": float("nan")}, ["max_keep = nan", "at most 1"]),
        ({"threshold": 0.5}, ["method: missing", "'semanticache'"]),
        (7, ["= 7", "method name"]),
        ([], ["= []", "method name"]),
        ({"method": None}, ["method = None"]),
        ({"method": ["none"]}, ["method = ['none']"]),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(raw, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        parse_config(raw)
    for word in words:
        assert word in str(error.value)


def test_every_setting_is_read_by_the_engine_or_a_method():
    engine = {"method", "window", "min_prompt_tokens", "min_output_tokens"}
    methods = {
        name for method in method_names() for name in create_method(parse_config(method)).settings
    }
    assert not engine & methods
    assert engine | methods == set(CompressionConfig.model_fields)


def test_all_errors_come_at_once():
    with pytest.raises(ValueError) as error:  # noqa: PT011
        parse_config({"method": "nope", "window": -1, "max_chunk": 1, "x": 1})
    for word in ("method = 'nope'", "window = -1", "max_chunk = 1", "x = 1"):
        assert word in str(error.value)


def test_request_values_win():
    options = request_options(
        {"kv_compression_keep": 0.25, "kv_compression_threshold": 0.5, "other": object()}, CONFIG
    )
    assert (options.method, options.keep, options.threshold) == ("semanticache", 0.25, 0.5)
    assert request_options({"kv_compression": "none"}, CONFIG).method == "none"
    assert request_options(None, CONFIG) == RequestOptions("semanticache")


@pytest.mark.parametrize(
    ("xargs", "words"),
    [
        ({"kv_compression": "nones"}, ["kv_compression = 'nones'", "did you mean 'none'"]),
        ({"kv_compression": "relocate"}, ["the server runs 'semanticache'"]),
        ({"kv_compression": 3}, ["kv_compression = 3"]),
        ({"kv_compression_kepp": 0.5}, ["kv_compression_kepp", "mean 'kv_compression_keep'"]),
        ({"kv_compression_keep": 0}, ["kv_compression_keep = 0", "above 0.02"]),
        ({"kv_compression_keep": 2}, ["kv_compression_keep = 2", "at most 1"]),
        ({"kv_compression_keep": "0.4"}, ["kv_compression_keep = '0.4'", "a number"]),
        ({"kv_compression_keep": [0.4]}, ["kv_compression_keep = [0.4]"]),
        ({"kv_compression_threshold": float("inf")}, ["kv_compression_threshold = inf"]),
        ({"kv_compression_threshold": 10**400}, ["kv_compression_threshold = 1000"]),
    ],
)
def test_request_errors_name_key_value_and_what_is_allowed(xargs, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        request_options(xargs, CONFIG)
    for word in words:
        assert word in str(error.value)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from([*CompressionConfig.model_fields, "x", ""]) | st.text(), _json, max_size=4
    )
    | _json
)
def test_any_json_is_read_or_refused_in_one_way(raw):
    try:
        config = parse_config(raw)
    except ValueError as error:
        message = str(error)
    else:
        message = "kv_compression"
        assert parse_config(json.loads(json.dumps(config.model_dump()))) == config
    assert "kv_compression" in message
    assert len(message) < 4000


@given(st.dictionaries(st.sampled_from([*OPTION_KEYS, "kv_compression_", "a"]), _json, max_size=4))
def test_any_request_is_read_or_refused_in_one_way(xargs):
    try:
        options = request_options(xargs, CONFIG)
    except ValueError as error:
        message = str(error)
    else:
        message = "invalid vllm_xargs: "
        assert options.keep is None or 0.02 < options.keep <= 1
        assert options.threshold is None or 0 < options.threshold < 1
    assert message.startswith("invalid vllm_xargs: ")
