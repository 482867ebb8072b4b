"""Model families beside Llama: moved, not changed, means the tokens of stock vLLM."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from harness import check_idle

RELOCATE = {"method": "relocate", "min_prompt_tokens": 64, "window": 32}
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"] * 2
FAMILIES = {
    "qwen2 (attention bias)": ("Qwen2", {"num_hidden_layers": 2}),
    "qwen3 (norm on queries and keys)": ("Qwen3", {"num_hidden_layers": 2, "head_dim": 32}),
    "mistral": ("Mistral", {"num_hidden_layers": 2, "head_dim": 32, "sliding_window": None}),
    "phi3 (fused projections)": ("Phi3", {"num_hidden_layers": 2}),
    "gemma3 (sliding-window and full layers)": (
        "Gemma3",
        {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 64, "layer_types": MIXED},
    ),
}


@pytest.fixture
def write(model_path, tmp_path_factory):
    """Write a random float32 model of a family; its folder."""

    def write(family, **changes):
        real = transformers.AutoConfig.from_pretrained(model_path)
        suffix = "TextConfig" if family == "Gemma3" else "Config"
        tokens = {
            name: getattr(real, name)
            for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        }
        config = getattr(transformers, family + suffix)(**{**SIZES, **tokens, **changes})
        folder = tmp_path_factory.mktemp(family)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = getattr(transformers, f"{family}ForCausalLM")(config)
        model.float().save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model_path / name, folder)
        return folder

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_relocation(make_engine, write, token_ids, family):
    name, changes = FAMILIES[family]
    folder = write(name, **changes)
    prompts = [token_ids[:300], token_ids[500:1000]]
    ours, stock = make_engine(folder, RELOCATE), make_engine(folder)
    assert ours.generate(prompts) == stock.generate(prompts)
    assert ours.planner._metrics.requests_compressed._value.get() >= 2
    check_idle(ours)


def test_only_full_attention_layers_are_compressed(make_engine, write, token_ids):
    name, changes = FAMILIES["gemma3 (sliding-window and full layers)"]
    folder = write(name, **changes)
    config = {"method": "semanticache", "min_prompt_tokens": 64, "threshold": 0.6}
    engine = make_engine(folder, config)
    request = engine.add(token_ids[:500])
    assert len(engine.drain()[request].outputs[0].token_ids) == 32
    assert engine.compressor.state.geometry.num_layers == MIXED.count("full_attention")
    check_idle(engine)


@pytest.mark.parametrize(
    ("family", "changes", "word"),
    [
        ("Mistral", {"num_hidden_layers": 2, "sliding_window": 64}, "full-attention layers"),
        ("Gemma2", {"num_hidden_layers": 2, "sliding_window": 64}, "soft cap"),
    ],
)
def test_models_that_are_refused(make_engine, write, family, changes, word):
    with pytest.raises(ValueError, match=word):
        make_engine(write(family, **changes), RELOCATE)
