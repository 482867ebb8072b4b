"""Every method through the same engine: what it keeps of a prompt must not depend on how the prompt
was computed, and whatever the prompt, nothing leaks."""

from __future__ import annotations

import pytest
import torch
from harness import BLOCK_SIZE, check_idle, check_invariants
from tiny_artifact import make_artifact
from tiny_soft_tokens import make_soft_tokens

from kvcompress_kernels import code_format, formats
from kvcompress_kernels.code_rows import reference

BASE = {"min_prompt_tokens": 64, "window": 32}
EASY = {
    "semanticache": {"threshold": 0.9, "max_keep": 0.6},
    "selkv": {"keep": 0.5},
    "metasoft": {"keep": 0.5},
    "aatc": {"bits": 4.0},
    "semanticache+aatc": {"threshold": 0.9, "max_keep": 0.6, "bits": 4.0},
    "selkv+aatc": {"keep": 0.5, "bits": 4.0},
    "metasoft+aatc": {"keep": 0.5, "bits": 4.0},
}
HARD = {
    "semanticache": {"threshold": 0.5, "max_keep": 0.3},
    "selkv": {"keep": 0.1, "heads": "adaptive", "alpha": 1.0},
    "metasoft": {"keep": 0.15, "probes": "dynamic", "flow": "mass"},
    "aatc": {"bits": 1.5},
    "semanticache+aatc": {"threshold": 0.5, "max_keep": 0.3, "bits": 1.5},
    "selkv+aatc": {"keep": 0.1, "heads": "each", "bits": 1.5},
    "metasoft+aatc": {"keep": 0.1, "heads": "adaptive", "bits": 1.5},
}
METHODS = tuple(EASY)


def configuration(method, settings, **artifacts):
    return {"method": method, **BASE, **settings[method], **artifacts}


@pytest.fixture(scope="module")
def artifacts(tiny_model, texts, tmp_path_factory):
    """Function: what a method needs for the tiny model."""
    folder = tmp_path_factory.mktemp("artifacts")
    made = {
        "aatc": {"artifact": str(make_artifact(tiny_model(), folder / "aatc", texts[:20_000]))},
        "metasoft": {"soft_tokens": str(make_soft_tokens(tiny_model(), folder / "metasoft"))},
    }
    return lambda method: {
        key: path for name in method.split("+") for key, path in made.get(name, {}).items()
    }


@pytest.fixture(scope="module")
def soft_tokens(model_path, tmp_path_factory):
    """Function: what a method needs for the real model beside what is shipped."""
    folder = str(make_soft_tokens(model_path, tmp_path_factory.mktemp("soft_tokens")))
    return lambda method: {"soft_tokens": folder} if "metasoft" in method else {}


def kept(engine):
    """What is held of the one compressed request: how many entries and rows, and their content."""
    state = engine.compressor.state
    ((slot, _),) = state._requests.values()
    blocks = engine.manager.req_to_blocks[next(iter(engine.manager.compressed))]
    slab = torch.tensor([block.block_id for block in blocks])
    parts = []
    places = (state.first_cell[slot].flatten().tolist(), state.num_entries[slot].flatten().tolist())
    for first, count in zip(*places, strict=True):
        parts += formats.read_segment(state.kv_cache, state.bias, slab, first, count)
    for layer, codecs in enumerate(state.codecs):
        for group, codec in enumerate(codecs.groups):
            first, count = (
                state.first_code_cell[slot, layer, group],
                state.num_rows[slot, layer, group],
            )
            codes = code_format.read_rows(
                state.kv_cache, slab, int(first), int(count), codec.layout
            )
            parts += reference.decode(codes, codec, state.kv_cache.shape[-1] // 2)
    numbers = [state.num_entries[slot].flatten(), state.num_rows[slot].flatten()]
    return torch.cat(numbers), torch.cat([part.flatten() for part in parts])


def compress(engine, prompt, **params):
    """What is kept of a prompt, and the tokens that follow it."""
    name = engine.add(prompt, max_tokens=40, **params)
    found = None
    final = None
    while engine.engine.has_unfinished_requests():
        for output in engine.step():
            final = output
        if found is None and engine.compressor.state.num_requests:
            found = kept(engine)
    engine.flush()
    assert found is not None, f"{name} was not compressed"
    return *found, list(final.outputs[0].token_ids)


def assert_same(ours, theirs):
    # other chunks, other last bits: two keys whose similarity is the threshold to six digits, or a
    # number between two levels of a code, may fall to either side
    if not torch.equal(ours[0], theirs[0]):
        assert (ours[0] - theirs[0]).abs().sum() <= 2
        return
    different = (ours[1] - theirs[1]).abs() > 1e-3 + 1e-3 * theirs[1].abs()
    assert different.float().mean() < 1e-3
    assert ours[2] == theirs[2]


def test_blocks_that_held_codes_are_fit_for_raw_tokens(make_engine, model_path, token_ids):
    """Whatever codes spell when read as numbers, it must not reach those who get the blocks next:
    vLLM's kernels read slots that no token has filled yet."""
    settings = {
        "num_gpu_blocks_override": 40,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
    }
    ours = make_engine(model_path, configuration("aatc", HARD), **settings)
    stock = make_engine(model_path, **settings)
    ours.generate([token_ids[:600], token_ids[900:1500]], max_tokens=40)
    assert ours.planner._metrics.requests_compressed._value.get() > 0
    check_idle(ours)
    assert not ours.compressor.state.kv_cache[:, 1:].isnan().any()
    prompts = [token_ids[50 * n : 50 * n + 40 + n] for n in range(8)]
    assert ours.generate(prompts) == stock.generate(prompts)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=pytest.mark.slow)  # on the real model
        for m in METHODS
    ],
)
def test_neither_chunks_nor_prefix_hits_change_what_is_kept(
    make_engine, model_path, token_ids, soft_tokens, method
):
    """A prompt at once, in chunks shorter than the observed queries, and from the prefix cache."""
    prompt = token_ids[3000:3650]
    config = configuration(method, HARD, **soft_tokens(method))
    whole = make_engine(model_path, config)
    chunked = make_engine(model_path, config, max_num_batched_tokens=23, max_num_seqs=4)
    expected = compress(whole, prompt)
    assert_same(compress(chunked, prompt), expected)
    for _ in range(2):  # on the blocks of the same prompt
        assert_same(compress(whole, prompt), expected)
    # on the blocks of a longer prompt, whose last full block ends exactly where this one does
    whole.generate([token_ids[3000:3700]], max_tokens=20)
    aligned = token_ids[3000 : 3000 + 20 * BLOCK_SIZE]
    assert_same(compress(whole, aligned), compress(chunked, aligned, salt="alone"))
    check_idle(whole)
    check_idle(chunked)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        pytest.param(EASY, "bfloat16", id="easy", marks=pytest.mark.slow),
        pytest.param(HARD, "float16", id="hard"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_every_residue_in_half_precision(
    make_engine, tiny_model, artifacts, token_ids, method, settings, dtype
):
    """Prompts of all lengths modulo the block size, short ones and one without delimiters among
    them, in a pool that makes them preempt each other."""
    engine = make_engine(
        tiny_model(),
        configuration(method, settings, **artifacts(method)),
        dtype=dtype,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=40,
        max_model_len=512,
    )
    prompts = [token_ids[50 * n : 50 * n + 300 + n] for n in range(BLOCK_SIZE)]
    prompts += [token_ids[:30], [token_ids[100]] * 300]
    names = [engine.add(prompt, max_tokens=24) for prompt in prompts]
    finished = set()
    while engine.engine.has_unfinished_requests():
        finished |= {output.request_id for output in engine.step() if output.finished}
        check_invariants(engine)
    engine.flush()
    check_idle(engine)
    assert finished == set(names)
    assert engine.planner._metrics.requests_compressed._value.get() > 0
