"""Real text to evaluate on: files, the sample that is shipped, and this Python's own sources."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcompress_serving import SAMPLE_TEXT

_STANDARD_MODULES = ("argparse", "difflib", "inspect", "threading", "typing", "pathlib", "ast")


@dataclass(frozen=True)
class Document:
    """A stretch of one text.

    Args:
        name: file and place, for the report.
        kind: ``prose``, ``code`` or what the user calls it; results are given for each kind.
        text: the text.
    """

    name: str
    kind: str
    text: str


def default_text() -> str:
    """English prose in the public domain: what tasks are made from unless files are given."""
    return SAMPLE_TEXT.read_text(encoding="utf-8")


def default_sources() -> list[Document]:
    """The shipped prose, and modules of the standard library of the Python that runs this."""
    sources = [Document(SAMPLE_TEXT.name, "prose", default_text())]
    for name in _STANDARD_MODULES:
        module = __import__(name)
        sources.append(Document(f"{name}.py", "code", inspect.getsource(module)))
    return sources


def read_sources(specs: Iterable[str]) -> list[Document]:
    """Files as ``PATH`` or ``KIND=PATH``; a folder stands for its files.

    The kind of a plain path is ``code`` by the ending of a source file, else ``prose``.

    Raises:
        ValueError: a path does not exist or holds no text, all of them in one message.
    """
    sources, problems = [], []
    for spec in specs:
        kind, _, path_text = spec.rpartition("=")
        path = Path(path_text)
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                problems.append(f"{file}: {error}")
                continue
            if not text.strip():
                problems.append(f"{file}: no text in it")
                continue
            sources.append(Document(file.name, kind or _kind(file), text))
    if problems or not sources:
        raise ValueError(f"cannot read texts: {'; '.join(problems) or 'no file given'}")
    return sources


def _kind(path: Path) -> str:
    source = {".py", ".c", ".cc", ".cpp", ".h", ".java", ".js", ".ts", ".go", ".rs", ".sh", ".rb"}
    return "code" if path.suffix in source else "prose"


def cut(
    sources: Sequence[Document],
    encode: Callable[[str], list[int]],
    num_tokens: int,
    per_kind: int,
) -> list[tuple[Document, list[int]]]:
    """Stretches of ``num_tokens`` tokens, ``per_kind`` of every kind, that do not overlap.

    The sources of a kind take turns; the stretches of one source are spread over it evenly.

    Raises:
        ValueError: a kind has too little text.
    """
    stretches = []
    for kind in dict.fromkeys(source.kind for source in sources):
        encoded = [(s, encode(s.text)) for s in sources if s.kind == kind]
        room = [len(ids) // num_tokens for _, ids in encoded]
        takes = [0] * len(encoded)
        while sum(takes) < per_kind:
            free = [i for i in range(len(encoded)) if takes[i] < room[i]]
            if not free:
                raise ValueError(
                    f"the texts of kind '{kind}' hold {sum(room)} stretches of {num_tokens} "
                    f"tokens, {per_kind} are asked for; give more text with --text"
                )
            takes[min(free, key=lambda i: takes[i])] += 1
        for (source, ids), count in zip(encoded, takes, strict=True):
            step = (len(ids) - num_tokens) // max(count, 1)
            for index in range(count):
                start = index * step if count > 1 else 0
                part = ids[start : start + num_tokens]
                name = f"{source.name}@{start}"
                stretches.append((Document(name, kind, ""), part))
    return stretches
