"""The offline back end on a tiny random model: one prefill, all rows, and sizes by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from kvcompress_serving.evaluation import fidelity, retrieval
from kvcompress_serving.evaluation.fidelity import kl_divergence, token_nll
from kvcompress_serving.evaluation.offline import Offline
from kvcompress_serving.evaluation.results import common_prefix, summarize
from kvcompress_serving.evaluation.rows import Row, rows_of
from kvcompress_serving.evaluation.texts import Document
from vllm_kvcompress.config import parse_config, request_options
from vllm_kvcompress.core import IncompressibleError, RequestOptions, Segment
from vllm_kvcompress.methods.base import Method
from vllm_kvcompress.methods.registry import create_method
from vllm_kvcompress.simulation import Simulation

NUM_PROMPT, NUM_FED, WINDOW, BLOCK = 400, 32, 64, 32
GAP_END = (NUM_PROMPT - WINDOW) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def engine(tiny_model):
    return Offline(tiny_model(), block_size=BLOCK)


@pytest.fixture(scope="module")
def run(engine, texts):
    ids = engine.encode(texts[:5000])[: NUM_PROMPT + NUM_FED]
    return engine.full(ids[:NUM_PROMPT], ids[NUM_PROMPT:])


def test_the_full_run_is_the_model(engine, run):
    ids = torch.tensor([run.prompt + run.continuation])
    with torch.inference_mode():
        engine.model.set_attn_implementation("sdpa")
        logits = engine.model(ids).logits[0]
    torch.testing.assert_close(run.prompt_logits, logits[NUM_PROMPT - 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run.logits, logits[NUM_PROMPT:], atol=1e-4, rtol=1e-4)
    assert run.cache.get_seq_length() == NUM_PROMPT


def test_greedy_text_is_the_models_own(engine, run):
    with torch.inference_mode():
        engine.model.set_attn_implementation("sdpa")
        theirs = engine.model.generate(
            torch.tensor([run.prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    assert run.greedy(12) == theirs[0, NUM_PROMPT:].tolist()
    full = engine.compress(Row("full"), run)
    assert full.greedy([], 12, frozenset()) == run.greedy(12)
    tokens = run.greedy(12)
    assert full.greedy(tokens[:5], 7, frozenset()) == tokens[5:]
    first = tokens.index(tokens[6])
    assert full.greedy([], 12, frozenset({tokens[6]})) == tokens[:first]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "semanticache", "max_keep": 0.8},
        {"method": "relocate"},
        {"method": "selkv", "keep": 0.5},
    ],
    ids=lambda settings: settings["method"],
)
def test_a_shared_prefill_gives_what_a_prefill_of_its_own_gives(engine, run, settings):
    packed = engine.compress(Row.of("row", settings), run)
    assert not packed.bypassed
    ours = packed.feed(run.continuation)
    config = parse_config(settings)
    method = create_method(config)
    method.bind_tokenizer(engine.tokenizer)
    simulation = Simulation(engine.model, method, BLOCK)
    alone = simulation.prefill(run.prompt, request_options({}, config))
    theirs = simulation.feed(alone, run.continuation)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_feeding_leaves_the_prompt_as_it_was(engine, run):
    packed = engine.compress(Row.parse("semanticache:max_keep=0.8"), run)
    first = packed.feed(run.continuation)
    assert torch.equal(packed.feed(run.continuation), first)
    assert torch.equal(packed.feed(run.continuation[:5]), packed.feed(run.continuation[:5]))


def test_relocation_changes_nothing_but_the_bias_bytes(engine, run):
    packed = engine.compress(Row.parse("relocate"), run)
    scores = fidelity.measure(run, packed, run.greedy(8))
    assert scores["kl"] < 1e-8
    assert scores["top1"] == 1.0
    assert scores["greedy_prefix"] == 8
    assert scores["ppl_ratio"] == pytest.approx(1.0, abs=1e-5)
    # two layers, two heads, head size 32: 128 bytes of keys and values and 4 of bias for a slot
    assert packed.bytes.raw == NUM_PROMPT * 4 * 128
    assert packed.bytes.segments == GAP_END * 4 * 132
    assert packed.bytes.tail == (NUM_PROMPT - GAP_END) * 4 * 132
    assert packed.bytes.ratio == pytest.approx(132 / 128)
    assert packed.bytes.blocks == packed.bytes.raw_blocks == -(-NUM_PROMPT // BLOCK)
    assert packed.kept == 1.0


def test_cells_are_rounded_up_head_by_head(engine, run):
    packed = engine.compress(Row.parse("semanticache:max_keep=0.8"), run)
    config = parse_config({"method": "semanticache", "max_keep": 0.8})
    method = create_method(config)
    method.bind_tokenizer(engine.tokenizer)
    simulation = Simulation(engine.model, method, BLOCK)
    entries = simulation.prefill(run.prompt, request_options({}, config)).num_entries()
    cells = int(np.ceil(entries.numpy() / BLOCK).sum())
    assert packed.bytes.segments == cells * BLOCK * 132
    tail = NUM_PROMPT - GAP_END
    assert packed.bytes.blocks == -(-cells // 4) + -(-tail // BLOCK)
    assert packed.kept == pytest.approx((entries.double().mean() + tail) / NUM_PROMPT)
    assert packed.bytes.segments > entries.sum() * 132


@pytest.mark.parametrize(("keep", "expected"), [(0.0, 4), (0.25, 80), (0.5, 160)])
def test_the_window_keeps_first_and_last_tokens(engine, run, keep, expected):
    packed = engine.compress(Row.parse(f"window:keep={keep}"), run)
    _, prompt = packed._compressed
    assert set(prompt.num_entries().flatten().tolist()) == {expected}
    index = [*range(4), *range(GAP_END - expected + 4, GAP_END)]
    for layer, segment in zip(run.cache.layers, prompt.segments, strict=True):
        for head in range(2):
            assert torch.equal(segment.keys[head], layer.keys[0, head, index])
            assert torch.equal(segment.values[head], layer.values[0, head, index])
            assert not segment.bias[head].any()


def test_less_context_is_worse(engine, run):
    def kl(text: str) -> float:
        return fidelity.measure(run, engine.compress(Row.parse(text), run), [])["kl"]

    assert 0 < kl("window:keep=0.95") < kl("window:keep=0.1")


def test_greedy_prefix_is_where_free_running_leaves_the_full_cache(engine, run):
    reference = run.greedy(16)
    packed = engine.compress(Row.parse("window:keep=0.1"), run)
    scores = fidelity.measure(run, packed, reference)
    free = packed.greedy([], 16, frozenset())
    assert scores["greedy_prefix"] == common_prefix(reference, free)
    assert scores["greedy_prefix"] < 16


def test_a_method_that_is_in_no_registry(engine, run):
    class Zeros(Method):
        name = "zeros"

        def budget(self, num_tokens, layout, keep, geometry):
            from vllm_kvcompress.core import Budget

            assert keep == 0.125
            return Budget(geometry.cells(int(keep * num_tokens)))

        def compress(self, layer, prompt, settings):
            count = int(prompt.options.keep * layer.keys.shape[1])
            keys = [k[:count] for k in layer.keys]
            return Segment(keys, keys, [torch.zeros(count)] * len(keys))

    row = Row("zeros", Zeros(parse_config("none")), RequestOptions("zeros", keep=0.125))
    packed = engine.compress(row, run)
    assert packed.kept == pytest.approx((GAP_END // 8 + NUM_PROMPT - GAP_END) / NUM_PROMPT)
    assert fidelity.measure(run, packed, [])["kl"] > 0


def test_what_a_method_refuses_stays_as_it_is(engine, run):
    class Refusing(Method):
        name = "refusing"

        def budget(self, num_tokens, layout, keep, geometry):
            raise IncompressibleError("no_room", "no")

        def compress(self, layer, prompt, settings):
            raise AssertionError

    packed = engine.compress(Row("refusing", Refusing(parse_config("none"))), run)
    assert packed.bypassed == "no_room"
    assert packed.bytes.ratio == packed.kept == 1.0
    assert fidelity.measure(run, packed, run.greedy(4))["kl"] == 0.0


def test_divergence_and_likelihood_against_float64_by_hand():
    generator = torch.Generator().manual_seed(0)
    full, other = (torch.randn(3, 11, generator=generator) * 4 for _ in range(2))
    p, q = (np.exp(x.numpy().astype(np.float64)) for x in (full, other))
    p, q = (x / x.sum(1, keepdims=True) for x in (p, q))
    np.testing.assert_allclose(kl_divergence(full, other), (p * np.log(p / q)).sum(1), rtol=1e-9)
    np.testing.assert_allclose(token_nll(full, [1, 5, 9]), -np.log(p[range(3), [1, 5, 9]]))
    assert not kl_divergence(full, full.clone()).any()


def test_fidelity_of_documents(engine, texts):
    documents = [Document("a", "prose", texts[:9000]), Document("b", "other", texts[9000:15000])]
    done = []
    measured = fidelity.evaluate(
        engine,
        ["semanticache:max_keep=0.6", "window"],
        documents,
        prompt_tokens=300,
        continuation_tokens=16,
        greedy_tokens=4,
        per_kind=2,
        on_step=lambda: done.append(1),
    )
    assert len(measured) == len(done) == 2 * 2 * 3
    lines = summarize(measured)
    assert [(line.group, line.row) for line in lines] == [
        (group, row)
        for group in ("prose", "other")
        for row in ("full", "semanticache:max_keep=0.6", "window")
    ]
    for line in lines:
        assert line.count == 2
        assert line.scores["kl"].mean == 0 if line.row == "full" else line.scores["kl"].low > 0
        assert bool(line.against) == (line.row != "full")
    assert {m.num_tokens for m in measured} == {300}


def test_retrieval_of_all_orders_and_both_questions(engine, texts):
    measured = retrieval.evaluate(
        engine,
        ["relocate"],
        ["niah_multikey_1", "qa"],
        lengths=[512],
        num_samples=1,
        orders=["after", "before", "known"],
        text=texts,
        two_questions=True,
    )
    assert len(measured) == 2 * 3 * 2 * 2
    for group in {m.group for m in measured}:
        for task in ("niah_multikey_1", "qa"):
            full, moved = (m for m in measured if (m.task, m.group) == (task, group))
            assert (full.row, moved.row) == ("full", "relocate")
            assert full.prompt == moved.prompt
            assert moved.scores["nll"] == pytest.approx(full.scores["nll"], abs=1e-4)
            assert moved.num_tokens < 512
    assert {m.group for m in measured} == {
        f"512 tokens, question {order}{turn}"
        for order in ("after", "before", "known")
        for turn in ("", ", question 2")
    }


def test_generated_answers_are_scored_by_their_text(engine, run):
    from kvcompress_serving.evaluation.prompts import Case, Span
    from kvcompress_serving.evaluation.tasks import Question, Sample

    suffix = run.continuation[:4]
    packed = engine.compress(Row("full"), run)
    word = engine.decode(packed.greedy(suffix, 6, frozenset()))
    question = Question("?", "", (word, "not there"), "all", 6)
    case = Case(run.prompt, run.continuation, ((Span(4, 6),),), (4,))
    sample = Sample("made up", 0, "", "", (question,))
    (scores,) = retrieval.measure(sample, case, run, packed, engine.decode)
    assert scores["match"] == 0.5


def test_prompts_that_are_too_long_are_refused(tiny_model):
    short = Offline(tiny_model(max_position=256))
    with pytest.raises(ValueError, match="300 tokens are more than the model's 256"):
        short.full([1] * 290, [1] * 10)


def test_rows_are_read_as_they_are_written():
    row = Row.parse("mine=semanticache:threshold=0.9,max_keep=0.5")
    assert row.name == "mine"
    assert row.method.config.threshold == 0.9
    assert row.settings == {"method": "semanticache", "threshold": 0.9, "max_keep": 0.5}
    assert [row.name for row in rows_of(["window", "none=full"])] == ["none", "window"]
    assert [row.name for row in rows_of(["window"])] == ["full", "window"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "semanticach",
            "unknown method 'semanticach'; expected one of 'full', 'window', 'vllm', 'none'",
        ),
        ("semanticache:treshold=0.9", "did you mean 'threshold'"),
        ("semanticache:threshold=2", "threshold = 2"),
        ("semanticache:threshold", "expected key=value, got 'threshold'"),
        ("window:keep=2", "'window' takes keep"),
        ("full:keep=0.5", "the full cache has no settings"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Row.parse(text)


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two rows are named window"):
        rows_of(["window", "window"])


def test_stretches_do_not_overlap_and_take_turns(engine, texts):
    from kvcompress_serving.evaluation.texts import cut

    sources = [Document("a", "prose", texts[:6000]), Document("b", "prose", texts[6000:9000])]
    stretches = cut(sources, engine.encode, 200, 4)
    assert [document.name.split("@")[0] for document, _ in stretches] == ["a", "a", "b", "b"]
    starts = [int(document.name.split("@")[1]) for document, _ in stretches]
    assert starts[1] - starts[0] >= 200
    for document, ids in stretches:
        name, start = document.name.split("@")
        source = next(s for s in sources if s.name == name)
        assert ids == engine.encode(source.text)[int(start) : int(start) + 200]
    with pytest.raises(ValueError, match=r"'prose' hold .* stretches of 200 tokens, 99 are asked"):
        cut(sources, engine.encode, 200, 99)


def test_files_are_read_with_their_kinds(tmp_path):
    from kvcompress_serving.evaluation.texts import read_sources

    (tmp_path / "a.txt").write_text("Prose.")
    (tmp_path / "b.py").write_text("code = 1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_text("More.")
    kinds = {s.name: s.kind for s in read_sources([str(tmp_path)])}
    assert kinds == {"a.txt": "prose", "b.py": "code", "c.txt": "prose"}
    assert [s.kind for s in read_sources([f"logs={tmp_path / 'a.txt'}"])] == ["logs"]
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"empty\.txt: no text.*gone\.txt"):
        read_sources([str(tmp_path / "empty.txt"), str(tmp_path / "gone.txt")])


def test_default_sources_are_prose_and_code():
    from kvcompress_serving.evaluation.texts import default_sources

    assert {source.kind for source in default_sources()} == {"prose", "code"}
    assert all(len(copy.copy(source.text)) > 10_000 for source in default_sources())
