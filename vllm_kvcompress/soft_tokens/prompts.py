"""Prompts to learn from: pieces of text, some with a request or a question about a needle at the
end.

A piece of plain text is read once and gives several prompts, cut at different lengths; its keys and
values are the same up to the cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from vllm_kvcompress.calibration.texts import Chunk, Source, cut

PieceKind = Literal["text", "request", "needle"]

Encode = Callable[[str], list[int]]

_TURNS: tuple[PieceKind, ...] = ("text", "request", "text", "needle")
_ANSWERED_TURNS: tuple[PieceKind, ...] = ("text", "text", "text", "needle")
_REQUESTS = (
    "\n\nIn short, the text above says that",
    "\n\nSummary:",
    "\n\nQuestion: What are the most important points of the text above?\nAnswer:",
    "\n\nThe text continues as follows.\n\n",
    "\n\nList the names that occur in the text above:",
    "\n\nQuestion: Why?\nAnswer: Because",
)
_ADJECTIVES = ("northern", "silent", "copper", "hidden", "ancient", "little", "second", "broken")
_NOUNS = ("gate", "archive", "tower", "engine", "garden", "harbour", "cabinet", "bridge")


@dataclass(frozen=True)
class Piece:
    """Tokens that are read once, and the prompts that are made of them.

    Args:
        kind: what it is.
        source: name of its text.
        token_ids: of the longest prompt, and what follows it in the text, if that is known.
        cuts: lengths of the prompts, ascending.
        response_tokens: tokens of a response that count.
    """

    kind: PieceKind
    source: str
    token_ids: list[int]
    cuts: tuple[int, ...]
    response_tokens: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Of each prompt the place of its response, as far as the text has one."""
        end = len(self.token_ids)
        return [(cut, min(cut + self.response_tokens, end)) for cut in self.cuts]

    @property
    def is_answered(self) -> bool:
        """Whether the text goes on after each prompt."""
        return len(self.token_ids) > self.cuts[-1]


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and responses.

    Args:
        shortest: of a prompt.
        longest: of a prompt.
        cuts: prompts made of a piece of plain text.
        response: tokens of a response.
    """

    shortest: int = 256
    longest: int = 768
    cuts: int = 4
    response: int = 64


def make_pieces(
    sources: Iterable[Source],
    encode: Encode,
    count: int,
    lengths: Lengths,
    answered: bool,
    seed: int,
) -> list[Piece]:
    """Pieces of all sources by their shares, which do not overlap, in random order.

    Args:
        sources: texts.
        encode: text to token ids, without special tokens.
        count: pieces; a quarter asks for a needle, a quarter ends with a request unless
            ``answered``, and the rest is plain text.
        lengths: of prompts and responses.
        answered: every prompt is followed by its response, the text's own.
        seed: of lengths, requests, needles and the order.

    Raises:
        ValueError: there is too little text.
    """
    chunks = cut(sources, encode, count, lengths.longest + lengths.response)
    chooser = random.Random(seed)
    chooser.shuffle(chunks)
    turns = _ANSWERED_TURNS if answered else _TURNS
    pieces = []
    for index, chunk in enumerate(chunks):
        kind = turns[index % len(turns)]
        if kind == "text":
            pieces.append(_text(chunk, lengths, chooser))
        elif kind == "request":
            pieces.append(_request(chunk, encode, lengths, chooser))
        else:
            pieces.append(_needle(chunk, encode, lengths, chooser))
    return pieces


def _text(chunk: Chunk, lengths: Lengths, chooser: random.Random) -> Piece:
    """One cut in each of as many equal parts of the allowed lengths."""
    step = (lengths.longest - lengths.shortest) / lengths.cuts
    starts = [lengths.shortest + step * part for part in range(lengths.cuts)]
    cuts = tuple(sorted({int(chooser.uniform(start, start + step)) for start in starts}))
    ids = chunk.token_ids[: cuts[-1] + lengths.response]
    return Piece("text", chunk.source, ids, cuts, lengths.response)


def _request(chunk: Chunk, encode: Encode, lengths: Lengths, chooser: random.Random) -> Piece:
    """A text with a request at its end."""
    end = encode(chooser.choice(_REQUESTS))
    length = chooser.randint(lengths.shortest, lengths.longest)
    ids = [*chunk.token_ids[: max(length - len(end), 0)], *end]
    return Piece("request", chunk.source, ids, (len(ids),), lengths.response)


def _needle(chunk: Chunk, encode: Encode, lengths: Lengths, chooser: random.Random) -> Piece:
    """A sentence with a number put in anywhere, asked for at the end, and the answer."""
    thing = f"{chooser.choice(_ADJECTIVES)} {chooser.choice(_NOUNS)}"
    number = chooser.randint(10_000, 9_999_999)
    needle = encode(f"\nThe access code of the {thing} is {number}.\n")
    question = encode(
        f"\nQuestion: What is the access code of the {thing}?\n"
        f"Answer: The access code of the {thing} is"
    )
    answer = encode(f" {number}.")
    length = chooser.randint(lengths.shortest, lengths.longest)
    body = chunk.token_ids[: max(length - len(needle) - len(question), 0)]
    place = chooser.randint(0, len(body))
    prompt = [*body[:place], *needle, *body[place:], *question]
    return Piece("needle", chunk.source, [*prompt, *answer], (len(prompt),), len(answer))
