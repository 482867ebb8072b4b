"""Scores of answers: by their text, and token by token under teacher forcing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcompress_serving.evaluation.tasks import Question

if TYPE_CHECKING:  # string scores need no torch
    import torch


def contained(text: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the text, upper and lower case alike.

    RULER's ``string_match_all`` for one sample: naming half of what was asked is worth half.
    """
    lowered = text.lower()
    return sum(reference.lower() in lowered for reference in references) / len(references)


def any_contained(text: str, references: Sequence[str]) -> float:
    """1 if one of the references occurs in the text, else 0: RULER's ``string_match_part``."""
    return float(contained(text, references) > 0)


def match_score(text: str, question: Question) -> float:
    """The string score that a question asks for."""
    score = contained if question.match == "all" else any_contained
    return score(text, question.references)


def answer_scores(nll: torch.Tensor, hits: torch.Tensor) -> dict[str, float]:
    """Scores of the reference answer, forced.

    Args:
        nll: float64 ``[n]``, of the answer's tokens, in nats.
        hits: bool ``[n]``, whether each is the most likely one.

    Returns:
        ``nll`` and ``top1``, means over the tokens, and ``exact``: 1 if greedy decoding gives this
        very answer, which is when every token is the most likely one.
    """
    return {
        "nll": float(nll.mean()),
        "top1": float(hits.double().mean()),
        "exact": float(hits.all()),
    }
