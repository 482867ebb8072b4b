"""The configuration of the plugin: one frozen model, and the per-request values on top of it.

It reaches every process inside vLLM's ``additional_config`` under the key ``kv_compression``, as a
method name or an object; the two command-line flags write there too. Unknown keys are errors that
name the nearest valid one.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from vllm_kvcompress.core import RequestOptions

CONFIG_KEY = "kv_compression"
"""Key in ``additional_config``, and prefix of the per-request keys in ``vllm_xargs``."""

MethodName = Literal[
    "none",
    "semanticache",
    "selkv",
    "metasoft",
    "aatc",
    "semanticache+aatc",
    "selkv+aatc",
    "metasoft+aatc",
    "relocate",
]


class CompressionConfig(BaseModel):
    """Settings of KV-cache compression. All counts are in tokens.

    Which of them a method reads is said in the method's own docstring.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: MethodName = Field(description="compression method")
    window: int = Field(
        64, ge=0, le=1_000_000, description="recent prompt tokens that stay as they are"
    )
    min_prompt_tokens: int = Field(512, ge=1, description="shorter prompts are left alone")
    min_output_tokens: int = Field(
        16, ge=1, description="requests that can generate fewer tokens than this are left alone"
    )
    threshold: float = Field(
        0.75,
        gt=0.0,
        lt=1.0,
        description="semanticache: cosine similarity of keys above which tokens of a chunk merge",
    )
    max_keep: float = Field(
        0.6,
        gt=0.02,
        le=1.0,
        description="semanticache: largest share of the compressed tokens that is kept; "
        "the threshold is relaxed until it holds",
    )
    max_chunk: int = Field(
        64, ge=2, le=128, description="semanticache: longest chunk; longer runs are cut"
    )
    num_sink_tokens: int = Field(
        4, ge=0, le=1024, description="all methods: first tokens, kept as they are"
    )
    keep: float = Field(
        0.25,
        gt=0.02,
        le=1.0,
        description="selkv, metasoft: share of the compressed tokens that is kept",
    )
    keep_tokens: int | None = Field(
        None, ge=16, description="selkv, metasoft: number of tokens to keep, in place of a share"
    )
    observed_queries: int = Field(
        32, ge=1, le=256, description="selkv: last prompt queries whose attention is looked at"
    )
    pool_kernel: int | None = Field(
        None,
        ge=1,
        le=63,
        description="selkv, metasoft: width of the average over neighbours' scores, odd; null is "
        "5 for selkv and 1 for metasoft",
    )
    heads: Literal["union", "each", "adaptive"] = Field(
        "union",
        description="selkv, metasoft: the KV heads of a layer keep the same tokens, each its own, "
        "or each its own and as many as its scores are worth",
    )
    merge: bool = Field(
        True, description="selkv: merge values of dropped tokens into kept ones nearby"
    )
    alpha: float = Field(
        0.5, ge=0.0, le=2.0, description="selkv: strength of the bias that makes up for merging"
    )
    probes: Literal["static", "dynamic"] | None = Field(
        None,
        description="metasoft: the same soft tokens for every prompt, or some mixed for each; "
        "null is what the trained ones name as better",
    )
    soft_tokens: str | None = Field(
        None,
        description="metasoft: folder that `vllm-kvcompress train metasoft` wrote for this model; "
        "the sample model needs none",
    )
    flow: Literal["none", "mass", "convex", "printed"] = Field(
        "none",
        description="metasoft: how values of dropped tokens flow into kept ones: not, weighed by "
        "attention, as a mean, or as the paper prints it",
    )
    gamma: float = Field(
        0.5, ge=0.0, le=1.0, description="metasoft: strength of the flow of values"
    )
    bits: float = Field(
        2.5, ge=0.5, le=8.0, description="aatc: mean bits of a coded number, scales not counted"
    )
    artifact: str | None = Field(
        None,
        description="aatc: folder that `vllm-kvcompress calibrate` wrote for this model; the "
        "sample model needs none",
    )


OPTION_KEYS: dict[str, tuple[type, ...]] = {
    CONFIG_KEY: (str,),
    f"{CONFIG_KEY}_keep": (int, float),
    f"{CONFIG_KEY}_threshold": (int, float),
}
"""Per-request keys in ``vllm_xargs`` and their JSON types."""


_MAX_REASONS = 5
"""Most reasons that one error message gives; whoever sends thousands of wrong keys gets no more."""


def method_names() -> tuple[str, ...]:
    return get_args(MethodName)


def _did_you_mean(name: object, allowed: Iterable[str]) -> str:
    if not isinstance(name, str) or len(name) > 80:
        return ""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, nested too deeply
        return f"({type(value).__name__} that is too large to show)"
    return text if len(text) <= 80 else text[:77] + "..."


def _all_of(reasons: Iterable[str], num_reasons: int) -> str:
    """The reasons as one text of bounded length; they are made only as far as they are shown."""
    shown = "; ".join(itertools.islice(reasons, _MAX_REASONS))
    more = num_reasons - _MAX_REASONS
    return f"{shown}; and {more} more" if more > 0 else shown


def parse_config(raw: object) -> CompressionConfig:
    """Read what stands under ``kv_compression`` in ``additional_config``.

    Args:
        raw: a method name, or a mapping with the key ``method`` and any field of
            `CompressionConfig`.

    Raises:
        ValueError: one message with every field that is wrong, its value and what is allowed.
    """
    if isinstance(raw, CompressionConfig):
        return raw
    if isinstance(raw, str):
        raw = {"method": raw}
    if not isinstance(raw, Mapping):
        raise ValueError(
            f"{CONFIG_KEY} = {_shown(raw)}: expected a method name ({_quote(method_names())}) or "
            "an object with the key 'method'"
        )
    try:
        return CompressionConfig.model_validate(dict(raw))
    except ValidationError as error:
        items = error.errors(include_url=False)
        raise ValueError(
            f"invalid {CONFIG_KEY} configuration: {_all_of(map(_reason, items), len(items))}"
        ) from None


def _reason(item: ErrorDetails) -> str:
    """What is wrong with one field, its value and what is allowed."""
    shown = _shown(item["input"])
    fields = CompressionConfig.model_fields
    if not item["loc"]:  # the key itself cannot be read, half of a surrogate pair for instance
        return f"{shown}: unknown key; expected one of {_quote(fields)}"
    name = str(item["loc"][0])
    if item["type"] == "missing":
        return f"{name}: missing; {_allowed(name)}"
    if name not in fields:
        label = name if name.isidentifier() and len(name) <= 80 else _shown(item["loc"][0])
        return (
            f"{label} = {shown}: unknown key; expected one of {_quote(fields)}"
            f"{_did_you_mean(name, fields)}"
        )
    if name == "method":
        return (
            f"method = {shown}: unknown method; {_allowed(name)}"
            f"{_did_you_mean(item['input'], method_names())}"
        )
    return f"{name} = {shown}: {_allowed(name)}"


def _allowed(name: str) -> str:
    """What a field accepts, in words, read from the model."""
    field = CompressionConfig.model_fields[name]
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds = [
        f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}"
        for item in field.metadata
        for key, word in words.items()
        if (bound := getattr(item, key, None)) is not None
    ]
    options = [field.annotation, *get_args(field.annotation)]
    literals = [option for option in options if get_origin(option) is Literal]
    if literals:
        null = " or null" if NoneType in options else ""
        return f"expected one of {_quote(get_args(literals[0]))}{null}"
    kinds = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        NoneType: "null",
    }
    types = get_args(field.annotation) or (field.annotation,)
    allowed = [kinds[kind] for kind in types]
    allowed[0] = f"{allowed[0]} {' and '.join(bounds)}".rstrip()
    return f"expected {' or '.join(allowed)}"


def request_options(
    extra_args: Mapping[str, Any] | None, config: CompressionConfig
) -> RequestOptions:
    """What one request asks for in its ``vllm_xargs``.

    Args:
        extra_args: ``SamplingParams.extra_args``; keys that do not start with
            ``kv_compression`` belong to others and are ignored.
        config: the server's configuration.

    Raises:
        ValueError: one message with every key that is wrong, its value and what is allowed.
    """
    own = {k: v for k, v in (extra_args or {}).items() if str(k).startswith(CONFIG_KEY)}
    wrong = [(key, value) for key, value in own.items() if not _accepted(key, value, config)]
    if wrong:
        reasons = (_option_reason(key, value, config) for key, value in wrong)
        raise ValueError(f"invalid vllm_xargs: {_all_of(reasons, len(wrong))}")
    method = own.get(CONFIG_KEY, config.method)
    numbers = {
        name: float(own[key]) if (key := f"{CONFIG_KEY}_{name}") in own else None
        for name in ("keep", "threshold")
    }
    return RequestOptions(method=str(method), **numbers)


def _field(key: str) -> str:
    """The setting that a per-request number takes the place of."""
    return key.removeprefix(f"{CONFIG_KEY}_")


def _accepted(key: str, value: Any, config: CompressionConfig) -> bool:
    if key == CONFIG_KEY:
        return value in ("none", config.method)
    if key not in OPTION_KEYS or isinstance(value, bool):
        return False
    return isinstance(value, OPTION_KEYS[key]) and _within(_field(key), value)


def _option_reason(key: str, value: Any, config: CompressionConfig) -> str:
    """What is wrong with one per-request value, and what is allowed."""
    if key not in OPTION_KEYS:
        return (
            f"{_shown(key)}: unknown key; expected one of {_quote(OPTION_KEYS)}"
            f"{_did_you_mean(key, OPTION_KEYS)}"
        )
    if key != CONFIG_KEY:
        return f"{key} = {_shown(value)}: {_allowed(_field(key))}"
    allowed = dict.fromkeys(("none", config.method))
    return (
        f"{key} = {_shown(value)}: expected one of {_quote(allowed)} (the server runs "
        f"'{config.method}'){_did_you_mean(value, allowed)}"
    )


def _within(name: str, value: Any) -> bool:
    try:
        CompressionConfig.model_validate({"method": "none", name: float(value)})
    except (ValidationError, OverflowError):
        return False
    return True
