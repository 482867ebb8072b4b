"""Untrained soft tokens of tiny models: rows of their embedding tables, and mixes of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from vllm_kvcompress.artifacts import identify
from vllm_kvcompress.soft_tokens.artifact import ARTIFACT_FILE, save_soft_tokens
from vllm_kvcompress.soft_tokens.model import DynamicTokens, StaticTokens


def make_soft_tokens(model: Path, out: Path, num_tokens: int = 8, default: str = "static") -> Path:
    """Write an artifact with both kinds; its folder.

    What the dynamic ones are depends on the prompt a good deal.
    """
    with safe_open(model / "model.safetensors", "pt") as file:
        table = file.get_tensor("model.embed_tokens.weight").float()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rows = table[torch.randint(0, len(table), (num_tokens + 64,))]
        echo = torch.full((num_tokens,), 0.1)
        offset = 0.3 * rows[:num_tokens]
        mixed = DynamicTokens(rows[num_tokens:], offset, echo, 1.0, hidden_width=32)
        torch.nn.init.normal_(mixed.selector[-1].weight, std=0.5)
    kinds = {"static": StaticTokens(rows[:num_tokens]), "dynamic": mixed}
    out.mkdir(parents=True, exist_ok=True)
    save_soft_tokens(out / ARTIFACT_FILE, identify(model), kinds, default, {}, torch.float32)
    return out
