"""How well the attention of soft tokens is that of a response.

Shape letters: ``L`` layers, ``H`` KV heads, ``T`` tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LEAST = 1e-12


@dataclass(frozen=True)
class Scored:
    """Tokens of a prompt that a choice is about: not the first ones, not the recent window.

    Args:
        num_sink_tokens: first tokens that are kept in any case.
        window: recent tokens, likewise.
    """

    num_sink_tokens: int
    window: int

    def part(self, attention: torch.Tensor) -> torch.Tensor:
        """``[..., T]`` without the others, each row summing to 1."""
        own = attention[..., self.num_sink_tokens : attention.shape[-1] - self.window]
        return own / own.sum(-1, keepdim=True).clamp_min(_LEAST)


def divergence(gold: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Cross-entropy less the entropy of ``gold``: KL(gold || found) in nats, mean over rows.

    Args:
        gold: ``[L, H, n]``, each row summing to 1.
        found: the same.
    """
    log_ratio = gold.clamp_min(_LEAST).log() - found.clamp_min(_LEAST).log()
    return (gold * log_ratio).sum(-1).mean()


def squared_error(gold: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Mean squared error times ``n`` squared, so that it does not shrink with the prompt
    (arXiv 2605.22337, its loss). Arguments as for `divergence`."""
    return (gold - found).square().mean() * gold.shape[-1] ** 2


def hit_rate(scores: torch.Tensor, gold: torch.Tensor, keep: float) -> torch.Tensor:
    """Share of the tokens with the highest ``gold`` that are among those with the highest scores.

    Args:
        scores: ``[..., n]``.
        gold: ``[..., n]``.
        keep: share of the tokens that is chosen, at least one token.

    Returns:
        ``[...]``; a random choice has ``keep``.
    """
    count = max(int(keep * scores.shape[-1]), 1)
    chosen, wanted = (
        torch.zeros_like(x, dtype=torch.bool).scatter_(-1, x.topk(count).indices, True)
        for x in (scores, gold)
    )
    return (chosen & wanted).sum(-1) / count
