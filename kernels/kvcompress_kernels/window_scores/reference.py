"""Plain torch form of `window_scores`; defines the result. Computed in float64.

Shape letters: ``H`` KV heads, ``n`` tokens, ``G`` of them scored, ``w`` queries, ``D`` head size.
"""

from __future__ import annotations

import torch

from kvcompress_kernels import formats


def attention_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attention that each token receives, summed over the queries of its KV head.

    Query ``i`` is at position ``first_position + i`` and sees the tokens up to its own.

    Args:
        queries: ``[num_heads, w, D]``.
        keys: ``[H, n, D]``.
        first_position: position of the first query, at least 0.
        scale: factor of the logits.
        dtype: of every intermediate result.

    Returns:
        ``[H, n]`` in ``dtype``.
    """
    num_kv_heads, num_tokens, head_size = keys.shape
    grouped = queries.to(dtype).reshape(num_kv_heads, -1, head_size)  # [H, group * w, D]
    logits = grouped @ keys.to(dtype).mT * scale
    positions = first_position + torch.arange(queries.shape[1])
    hidden = torch.arange(num_tokens) > positions[:, None]  # [w, n]
    logits = logits.unflatten(1, (-1, queries.shape[1])).masked_fill(hidden, float("-inf"))
    return logits.softmax(-1).sum((1, 2))


def weigh(
    mass: torch.Tensor, values: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """VATP score: attention times the Euclidean norm of the value, ``[H, G]`` in ``dtype``."""
    return mass.to(dtype) * torch.linalg.vector_norm(values.to(dtype), dim=-1)


def window_scores(
    kv_cache: torch.Tensor,
    source: torch.Tensor,
    tail: torch.Tensor,
    num_tokens: int,
    queries: torch.Tensor,
    first_position: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `api.window_scores`."""
    num_scored = source.numel() * kv_cache.shape[3]
    blocks = torch.cat([source, tail])
    masses, scores = [], []
    for layer in range(kv_cache.shape[0]):
        keys, values = formats.gather_prompt(kv_cache, layer, blocks)
        mass = attention_mass(queries[layer], keys[:, :num_tokens], first_position, scale)
        masses.append(mass[:, :num_scored])
        scores.append(weigh(masses[-1], values[:, :num_scored]))
    return torch.stack(masses).float(), torch.stack(scores).float()
