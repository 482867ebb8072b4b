"""Retrieval: what can still be found in a compressed context."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvcompress_serving.evaluation.fidelity import token_nll
from kvcompress_serving.evaluation.offline import CompressedRun, FullRun, Offline
from kvcompress_serving.evaluation.prompts import (
    BORDER_TOKENS,
    PLAIN,
    Case,
    Frame,
    Order,
    chat_frame,
    make_case,
)
from kvcompress_serving.evaluation.results import Measurement
from kvcompress_serving.evaluation.rows import Row, rows_of
from kvcompress_serving.evaluation.scoring import answer_scores, match_score
from kvcompress_serving.evaluation.tasks import Sample, Source, samples
from kvcompress_serving.evaluation.texts import Document, default_text


def group_name(num_tokens: int, order: Order, turn: int) -> str:
    """Name of a table: length, place of the question, and which question it is."""
    name = f"{num_tokens} tokens, question {order}"
    return name if turn == 0 else f"{name}, question {turn + 1}"


def forced_scores(case: Case, logits: torch.Tensor, prompt_logits: torch.Tensor) -> list[dict]:
    """Teacher-forced scores of each question's answer.

    Args:
        case: the tokens.
        logits: ``[len(case.continuation), vocab]`` or one less, after each of them.
        prompt_logits: ``[vocab]``, before the first of them.
    """
    before = torch.cat([prompt_logits[None], logits])
    scores = []
    for spans in case.answers:
        index = [i for span in spans for i in range(span.start, span.stop)]
        targets = [case.continuation[i] for i in index]
        chosen = before[index]
        hits = chosen.argmax(-1) == torch.tensor(targets)
        scores.append(answer_scores(token_nll(chosen, targets), hits))
    return scores


def measure(
    sample: Sample,
    case: Case,
    run: FullRun,
    packed: CompressedRun,
    decode: Callable[[list[int]], str] | None = None,
    stop: frozenset[int] = frozenset(),
) -> list[dict[str, float]]:
    """Scores of one row on one sample, question by question.

    Args:
        sample: the sample.
        case: its tokens.
        run: the full cache.
        packed: the row.
        decode: token ids to text; where given, the answers are also generated and scored by their
            text (``match``).
        stop: tokens that end a generated answer.
    """
    scores = forced_scores(case, packed.feed(case.continuation[:-1]), run.prompt_logits)
    if decode is not None:
        for question, asked, result in zip(sample.questions, case.asked, scores, strict=True):
            tokens = packed.greedy(case.continuation[:asked], question.answer_tokens, stop)
            result["match"] = match_score(decode(tokens), question)
    return scores


def evaluate(
    model: Offline | Path | str,
    rows: Sequence[str | Row],
    tasks: Sequence[str] = ("niah_multikey_1",),
    *,
    lengths: Sequence[int] = (1024,),
    num_samples: int = 10,
    orders: Sequence[Order] = ("after",),
    text: str | None = None,
    two_questions: bool = False,
    generate: bool = False,
    chat: bool = False,
    seed: int = 0,
    places: range | None = None,
    on_step: Callable[[], Any] = lambda: None,
    **settings: Any,
) -> list[Measurement]:
    """Retrieval of all rows; one prefill per sample and order.

    Args:
        model: folder, or a model that is loaded already.
        rows: see `fidelity.evaluate`.
        tasks: of `tasks.TASKS`.
        lengths: tokens of context, questions and answers together.
        num_samples: samples of each task and length.
        orders: where the question stands (`prompts.make_case`).
        text: haystack; the shipped prose by default.
        two_questions: ask two questions of each context (where a task can).
        generate: also generate answers and score their text; slow.
        chat: put prompts into the model's chat template.
        seed: of the samples.
        places: of all prompts in order, the numbers of those that are evaluated; None: all.
        on_step: called after each row of each prompt.
        settings: of `Offline`, where ``model`` is a folder.

    Raises:
        ValueError: a row, task or length does not fit.
    """
    engine = model if isinstance(model, Offline) else Offline(model, **settings)
    chosen = rows_of(list(rows))
    source = Source.of(text if text is not None else default_text())
    frame: Frame = chat_frame(engine.tokenizer) if chat else PLAIN
    # a chat template writes the first token itself
    start = [] if chat else engine.start()
    extra = (
        BORDER_TOKENS
        + len(start)
        + sum(
            len(engine.encode(part))
            for part in (frame.head, frame.answer, frame.turn, frame.answer)
        )
    )
    decode = engine.decode if generate else None
    measurements = []
    numbers = itertools.count()
    for task in tasks:
        for num_tokens in lengths:
            for sample in samples(
                task,
                num_tokens - extra,
                num_samples,
                source,
                lambda text: len(engine.encode(text)),
                seed=seed,
                two_questions=two_questions,
            ):
                for order in orders:
                    number = next(numbers)
                    if places is not None and number not in places:
                        continue
                    case = make_case(sample, order, engine.encode, start, frame)
                    run = engine.full(case.prompt, case.continuation)
                    for row in chosen:
                        packed = engine.compress(row, run)
                        scores = measure(sample, case, run, packed, decode, engine.stop_tokens)
                        for turn, result in enumerate(scores):
                            group = group_name(num_tokens, order, turn)
                            document = Document(f"{task}/{num_tokens}/{sample.index}", group, "")
                            measurements.append(Measurement.of(task, document, row, packed, result))
                        on_step()
    return measurements
