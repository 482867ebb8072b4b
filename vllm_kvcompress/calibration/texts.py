"""Text to calibrate on: files of the user, or a mix that every installation has.

The default mix is English prose (a novel, shipped in ``data/``; the manual pages of Python),
source code (modules of the running Python's library), and short passages in other languages
(``data/languages.txt``). It is meant for a first try: calibrate on what is served.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data"
_MODULES = ("functools", "datetime", "logging", "http.client", "dataclasses", "asyncio.base_events")
_MOST_CHARACTERS = 500_000


@dataclass(frozen=True)
class Source:
    """One text.

    Args:
        name: for the record.
        text: the text.
        share: how much of the tokens comes from it, against the other sources.
    """

    name: str
    text: str
    share: int = 1

    def record(self) -> dict[str, object]:
        """What an artifact remembers of it."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"name": self.name, "share": self.share, "sha256": digest}


def default_sources() -> list[Source]:
    """The default mix."""
    sources = [
        Source(file.name, file.read_text(encoding="utf-8"), share)
        for file, share in ((_DATA / "pride_and_prejudice.txt", 8), (_DATA / "languages.txt", 8))
    ]
    for module, share in (("pydoc_data.topics", 6), *((name, 2) for name in _MODULES)):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # a stripped-down Python
            continue
        sources.append(Source(module, Path(spec.origin).read_text(encoding="utf-8"), share))
    return sources


def read_sources(specs: Iterable[str]) -> list[Source]:
    """Files given as ``PATH`` or ``PATH=SHARE``; a folder stands for its files.

    Raises:
        ValueError: a file cannot be read, is empty, or a share is no whole number above 0; all
            of them in one message.
    """
    sources, problems = [], []
    for spec in specs:
        name, _, share_text = spec.rpartition("=")
        if not name:
            name, share_text = spec, "1"
        if not share_text.isdecimal() or int(share_text) < 1:
            problems.append(f"{spec}: expected PATH=SHARE with a whole number above 0")
            continue
        path = Path(name).expanduser()
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                problems.append(f"{file}: {error}")
                continue
            if text.strip():
                sources.append(Source(file.name, text, int(share_text)))
            else:
                problems.append(f"{file}: no text in it")
    if problems or not sources:
        raise ValueError(f"cannot read texts: {'; '.join(problems[:5]) or 'no file given'}")
    return sources


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Token ids of a text without special tokens, by a transformers tokenizer."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one source."""

    source: str
    token_ids: list[int]


def cut(
    sources: Iterable[Source],
    encode: Callable[[str], list[int]],
    num_chunks: int,
    chunk_tokens: int,
) -> list[Chunk]:
    """Chunks from all sources by their shares, spread evenly over each, the sources mixed.

    Raises:
        ValueError: there is too little text.
    """
    encoded = [(source, encode(source.text[:_MOST_CHARACTERS])) for source in sources]
    room = [len(ids) // chunk_tokens for _, ids in encoded]
    takes = [0] * len(encoded)
    order = []
    for _ in range(num_chunks):
        free = [i for i, most in enumerate(room) if takes[i] < most]
        if not free:
            raise ValueError(
                f"the texts hold {sum(room)} chunks of {chunk_tokens} tokens, {num_chunks} are "
                "needed; give more text, or ask for fewer tokens"
            )
        chosen = min(free, key=lambda i: (takes[i] + 1) / encoded[i][0].share)
        takes[chosen] += 1
        order.append((chosen, takes[chosen] - 1))
    chunks = []
    for index, place in order:
        source, ids = encoded[index]
        start = place * ((len(ids) - chunk_tokens) // max(takes[index] - 1, 1))
        chunks.append(Chunk(source.name, ids[start : start + chunk_tokens]))
    return chunks
