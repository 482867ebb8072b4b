"""Prompts, what is collected, and the whole procedure on a small model."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from vllm_kvcompress.calibration.texts import Source
from vllm_kvcompress.cli import app
from vllm_kvcompress.soft_tokens.artifact import load_soft_tokens
from vllm_kvcompress.soft_tokens.collect import FreshSamples, Responses, collect
from vllm_kvcompress.soft_tokens.prompts import Lengths, make_pieces
from vllm_kvcompress.soft_tokens.settings import Settings
from vllm_kvcompress.soft_tokens.store import StoredSamples

LENGTHS = Lengths(shortest=200, longest=300, cuts=3, response=6)
TEXT = "".join(chr(97 + i * i % 25) for i in range(4000))


def encode(text):
    return [ord(letter) % 300 for letter in text]


def pieces_of(answered, count=8, seed=0):
    return make_pieces([Source("letters", TEXT)], encode, count, LENGTHS, answered, seed)


@pytest.mark.parametrize("answered", [False, True])
def test_pieces(answered):
    pieces = pieces_of(answered)
    assert pieces == pieces_of(answered)
    assert pieces != pieces_of(answered, seed=1)
    kinds = [piece.kind for piece in pieces]
    assert kinds.count("text") == (6 if answered else 4)
    assert kinds.count("needle") == 2
    for piece in pieces:
        assert all(LENGTHS.shortest <= cut <= LENGTHS.longest for cut in piece.cuts)
        if piece.kind == "text":
            assert len(piece.cuts) == 3
            assert all(stop - start == 6 for start, stop in piece.spans)
        if answered:
            assert piece.is_answered
    needle = "".join(map(chr, next(p for p in pieces if p.kind == "needle").token_ids))
    prompt, answer = needle.rsplit("Answer: The access code of the ", 1)
    thing, number = answer.rstrip(".").split(" is ")
    assert f"The access code of the {thing} is {number}." in prompt


def test_too_little_text():
    with pytest.raises(ValueError, match="give more text"):
        pieces_of(True, count=200)


@pytest.mark.parametrize("source", ["text", "model"])
def test_stored_and_fresh_samples_are_the_same(frozen, tmp_path, source):
    pieces = pieces_of(source == "text")
    responses = Responses(source=source, per_prompt=2, temperature=1.0, batch_size=3)
    done = []
    for _ in range(2):  # the second time all is there already
        collect(
            frozen, pieces, range(5), responses, tmp_path, torch.float32, lambda: done.append(1)
        )
    assert len(done) == 10
    stored = StoredSamples(tmp_path, range(5), pieces)
    fresh = FreshSamples(frozen, range(5), pieces, responses, torch.float32)
    assert len(stored) == len(fresh) == sum(len(piece.cuts) for piece in pieces[:5])
    for index in range(len(stored)):
        ours, theirs = stored[index], fresh[index]
        assert torch.equal(ours.token_ids, theirs.token_ids)
        torch.testing.assert_close(ours.cache.keys, theirs.cache.keys, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.gold, theirs.gold, atol=1e-5, rtol=1e-4)
        assert 0 < float(ours.gold.sum(-1).max()) <= 1 + 1e-5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kinds": ("both",)}, "expected some of static, dynamic"),
        ({"num_tokens": 0}, "k = 0"),
        ({"pieces": 1}, "at least one piece to learn from"),
        ({"lengths": Lengths(shortest=100)}, "lengths from 100"),
        ({"responses": Responses(source="mine")}, "responses = 'mine'"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"kinds": ("static",), "default": "dynamic"}, "default = 'dynamic': expected one of sta"),
    ],
)
def test_wrong_settings_are_named(change, match):
    (problem,) = Settings(**change).problems(1)
    assert match in problem


def test_a_batch_that_processes_cannot_share():
    assert Settings().problems(2) == []
    assert "multiple of the 3 processes" in Settings().problems(3)[0]


def test_the_command(tiny_model, tmp_path):
    """A training of seconds: what it writes is loaded, and goes on."""
    command = [
        "train",
        "metasoft",
        "--model",
        str(tiny_model()),
        "--out",
        str(tmp_path),
        "--k",
        "4",
    ]
    command += ["--rows", "8", "--pieces", "4", "--cuts", "2", "--shortest", "140"]
    command += ["--longest", "160", "--epochs", "1", "--batch-size", "2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    history = json.loads((tmp_path / "history.json").read_text())
    assert [len(history[kind]["epochs"]) for kind in ("static", "dynamic")] == [2, 3]
    assert (tmp_path / "losses.png").stat().st_size > 1000
    assert "| untrained | 0 |" in (tmp_path / "report.md").read_text()
    tokens = load_soft_tokens(str(tiny_model()), str(tmp_path), "dynamic")
    assert tokens.num_tokens == 4
    best = load_soft_tokens(str(tiny_model()), str(tmp_path), None).kind
    assert best == max(history, key=lambda kind: history[kind]["epochs"][-1]["hit_rate"])
    (other,) = {"static", "dynamic"} - {best}
    again = CliRunner().invoke(app, [*command, "--resume", "--default", other])
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "history.json").read_text()) == history
    assert load_soft_tokens(str(tiny_model()), str(tmp_path), None).kind == other


def test_the_command_refuses(tiny_model, tmp_path):
    command = ["train", "metasoft", "--model", str(tiny_model()), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*command, "--kind", "other"])
    assert result.exit_code == 1
    assert "expected some of static, dynamic" in " ".join(result.output.split())
