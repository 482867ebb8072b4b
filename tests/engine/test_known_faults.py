"""Faults that plugins of this kind have had: one test for each, here or named here.

The numbers are those of R-KV's list of thirteen faults in its vLLM integration.
"""

from __future__ import annotations

import ast
import json
import random
import re
from pathlib import Path

import pytest
from harness import BLOCK_SIZE, check_idle, check_invariants
from player import TOKEN, Player, new_scheduler
from player import check_idle as check_played_idle

from vllm_kvcompress.config import parse_config
from vllm_kvcompress.core import Signal
from vllm_kvcompress.engine.protocol import ATTRIBUTE

TESTS = Path(__file__).parents[1]
COVERED = {
    "1 constructed though disabled": ["engine/test_plugin.py::test_installed_is_not_active"],
    "2 view of a cache that is not contiguous": [
        "kernels/test_segment_attention.py::test_strides_of_the_pool_do_not_matter",
        "kernels/test_segment_attention.py::test_strided_query_and_output",
    ],
    "3 silently nothing on another model runner": [
        "engine/test_async_scheduler.py::test_a_worker_that_does_not_answer_a_plan_is_an_error",
        "engine/test_plugin.py::test_unsupported_settings_are_refused_all_at_once",
    ],
    "4 more cached tokens in a batch than its token budget": [
        "engine/test_relocate.py::test_chunked_prefill"
    ],
    "5 compressed between prefill chunks": ["engine/test_known_faults.py::test_05_chunks"],
    "6 prefix cache corrupted": [
        "engine/test_lifecycle.py::test_compressed_content_is_never_published",
        "engine/test_lifecycle.py::test_prefix_hits_stay_correct",
        "engine/test_known_faults.py::test_06_the_block_that_a_plan_s_own_step_fills",
        "engine/test_known_faults.py::test_06_next_turn",
        "engine/test_known_faults.py::test_hit_equals_miss_bit_by_bit",
    ],
    "7 decisions of layers drift apart": ["engine/test_known_faults.py::test_07_layers"],
    "8 trigger counts generated tokens": ["engine/test_known_faults.py::test_08_trigger"],
    "9 observation window empty in mixed batches": [
        "engine/test_known_faults.py::test_09_observation"
    ],
    "10 stale state of a slot overwrites a survivor": [
        "engine/test_known_faults.py::test_10_slots"
    ],
    "11 state survives a preemption": [
        "engine/test_relocate.py::test_preemption",
        "engine/test_known_faults.py::test_11_resumed_on_cached_blocks",
    ],
    "12 defaults are not the documented ones": ["engine/test_known_faults.py::test_12_defaults"],
    "13 blocks never come back": [
        "engine/test_lifecycle.py::test_freed_blocks_are_used_by_others",
        "engine/test_lifecycle.py::test_usage_falls_when_blocks_come_back",
    ],
    "state of a reused block": ["engine/test_known_faults.py::test_reused_block"],
    "preemption livelock": [
        "engine/test_lifecycle.py::test_no_livelock_in_a_tiny_pool",
        "engine/test_known_faults.py::test_no_more_preemptions_than_stock",
    ],
    "positions after compression": ["engine/test_known_faults.py::test_positions"],
    "corruption in a full pool": ["engine/test_known_faults.py::test_full_pool"],
}
CONFIG = {
    "method": "semanticache",
    "min_prompt_tokens": 64,
    "min_output_tokens": 2,
    "window": 16,
    "threshold": 0.6,
    "max_keep": 0.3,
}
RELOCATE = {"method": "relocate", "min_prompt_tokens": 64, "min_output_tokens": 2, "window": 16}
OPT_OUT = {"kv_compression": "none"}
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.mark.parametrize("fault", COVERED)
def test_every_fault_has_its_test(fault):
    for test_id in COVERED[fault]:
        file, name = test_id.split("::")
        nodes = ast.parse((TESTS / file).read_text()).body
        assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, test_id


@pytest.fixture
def play(make_engine, tiny_model):
    """Function that makes a `Player` of a fresh scheduler."""
    engine = make_engine(
        tiny_model(),
        CONFIG,
        num_gpu_blocks_override=64,
        max_model_len=1024,
        max_num_batched_tokens=128,
    )

    def play(asynchronous):
        scheduler = new_scheduler(engine, asynchronous=asynchronous)
        return Player(scheduler, random.Random(0), depth=2 if asynchronous else 1)

    return play


def logprobs(output):
    """Chosen tokens and all log-probabilities of the only completion."""
    (completion,) = output.outputs
    return list(completion.token_ids), [
        {token: value.logprob for token, value in step.items()} for step in completion.logprobs
    ]


def assert_close(ours, stock):
    """The same tokens, and log-probabilities as near as another order of sums allows."""
    assert ours[0] == stock[0]
    for mine, theirs in zip(ours[1], stock[1], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


@BOTH
def test_05_chunks(play, token_ids, asynchronous):
    """Whatever runs beside it, a prompt is compressed in a step after its last chunk's."""
    player = play(asynchronous)
    prompts = {}
    for i, length in enumerate((500, 300, 420)):
        prompts[player.add(token_ids[i * 600 :][:length], 40)] = length
    computed = dict.fromkeys(prompts, 0)
    for _ in range(40):
        player.step()
        if not player.in_flight:
            continue
        output, _ = player.in_flight[-1]
        for plan in getattr(output, ATTRIBUTE).compress:
            assert computed[plan.request_id] >= prompts[plan.request_id]
        for name, num_tokens in output.num_scheduled_tokens.items():
            computed[name] += num_tokens
    player.drain()
    assert player.num_plans == 3


@BOTH
@pytest.mark.parametrize("length", [222, 223, 224, 255, 256])
def test_06_the_block_that_a_plan_s_own_step_fills(play, token_ids, asynchronous, length):
    """vLLM publishes a block when it schedules the step that fills it; if that step compresses
    first, the block's last token is not exact and must not be found by the next turn."""
    player = play(asynchronous)
    player.add(token_ids[:length], 60)
    for _ in range(8):
        player.step()
    assert player.num_plans == 1
    player.add([*token_ids[:length], *[TOKEN] * 40], 10)
    player.drain()
    check_played_idle(player.scheduler)


@pytest.mark.parametrize("length", [255, 287])
def test_06_next_turn(make_engine, tiny_model, token_ids, length):
    """The same through the engine: the next turn of a conversation is that of stock vLLM."""
    ours, stock = make_engine(tiny_model(), CONFIG), make_engine(tiny_model())
    prompt = token_ids[:length]
    turn = [*prompt, *ours.generate([prompt], max_tokens=8)[0][0], *token_ids[7000:7040]]
    mine = ours.add(turn, logprobs=5, max_tokens=8, extra_args=OPT_OUT)
    theirs = stock.add(turn, logprobs=5, max_tokens=8)
    assert_close(logprobs(ours.drain()[mine]), logprobs(stock.drain()[theirs]))
    check_idle(ours)


def test_07_layers(make_engine, tiny_model, token_ids):
    """Layers and heads keep different numbers of entries, in cells that do not overlap."""
    engine = make_engine(tiny_model(), CONFIG)
    name = engine.add(token_ids[:640], max_tokens=20)
    while not engine.compressor.state.num_requests:
        engine.step()
    (found,) = engine.compressed_manager.compressed.values()
    blocks = engine.manager.req_to_blocks[engine.live_id(name)]
    state = engine.compressor.state
    slot = int(state.slot_of_block[blocks[0].block_id])
    firsts, counts = state.first_cell[slot].flatten(), state.num_entries[slot].flatten()
    cells = [
        cell
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
        for cell in range(first, first + -(-count // BLOCK_SIZE))
    ]
    assert len(cells) == len(set(cells))
    assert max(cells) < found.num_slab_blocks * state.geometry.cells_per_block
    assert int(state.gap_end[slot]) == found.num_gap_blocks * BLOCK_SIZE
    engine.drain()
    check_idle(engine)


@BOTH
def test_08_trigger(play, token_ids, asynchronous):
    """A short prompt is not compressed when its output has made it long."""
    player = play(asynchronous)
    player.add(token_ids[:63], 400)
    player.drain()
    assert player.num_plans == 0


@BOTH
def test_09_observation(play, token_ids, asynchronous, monkeypatch):
    """Where a method wants the last queries, those of each prompt are named once, in whichever
    chunks they are, also in batches that hold decodes and chunks of other prompts."""
    player = play(asynchronous)
    planner = player.scheduler.planner
    monkeypatch.setattr(type(planner._method), "needs", frozenset({Signal.QUERY_WINDOW}))
    prompts, computed, observed = {}, {}, {}
    for i, length in enumerate((500, 257, 129, 384)):
        prompts[player.add(token_ids[i * 600 :][:length], 60)] = length
    schedule = player.scheduler.schedule

    def watch():
        output = schedule()
        starts = dict(computed)
        for name, num_tokens in output.num_scheduled_tokens.items():
            computed[name] = computed.get(name, 0) + num_tokens
        for order in getattr(output, ATTRIBUTE).observe:
            name = order.request_id
            assert starts.get(name, 0) + order.offset == order.start
            assert order.stop <= computed[name]
            assert order.end - order.first == planner.num_queries
            observed.setdefault(name, []).extend(range(order.start, order.stop))
        return output

    monkeypatch.setattr(player.scheduler, "schedule", watch)
    player.drain()
    assert observed == {
        name: list(range(length - planner.num_queries, length)) for name, length in prompts.items()
    }


def test_10_slots(make_engine, tiny_model, token_ids):
    """A slot goes from an aborted request to a new one; the survivors keep theirs."""
    ours, stock = make_engine(tiny_model(), RELOCATE), make_engine(tiny_model())
    prompts = [token_ids[i * 500 : i * 500 + 200] for i in range(4)]
    names = [ours.add(prompt, max_tokens=60) for prompt in prompts[:3]]
    while ours.compressor.state.num_requests < 3:
        ours.step()
    slot = ours.compressor.state._requests[ours.live_id(names[0])][0]
    ours.engine.abort_request([names[0]])
    names.append(ours.add(prompts[3], max_tokens=60))
    while ours.live_id(names[3]) not in ours.compressor.state._requests:
        ours.step()
    assert ours.compressor.state._requests[ours.live_id(names[3])][0] == slot
    final = ours.drain()
    tokens = [list(final[name].outputs[0].token_ids) for name in names[1:]]
    assert tokens == [c[0] for c in stock.generate(prompts[1:], max_tokens=60)]
    check_idle(ours)


@BOTH
@pytest.mark.parametrize("after", range(1, 6))
def test_11_resumed_on_cached_blocks(play, token_ids, asynchronous, after):
    """A prompt of whole blocks comes back from the cache at once, so that the step that resumes
    the request looks like its first decode; the worker gets its old block list with that step."""
    player = play(asynchronous)
    name = player.add(token_ids[:256], 60)
    for _ in range(after):
        player.step()
    scheduler = player.scheduler
    request = scheduler.requests[name]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    player.drain()
    assert len(player.outputs[name]) == 60
    assert player.num_plans >= 1
    check_played_idle(scheduler)


def test_12_defaults():
    """The table of settings in the README is what the code does."""
    readme = (TESTS.parent / "README.md").read_text()
    table = readme.split("| setting | default | |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE)
    defaults = parse_config("semanticache").model_dump(exclude={"method"})
    assert {name: json.loads(value) for name, value in rows} == defaults


@pytest.mark.parametrize("how", ["finished", "aborted"])
def test_reused_block(make_engine, tiny_model, token_ids, how):
    """A slab's first block becomes the first of an uncompressed request in the very next step."""
    settings = {
        "num_gpu_blocks_override": 40,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
    }
    engine, stock = make_engine(tiny_model(), CONFIG, **settings), make_engine(tiny_model())
    first = engine.add(token_ids[:400], max_tokens=6)
    while not engine.compressed_manager.compressed:
        engine.step()
    (live,) = engine.compressed_manager.compressed
    block = engine.manager.req_to_blocks[live][0]
    if how == "aborted":
        engine.engine.abort_request([first])
    while engine.engine.has_unfinished_requests():
        engine.step()
    queue = engine.pool.free_block_queue
    queue.remove(block)
    queue.prepend_n([block])
    prompt = token_ids[900:1200]
    name = engine.add(prompt, logprobs=5, extra_args=OPT_OUT)
    engine.step()
    assert engine.manager.req_to_blocks[engine.live_id(name)][0] is block
    ours = logprobs(engine.drain()[name])
    expected = stock.add(prompt, logprobs=5)
    assert ours == logprobs(stock.drain()[expected])
    check_idle(engine)


@pytest.mark.parametrize("compression", [CONFIG, RELOCATE], ids=["semanticache", "relocate"])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no_cache", "cache"])
def test_no_more_preemptions_than_stock(
    make_engine, tiny_model, token_ids, compression, prefix_caching
):
    """Blocks that are held for a plan must not drive others out again and again."""

    def count(compression):
        engine = make_engine(
            tiny_model(),
            compression,
            num_gpu_blocks_override=22,
            enable_prefix_caching=prefix_caching,
            max_model_len=608,
        )
        names = [engine.add(token_ids[i * 500 : i * 500 + 400], max_tokens=100) for i in range(6)]
        preemptions, steps, ended = {}, 0, 0
        while engine.engine.has_unfinished_requests():
            ended += sum(output.finished for output in engine.step())
            preemptions.update({r.request_id: r.num_preemptions for r in engine.scheduler.running})
            steps += 1
            assert steps < 3000
        assert ended == len(names)
        return sum(preemptions.values())

    assert count(compression) <= count(None) + 6


def test_positions(make_engine, tiny_model, token_ids):
    """Tokens after a compression sit where they would sit without: while decoding, beside prompt
    chunks of others, and in a prompt that continues a compressed one on its cached prefix."""
    settings = {"max_num_batched_tokens": 96}

    def run(engine):
        names = [engine.add(token_ids[:321], logprobs=5, max_tokens=60)]
        for _ in range(8):
            engine.step()
        names.append(engine.add(token_ids[2000:2700], logprobs=5, max_tokens=40))
        for _ in range(3):
            engine.step()
        names.append(engine.add(token_ids[:500], logprobs=5, max_tokens=40))
        final = engine.drain()
        return [logprobs(final[name]) for name in names], final[names[2]].num_cached_tokens

    engine = make_engine(tiny_model(), RELOCATE, **settings)
    before = engine.planner._metrics.requests_compressed._value.get()
    ours, num_cached = run(engine)
    assert engine.planner._metrics.requests_compressed._value.get() == before + 3
    stock, _ = run(make_engine(tiny_model(), **settings))
    assert num_cached >= 288
    for mine, theirs in zip(ours, stock, strict=True):
        assert_close(mine, theirs)
    check_idle(engine)


def test_full_pool(make_engine, tiny_model, model_path):
    """Every block of the pool in use, with prefix caching: the tokens of stock vLLM."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    schema = '{"name": "order", "fields": [{"id": 1, "type": "string"}, {"id": 2}], "strict": true}'
    prompts = [
        list(tokenizer.encode(f"{schema * 12}\n{kind}: ").ids)[-300:]
        + list(range(400 + i, 420 + i))
        for i, kind in enumerate(["JSON", "answer", "list", "table", "object"])
    ]
    settings = {"num_gpu_blocks_override": 31, "max_model_len": 608}
    ours, stock = make_engine(tiny_model(), RELOCATE, **settings), make_engine(tiny_model())
    before = ours.planner._metrics.requests_compressed._value.get()
    for _ in range(2):
        names = [ours.add(prompt, max_tokens=120) for prompt in prompts]
        usage, final = 0.0, {}
        while ours.engine.has_unfinished_requests():
            for output in ours.step():
                if output.finished:
                    final[output.request_id] = list(output.outputs[0].token_ids)
            usage = max(usage, ours.scheduler.get_kv_cache_usage())
            check_invariants(ours)
        ours.flush()
        assert usage == 1.0
        expected = [c[0] for c in stock.generate(prompts, max_tokens=120)]
        assert [final[name] for name in names] == expected
    assert ours.planner._metrics.requests_compressed._value.get() > before
    check_idle(ours)


def test_hit_equals_miss_bit_by_bit(make_engine, tiny_model, token_ids):
    """What a prompt reads from the cache of a compressed one is what it would have computed."""
    ours, stock = make_engine(tiny_model(), CONFIG), make_engine(tiny_model())
    prompt, longer = token_ids[3000:3320], token_ids[3000:3400]
    for engine in (ours, stock):
        engine.scheduler.reset_prefix_cache()
        engine.generate([prompt], max_tokens=40)
    mine = ours.add(longer, logprobs=5, extra_args=OPT_OUT)
    theirs = stock.add(longer, logprobs=5)
    hit, stock_hit = ours.drain()[mine], stock.drain()[theirs]
    assert hit.num_cached_tokens == stock_hit.num_cached_tokens == len(prompt)
    assert logprobs(hit) == logprobs(stock_hit)
    ours.scheduler.reset_prefix_cache()
    name = ours.add(longer, logprobs=5, extra_args=OPT_OUT)
    miss = ours.drain()[name]
    assert miss.num_cached_tokens == 0
    assert logprobs(miss) == logprobs(hit)
