"""The server back end: generated answers through the OpenAI endpoint of a running server.

The rows are per-request settings (``vllm_xargs``), so that the full cache is measured on the same
server. A server computes prompt log-probabilities while it prefills, before anything is
compressed, so they say nothing about compression; what it generates is what can be scored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvcompress_serving.evaluation.prompts import BORDER_TOKENS, Order, make_case
from kvcompress_serving.evaluation.results import (
    EndpointError,
    Measurement,
    common_prefix,
    token_digest,
)
from kvcompress_serving.evaluation.scoring import match_score
from kvcompress_serving.evaluation.tasks import Source, samples
from kvcompress_serving.evaluation.texts import default_text
from vllm_kvcompress.config import CONFIG_KEY, OPTION_KEYS

FULL = "full"
_METRICS = "vllm_kvcompress:"
_SECONDS = 600.0
SERVER_ORDERS: tuple[Order, ...] = ("known", "before")
"""A server compresses all that it is sent, so a question cannot come after the compression."""


@dataclass(frozen=True)
class ServerRow:
    """One row: what the requests carry.

    Args:
        name: shown in the tables.
        xargs: the requests' ``vllm_xargs``.
    """

    name: str
    xargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return self.xargs.get(CONFIG_KEY) == "none"

    @staticmethod
    def parse(text: str) -> ServerRow:
        """Row from ``METHOD`` or ``METHOD:keep=0.3,threshold=0.8``; ``full`` switches it off.

        ``NAME=METHOD:...`` gives the row a name of its own.

        Raises:
            ValueError: a setting that no request can carry.
        """
        head, _, tail = text.partition(":")
        name, _, method = head.rpartition("=")
        xargs: dict[str, Any] = {CONFIG_KEY: "none" if method in (FULL, "none") else method}
        for part in filter(None, (part.strip() for part in tail.split(","))):
            key, _, value = part.partition("=")
            allowed = [k.removeprefix(f"{CONFIG_KEY}_") for k in OPTION_KEYS if k != CONFIG_KEY]
            if key not in allowed:
                raise ValueError(
                    f"row '{text}': a request cannot carry '{key}'; it can carry "
                    f"{', '.join(allowed)}. Other settings belong to the server's own flags"
                )
            xargs[f"{CONFIG_KEY}_{key}"] = json.loads(value)
        return ServerRow(name or text, xargs)


def rows_of(texts: Sequence[str]) -> list[ServerRow]:
    """Rows from their texts; ``full`` comes first, asked for or not.

    Raises:
        ValueError: two rows have one name, or a row cannot be read.
    """
    rows = [ServerRow.parse(text) for text in texts]
    if not any(row.is_full for row in rows):
        rows.append(ServerRow.parse(FULL))
    rows.sort(key=lambda row: not row.is_full)
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two rows are named {', '.join(twice)}; name them NAME=METHOD:...")
    return rows


@dataclass(frozen=True)
class Answer:
    """What the server generated, and what compression did for it.

    Args:
        text: generated text.
        token_ids: the same as tokens.
        delta: growth of the plugin's counters over the request.
    """

    text: str
    token_ids: list[int]
    delta: dict[str, float]


class Endpoint:
    """A running server that nobody else uses meanwhile (its counters are read).

    Args:
        url: root of the server, without ``/v1``.
        model: served name; the server's only one by default.
        client: HTTP client, for tests.
    """

    def __init__(
        self, url: str, model: str | None = None, client: httpx.Client | None = None
    ) -> None:
        self._client = client or httpx.Client(base_url=url, timeout=_SECONDS)
        listed = self._get("/v1/models").json()["data"]
        names = [item["id"] for item in listed]
        self.model = model or names[0]
        if self.model not in names:
            raise EndpointError(f"the server has no model '{model}'; it serves {names}")
        self.max_length = int(next(m for m in listed if m["id"] == self.model)["max_model_len"])
        self.block_size = self._block_size()

    def _get(self, path: str) -> httpx.Response:
        return self._sent(self._client.build_request("GET", path))

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._sent(self._client.build_request("POST", path, json=dict(body))).json()

    def _sent(self, request: httpx.Request) -> httpx.Response:
        try:
            reply = self._client.send(request)
        except httpx.HTTPError as error:
            raise EndpointError(f"{request.url}: {error}") from None
        if reply.is_error:
            raise EndpointError(f"{request.url}: HTTP {reply.status_code}: {reply.text[:500]}")
        return reply

    def _samples(self) -> list[Any]:
        families = text_string_to_metric_families(self._get("/metrics").text)
        return [sample for family in families for sample in family.samples]

    def _block_size(self) -> int:
        for sample in self._samples():
            if sample.name == "vllm:cache_config_info":
                return int(sample.labels["block_size"])
        raise EndpointError("the server's /metrics do not tell its block size; is it vLLM?")

    def _counters(self) -> dict[str, float]:
        """The plugin's counters; those by reason under ``bypassed:REASON``."""
        totals: dict[str, float] = {}
        for sample in self._samples():
            if not sample.name.startswith(_METRICS):
                continue
            name = sample.name.removeprefix(_METRICS)
            if reason := sample.labels.get("reason"):
                name = f"bypassed:{reason}"
            totals[name] = totals.get(name, 0.0) + sample.value
        return totals

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list(self._post("/tokenize", body)["tokens"])

    def start(self) -> list[int]:
        """Tokens that the tokenizer puts in front of every text."""
        body = {"model": self.model, "prompt": "a", "add_special_tokens": True}
        tokens = list(self._post("/tokenize", body)["tokens"])
        return tokens[: len(tokens) - len(self.encode("a"))]

    def answer(self, prompt: Sequence[int], max_tokens: int, row: ServerRow) -> Answer:
        """Generate greedily."""
        before = self._counters()
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "vllm_xargs": dict(row.xargs),
        }
        choice = self._post("/v1/completions", body)["choices"][0]
        delta = {k: v - before.get(k, 0.0) for k, v in self._counters().items()}
        return Answer(choice["text"], list(choice["token_ids"]), delta)


def measurement(
    task: str,
    group: str,
    name: str,
    prompt: Sequence[int],
    row: ServerRow,
    answer: Answer,
    block_size: int,
    scores: dict[str, float],
) -> Measurement:
    """Measurement of one request, its sizes from what the plugin counted for it.

    A request that was left alone holds all its blocks. ``bytes_ratio`` is that of the blocks: the
    server does not tell how much of its pool the biases take.
    """
    num_tokens = len(prompt)
    blocks = math.ceil(num_tokens / block_size)
    compressed = answer.delta.get("requests_compressed_total", 0.0) > 0
    freed = answer.delta.get("blocks_freed_total", 0.0) if compressed else 0.0
    saved = (
        answer.delta.get("prompt_tokens_in_total", 0.0)
        - answer.delta.get("entries_kept_total", 0.0)
        if compressed
        else 0.0
    )
    reasons = [k for k, v in answer.delta.items() if k.startswith("bypassed:") and v > 0]
    bypassed = "" if compressed or row.is_full else (reasons or ["bypassed:unknown"])[0]
    return Measurement(
        task=task,
        group=group,
        prompt=f"{name}#{token_digest(prompt)}",
        row=row.name,
        scores=scores,
        num_tokens=num_tokens,
        bytes_ratio=(blocks - freed) / blocks,
        blocks_ratio=(blocks - freed) / blocks,
        kept=(num_tokens - saved) / num_tokens,
        bypassed=bypassed.removeprefix("bypassed:"),
    )


def evaluate(
    endpoint: Endpoint,
    rows: Sequence[ServerRow],
    tasks: Sequence[str],
    *,
    lengths: Sequence[int] = (1024,),
    num_samples: int = 10,
    orders: Sequence[Order] = ("known",),
    text: str | None = None,
    seed: int = 0,
    on_step: Callable[[], Any] = lambda: None,
) -> list[Measurement]:
    """Generated answers of all rows, scored by their text (``match``), and the share of the full
    cache's answer up to the first token that differs (``same_prefix``).

    Args:
        endpoint: the server.
        rows: as `rows_of` gives them, the full cache first.
        tasks: of `tasks.TASKS`.
        lengths: tokens of context, question and answer together.
        num_samples: samples of each task and length.
        orders: of `SERVER_ORDERS`.
        text: haystack; the shipped prose by default.
        seed: of the samples.
        on_step: called after each request.

    Raises:
        ValueError: a row, task, order or length does not fit.
        EndpointError: the server refused a request.
    """
    if misplaced := sorted(set(orders) - set(SERVER_ORDERS)):
        raise ValueError(
            f"a server compresses the whole prompt, so the question cannot stand {misplaced}; "
            f"expected {', '.join(SERVER_ORDERS)}"
        )
    if longer := [length for length in lengths if length > endpoint.max_length]:
        raise ValueError(f"lengths {longer}: the server takes {endpoint.max_length} tokens")
    source = Source.of(text if text is not None else default_text())
    start = endpoint.start()
    measurements = []
    for task in tasks:
        for num_tokens in lengths:
            made = samples(
                task,
                num_tokens - len(start) - BORDER_TOKENS,
                num_samples,
                source,
                lambda text: len(endpoint.encode(text)),
                seed=seed,
            )
            for sample in made:
                for order in orders:
                    case = make_case(sample, order, endpoint.encode, start)
                    question = sample.questions[0]
                    prompt = [*case.prompt, *case.continuation[: case.asked[0]]]
                    reference: list[int] = []
                    for row in rows:
                        answer = endpoint.answer(prompt, question.answer_tokens, row)
                        reference = reference or answer.token_ids
                        same = common_prefix(reference, answer.token_ids)
                        scores = {
                            "match": match_score(answer.text, question),
                            "same_prefix": same / max(len(reference), 1),
                        }
                        measurements.append(
                            measurement(
                                task,
                                f"{num_tokens} tokens, question {order}, generated",
                                f"{task}/{num_tokens}/{sample.index}",
                                prompt,
                                row,
                                answer,
                                endpoint.block_size,
                                scores,
                            )
                        )
                        on_step()
    return measurements
