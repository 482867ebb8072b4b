"""A small frozen model and what was collected with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_kvcompress.soft_tokens.frozen import FrozenModel
from vllm_kvcompress.soft_tokens.store import Sample

VOCAB_SIZE = 300


@pytest.fixture(scope="session")
def network() -> Any:
    """Random weights that attend to something: queries and keys are large."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "embed_tokens.weight")):
                torch.nn.init.normal_(weight, std=0.5)
    return model.eval()


@pytest.fixture(scope="session")
def frozen(network: Any) -> FrozenModel:
    return FrozenModel(network)


@pytest.fixture(scope="session")
def make_samples(frozen: FrozenModel) -> Callable[[int, int], list[Sample]]:
    """Prompts of 40 to 60 random tokens whose response are 8 more of them."""

    def make(count: int, seed: int) -> list[Sample]:
        generator = torch.Generator().manual_seed(seed)
        samples = []
        for _ in range(count):
            length = int(torch.randint(40, 60, (1,), generator=generator))
            ids = torch.randint(VOCAB_SIZE, (length + 8,), generator=generator)
            cache, (gold,) = frozen.read(ids, [(length, length + 8)])
            prompt = type(cache)(cache.keys[:, :, :length], cache.values[:, :, :length])
            samples.append(Sample(ids[:length], prompt, gold))
        return samples

    return make
