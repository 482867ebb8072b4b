"""Real text as prompts: stretches of a text, or the prompts of a file as they are."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvcompress_serving import SAMPLE_TEXT

RANDOM = "random"


@dataclass(frozen=True)
class Source:
    """Where prompts come from.

    Args:
        name: for the report.
        text: to cut stretches from, or empty.
        prompts: to send as they are, or empty.
    """

    name: str
    text: str = ""
    prompts: tuple[str, ...] = ()

    @property
    def is_random(self) -> bool:
        return self.name == RANDOM


def read(path: Path | None) -> Source:
    """Prompts from a file, or the shipped text.

    Args:
        path: ``.jsonl`` with an object with ``prompt`` on each line; ``.json`` in ShareGPT's
            format; ``random`` for vLLM's random tokens; a folder or any other file is plain text.

    Raises:
        ValueError: the file cannot be read as what its ending says.
    """
    if path is None:
        return Source(SAMPLE_TEXT.name, SAMPLE_TEXT.read_text(encoding="utf-8"))
    if str(path) == RANDOM:
        return Source(RANDOM)
    try:
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            found = [_prompt_of(json.loads(line)) for line in lines if line.strip()]
        elif path.suffix == ".json":
            found = _sharegpt(json.loads(path.read_text(encoding="utf-8")))
        else:
            files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
            if not text.strip():
                raise ValueError("no text in it")
            return Source(path.name, text)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read prompts from {path}: {error}") from None
    if not found:
        raise ValueError(f"cannot read prompts from {path}: no prompt in it")
    return Source(path.name, prompts=tuple(found))


def _prompt_of(item: Any) -> str:
    if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
        raise ValueError('every line must be an object with a text "prompt"')
    return str(item["prompt"])


def _sharegpt(body: Any) -> list[str]:
    """One prompt of each conversation: all turns before the last answer, in order."""
    if not isinstance(body, list):
        raise ValueError("a list of conversations is expected, as in ShareGPT's files")
    prompts = []
    for entry in body:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise ValueError('every entry must have a list "conversations"')
        values = [str(turn.get("value", "")) for turn in turns if isinstance(turn, dict)]
        roles = [turn.get("from") for turn in turns if isinstance(turn, dict)]
        answers = [i for i, role in enumerate(roles) if role in ("gpt", "assistant", "chatgpt")]
        if answers and answers[-1] > 0:
            prompts.append("\n\n".join(values[: answers[-1]]))
    return prompts


def load_tokenizer(model: str) -> Tokenizer:
    """Tokenizer of a model folder, or of a model by its name on the hub.

    Raises:
        ValueError: there is none.
    """
    file = Path(model) / "tokenizer.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    if Path(model).is_dir():
        raise ValueError(f"{model} has no tokenizer.json, with which prompts are cut to length")
    try:
        return Tokenizer.from_pretrained(model)
    except Exception as error:  # noqa: BLE001 - the library has no exception of its own
        raise ValueError(f"no model folder '{model}', and no such tokenizer: {error}") from None


@dataclass(frozen=True)
class Drawn:
    """Prompts of one server session.

    Args:
        loads: for each load its prompts; no prompt occurs twice.
        dropped: prompts of the file that were too long.
    """

    loads: list[list[str]]
    dropped: int = 0


def draw(
    source: Source, tokenizer: Tokenizer, wanted: Sequence[tuple[int, int]], seed: int
) -> Drawn:
    """Prompts for the loads of one session, none another's prefix.

    Stretches of a text start at different places, in an order that the seed decides. Prompts of a
    file keep their length; those above a load's are left out.

    Args:
        source: text or prompts.
        tokenizer: of the model.
        wanted: for each load, number and tokens of its prompts.
        seed: of the order.

    Raises:
        ValueError: there are too few.
    """
    rng = random.Random(seed)
    total = sum(count for count, _ in wanted)
    longest = max(tokens for _, tokens in wanted)
    if source.prompts:
        pairs = [(prompt, len(tokenizer.encode(prompt).ids)) for prompt in source.prompts]
        usable = list(dict.fromkeys(prompt for prompt, length in pairs if length <= longest))
        dropped = sum(length > longest for _, length in pairs)
        if len({tokens for _, tokens in wanted}) > 1:
            raise ValueError(f"{source.name}: prompts of a file cannot be cut to several lengths")
        if len(usable) < total:
            raise ValueError(
                f"{source.name} has {len(usable)} different prompts of at most {longest} tokens, "
                f"{total} are needed; give more of them, fewer --requests or another "
                "--prompt-tokens"
            )
        rng.shuffle(usable)
        pool = iter(usable)
        return Drawn([[next(pool) for _ in range(count)] for count, _ in wanted], dropped)
    ids = tokenizer.encode(source.text, add_special_tokens=False).ids
    step = (len(ids) - longest) // total
    if step < 1:
        raise ValueError(
            f"{source.name} has {len(ids)} tokens, too few for {total} different prompts of up to "
            f"{longest}; give a longer text, fewer --requests or another --prompt-tokens"
        )
    starts = [index * step for index in range(total)]
    rng.shuffle(starts)
    places = iter(starts)

    def stretch(tokens: int) -> str:
        start = next(places)
        return str(tokenizer.decode(ids[start : start + tokens]))

    return Drawn([[stretch(tokens) for _ in range(count)] for count, tokens in wanted])
