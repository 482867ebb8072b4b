"""Odd requests: each is compressed rightly or left alone and counted, never wrong silently."""

from __future__ import annotations

import pytest
from harness import BLOCK_SIZE, check_idle
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.attention.backends import cpu_attn

from vllm_kvcompress.engine import backend_cpu

CONFIG = {"method": "semanticache", "min_prompt_tokens": 64, "window": 32, "threshold": 0.7}
RELOCATE = {"method": "relocate", "min_prompt_tokens": 64, "window": 32}


@pytest.fixture
def encode(model_path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text).ids)


def test_every_residue_of_the_block_size(make_engine, tiny_model, token_ids):
    """Prompt lengths through two blocks: the partial last block is where such code breaks."""
    prompts = [token_ids[n : n + 96 + n] for n in range(2 * BLOCK_SIZE)]
    ours = make_engine(tiny_model(), RELOCATE, max_num_seqs=32)
    stock = make_engine(tiny_model(), max_num_seqs=32)
    assert ours.generate(prompts, max_tokens=20) == stock.generate(prompts, max_tokens=20)
    check_idle(ours)


@pytest.mark.parametrize("window", [0, 1, 31, 32, 33, 100])
def test_every_kind_of_window(make_engine, tiny_model, token_ids, window):
    prompts = [token_ids[:200], token_ids[300:517]]
    ours = make_engine(tiny_model(), {**RELOCATE, "window": window})
    stock = make_engine(tiny_model())
    assert ours.generate(prompts) == stock.generate(prompts)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "dtype"),
    [
        (4, 4, 64, "float32"),
        (6, 2, 80, "float32"),
        (8, 1, 96, "bfloat16"),
        (4, 2, 128, "float16"),
        (2, 1, 256, "float32"),
        (7, 1, 64, "bfloat16"),
    ],
)
def test_head_shapes_and_types(
    make_engine, tiny_model, token_ids, num_heads, num_kv_heads, head_size, dtype
):
    model = tiny_model(
        hidden_size=num_heads * 16,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
    )
    prompts = [token_ids[:200], token_ids[400:531]]
    ours, stock = make_engine(model, RELOCATE, dtype=dtype), make_engine(model, dtype=dtype)
    packed, plain = ours.generate(prompts), stock.generate(prompts)
    if dtype == "float32":
        assert packed == plain
    else:  # two kernels round differently; the first tokens still have to be the same
        assert [c[0][:4] for c in packed] == [c[0][:4] for c in plain]


def test_block_sizes(make_engine, tiny_model, token_ids):
    prompts = [token_ids[:300], token_ids[400:731]]
    expected = make_engine(tiny_model()).generate(prompts)
    for block_size in (64, 128):
        engine = make_engine(tiny_model(), RELOCATE, block_size=block_size)
        assert engine.generate(prompts) == expected
        check_idle(engine)


def test_short_prompts_and_outputs_are_left_alone_and_counted(
    make_engine, tiny_model, token_ids, changes
):
    engine = make_engine(tiny_model(), {**CONFIG, "min_output_tokens": 16})
    stock = make_engine(tiny_model())
    cases = [(token_ids[:1], 32), (token_ids[:63], 32), (token_ids[:300], 1), (token_ids[:300], 15)]
    for prompt, max_tokens in cases:
        ours = engine.generate([prompt], max_tokens=max_tokens)
        assert ours == stock.generate([prompt], max_tokens=max_tokens)
    assert changes() == {"short_prompt": 2, "short_output": 2}
    check_idle(engine)


def test_prompt_at_the_models_limit(make_engine, tiny_model, token_ids, changes):
    engine = make_engine(tiny_model(), CONFIG, max_model_len=512)
    name = engine.add(token_ids[:488], max_tokens=24)
    assert len(engine.drain()[name].outputs[0].token_ids) == 24
    name = engine.add(token_ids[:511], max_tokens=1)
    assert len(engine.drain()[name].outputs[0].token_ids) == 1
    assert changes() == {"compressed": 1, "short_output": 1}
    check_idle(engine)


TEXTS = {
    "delimiters": ". , ; : ! ? " * 60,
    "newlines": "\n" * 300,
    "spaces": " " * 1000,
    "one line": "abcdefghij" * 200,
    "base64": "QmFzZTY0IGlzIG5vdCBhIGNpcGhlcg" * 60,
    "minified json": '{"a":{"b":[1,2,3],"c":"d"}}' * 60,
    "chinese": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。" * 20,
    "japanese": "吾輩は猫である。名前はまだ無い。" * 20,
    "arabic": "كان يا ما كان، في قديم الزمان؟ " * 20,
    "hindi": "एक समय की बात है। एक राजा था॥ " * 15,
    "emoji": "🎉👩‍👩‍👧‍👦🏳️‍🌈 " * 60,
    "code": "def f(x):\n    return {'a': [x + 1, x * 2]};\n" * 25,
    "repeated word": "the " * 400,
    "control characters": "\x00\x01\x7f a" * 80,
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_every_kind(make_engine, tiny_model, encode, changes, name):
    """Compressed or counted; and the same text, only moved, gives the tokens of stock vLLM."""
    prompt = encode(TEXTS[name])[:900]
    engine = make_engine(tiny_model(), CONFIG)
    request = engine.add(prompt, max_tokens=24)
    assert len(engine.drain()[request].outputs[0].token_ids) == 24
    check_idle(engine)
    assert sum(changes().values()) == 1, changes()
    if changes().get("compressed"):
        state = engine.planner._metrics
        assert state.entries_kept._value.get() > 0
    moved = make_engine(tiny_model(), RELOCATE).generate([prompt])
    assert moved == make_engine(tiny_model()).generate([prompt])


@pytest.mark.parametrize("keep", [0.05, 0.2, 0.5, 0.9, 1.0])
def test_budget_of_a_request_is_kept(make_engine, tiny_model, token_ids, keep):
    """Whatever the text, at most the asked share is kept, or the request is left alone."""
    engine = make_engine(tiny_model(), {**CONFIG, "threshold": 0.95})
    for prompt in (token_ids[:640], token_ids[2000:2900]):
        engine.compressor.state.num_entries.zero_()
        engine.compressor.state.gap_end.zero_()
        engine.add(prompt, max_tokens=24, extra_args={"kv_compression_keep": keep})
        entries = gap_end = None
        while engine.engine.has_unfinished_requests():
            engine.step()
            state = engine.compressor.state
            if state.num_requests and entries is None:
                entries = state.num_entries.sum() / state.geometry.cells_per_block
                gap_end = int(state.gap_end.max())
                blocks = engine.compressed_manager.num_slab_blocks
        engine.flush()
        if keep == 1.0:
            assert entries is None  # would not get smaller, so it was left alone
        elif keep < 0.9 or entries is not None:
            assert entries <= keep * gap_end
            assert blocks <= gap_end / BLOCK_SIZE * keep + 2
    check_idle(engine)


def test_opting_out_is_stock(make_engine, tiny_model, token_ids, changes):
    """In a batch with compressed neighbours in other steps, and alone: the tokens of stock vLLM."""
    prompt = token_ids[:400]
    engine = make_engine(tiny_model(), CONFIG)
    ours = engine.generate([prompt], extra_args={"kv_compression": "none"})
    assert ours == make_engine(tiny_model()).generate([prompt])
    assert changes() == {"opted_out": 1}


def test_untouched_rows_beside_compressed_ones(make_engine, tiny_model, token_ids):
    """A compressed and an untouched request decode in one batch; the untouched one is stock's."""
    engine, stock = make_engine(tiny_model(), CONFIG), make_engine(tiny_model())
    prompts = [token_ids[:400], token_ids[1000:1350]]
    packed = engine.add(prompts[0], max_tokens=60)
    plain = engine.add(prompts[1], max_tokens=60, extra_args={"kv_compression": "none"})
    final = engine.drain()
    expected = stock.generate(prompts, max_tokens=60)
    assert list(final[plain].outputs[0].token_ids) == expected[1][0]
    assert len(final[packed].outputs[0].token_ids) == 60


@pytest.fixture
def no_amx(monkeypatch):
    """vLLM's attention without AMX, as it always is with compression."""
    choose = cpu_attn._get_attn_isa

    def choose_another(*args, **kwargs):
        found = choose(*args, **kwargs)
        return "vec" if found == "amx" else found

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", choose_another)


def test_a_processor_with_amx(make_engine, tiny_model, token_ids, monkeypatch):
    """Its layout of the cache is not used, and that is said."""
    said = []
    stock = make_engine(tiny_model()).generate([token_ids[:300]])
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *args, **kwargs: "amx")
    monkeypatch.setattr(backend_cpu.logger, "warning", said.append)
    engine = make_engine(tiny_model(), RELOCATE, max_num_seqs=7)  # no engine of another test
    assert ["not on this processor's AMX" in text for text in said] == [True]
    assert engine.generate([token_ids[:300]]) == stock


def test_batches_without_compressed_rows_are_bit_identical(
    make_engine, model_path, token_ids, no_amx
):
    """Not only the tokens: every log-probability to the last bit, in the model's own bfloat16."""
    prompts = [token_ids[:300], token_ids[900:1000], token_ids[2000:2700]]
    settings = {"dtype": "bfloat16", "max_num_batched_tokens": 256}

    def run(engine, **params):
        names = [engine.add(prompt, logprobs=5, max_tokens=24, **params) for prompt in prompts]
        final = engine.drain()
        return [
            [{t: p.logprob for t, p in step.items()} for step in final[name].outputs[0].logprobs]
            for name in names
        ]

    ours = make_engine(model_path, CONFIG, **settings)
    stock = make_engine(model_path, **settings)
    assert run(ours, extra_args={"kv_compression": "none"}) == run(stock)


def test_method_none_is_stock(make_engine, tiny_model, token_ids, changes):
    prompts = [token_ids[:300], token_ids[500:900]]
    engine = make_engine(tiny_model(), "none")
    assert engine.generate(prompts) == make_engine(tiny_model()).generate(prompts)
    assert changes() == {"method_none": 2}
    check_idle(engine)


def test_invalid_options_past_the_front_end_do_not_kill_the_engine(
    make_engine, tiny_model, token_ids, changes
):
    engine = make_engine(tiny_model(), CONFIG)
    name = engine.add(token_ids[:300], max_tokens=20)
    request = engine.scheduler.requests[engine.live_id(name)]
    request.sampling_params.extra_args = {"kv_compression_keep": "all"}
    engine.planner._candidates.clear()
    engine.planner.add(request)
    assert len(engine.drain()[name].outputs[0].token_ids) == 20
    assert changes() == {"invalid_options": 1}
    check_idle(engine)


@pytest.mark.parametrize("params", [{"prompt_logprobs": 2}, {"logprobs": 3}])
def test_logprobs(make_engine, tiny_model, token_ids, params):
    """Prompt log-probabilities come from the prefill and must not change at all."""
    prompt = token_ids[:300]
    engine, stock = make_engine(tiny_model(), CONFIG), make_engine(tiny_model())
    ours, plain = engine.add(prompt, **params), stock.add(prompt, **params)
    got, want = engine.drain()[ours], stock.drain()[plain]
    if "prompt_logprobs" in params:
        assert got.prompt_logprobs == want.prompt_logprobs
    else:
        assert len(got.outputs[0].logprobs) == 32
    check_idle(engine)


def test_structured_output(make_engine, model_path, encode):
    """A choice forced by a grammar after a compressed prompt."""
    prompt = encode("The weather report says it rains all day in the city, and " * 40 + "Answer:")
    choice = ["it rains all day today", "it is sunny all day"]
    params = StructuredOutputsParams(choice=list(choice))
    engine = make_engine(model_path, {**CONFIG, "min_output_tokens": 2})
    name = engine.add(prompt, max_tokens=16, ignore_eos=False, structured_outputs=params)
    text = engine.drain()[name].outputs[0].text
    assert text in choice
    check_idle(engine)


def test_a_request_that_ends_right_after_its_prompt(make_engine, tiny_model, token_ids):
    """Stop tokens end a request before, at, and just after the step that compresses it."""
    stock = make_engine(tiny_model())
    tokens = stock.generate([token_ids[:300]])[0][0]
    engine = make_engine(tiny_model(), {**RELOCATE, "min_output_tokens": 2})
    for stop in tokens[:4]:
        name = engine.add(token_ids[:300], stop_token_ids=[stop])
        assert len(engine.drain()[name].outputs[0].token_ids) <= 4
        check_idle(engine)
