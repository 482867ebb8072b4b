"""Soft tokens are stored and found; what does not fit is refused with the remedy."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_soft_tokens import make_soft_tokens

from vllm_kvcompress.artifacts import identify, load_artifact
from vllm_kvcompress.soft_tokens.artifact import (
    ARTIFACT_FILE,
    ARTIFACT_KIND,
    ARTIFACT_VERSION,
    SHIPPED,
    load_soft_tokens,
    read_soft_tokens,
    save_soft_tokens,
)
from vllm_kvcompress.soft_tokens.model import StaticTokens


def make_model(folder, hidden_size=16, seed=0):
    folder.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": hidden_size,
    }
    (folder / "config.json").write_text(json.dumps(config))
    table = torch.randn(40, hidden_size, generator=torch.Generator().manual_seed(seed))
    save_file({"model.embed_tokens.weight": table}, folder / "model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


@pytest.fixture
def artifact(model, tmp_path):
    return make_soft_tokens(model, tmp_path / "tokens")


def test_both_kinds_come_back(model, artifact):
    prompt = torch.randn(7, 16)
    static = load_soft_tokens(str(model), str(artifact), None)
    dynamic = load_soft_tokens(str(model), str(artifact / ARTIFACT_FILE), "dynamic")
    assert (static.kind, dynamic.kind) == ("static", "dynamic")
    assert not static.training
    assert not any(value.requires_grad for value in dynamic.parameters())
    assert static(prompt).shape == dynamic(prompt).shape == (8, 16)
    assert torch.equal(dynamic(prompt), dynamic(prompt))


def test_float16_is_stored_and_float32_is_computed(model, tmp_path):
    tokens = StaticTokens(torch.linspace(-1, 1, 48).reshape(3, 16))
    file = tmp_path / ARTIFACT_FILE
    save_soft_tokens(file, identify(model), {"static": tokens}, "static", {"note": 1})
    found = load_artifact(file, ARTIFACT_KIND, ARTIFACT_VERSION)
    assert found.settings["note"] == 1
    assert found.tensors["static.tokens"].dtype == torch.float16
    back = read_soft_tokens(found)["static"]
    assert torch.equal(back.tokens, tokens.tokens.half().float())


def test_another_model_is_refused(artifact, tmp_path):
    other = make_model(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"the weights are others.*train metasoft --model"):
        load_soft_tokens(str(other), str(artifact), None)


def test_nothing_is_shipped_for_a_random_model(model):
    with pytest.raises(ValueError, match=r"no soft tokens are shipped.*train metasoft"):
        load_soft_tokens(str(model), None, None)


def test_a_kind_that_was_not_trained_is_refused(model, tmp_path):
    tokens = StaticTokens(torch.ones(3, 16))
    save_soft_tokens(tmp_path / ARTIFACT_FILE, identify(model), {"static": tokens}, "static", {})
    with pytest.raises(ValueError, match="none of kind 'dynamic'"):
        load_soft_tokens(str(model), str(tmp_path), "dynamic")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"kinds": ["moving"]}, "its kinds are"),
        ({"default": "dynamic", "kinds": ["static"]}, "its default is 'dynamic'"),
        ({"num_tokens": 0}, "'num_tokens' is 0"),
        ({"num_tokens": 9}, r"has shape \[8, 16\], not \[9, 16\]"),
        ({"hidden_size": 32}, "32 numbers, the model's embeddings 16"),
    ],
)
def test_a_wrong_artifact_is_refused(artifact, settings, match):
    found = load_artifact(artifact / ARTIFACT_FILE, ARTIFACT_KIND, ARTIFACT_VERSION)
    wrong = dataclasses.replace(found, settings={**found.settings, **settings})
    with pytest.raises(ValueError, match=match):
        read_soft_tokens(wrong)


def test_shipped_soft_tokens_fit_the_sample_model(model_path):
    files = sorted(SHIPPED.glob(f"*/{ARTIFACT_FILE}"))
    assert files
    assert all(file.stat().st_size < 3_000_000 for file in files)
    for kind in ("static", "dynamic", None):
        tokens = load_soft_tokens(str(model_path), None, kind)
        assert tokens.hidden_size == 576
        assert torch.isfinite(tokens(torch.randn(20, 576))).all()
