"""Retrieval tasks over long contexts, made locally from real text; the RULER family.

The families and their settings are those of RULER (arXiv 2404.06654): needles, variable tracking,
common and frequent words, questions. The wording and the texts are this project's own, so scores
compare methods with each other and not with published tables. ``docs/evaluation.md`` gives the
exact definitions.

A task is made for a number of tokens: the haystack is the largest with which the prompt, the
question and room for the answer do not exceed it. Everything random comes from the seed, the name
of the task, the length and the number of the sample.
"""

from __future__ import annotations

import random
import re
import string
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Literal

from kvcompress_serving.evaluation import words

Match = Literal["all", "part"]
Haystack = Literal["noise", "text", "needles"]

NOISE = (
    "The kettle is warm. The road is long. The lamp is lit. We walk a while. We turn and walk back."
)
NUM_COMMON = 10
NUM_HOPS = 4
_ANSWER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


@dataclass(frozen=True)
class Question:
    """A question about the context.

    Args:
        text: the question.
        lead: how the answer begins; it ends where the first reference follows.
        references: what the answer has to name.
        match: whether it has to name all of them or one.
        answer_tokens: tokens that a generated answer may take.
    """

    text: str
    lead: str
    references: tuple[str, ...]
    match: Match
    answer_tokens: int


@dataclass(frozen=True)
class Sample:
    """A context and what is asked about it.

    Args:
        task: name.
        index: number of the sample.
        intro: said before the context.
        context: the haystack with what is to be found.
        questions: one, or two about different things in the same context.
    """

    task: str
    index: int
    intro: str
    context: str
    questions: tuple[Question, ...]

    def text(self) -> str:
        """All of it but the answers, for counting tokens."""
        asked = (f"\n{q.text}{q.lead}" for q in self.questions)
        return f"{self.intro}\n{self.context}{''.join(asked)}"


@dataclass(frozen=True)
class NeedleSettings:
    """One setting of the needle family.

    Args:
        haystack: noise (one paragraph again and again), real text, or other needles.
        keys: needles with keys of their own; in a haystack of needles, how many are asked for.
        values: needles of the asked key.
        queries: keys asked for in one question.
        uuid_keys: keys are UUIDs, not an adjective and a noun.
        uuid_values: values are UUIDs, not seven digits.
    """

    haystack: Haystack
    keys: int = 1
    values: int = 1
    queries: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False


NEEDLES = {
    "niah_single_1": NeedleSettings("noise"),
    "niah_single_2": NeedleSettings("text"),
    "niah_single_3": NeedleSettings("text", uuid_values=True),
    "niah_multikey_1": NeedleSettings("text", keys=4),
    "niah_multikey_2": NeedleSettings("needles"),
    "niah_multikey_3": NeedleSettings("needles", uuid_keys=True, uuid_values=True),
    "niah_multivalue": NeedleSettings("text", values=4),
    "niah_multiquery": NeedleSettings("text", keys=4, queries=4),
}
TASKS = (*NEEDLES, "vt", "cwe", "fwe", "qa")


@dataclass(frozen=True)
class Source:
    """Real text to hide things in, prepared once.

    Args:
        sentences: in order.
        vocabulary: distinct words of four to ten letters, lower case, sorted.
    """

    sentences: tuple[str, ...]
    vocabulary: tuple[str, ...]

    @staticmethod
    def of(text: str) -> Source:
        """Prepare a text.

        Raises:
            ValueError: it has fewer than 50 sentences.
        """
        paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text))
        sentences = [s for p in paragraphs for s in re.split(r"(?<=[.!?])\s+", p) if s]
        if len(sentences) < 50:
            raise ValueError(
                f"a haystack needs 50 sentences or more; the text has {len(sentences)}"
            )
        found = re.findall(r"\b[a-z]{4,10}\b", text)
        return Source(tuple(sentences), tuple(sorted(set(found))))

    def from_sentence(self, start: int) -> Iterator[str]:
        """Sentences from one on, beginning again at the end of the text."""
        for index in count(start):
            yield self.sentences[index % len(self.sentences)]


def samples(
    task: str,
    num_tokens: int,
    num_samples: int,
    source: Source,
    count_tokens: Callable[[str], int],
    *,
    seed: int = 0,
    two_questions: bool = False,
) -> list[Sample]:
    """Samples of a task.

    Args:
        task: one of `TASKS`.
        num_tokens: most tokens of context, questions and answers together.
        num_samples: number of samples.
        source: real text.
        count_tokens: tokens of a text.
        seed: of everything random.
        two_questions: ask about two different things in the same context; for tasks with one key
            or fact in the question.

    Raises:
        ValueError: unknown task, a length that is too short for it, or a task that cannot ask two
            questions.
    """
    if task not in TASKS:
        allowed = ", ".join(f"'{name}'" for name in TASKS)
        raise ValueError(f"unknown task '{task}'; expected one of {allowed}")
    if two_questions and not takes_two_questions(task):
        able = ", ".join(f"'{name}'" for name in TASKS if takes_two_questions(name))
        raise ValueError(f"task '{task}' has one question; two are possible with {able}")
    made = []
    for index in range(num_samples):
        draw = random.Random(f"{seed}/{task}/{num_tokens}/{index}")
        plan = _plan(task, index, draw, source, num_tokens, two_questions)
        made.append(_fit(plan, num_tokens, count_tokens))
    return made


def takes_two_questions(task: str) -> bool:
    """Whether a sample of the task holds a second thing that can be asked for."""
    return task in ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3", "qa")


@dataclass(frozen=True)
class _Plan:
    """A sample but for the size of its haystack.

    Args:
        build: from the size to the sample; the same whenever it is asked.
        most: largest size that there is material for.
        lacking: what runs out above it, and the remedy.
    """

    build: Callable[[int], Sample]
    most: int = sys.maxsize
    lacking: str = ""


def _plan(
    task: str, index: int, draw: random.Random, source: Source, num_tokens: int, two: bool
) -> _Plan:
    """Everything random of one sample."""
    if task in NEEDLES:
        return _needles(task, index, draw, source, NEEDLES[task], two)
    if task == "vt":
        return _variables(index, draw)
    if task == "cwe":
        return _common_words(index, draw, source, num_tokens)
    if task == "fwe":
        return _frequent_words(index, draw, num_tokens)
    return _facts(index, draw, source, two)


def _fit(plan: _Plan, num_tokens: int, count_tokens: Callable[[str], int]) -> Sample:
    """The sample with the largest haystack that leaves room for question and answer."""

    def fits(size: int) -> bool:
        sample = plan.build(size)
        room = sum(question.answer_tokens for question in sample.questions)
        return count_tokens(sample.text()) + room <= num_tokens

    if not fits(0):
        raise ValueError(
            f"task '{plan.build(0).task}' does not fit {num_tokens} tokens; ask for a longer length"
        )
    low, high = 0, 64
    while high < plan.most and fits(high):
        low, high = high, 2 * high
    high = min(high, plan.most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if high == plan.most and fits(high):
        raise ValueError(
            f"task '{plan.build(0).task}' with {num_tokens} tokens needs {plan.lacking}"
        )
    return plan.build(low)


def _scatter(pieces: Sequence[str], units: Sequence[str], depths: Sequence[float]) -> list[str]:
    """``units`` with the pieces put in between at the given depths, 0 to 1, in their order."""
    places = sorted(round(depth * len(units)) for depth in depths)
    mixed: list[str] = []
    start = 0
    for piece, place in zip(pieces, places, strict=True):
        mixed += [*units[start:place], piece]
        start = place
    return [*mixed, *units[start:]]


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _needle(key: str, value: str, kind: str) -> str:
    return f"The secret {kind} of the {key} is {value}."


def _needle_question(keys: Sequence[str], values: Sequence[str], kind: str) -> Question:
    several = len(values) > 1
    kinds = f"{kind}s" if several else kind
    names = _listed([f"the {key}" for key in keys])
    verb = "are" if several else "is"
    return Question(
        text=f"What {verb} the secret {kinds} of {names} that the text gives?",
        lead=f" According to the text, the secret {kinds} of {names} {verb}",
        references=tuple(values),
        match="all",
        answer_tokens=_ANSWER_TOKENS["niah"],
    )


def _needles(
    task: str,
    index: int,
    draw: random.Random,
    source: Source,
    settings: NeedleSettings,
    two: bool,
) -> _Plan:
    kind = "code" if settings.uuid_values else "number"
    drawn: set[str] = set()

    def fresh(make: Callable[[], str]) -> str:
        while (text := make()) in drawn:
            pass
        drawn.add(text)
        return text

    def make_uuid() -> str:
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))

    def key() -> str:
        if settings.uuid_keys:
            return f"record {fresh(make_uuid)}"
        return fresh(lambda: f"{draw.choice(words.ADJECTIVES)} {draw.choice(words.NOUNS)}")

    def value() -> str:
        if settings.uuid_values:
            return fresh(make_uuid)
        return fresh(lambda: str(draw.randint(1_000_000, 9_999_999)))

    asked = [key() for _ in range(settings.queries)]
    needles = [(k, value()) for k in asked for _ in range(settings.values)]
    num_others = settings.keys - settings.queries
    if two and settings.haystack == "needles":
        num_others = 1
    needles += [(key(), value()) for _ in range(num_others)]
    order = draw.sample(range(len(needles)), len(needles))
    # several values of one key are asked for in the order in which they stand in the text
    listed = [needles[i] for i in order] if settings.values > 1 else needles
    questions = [_needle_question(asked, [v for k, v in listed if k in asked], kind)]
    if two:
        other, other_value = needles[len(asked)]
        questions.append(_needle_question([other], [other_value], kind))
    depths = [draw.random() for _ in needles]
    first = draw.randrange(len(source.sentences))
    distractors: list[str] = []

    def units(size: int) -> list[str]:
        if settings.haystack == "noise":
            return [NOISE] * size
        if settings.haystack == "text":
            return list(islice(source.from_sentence(first), size))
        while len(distractors) < size:
            distractors.append(_needle(key(), value(), kind))
        return distractors[:size]

    pieces = [_needle(*needles[i], kind) for i in order]

    def build(size: int) -> Sample:
        joint = " " if settings.haystack == "text" else "\n"
        return Sample(
            task=task,
            index=index,
            intro=(
                f"The following text mentions secret {kind}s. Keep them in mind; they are asked "
                "for afterwards."
            ),
            context=joint.join(_scatter(pieces, units(size), depths)),
            questions=tuple(questions),
        )

    if settings.haystack == "needles" and not settings.uuid_keys:
        # drawing keys that have not been drawn before slows down as they run out
        most = len(words.ADJECTIVES) * len(words.NOUNS) * 3 // 4
        return _Plan(build, most, "more keys than there are; ask for niah_multikey_3 instead")
    return _Plan(build)


def _chain(draw: random.Random, name_length: int, taken: set[str]) -> tuple[list[str], list[str]]:
    """Names of one chain of variables and the lines that assign them."""
    names: list[str] = []
    while len(names) <= NUM_HOPS:
        name = "".join(draw.choices(string.ascii_uppercase, k=name_length))
        if name not in taken:
            taken.add(name)
            names.append(name)
    value = str(draw.randint(10_000, 99_999))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {b} = VAR {a}" for a, b in pairwise(names)]
    return names, lines


def _chain_question(names: Sequence[str], lines: Sequence[str]) -> Question:
    value = lines[0].rsplit(" ", 1)[1]
    return Question(
        text=f"Which variables have the value {value}, directly or through another variable?",
        lead=f" By the assignments in the text, {len(names)} variables have the value {value}:",
        references=tuple(names),
        match="all",
        answer_tokens=_ANSWER_TOKENS["vt"],
    )


def _variables(index: int, draw: random.Random) -> _Plan:
    taken: set[str] = set()
    example_names, example_lines = _chain(draw, 3, taken)
    example_depths = [draw.random() for _ in example_lines]
    names, lines = _chain(draw, 5, taken)
    depths = [draw.random() for _ in lines]
    question = _chain_question(names, lines)
    shown = _chain_question(example_names, example_lines)

    def build(size: int) -> Sample:
        example = "\n".join(_scatter(example_lines, [NOISE] * 4, example_depths))
        return Sample(
            task="vt",
            index=index,
            intro=(
                "Variables are assigned in the text; follow the assignments.\n"
                f"{example}\n{shown.text}{shown.lead} {' '.join(example_names)}\n"
            ),
            context="\n".join(_scatter(lines, [NOISE] * size, depths)),
            questions=(question,),
        )

    return _Plan(build)


def _numbered(items: Sequence[str]) -> str:
    return " ".join(f"{number}. {item}" for number, item in enumerate(items, 1))


def _common_question(common: Sequence[str]) -> Question:
    return Question(
        text=f"Which {len(common)} words are the most common in this list?",
        lead=f" The {len(common)} most common words are:",
        references=tuple(common),
        match="all",
        answer_tokens=_ANSWER_TOKENS["cwe"],
    )


def _common_words(index: int, draw: random.Random, source: Source, num_tokens: int) -> _Plan:
    long = num_tokens >= 4096
    often, seldom = (30, 3) if long else (6, 1)
    example_often, example_seldom, example_size = (10, 3, 40) if long else (3, 1, 20)
    vocabulary = draw.sample(source.vocabulary, len(source.vocabulary))
    if len(vocabulary) < example_size + NUM_COMMON:
        raise ValueError(f"task 'cwe' needs more words than the text's {len(vocabulary)}")
    common, rest = vocabulary[:NUM_COMMON], vocabulary[NUM_COMMON:]
    example = rest[-example_size:]
    rest = rest[:-example_size]
    shown = example[:NUM_COMMON]
    example_list = shown * example_often + example[NUM_COMMON:] * example_seldom
    draw.shuffle(example_list)
    order_seed = draw.getrandbits(64)
    question = _common_question(common)
    shown_question = _common_question(shown)

    def build(size: int) -> Sample:
        items = common * often + rest[:size] * seldom
        random.Random(order_seed).shuffle(items)
        answer = f"{shown_question.lead} {_numbered(shown)}"
        return Sample(
            task="cwe",
            index=index,
            intro=(
                "A numbered list of words follows; some of them come up more often than others.\n"
                f"{_numbered(example_list)}\n{shown_question.text}{answer}\n"
            ),
            context=_numbered(items),
            questions=(question,),
        )

    return _Plan(build, len(rest), "more different words than the text has; give more text")


def _frequent_words(index: int, draw: random.Random, num_tokens: int) -> _Plan:
    vocabulary: list[str] = []
    while len(vocabulary) < max(num_tokens // 50, 8):
        word = "".join(draw.choices(string.ascii_lowercase, k=6))
        if word not in vocabulary:
            vocabulary.append(word)
    vocabulary[0] = "..."
    order_seed = draw.getrandbits(64)
    question = Question(
        text="The dots are padding. Which three words are the most frequent in this text?",
        lead=" The three most frequent words are:",
        references=tuple(vocabulary[1:4]),
        match="all",
        answer_tokens=_ANSWER_TOKENS["fwe"],
    )
    zeta = sum(rank**-2 for rank in range(1, 100_000))

    def build(size: int) -> Sample:
        # below 64 words the third and fourth ranks would be equally frequent
        num_words = size + 64
        items = [
            word
            for rank, word in enumerate(vocabulary, 1)
            for _ in range(int(num_words * rank**-2 / zeta))
        ]
        random.Random(order_seed).shuffle(items)
        return Sample(
            task="fwe",
            index=index,
            intro="The following text is in a code; note how often each word is used.",
            context=" ".join(items),
            questions=(question,),
        )

    return _Plan(build)


def _facts(index: int, draw: random.Random, source: Source, two: bool) -> _Plan:
    num_facts = 6
    firsts = draw.sample(words.FIRST_NAMES, num_facts)
    lasts = draw.sample(words.LAST_NAMES, num_facts)
    trades = draw.sample(words.TRADES, num_facts)
    text = " ".join(source.sentences)
    towns = draw.sample([town for town in words.TOWNS if town not in text], num_facts)
    facts = [
        f"{first} {last} works as a {trade} in the town of {town}."
        for first, last, trade, town in zip(firsts, lasts, trades, towns, strict=True)
    ]
    questions = tuple(
        Question(
            text=f"In which town does {firsts[i]} {lasts[i]} work?",
            lead=f" {firsts[i]} {lasts[i]} works in the town of",
            references=(towns[i],),
            match="part",
            answer_tokens=_ANSWER_TOKENS["qa"],
        )
        for i in range(1 + two)
    )
    order = draw.sample(range(num_facts), num_facts)
    depths = [draw.random() for _ in facts]
    first = draw.randrange(len(source.sentences))

    def build(size: int) -> Sample:
        units = list(islice(source.from_sentence(first), size))
        return Sample(
            task="qa",
            index=index,
            intro="Read the following text; questions about it come afterwards.",
            context=" ".join(_scatter([facts[i] for i in order], units, depths)),
            questions=questions,
        )

    return _Plan(build)
