"""What a mode measures: server sessions with a pool of a fixed size, and the loads on each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

AMPLE = 0.0
"""In place of a number of prompts: a pool in which every request fits."""
_SLACK_TOKENS = 64
_OFFLINE_MAX_PROMPT, _OFFLINE_MAX_TOTAL = 1024, 2048
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Mode(StrEnum):
    """What is asked."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    MEMORY = "memory"
    ABLATION = "ablation"
    OFFLINE = "offline"


@dataclass(frozen=True)
class Load:
    """Requests sent to a server, and where their numbers go.

    Args:
        group: table that they belong to.
        label: the load within the table.
        x: its place on the axis of a plot.
        concurrency: most requests that the client has open at a time.
        num_requests: in all.
        prompt_tokens: of each, about.
        output_tokens: of each, exactly.
        cached_group: table of a second pass with the same prompts, then in the prefix cache, so
            that all requests decode together nearly from the start; None: no such pass.
    """

    group: str
    label: str
    x: float
    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    cached_group: str | None = None


@dataclass(frozen=True)
class Session:
    """One server, or offline engine, for each row.

    Args:
        pool_bytes: of the KV cache, the same for all rows.
        max_model_len: tokens.
        max_num_seqs: requests that may run at a time.
        loads: one after another.
    """

    pool_bytes: int
    max_model_len: int
    max_num_seqs: int
    loads: tuple[Load, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--kv-cache-memory-bytes", str(self.pool_bytes)),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.max_num_seqs)),
        )


@dataclass(frozen=True)
class Sizes:
    """What a user may choose; None or empty is the mode's default.

    Args:
        concurrency: requests open at a time.
        prompt_tokens: of each request.
        output_tokens: of each request.
        requests: of each load; twice the concurrency, or as many, by mode.
        pool_prompts: sizes of the pool in longest requests; `AMPLE` for enough of it.
        pool_bytes: size of the pool, in place of that.
    """

    concurrency: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    output_tokens: int | None = None
    requests: int | None = None
    pool_prompts: tuple[float, ...] = ()
    pool_bytes: int | None = None


_DEFAULTS = {
    Mode.THROUGHPUT: Sizes((1, 2, 4, 8, 16), (2000,), 128, None, (3.4, AMPLE)),
    Mode.LATENCY: Sizes((8,), (4000,), 128, None, (AMPLE,)),
    Mode.MEMORY: Sizes((12,), (1000, 2000, 4000), 256, None, (3.4,)),
    Mode.ABLATION: Sizes((8,), (4000,), 128, None, (AMPLE,)),
    Mode.OFFLINE: Sizes((32,), (960,), 128, None, (AMPLE,)),
}


def bytes_per_token(model: str) -> int:
    """Keys and values of one token in all layers, by the model's ``config.json``.

    Raises:
        ValueError: there is no such file, or it says something else than attention with KV heads.
    """
    try:
        body = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        config: dict[str, Any] = body.get("text_config") or body
        dtype = config.get("dtype") or config.get("torch_dtype") or body.get("torch_dtype")
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = _DTYPE_BYTES[dtype or "bfloat16"]
        return int(2 * size * config["num_hidden_layers"] * heads * head_dim)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"the pool's size cannot be found from {model}/config.json ({error!r}); give "
            "--pool-bytes"
        ) from None


def make(mode: Mode, model: str, chosen: Sizes) -> list[Session]:
    """Sessions of a mode.

    Args:
        mode: what is asked.
        model: folder, for the pool's size.
        chosen: what differs from the mode's defaults.

    Raises:
        ValueError: sizes that do not go with the mode.
    """
    base = _DEFAULTS[mode]
    concurrency = chosen.concurrency or base.concurrency
    lengths = chosen.prompt_tokens or base.prompt_tokens
    output = chosen.output_tokens or base.output_tokens
    assert output is not None
    _check(mode, concurrency, lengths, output, chosen)
    loads = _loads(mode, concurrency, lengths, output, chosen.requests)
    longest = max(lengths) + output
    most = max(concurrency)
    model_len = longest + _SLACK_TOKENS
    if chosen.pool_bytes is not None:
        pools = [(f"pool of {chosen.pool_bytes / 2**20:.0f} MiB", chosen.pool_bytes)]
    else:
        per_request = bytes_per_token(model) * longest
        # a second pass finds the first one's prompts in the cache and needs room for itself
        ample = most * 2 + 2 if mode is Mode.LATENCY else most * 1.25 + 1
        pools = []
        for count in chosen.pool_prompts or base.pool_prompts:
            shown = "ample pool" if count == AMPLE else f"pool for {count:g} of the longest prompts"
            pools.append((shown, int(per_request * (count or ample))))
    return [
        Session(size, model_len, most, tuple(_within(load, title) for load in loads))
        for title, size in pools
    ]


def _within(load: Load, pool: str) -> Load:
    cached = load.cached_group and f"{load.cached_group}, {pool}"
    return Load(**{**load.__dict__, "group": f"{load.group}, {pool}", "cached_group": cached})


def _clients(count: int) -> str:
    return f"{count} client{'s' if count > 1 else ''}"


def _loads(
    mode: Mode,
    concurrency: Sequence[int],
    lengths: Sequence[int],
    output: int,
    requests: int | None,
) -> list[Load]:
    loads = []
    for tokens in lengths:
        for clients in concurrency:
            sizes = f"prompts of {tokens:,} + {output} tokens"
            group, label, x, cached, waves = sizes, _clients(clients), float(clients), None, 1
            if mode is Mode.THROUGHPUT:
                waves = 2
            elif mode is Mode.LATENCY:
                group, cached = f"cold, {sizes}", f"prompts cached, {sizes}"
            elif mode is Mode.MEMORY:
                group = f"{clients} requests at once, {output} output tokens"
                label, x = f"{tokens:,} tokens", float(tokens)
            elif mode is Mode.ABLATION:
                group = f"{_clients(clients)}, {sizes}"
            elif mode is Mode.OFFLINE:
                label = f"{requests or clients} prompts"
            count = requests or clients * waves
            loads.append(Load(group, label, x, clients, count, tokens, output, cached))
    return loads


def _check(
    mode: Mode, concurrency: Sequence[int], lengths: Sequence[int], output: int, chosen: Sizes
) -> None:
    reasons = []
    if wrong := [n for n in (*concurrency, *lengths, output) if n < 1]:
        reasons.append(f"sizes must be positive, got {wrong}")
    if any(count < 0 for count in chosen.pool_prompts):
        reasons.append("--pool-prompts must be positive, or 0 for an ample pool")
    if any(0 < count < 1 for count in chosen.pool_prompts):
        reasons.append("a pool below --pool-prompts 1 cannot hold the longest prompt")
    if mode is Mode.OFFLINE:
        if len(concurrency) > 1:
            reasons.append("offline sends all prompts at once: give --requests, not --concurrency")
        if max(lengths) > _OFFLINE_MAX_PROMPT or max(lengths) + output > _OFFLINE_MAX_TOTAL:
            reasons.append(
                f"`vllm bench throughput` leaves out prompts above {_OFFLINE_MAX_PROMPT} tokens "
                f"and requests above {_OFFLINE_MAX_TOTAL}; use the mode throughput for them"
            )
    if reasons:
        raise ValueError("; ".join(reasons))
