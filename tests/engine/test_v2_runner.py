"""vLLM's V2 model runner with compression, on the CPU's own attention backend.

vLLM's Triton kernels of the runner (block tables, inputs, sampling) are interpreted; the cells and
the kernels of the plugin are those of the CPU. `test_backend_triton` has the GPU's.
"""

from __future__ import annotations

import functools

import gpu_stand_in

gpu_stand_in.require()

import pytest  # noqa: E402
import torch  # noqa: E402
from harness import check_idle, check_invariants  # noqa: E402
from tiny_soft_tokens import make_soft_tokens  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.v1.worker.cpu.model_runner import CPUModelRunner  # noqa: E402

from vllm_kvcompress.engine import settings  # noqa: E402
from vllm_kvcompress.engine.scheduler import (  # noqa: E402
    CompressionAsyncScheduler,
    CompressionScheduler,
)
from vllm_kvcompress.engine.worker_gpu import CompressionCPUModelRunnerV2  # noqa: E402

VOCAB_SIZE = 512
RELOCATE = {"method": "relocate", "min_prompt_tokens": 64, "min_output_tokens": 2, "window": 16}
SEMANTICACHE = {**RELOCATE, "method": "semanticache", "threshold": 0.6}
SELKV = {**RELOCATE, "method": "selkv", "keep": 0.4, "observed_queries": 24}
METASOFT = {**RELOCATE, "method": "metasoft", "keep": 0.4, "probes": "dynamic"}


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    target = tmp_path_factory.mktemp("small_vocabulary")
    return gpu_stand_in.shrink_vocabulary(tiny_model(), target, VOCAB_SIZE)


@pytest.fixture
def prompts(token_ids):
    return [
        [token % VOCAB_SIZE for token in token_ids[i * 700 : i * 700 + n]]
        for i, n in enumerate((150, 217, 97, 320))
    ]


@pytest.fixture(autouse=True)
def _allow_v2(monkeypatch):
    """The refusal is for users: nobody has run it on a CPU but under the interpreter."""
    monkeypatch.setattr(settings, "_unsupported_runner", lambda vllm_config: ())


@pytest.fixture
def asynchronous(monkeypatch, request):
    """Asynchronous scheduling, which vLLM switches off on CPUs after all is configured."""
    load_general_plugins()  # ours wraps the same method
    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_with_async_scheduling(self, *args, **kwargs):
        config = create(self, *args, **kwargs)
        config.scheduler_config.async_scheduling = request.param
        return config

    monkeypatch.setattr(EngineArgs, "create_engine_config", create_with_async_scheduling)
    return request.param


both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"], indirect=True)
only_async = pytest.mark.parametrize("asynchronous", [True], ids=["async"], indirect=True)


@both
def test_relocation_changes_nothing(make_engine, model, prompts, asynchronous):
    """Two rounds, so that the second one hits the prefix cache; over two block boundaries."""
    settings = {"max_num_seqs": 9 + asynchronous}  # an engine of its own
    ours, stock = make_engine(model, RELOCATE, **settings), make_engine(model, **settings)
    assert type(ours.runner) is CompressionCPUModelRunnerV2
    assert type(stock.runner) is CPUModelRunner
    scheduler = CompressionAsyncScheduler if asynchronous else CompressionScheduler
    assert type(ours.scheduler) is scheduler
    length = {"max_tokens": 12}
    for number in (1, 2):
        before = ours.planner._metrics.requests_compressed._value.get()
        assert ours.generate(prompts[:3], **length) == stock.generate(prompts[:3], **length)
        assert ours.planner._metrics.requests_compressed._value.get() == before + 3, number
        check_idle(ours)


@only_async
def test_chunked_prefill(make_engine, model, prompts, asynchronous):
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 5}
    ours, stock = make_engine(model, RELOCATE, **settings), make_engine(model, **settings)
    assert ours.generate(prompts, max_tokens=12) == stock.generate(prompts, max_tokens=12)
    check_idle(ours)


@only_async
def test_preemption(make_engine, model, prompts, asynchronous):
    settings = {
        "num_gpu_blocks_override": 22,
        "enable_prefix_caching": False,
        "max_model_len": 512,
        "max_num_seqs": 4,
    }
    ours, stock = make_engine(model, RELOCATE, **settings), make_engine(model, **settings)
    names = [ours.add(prompt, max_tokens=90) for prompt in prompts]
    preempted, final = 0, {}
    while ours.engine.has_unfinished_requests():
        for output in ours.step():
            if output.finished:
                final[output.request_id] = list(output.outputs[0].token_ids)
        preempted = max(preempted, sum(r.num_preemptions for r in ours.scheduler.requests.values()))
        check_invariants(ours)
    ours.flush()
    assert preempted > 0, "the pool was not tight enough to test anything"
    expected = [c[0] for c in stock.generate(prompts, max_tokens=90)]
    assert [final[name] for name in names] == expected
    check_idle(ours)


@only_async
@pytest.mark.parametrize("after", [1, 3, 5])
def test_abort_leaves_the_others_alone(make_engine, model, prompts, asynchronous, after):
    """Aborted with a plan in flight, compressed, or before."""
    ours, stock = make_engine(model, RELOCATE), make_engine(model)
    victim, survivor = ours.add(prompts[3]), ours.add(prompts[0], max_tokens=10)
    for _ in range(after):
        ours.step()
        check_invariants(ours)
    ours.engine.abort_request([victim])
    final = ours.drain()
    check_idle(ours)
    expected = stock.generate([prompts[0]], max_tokens=10)[0][0]
    assert list(final[survivor].outputs[0].token_ids) == expected


@pytest.fixture(scope="module")
def soft_tokens(model, tmp_path_factory):
    return {"soft_tokens": str(make_soft_tokens(model, tmp_path_factory.mktemp("soft_tokens")))}


def kept(engine, prompt):
    """Tables, and entries of all segments, of one prompt right after its compression; and the
    tokens that came out in the end."""
    name = engine.add(prompt, max_tokens=8)
    found = None
    while engine.engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and output.request_id == name:
                tokens = list(output.outputs[0].token_ids)
        state = engine.compressor.state
        if found is None and state.num_requests:
            slot = int(state.slot_of_block.max())
            found = state.first_cell[slot].clone(), state.num_entries[slot].clone()
    engine.flush()
    assert found is not None
    return found, tokens


@only_async
@pytest.mark.parametrize(
    "config", [SEMANTICACHE, SELKV, METASOFT], ids=lambda config: config["method"]
)
def test_the_methods_keep_what_they_keep_under_v1(
    make_engine, model, prompts, asynchronous, config, soft_tokens, monkeypatch
):
    """In chunks, so that queries are observed over several steps and among other requests."""
    config = {**config, **(soft_tokens if config is METASOFT else {})}
    settings = {"max_num_batched_tokens": 96, "max_num_seqs": 6}
    v2 = make_engine(model, config, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(VllmConfig, "use_v2_model_runner", False)
        synchronous = EngineArgs.create_engine_config.__wrapped__
        patch.setattr(EngineArgs, "create_engine_config", synchronous)
        v1 = make_engine(model, config, **{**settings, "max_num_seqs": 7})
    assert "V2" in type(v2.runner).__name__
    assert "V2" not in type(v1.runner).__name__
    (one, other), tokens = kept(v2, prompts[3])
    (one_v1, other_v1), tokens_v1 = kept(v1, prompts[3])
    assert torch.equal(one, one_v1)
    assert torch.equal(other, other_v1)
    assert other.sum() < other.numel() * 320
    assert tokens == tokens_v1
    check_idle(v2)
