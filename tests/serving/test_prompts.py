"""Where the question stands, which tokens are answers, and how answers are scored."""

from __future__ import annotations

import math

import pytest
import torch

from kvcompress_serving.evaluation.prompts import (
    BORDER_TOKENS,
    ORDERS,
    PLAIN,
    Frame,
    chat_frame,
    make_case,
)
from kvcompress_serving.evaluation.results import common_prefix
from kvcompress_serving.evaluation.retrieval import forced_scores
from kvcompress_serving.evaluation.scoring import any_contained, contained, match_score
from kvcompress_serving.evaluation.tasks import Question, Sample, Source, samples

FIRST = Question("What are A and B?", " A and B are", ("111", "222"), "all", 16)
SECOND = Question("Which town is it?", " The town is", ("Vexford",), "part", 16)
SAMPLE = Sample("made up", 0, "Listen.", "A is 111. B is 222. Vexford.", (FIRST, SECOND))


@pytest.fixture(scope="module")
def tokenizer(model_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="module")
def encode(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def read(tokenizer, case) -> tuple[str, str]:
    return tokenizer.decode(case.prompt), tokenizer.decode(case.continuation)


def test_a_question_after_the_context_is_not_in_the_compressed_part(tokenizer, encode):
    prompt, fed = read(tokenizer, make_case(SAMPLE, "after", encode))
    assert prompt == "Listen.\nA is 111. B is 222. Vexford."
    assert fed == (
        "\nWhat are A and B? A and B are 111, 222.\nWhich town is it? The town is Vexford."
    )


def test_a_known_question_is_compressed_with_the_context(tokenizer, encode):
    prompt, fed = read(tokenizer, make_case(SAMPLE, "known", encode))
    assert prompt.endswith("Vexford.\nWhat are A and B?")
    assert fed.startswith(" A and B are 111, 222.")
    # the second question comes after the compression in any case
    assert fed.endswith("\nWhich town is it? The town is Vexford.")
    assert "town" not in prompt


def test_a_question_before_the_context_is_not_repeated(tokenizer, encode):
    prompt, fed = read(tokenizer, make_case(SAMPLE, "before", encode))
    assert prompt.startswith("What are A and B?\nListen.\n")
    assert fed.startswith("\nA and B are 111, 222.")
    assert "What are" not in fed


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("frame", [PLAIN, Frame("<head>", "<answer>", "<turn>")])
def test_answers_are_where_the_spans_say(tokenizer, encode, order, frame):
    case = make_case(SAMPLE, order, encode, start=[1, 2], frame=frame)
    assert case.prompt[:2] == [1, 2]
    answers = [
        [tokenizer.decode(case.continuation[span.start : span.stop]) for span in spans]
        for spans in case.answers
    ]
    assert answers == [[" 111", " 222"], [" Vexford"]]
    for asked, spans in zip(case.asked, case.answers, strict=True):
        assert spans[0].start == asked


def test_chat_prompts_are_those_of_the_models_template(tokenizer, encode):
    frame = chat_frame(tokenizer)
    case = make_case(SAMPLE, "after", encode, frame=frame)
    first = case.continuation[: case.asked[0]]
    asked = f"{SAMPLE.intro}\n{SAMPLE.context}\n{FIRST.text}"
    turns = [{"role": "user", "content": asked}]
    template = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode([*case.prompt, *first]) == template + FIRST.lead.lstrip() or (
        tokenizer.decode([*case.prompt, *first]) == template + FIRST.lead
    )
    turns += [
        {"role": "assistant", "content": f"{FIRST.lead} 111, 222."},
        {"role": "user", "content": SECOND.text},
    ]
    template = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.decode([*case.prompt, *case.continuation[: case.asked[1]]])
    assert "".join(whole.split()) == "".join((template + SECOND.lead).split())


def test_a_model_without_a_template_is_refused():
    class Plain:
        def apply_chat_template(self, *args, **kwargs):
            raise ValueError("no template")

    with pytest.raises(ValueError, match="has no chat template"):
        chat_frame(Plain())


@pytest.mark.parametrize("order", ORDERS)
def test_pieces_take_few_more_tokens_than_the_whole(tokenizer, encode, texts, order):
    source = Source.of(texts)
    for task in ("niah_multikey_1", "cwe", "vt", "qa"):
        (sample,) = samples(task, 1024, 1, source, lambda text: len(encode(text)))
        case = make_case(sample, order, encode)
        asked = len(case.prompt) + case.asked[0]
        assert asked + sample.questions[0].answer_tokens <= 1024 + BORDER_TOKENS


def test_string_scores():
    assert contained("It is 111 and 999.", ("111", "222")) == 0.5
    assert contained("x", ("111", "222")) == 0.0
    assert any_contained("in VEXFORD then", ("Vexford", "Aldermoor")) == 1.0
    assert any_contained("nowhere", ("Vexford",)) == 0.0
    assert match_score("111", FIRST) == 0.5
    assert match_score("Vexford", SECOND) == 1.0


def test_forced_scores_look_at_the_logits_before_each_answer_token(encode):
    case = make_case(SAMPLE, "after", encode)
    size = 50_000
    certain = torch.full((len(case.continuation), size), 0.0)
    for position, token in enumerate(case.continuation):
        certain[position, token] = 100.0
    first, second = forced_scores(case, certain[1:], certain[0])
    assert first["exact"] == second["exact"] == first["top1"] == 1.0
    assert first["nll"] == pytest.approx(0.0, abs=1e-6)

    # one wrong token of the second answer: neither exact nor all right, the first is untouched
    span = case.answers[1][0]
    certain[span.start, case.continuation[span.start]] = 0.0
    first, second = forced_scores(case, certain[1:], certain[0])
    length = span.stop - span.start
    assert first["exact"] == 1.0
    assert second["exact"] == 0.0
    assert second["top1"] == pytest.approx((length - 1) / length)
    assert second["nll"] == pytest.approx(math.log(size) / length, rel=1e-3)

    # what is not an answer does not count
    certain[case.answers[0][0].start - 1] = 0.0
    assert forced_scores(case, certain[1:], certain[0])[0]["exact"] == 1.0


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
