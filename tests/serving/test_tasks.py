"""The generators: what is asked for is there, once, and the prompt keeps to its length."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from tokenizers import Tokenizer

from kvcompress_serving.evaluation.tasks import (
    NEEDLES,
    NUM_COMMON,
    TASKS,
    Source,
    samples,
    takes_two_questions,
)

LENGTHS = (1024, 4096)


@pytest.fixture(scope="module")
def source(texts):
    return Source.of(texts)


@pytest.fixture(scope="module")
def count_tokens(model_path):
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def make(source, count_tokens):
    made = {}

    def build(task, length=1024, count=3, **settings):
        key = (task, length, count, tuple(sorted(settings.items())))
        if key not in made:
            made[key] = samples(task, length, count, source, count_tokens, **settings)
        return made[key]

    return build


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_their_length_and_do_not_exceed_it(make, count_tokens, task, length):
    for sample in make(task, length):
        used = count_tokens(sample.text()) + sum(q.answer_tokens for q in sample.questions)
        assert used <= length
        # the next sentence, line or word would have been too much; sentences of the text are long
        assert used > length - 200


@pytest.mark.parametrize("task", TASKS)
def test_samples_depend_on_seed_length_and_number_alone(make, source, count_tokens, task):
    again = samples(task, 1024, 3, source, count_tokens)
    assert again == make(task)
    assert samples(task, 1024, 1, source, count_tokens) == again[:1]
    others = samples(task, 1024, 3, source, count_tokens, seed=1)
    assert all(a.context != b.context for a, b in zip(again, others, strict=True))
    assert len({sample.context for sample in again}) == 3


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_are_what_the_setting_says(make, task):
    settings = NEEDLES[task]
    for sample in make(task):
        found = re.findall(r"The secret (?:number|code) of the (.+?) is (\S+)\.", sample.context)
        question = sample.questions[0]
        values = [value for _, value in found]
        assert len(set(values)) == len(values)
        assert len(question.references) == settings.values * settings.queries
        for reference in question.references:
            assert sample.context.count(reference) == 1
        asked = {key for key, value in found if value in question.references}
        assert len(asked) == settings.queries
        assert all(key in question.text and key in question.lead for key in asked)
        # nothing else in the text has an asked key
        assert sum(key in asked for key, _ in found) == len(question.references)
        if settings.haystack == "needles":
            assert len(found) >= 10
            assert len({key for key, _ in found}) == len(found)
        else:
            others = settings.keys - settings.queries
            assert len(found) == settings.queries * settings.values + others
        shape = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if settings.uuid_values else r"\d{7}"
        assert all(re.fullmatch(shape, value) for value in values)


def test_several_values_are_asked_for_in_the_order_of_the_text(make):
    for sample in make("niah_multivalue"):
        places = [sample.context.index(value) for value in sample.questions[0].references]
        assert places == sorted(places)


def test_several_keys_are_answered_in_the_order_of_the_question(make):
    for sample in make("niah_multiquery"):
        question = sample.questions[0]
        keys = [
            re.search(rf"of the (\w+ \w+) is {value}", sample.context)[1]
            for value in question.references
        ]
        places = [question.text.index(key) for key in keys]
        assert places == sorted(places)


def test_needles_lie_at_all_depths(source, count_tokens):
    """No end of the text is preferred: with 30 needles each third has some."""
    made = samples("niah_single_2", 1024, 30, source, count_tokens)
    depths = [s.context.index(s.questions[0].references[0]) / len(s.context) for s in made]
    thirds = Counter(int(3 * depth) for depth in depths)
    assert all(thirds[third] >= 3 for third in range(3)), thirds


def test_the_haystack_of_text_is_the_text(make, texts):
    plain = " ".join(texts.split())
    for sample in make("niah_single_2"):
        rest = re.sub(r"\s*The secret number of the .+? is \S+\.", "", sample.context)
        halves = [half for half in re.split(r"(?<=[.!?])\s+", rest) if half]
        assert all(" ".join(half.split()) in plain for half in halves)


def test_variables_resolve_to_the_answer(make):
    for sample in make("vt"):
        value = re.search(r"have the value (\d+)", sample.questions[0].text)[1]
        values: dict[str, str] = {}
        for name, right in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", sample.context):
            assert name not in values
            values[name] = values.get(right, right)
        holders = [name for name, held in values.items() if held == value]
        assert tuple(holders) == sample.questions[0].references
        assert len(holders) == 5
        # the example in front is about another chain
        assert not any(name in sample.intro for name in holders)
        assert value not in sample.intro


@pytest.mark.parametrize("length", LENGTHS)
def test_common_words_are_the_most_common(make, length):
    often, seldom = (30, 3) if length >= 4096 else (6, 1)
    for sample in make("cwe", length):
        counts = Counter(re.findall(r"\d+\. (\w+)", sample.context))
        top = counts.most_common(NUM_COMMON + 1)
        assert {word for word, _ in top[:NUM_COMMON]} == set(sample.questions[0].references)
        assert {count for _, count in top[:NUM_COMMON]} == {often}
        assert top[NUM_COMMON][1] == seldom
        assert not any(f" {word} " in sample.intro for word in sample.questions[0].references)


@pytest.mark.parametrize("length", LENGTHS)
def test_frequent_words_are_the_next_after_the_padding(make, length):
    for sample in make("fwe", length):
        ranked = Counter(sample.context.split()).most_common(5)
        assert ranked[0][0] == "..."
        assert tuple(word for word, _ in ranked[1:4]) == sample.questions[0].references
        counts = [count for _, count in ranked]
        assert all(a > b for a, b in itertools.pairwise(counts))


def test_facts_are_stated_once_and_nowhere_else(make, texts):
    for sample in make("qa"):
        question = sample.questions[0]
        person = re.search(r"does (\w+ \w+) work", question.text)[1]
        stated = re.findall(rf"{person} works as an? \w+ in the town of (\w+)\.", sample.context)
        assert tuple(stated) == question.references
        assert sample.context.count(stated[0]) == 1
        assert stated[0] not in texts
        assert len(re.findall(r"in the town of \w+\.", sample.context)) == 6


@pytest.mark.parametrize("task", [task for task in TASKS if takes_two_questions(task)])
def test_two_questions_have_two_answers_in_one_context(make, task):
    for sample in make(task, two_questions=True):
        first, second = sample.questions
        assert first.text != second.text
        assert first.references != second.references
        for question in sample.questions:
            assert len(question.references) == 1
            assert sample.context.count(question.references[0]) == 1


def test_a_task_with_one_thing_to_find_refuses_a_second_question(source, count_tokens):
    with pytest.raises(ValueError, match="task 'vt' has one question; two are possible with 'niah"):
        samples("vt", 1024, 1, source, count_tokens, two_questions=True)


def test_wrong_requests_say_what_is_possible(source, count_tokens):
    with pytest.raises(ValueError, match="unknown task 'niah'; expected one of 'niah_single_1'"):
        samples("niah", 1024, 1, source, count_tokens)
    with pytest.raises(ValueError, match="'cwe' does not fit 200 tokens"):
        samples("cwe", 200, 1, source, count_tokens)
    with pytest.raises(ValueError, match="50 sentences or more; the text has 1"):
        Source.of("Too little.")


def test_a_text_with_too_few_words_is_named(count_tokens):
    text = " ".join(f"{'abcdefghij'[i % 10] * (4 + i // 10)}." for i in range(60))
    poor = Source.of(text)
    with pytest.raises(ValueError, match="more different words than the text has"):
        samples("cwe", 8192, 1, poor, count_tokens)
