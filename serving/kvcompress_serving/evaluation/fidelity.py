"""Fidelity: how far the model's next tokens move when the prompt before them is compressed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvcompress_serving.evaluation.offline import CompressedRun, FullRun, Offline
from kvcompress_serving.evaluation.results import Measurement, common_prefix
from kvcompress_serving.evaluation.rows import Row, rows_of
from kvcompress_serving.evaluation.texts import Document, cut, default_sources

TASK = "fidelity"


def kl_divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(full || other) in nats, token by token.

    Args:
        full: float32 ``[n, vocab]``, logits.
        other: the same.

    Returns:
        float64 ``[n]``.
    """
    p, q = (logits.double().log_softmax(-1) for logits in (full, other))
    return (p.exp() * (p - q)).sum(-1)


def token_nll(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """Negative log-likelihood in nats of each target.

    Args:
        logits: ``[n, vocab]``, before each target.
        targets: n token ids.

    Returns:
        float64 ``[n]``.
    """
    index = torch.tensor(list(targets), dtype=torch.long)[:, None]
    return -logits.double().log_softmax(-1).gather(1, index)[:, 0]


def measure(run: FullRun, packed: CompressedRun, greedy: Sequence[int]) -> dict[str, float]:
    """Fidelity of one row on one prompt.

    The first token after the prompt is predicted by the prefill itself, the same for every row, and
    is left out of all of them.

    Args:
        run: the full cache.
        packed: the row.
        greedy: what the full cache generates after the prompt; empty to leave that out.

    Returns:
        ``kl``, ``top1``, ``nll``, ``ppl_ratio`` over the forced continuation, and
        ``greedy_prefix``, leading tokens of the greedy continuation that are the full cache's own.
    """
    targets = run.continuation[1:]
    full = run.logits[: len(targets)]
    ours = packed.feed(run.continuation[: len(targets)])
    nll, nll_full = token_nll(ours, targets).mean(), token_nll(full, targets).mean()
    scores = {
        "kl": float(kl_divergence(full, ours).mean()),
        "top1": float((full.argmax(-1) == ours.argmax(-1)).double().mean()),
        "nll": float(nll),
        "ppl_ratio": math.exp(float(nll - nll_full)),
    }
    if len(greedy) > 1:
        # under teacher forcing with the full cache's tokens, the first difference is where free
        # running leaves it
        predicted = packed.feed(greedy[:-1]).argmax(-1).tolist()
        scores["greedy_prefix"] = 1.0 + common_prefix(greedy[1:], predicted)
    return scores


def evaluate(
    model: Offline | Path | str,
    rows: Sequence[str | Row],
    documents: Sequence[Document] | None = None,
    *,
    prompt_tokens: int = 1536,
    continuation_tokens: int = 128,
    greedy_tokens: int = 64,
    per_kind: int = 4,
    places: range | None = None,
    on_step: Callable[[], Any] = lambda: None,
    **settings: Any,
) -> list[Measurement]:
    """Fidelity of all rows on stretches of the documents; one prefill per stretch.

    Args:
        model: folder, or a model that is loaded already.
        rows: ``semanticache:threshold=0.9`` and the like, or `Row` objects, which may hold a
            method that is in no registry. The full cache is always among the rows.
        documents: texts to cut stretches from; the shipped prose and Python's sources by default.
        prompt_tokens: tokens of the prompt.
        continuation_tokens: tokens fed after it, the text's own.
        greedy_tokens: length of the greedy comparison; 0 leaves it out.
        per_kind: stretches of each kind of text.
        places: of all stretches in order, the numbers of those that are evaluated; None: all.
        on_step: called after each row of each stretch, for a progress bar.
        settings: of `Offline`, where ``model`` is a folder.

    Raises:
        ValueError: a row, a text or a length does not fit.
    """
    engine = model if isinstance(model, Offline) else Offline(model, **settings)
    chosen = rows_of(list(rows))
    length = prompt_tokens + continuation_tokens
    start = engine.start()
    measurements = []
    stretches = cut(documents or default_sources(), engine.encode, length - len(start), per_kind)
    for document, ids in stretches if places is None else [stretches[place] for place in places]:
        ids = [*start, *ids]
        run = engine.full(ids[:prompt_tokens], ids[prompt_tokens:])
        greedy = run.greedy(greedy_tokens) if greedy_tokens > 1 else []
        for row in chosen:
            packed = engine.compress(row, run)
            scores = measure(run, packed, greedy)
            measurements.append(Measurement.of(TASK, document, row, packed, scores))
            on_step()
    return measurements
