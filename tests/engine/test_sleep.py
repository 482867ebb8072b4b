"""Sleep and wake, pause and resume: what is compressed goes with the cache, or stays with it."""

from __future__ import annotations

import pytest
from harness import check_idle, check_invariants

RELOCATE = {"method": "relocate", "min_prompt_tokens": 64, "window": 32}
SEMANTICACHE = {"method": "semanticache", "min_prompt_tokens": 64, "threshold": 0.6}


def start(engine, token_ids):
    """Three requests in the midst of decoding, compressed where the engine compresses."""
    names = [engine.add(token_ids[n * 400 : n * 400 + 300], max_tokens=40) for n in range(3)]
    for _ in range(12):
        engine.step()
    if hasattr(engine.scheduler, "planner"):
        assert len(engine.compressed_manager.compressed) == 3
    return names


def tokens(final, names):
    return [list(final[name].outputs[0].token_ids) for name in names]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_running_requests_survive_a_sleep(make_engine, tiny_model, token_ids, level):
    """Mode "keep": at level 0 the cache stays, at the others it is emptied and made again."""
    ours, stock = make_engine(tiny_model(), RELOCATE), make_engine(tiny_model())
    answers = []
    for engine in (ours, stock):
        names = start(engine, token_ids)
        engine.llm.sleep(level=level, mode="keep")
        if engine is ours:
            check_invariants(ours)
            kept = 3 if level == 0 else 0
            assert len(ours.compressed_manager.compressed) == kept
            assert ours.pool.get_num_free_blocks() == ours.pool.num_gpu_blocks - 1 or kept
        assert engine.step() == []
        engine.llm.wake_up(["scheduling"] if level == 0 else None)
        answers.append(tokens(engine.drain(), names))
    assert answers[0] == answers[1]
    check_idle(ours)


@pytest.mark.parametrize("config", [RELOCATE, SEMANTICACHE], ids=["relocate", "semanticache"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_aborts_leaves_nothing(make_engine, tiny_model, token_ids, config, level):
    engine = make_engine(tiny_model(), config)
    before = engine.generate([token_ids[:300]])
    names = start(engine, token_ids)
    engine.llm.sleep(level=level)  # mode "abort"
    engine.engine.abort_request(names)  # an engine in this process does not hear of it by itself
    assert not engine.scheduler.requests
    assert not engine.compressed_manager.compressed
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    engine.llm.wake_up()
    engine.flush()
    check_idle(engine)
    # nor in the prefix cache: the same answer, computed anew
    assert engine.generate([token_ids[:300]]) == before
    check_idle(engine)


def test_requests_that_arrive_during_a_sleep(make_engine, tiny_model, token_ids):
    ours, stock = make_engine(tiny_model(), RELOCATE), make_engine(tiny_model())
    answers = []
    for engine in (ours, stock):
        engine.llm.sleep(level=1)
        names = [engine.add(token_ids[:300]), engine.add(token_ids[500:900])]
        assert engine.step() == []
        engine.llm.wake_up()
        answers.append(tokens(engine.drain(), names))
    assert answers[0] == answers[1]
    check_idle(ours)


def test_sleep_mode_itself_is_vllms_to_refuse(make_engine, tiny_model):
    """The memory of a CPU engine cannot be given up while it sleeps."""
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        make_engine(tiny_model(), RELOCATE, enable_sleep_mode=True)
