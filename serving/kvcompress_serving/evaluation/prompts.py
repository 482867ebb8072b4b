"""From a sample to token ids: what is compressed, what is fed after it, and what is scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvcompress_serving.evaluation.tasks import Sample

Order = Literal["after", "before", "known"]
ORDERS: tuple[Order, ...] = get_args(Order)
BORDER_TOKENS = 8
"""Tokens to leave free: a prompt is tokenized in pieces, which may take more than the whole."""
_MARKS = ("\ue000", "\ue001", "\ue002")


@dataclass(frozen=True)
class Frame:
    """Text around the turns of a conversation.

    Args:
        head: before the user's first words.
        answer: between the user's words and the answer.
        turn: between an answer and the user's next words.
    """

    head: str = ""
    answer: str = ""
    turn: str = "\n"


PLAIN = Frame()


def chat_frame(tokenizer: Any) -> Frame:
    """Frame of a model's own chat template.

    Raises:
        ValueError: the model has none, or one that changes what is said.
    """
    roles = ("user", "assistant", "user")
    turns = [{"role": r, "content": m} for r, m in zip(roles, _MARKS, strict=True)]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except ValueError as error:
        raise ValueError(f"the model has no chat template: {error}") from None
    if [text.count(mark) for mark in _MARKS] != [1, 1, 1]:
        raise ValueError("the model's chat template changes what is said; evaluate it without")
    head, rest = text.split(_MARKS[0])
    _, rest = rest.split(_MARKS[1])
    turn, answer = rest.split(_MARKS[2])
    return Frame(head, answer, turn)


@dataclass(frozen=True)
class Span:
    """Tokens of a continuation that are an answer: ``[start, stop)``, first and last excluded."""

    start: int
    stop: int


@dataclass(frozen=True)
class Case:
    """A sample as token ids.

    Args:
        prompt: what is prefilled and compressed.
        continuation: questions, leads and reference answers, fed after it.
        answers: spans of each question's references in the continuation.
        asked: for each question, how many tokens of the continuation precede its answer.
    """

    prompt: list[int]
    continuation: list[int]
    answers: tuple[tuple[Span, ...], ...]
    asked: tuple[int, ...]


def make_case(
    sample: Sample,
    order: Order,
    encode: Callable[[str], list[int]],
    start: Sequence[int] = (),
    frame: Frame = PLAIN,
) -> Case:
    """Tokens of a sample.

    Args:
        sample: the sample.
        order: where the first question stands. ``after``: after the compressed context, so that
            compression cannot know it. ``before``: in front of the context, and not again.
            ``known``: after the context, but compressed together with it. A second question always
            follows the first answer.
        encode: text to token ids, without special tokens.
        start: ids in front of everything.
        frame: text around the turns.
    """
    first = sample.questions[0]
    body = f"{sample.intro}\n{sample.context}"
    if order == "before":
        body = f"{first.text}\n{body}"
    if order == "known":
        body = f"{body}\n{first.text}{frame.answer}"
    prompt = [*start, *encode(frame.head + body)]
    continuation: list[int] = []
    answers, asked = [], []
    for number, question in enumerate(sample.questions):
        if number:
            opening = f"{frame.turn}{question.text}{frame.answer}"
        else:
            opening = {
                "after": f"\n{question.text}{frame.answer}",
                "before": frame.answer or "\n",
                "known": "",
            }[order]
        lead = question.lead.lstrip() if opening.endswith("\n") else question.lead
        continuation += encode(opening + lead)
        asked.append(len(continuation))
        spans = []
        for place, reference in enumerate(question.references):
            if place:
                continuation += encode(",")
            ids = encode(f" {reference}")
            spans.append(Span(len(continuation), len(continuation) + len(ids)))
            continuation += ids
        continuation += encode(".")
        answers.append(tuple(spans))
    return Case(prompt, continuation, tuple(answers), tuple(asked))
