"""From scores to kept tokens, for methods that choose tokens by a score.

Every choice is a pure function of float32 scores, with ties to the lowest token, so that whoever
holds the same scores keeps the same tokens. Shape letters: ``H`` KV heads of one layer, ``G``
tokens; leading dimensions (layers) are chosen for one by one.
"""

from __future__ import annotations

from typing import Literal

import torch

HeadRule = Literal["union", "each", "adaptive"]
"""How the KV heads of a layer share their room; see `select`."""

ADAPTIVE_FLOOR = 0.2
"""Share of an equal budget that every head keeps under the rule ``adaptive``."""


def pool(scores: torch.Tensor, kernel: int) -> torch.Tensor:
    """Mean of each score and its neighbours, as far as there are any.

    Args:
        scores: float32 ``[..., G]``.
        kernel: odd number of scores in a mean; 1 changes nothing.
    """
    assert kernel % 2 == 1, "a window has a middle"
    if kernel == 1 or scores.numel() == 0:
        return scores
    flat = scores.reshape(1, -1, scores.shape[-1])
    pooled = torch.nn.functional.avg_pool1d(
        flat, kernel, stride=1, padding=kernel // 2, count_include_pad=False
    )
    return pooled.reshape(scores.shape)


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` highest of each row; a NaN counts as the lowest there is.

    Args:
        scores: float32 ``[..., G]``.
        count: at most ``G``.

    Returns:
        bool ``[..., G]``, exactly ``count`` of each row.
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above = scores > least
    level = scores == least
    missing = count - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= missing))


def select(
    scores: torch.Tensor, num_entries: int, num_first_tokens: int, rule: HeadRule
) -> torch.Tensor:
    """Choose the tokens that each KV head keeps.

    - ``each``: every head its own ``num_entries`` highest.
    - ``union``: one set for all heads of a layer: of the tokens that any head would keep by itself
      the ``num_entries`` with the highest mean score.
    - ``adaptive``: the heads of a layer share ``H * num_entries``, which go to the highest scores
      of all heads, but no head keeps fewer than a share `ADAPTIVE_FLOOR` of ``num_entries``
      (after Ada-KV, arXiv 2407.11550).

    Args:
        scores: float32 ``[..., H, G]``.
        num_entries: entries per head, on average; at most ``G``.
        num_first_tokens: tokens from the start that are kept in any case, at most ``num_entries``.

    Returns:
        bool ``[..., H, G]``.
    """
    assert num_first_tokens <= num_entries <= scores.shape[-1]
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    scores[..., :num_first_tokens] = float("inf")
    if rule == "adaptive":
        sure = top(scores, max(int(ADAPTIVE_FLOOR * num_entries), num_first_tokens))
        pooled = torch.where(sure, float("inf"), scores).flatten(-2)
        return top(pooled, scores.shape[-2] * num_entries).unflatten(-1, scores.shape[-2:])
    kept = top(scores, num_entries)
    if rule == "each":
        return kept
    wanted = kept.any(-2)
    mean = torch.where(wanted, scores.mean(-2), float("-inf"))
    # a token that some head wants goes before one that none wants, whatever its mean
    mean = torch.where(wanted & (mean == float("-inf")), torch.finfo(mean.dtype).min, mean)
    return top(mean, num_entries)[..., None, :].expand_as(kept).contiguous()
