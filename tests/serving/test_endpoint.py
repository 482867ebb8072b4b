"""The server back end against a played server: what it sends, what it counts, what it scores."""

from __future__ import annotations

import json

import httpx
import pytest
from tokenizers import Tokenizer

from kvcompress_serving.evaluation import endpoint as module
from kvcompress_serving.evaluation.endpoint import Endpoint, ServerRow, rows_of
from kvcompress_serving.evaluation.results import EndpointError, summarize

BLOCK = 16
METHOD = "semanticache"


class PlayedServer:
    """Answers like vLLM; compresses 512 tokens to 128 and then forgets half of the answer.

    Args:
        tokenizer: of the served model.
        refuses: leave every request alone.
    """

    def __init__(self, tokenizer: Tokenizer, *, refuses: bool = False) -> None:
        self.tokenizer = tokenizer
        self.refuses = refuses
        self.sent: list[dict] = []
        self.counters = dict.fromkeys(
            ("requests_compressed", "prompt_tokens_in", "entries_kept", "blocks_freed"), 0
        )
        self.bypassed = 0

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://played", transport=httpx.MockTransport(self.reply))

    def reply(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "model", "max_model_len": 4096}]})
        if path == "/metrics":
            return httpx.Response(200, text=self.metrics())
        body = json.loads(request.content)
        if path == "/tokenize":
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
            return httpx.Response(200, json={"tokens": [*([1] * body["add_special_tokens"]), *ids]})
        if body["vllm_xargs"]["kv_compression"] not in ("none", METHOD):
            return httpx.Response(400, text="expected one of 'none', 'semanticache'")
        return httpx.Response(200, json={"choices": [self.complete(body)]})

    def metrics(self) -> str:
        labels = '{engine="0"}'
        lines = [f'vllm:cache_config_info{{block_size="{BLOCK}"}} 1.0']
        lines += [f"vllm_kvcompress:{k}_total{labels} {v}" for k, v in self.counters.items()]
        reason = '{engine="0",reason="short_prompt"}'
        lines.append(f"vllm_kvcompress:requests_bypassed_total{reason} {self.bypassed}")
        return "\n".join(lines) + "\n"

    def complete(self, body: dict) -> dict:
        self.sent.append(body)
        text = self.tokenizer.decode(body["prompt"])
        needle = text.rsplit("secret number of the ", 1)[1].rsplit(" is", 1)[0]
        answer = text.split(f"secret number of the {needle} is ")[1].split(".")[0]
        if body["vllm_xargs"]["kv_compression"] != "none":
            if self.refuses:
                self.bypassed += 1
            else:
                for name, growth in zip(self.counters, (1, 512, 128, 24), strict=True):
                    self.counters[name] += growth
                answer = answer[:3] + "0000"
        ids = self.tokenizer.encode(f" {answer}.", add_special_tokens=False).ids
        return {"text": f" {answer}.", "token_ids": ids}


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return Tokenizer.from_file(str(model_path / "tokenizer.json"))


def evaluate(server: PlayedServer, **settings):
    endpoint = Endpoint("http://played", client=server.client())
    rows = rows_of([METHOD, f"half={METHOD}:keep=0.5,threshold=0.8"])
    return module.evaluate(endpoint, rows, ["niah_single_2"], num_samples=2, **settings)


def test_answers_sizes_and_rows(tokenizer, texts):
    server = PlayedServer(tokenizer)
    measured = evaluate(server, text=texts)
    assert [sent["vllm_xargs"] for sent in server.sent[:3]] == [
        {"kv_compression": "none"},
        {"kv_compression": METHOD},
        {"kv_compression": METHOD, "kv_compression_keep": 0.5, "kv_compression_threshold": 0.8},
    ]
    assert server.sent[0]["prompt"] == server.sent[1]["prompt"] == server.sent[2]["prompt"]
    assert server.sent[0]["prompt"][0] == 1
    assert server.sent[0]["temperature"] == 0
    assert len(server.sent[0]["prompt"]) + server.sent[0]["max_tokens"] <= 1024
    full, packed, _ = summarize(measured)
    assert full.scores["match"].mean == full.scores["same_prefix"].mean == 1.0
    assert packed.scores["match"].mean == 0.0
    assert 0 < packed.scores["same_prefix"].mean < 1
    assert packed.against["match"].mean == -1.0
    assert full.bytes_ratio == full.kept == 1.0
    for m in measured:
        blocks = -(-m.num_tokens // BLOCK)
        if m.row != "full":
            assert m.blocks_ratio == pytest.approx((blocks - 24) / blocks)
            assert m.kept == pytest.approx((m.num_tokens - 512 + 128) / m.num_tokens)
        assert m.bypassed == ""


def test_requests_that_were_left_alone_are_told(tokenizer, texts):
    measured = evaluate(PlayedServer(tokenizer, refuses=True), text=texts)
    assert {m.bypassed for m in measured if m.row != "full"} == {"short_prompt"}
    assert {m.bypassed for m in measured if m.row == "full"} == {""}
    assert {m.bytes_ratio for m in measured} == {1.0}


def test_the_question_cannot_come_after_what_a_server_compresses(tokenizer, texts):
    with pytest.raises(ValueError, match="the question cannot stand \\['after'\\]"):
        evaluate(PlayedServer(tokenizer), text=texts, orders=["after"])
    with pytest.raises(ValueError, match=r"lengths \[8192\]: the server takes 4096 tokens"):
        evaluate(PlayedServer(tokenizer), text=texts, lengths=[8192])


def test_what_the_server_refuses_is_shown(tokenizer, texts):
    server = PlayedServer(tokenizer)
    endpoint = Endpoint("http://played", client=server.client())
    rows = [ServerRow.parse("selkv")]
    with pytest.raises(EndpointError, match="HTTP 400: expected one of 'none', 'semanticache'"):
        module.evaluate(endpoint, rows, ["niah_single_2"], num_samples=1, text=texts)
    with pytest.raises(EndpointError, match="no model 'other'"):
        Endpoint("http://played", "other", client=server.client())


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9"):
        Endpoint("http://127.0.0.1:9")


def test_settings_that_no_request_carries_are_refused():
    with pytest.raises(ValueError, match="cannot carry 'max_keep'; it can carry keep, threshold"):
        ServerRow.parse("semanticache:max_keep=0.5")
    with pytest.raises(ValueError, match="two rows are named full"):
        rows_of(["full", "full"])
