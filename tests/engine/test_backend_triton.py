"""The GPU backend under Triton's interpreter: in vLLM's V2 runner, and as a graph would replay it.

vLLM's CPU platform stands in for CUDA (`stand_in_worker`); the runner, the host's kernels and ours
are those of a GPU.
"""

from __future__ import annotations

import gpu_stand_in

gpu_stand_in.require()

from dataclasses import replace  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import compiled_forms  # noqa: E402
import pytest  # noqa: E402
import stand_in_worker  # noqa: E402
import torch  # noqa: E402
import triton_interpreter  # noqa: E402
from harness import check_idle  # noqa: E402
from tiny_artifact import TINY, make_artifact  # noqa: E402
from tiny_soft_tokens import make_soft_tokens  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl  # noqa: E402
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture  # noqa: E402

from kvcompress_kernels import code_format, formats  # noqa: E402
from kvcompress_kernels.coded_attention import coded_attention  # noqa: E402
from kvcompress_kernels.coded_attention import triton as codes_triton  # noqa: E402
from kvcompress_kernels.segment_attention import api, triton  # noqa: E402
from vllm_kvcompress.calibration import run  # noqa: E402
from vllm_kvcompress.config import parse_config, request_options  # noqa: E402
from vllm_kvcompress.engine import backend_triton, doctor, settings  # noqa: E402
from vllm_kvcompress.engine.protocol import ATTRIBUTE  # noqa: E402
from vllm_kvcompress.engine.worker_gpu import CompressionRunnerV2  # noqa: E402
from vllm_kvcompress.methods import aatc  # noqa: E402
from vllm_kvcompress.methods.gpu import GpuAATC, GpuSelKV, GpuSemantiCache  # noqa: E402
from vllm_kvcompress.methods.registry import create_method  # noqa: E402
from vllm_kvcompress.methods.selkv import SelKV  # noqa: E402
from vllm_kvcompress.methods.semanticache import SemantiCache  # noqa: E402
from vllm_kvcompress.simulation import Simulation  # noqa: E402

triton_interpreter.repair()

VOCAB_SIZE = 256
BLOCK_SIZE = 16
SETTINGS = {
    "block_size": BLOCK_SIZE,
    "kv_cache_memory_bytes": 1 << 22,
    "max_model_len": 256,
    "max_num_seqs": 4,
}
RELOCATE = {"method": "relocate", "min_prompt_tokens": 48, "min_output_tokens": 2, "window": 8}
SEMANTICACHE = {**RELOCATE, "method": "semanticache", "threshold": 0.6}
METASOFT = {**RELOCATE, "method": "metasoft", "keep": 0.4, "num_sink_tokens": 2}
AATC = {**RELOCATE, "method": "aatc", "bits": 4.0, "num_sink_tokens": 2}
SELKV = {**RELOCATE, "method": "selkv", "keep": 0.4, "observed_queries": 8, "num_sink_tokens": 2}


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    folder = tiny_model(num_heads=2, num_kv_heads=1)
    target = tmp_path_factory.mktemp("small_vocabulary")
    return gpu_stand_in.shrink_vocabulary(folder, target, VOCAB_SIZE)


@pytest.fixture(scope="module")
def artifact(model, texts, tmp_path_factory):
    """A calibration of the model, on tokens that it has."""
    settings = replace(TINY, num_tokens=8 * 160)
    target = tmp_path_factory.mktemp("artifact")
    cut = run.cut

    def cut_few_tokens(sources, encode, *rest):
        return cut(sources, lambda text: [t % VOCAB_SIZE for t in encode(text)], *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "cut", cut_few_tokens)
        return str(make_artifact(model, target, texts[:20_000], settings))


@pytest.fixture(scope="module")
def soft_tokens(model, tmp_path_factory):
    return str(make_soft_tokens(model, tmp_path_factory.mktemp("soft_tokens"), 8))


def coded(compression, artifact):
    return {**compression, "artifact": artifact}


def complete(compression, artifact, soft_tokens):
    """With what its method reads from files."""
    if "aatc" in compression["method"]:
        compression = coded(compression, artifact)
    if "metasoft" in compression["method"]:
        compression = {**compression, "soft_tokens": soft_tokens}
    return compression


@pytest.fixture
def prompts(token_ids):
    """Two that can be relocated, one that is too short, and one long enough for SemantiCache."""
    return [
        [token % VOCAB_SIZE for token in token_ids[i * 700 : i * 700 + n]]
        for i, n in enumerate((60, 52, 20, 93))
    ]


@pytest.fixture
def make_gpu_engine(make_engine, model, monkeypatch):
    """An engine as on a GPU: the V2 runner, vLLM's Triton attention, and ours over it."""
    monkeypatch.setattr(settings, "_unsupported_runner", lambda vllm_config: ())

    def make(compression, **more):
        with stand_in_worker.triton_backend():
            return make_engine(model, compression, **SETTINGS, **more)

    return make


@pytest.fixture
def expected(make_engine, model, prompts):
    """What stock vLLM generates, with the V2 runner and the CPU's own attention."""
    return make_engine(model, None, **{**SETTINGS, "block_size": 32}).generate(
        prompts[:3], max_tokens=6
    )


def test_relocation_changes_nothing(make_gpu_engine, prompts, expected):
    """Eager, as prefill and piecewise graphs are: the host for rows without state."""
    engine = make_gpu_engine(RELOCATE)
    impls = {type(layer.impl) for layer in layers(engine)}
    assert impls == {backend_triton.CompressionTritonImpl}
    before = engine.planner._metrics.requests_compressed._value.get()
    assert engine.generate(prompts[:3], max_tokens=6) == expected
    assert engine.planner._metrics.requests_compressed._value.get() == before + 2
    check_idle(engine)


def test_relocation_changes_nothing_when_decode_batches_are_graphs(
    make_gpu_engine, prompts, expected, monkeypatch
):
    """All rows of a decode batch, with state or without, by our kernel, as a graph has them."""
    build = backend_triton._Builder.build

    def build_every_row(self, common_prefix_len, common, fast_build=False):
        if common.max_query_len > 1:
            return build(self, common_prefix_len, common, fast_build)
        metadata = super(backend_triton._Builder, self).build(common_prefix_len, common, fast_build)
        setattr(metadata, ATTRIBUTE, self._every_row(common))
        return metadata

    monkeypatch.setattr(backend_triton._Builder, "build", build_every_row)
    engine = make_gpu_engine(RELOCATE)
    assert engine.generate(prompts[:3], max_tokens=6) == expected
    check_idle(engine)


def layers(engine):
    context = engine.runner.compilation_config.static_forward_context
    return [layer for _, layer in sorted(context.items())]


class Launches:
    """Launches of a kernel, with their grids and their very arguments."""

    def __init__(self, kernel, record):
        self._kernel = kernel
        self._record = record

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self._record.append((self._kernel, grid, args, kwargs))
            return self._kernel[grid](*args, **kwargs)

        return launch


@pytest.mark.parametrize("method", ["semanticache", pytest.param("aatc", marks=pytest.mark.slow)])
def test_a_replay_reads_what_was_written_in_place(
    make_gpu_engine, prompts, artifact, monkeypatch, method
):
    """A decode graph is captured on an idle engine by vLLM's own preparation, and its launches are
    repeated after a real request has been compressed: same arguments, other contents."""
    engine = make_gpu_engine(SEMANTICACHE if method == "semanticache" else coded(AATC, artifact))
    runner, state = engine.runner, engine.compressor.state
    num_rows = 3
    metadata, slot_mappings = prepare_inputs_to_capture(
        num_rows,
        num_rows,
        runner.model_state,
        runner.input_buffers,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
        full_cudagraph=True,
        max_query_len=1,
    )
    layer = layers(engine)[1]
    assert layer.impl.compression.layer == 1
    query = torch.zeros(num_rows, 2, 32)
    output = torch.zeros(num_rows, 2, 32)
    record = []
    kernels = [(triton, "attend_kernel"), (triton, "reduce_kernel")]
    if method == "aatc":
        names = ("fold_kernel", "attend_kernel", "unfold_kernel")
        kernels = [(codes_triton, name) for name in names] + kernels
    expected = [getattr(*kernel) for kernel in kernels]
    for module, name in kernels:
        monkeypatch.setattr(module, name, Launches(getattr(module, name), record))
    host_calls = []
    monkeypatch.setattr(
        backend_triton.TritonAttentionImpl, "forward", lambda *args: host_calls.append(args)
    )
    with set_forward_context(metadata, runner.vllm_config, slot_mapping=slot_mappings):
        layer.impl.forward(
            layer, query, query, query, layer.kv_cache, metadata[layer.layer_name], output
        )
    monkeypatch.undo()
    assert not host_calls
    assert [kernel for kernel, *_ in record] == expected

    # one compressed request, one short one without state, and a padded row
    monkeypatch.setattr(settings, "_unsupported_runner", lambda vllm_config: ())
    engine.add(prompts[3], max_tokens=6)
    engine.add(prompts[2], max_tokens=6, salt="alone")
    while state.num_requests == 0:
        engine.step()
    engine.step()
    slots = state.slot_of_block[runner.block_tables.input_block_tables[0][:2, 0].long()]
    assert sorted(slots.bool().tolist()) == [False, True]
    # what vLLM does for a step that is padded to three rows
    states = runner.req_states
    mapping = torch.tensor([states.req_id_to_index[name] for name in runner.step_request_ids])
    runner.block_tables.gather_block_tables(mapping, num_reqs_padded=num_rows)
    runner.input_buffers.query_start_loc[: num_rows + 1] = torch.tensor([0, 1, 2, 2])
    runner.input_buffers.seq_lens[2] = 0
    query.copy_(torch.randn(num_rows, 2, 32, generator=torch.Generator().manual_seed(0)))
    output.fill_(float("nan"))
    for kernel, grid, args, kwargs in record:
        kernel[grid](*args, **kwargs)

    exact = torch.zeros(num_rows, 2, 32)
    batch = {
        "query": query,
        "kv_cache": state.kv_cache,
        "layer": 1,
        "block_table": runner.block_tables.input_block_tables[0][:num_rows],
        "query_start_loc": runner.input_buffers.query_start_loc[: num_rows + 1],
        "rows": torch.arange(2, dtype=torch.int32),
        "slot_of_block": state.slot_of_block,
        "scale": layer.impl.scale,
        "impl": "reference",
    }
    partial = None, None
    if method == "aatc":
        assert state.num_rows.sum() > 0
        partial = torch.zeros_like(exact), torch.zeros(exact.shape[:2])
        coded_attention(
            **batch,
            output=partial[0],
            log_sum=partial[1],
            first_cell=state.first_code_cell,
            num_rows=state.num_rows,
            codecs=state.codecs[1],
        )
    api.segment_attention(
        **batch,
        output=exact,
        bias=state.bias,
        seq_lens=runner.input_buffers.seq_lens[:num_rows],
        gap_end=state.gap_end,
        first_cell=state.first_cell,
        num_entries=state.num_entries,
        partial_output=partial[0],
        partial_log_sum=partial[1],
    )
    assert exact[:2].abs().max() > 0.01
    torch.testing.assert_close(output[:2], exact[:2], atol=2e-6, rtol=1e-5)
    assert output[2].isnan().all(), "a padded row has no query and no output"
    engine.drain()
    check_idle(engine)


def test_a_mixed_batch_leaves_the_other_rows_to_the_host(make_gpu_engine, prompts, monkeypatch):
    """What each of the two computes, in the step in which a prompt joins a compressed request."""
    engine = make_gpu_engine(SEMANTICACHE)
    engine.add(prompts[3], max_tokens=6)
    while engine.compressor.state.num_requests == 0:
        engine.step()
    calls = []
    host, attend = backend_triton.TritonAttentionImpl.forward, backend_triton.attend

    def record_host(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        calls.append(("host", metadata.seq_lens.tolist(), metadata.query_start_loc.tolist()))
        return host(self, layer, query, key, value, kv_cache, metadata, output, *scales)

    def record_attend(query, output, compressed, *rest):
        calls.append(
            ("ours", compressed.rows.tolist(), compressed.num_tokens, compressed.max_query_len)
        )
        before = output.clone()
        attend(query, output, compressed, *rest)
        assert torch.equal(output[1:], before[1:])

    monkeypatch.setattr(backend_triton.TritonAttentionImpl, "forward", record_host)
    monkeypatch.setattr(backend_triton, "attend", record_attend)
    engine.step()
    assert [name for name, *_ in calls] == ["ours"] * 2, (
        "only compressed rows: no work for the host"
    )
    calls.clear()
    engine.add(prompts[2], max_tokens=2, salt="uncached")
    engine.step()
    # one token of the compressed row, which is no longer than that for the host, and 20 others
    assert calls == [("host", [1, 20], [0, 1, 21]), ("ours", [0], 1, 1)] * 2
    monkeypatch.undo()
    engine.drain()
    check_idle(engine)


def compress_twice(monkeypatch, gpu, cpu):
    """Let a method compress every prompt by its Triton kernels, from the GPU's cells, and before
    that by C++ from a copy of them in the CPU's; what both have written."""
    compress, found = gpu.compress_into, []

    def compress_into(method, prompt):
        copied = replace(
            prompt, kv_cache=formats.cpu_cells(prompt.kv_cache), bias=prompt.bias.clone()
        )
        theirs = cpu.compress_into(cpu_twin(method, cpu), copied)
        ours = compress(method, prompt)
        # blocks with codes are wiped when they go back to the pool
        found.append((copied, theirs, prompt, ours, code_format.gpu_rows(prompt.kv_cache)))
        return ours

    monkeypatch.setattr(gpu, "compress_into", compress_into)
    return found


def cpu_twin(method, cpu):
    """The same method, settings and model, for the CPU."""
    twin = object.__new__(cpu)
    twin.__dict__.update(method.__dict__)
    return twin


def entries_of(pool, bias, slab, usage):
    """Keys, values and biases of each layer and head."""
    places = (usage.first_cell.flatten().tolist(), usage.num_entries.flatten().tolist())
    return [formats.read_segment(pool, bias, slab, *place) for place in zip(*places, strict=True)]


def assert_same_places(theirs, ours):
    assert torch.equal(theirs.num_entries, ours.num_entries)
    assert torch.equal(theirs.first_cell, ours.first_cell)
    assert (theirs.num_cells, theirs.details) == (ours.num_cells, ours.details)


def test_the_same_entries_as_on_the_cpu(make_gpu_engine, prompts, monkeypatch):
    engine = make_gpu_engine(SEMANTICACHE)
    found = compress_twice(monkeypatch, GpuSemantiCache, SemantiCache)
    engine.add(prompts[3], max_tokens=3)
    engine.drain()
    check_idle(engine)
    ((copied, theirs, prompt, ours, _),) = found
    assert_same_places(theirs, ours)
    assert 0 < ours.num_entries.sum() <= 0.6 * 80 * ours.num_entries.numel()
    pool = formats.cpu_cells(prompt.kv_cache)
    for one, other in zip(
        entries_of(copied.kv_cache, copied.bias, copied.slab, theirs),
        entries_of(pool, prompt.bias, prompt.slab, ours),
        strict=True,
    ):
        assert all(map(torch.equal, one, other))


@pytest.mark.slow
def test_selkv_keeps_what_it_keeps_on_the_cpu(make_gpu_engine, prompts, monkeypatch):
    """From the queries that the backend has kept, which come in two chunks, the last of one token:
    a decode batch by its shape, which no graph may replay."""
    engine = make_gpu_engine(SELKV, max_num_batched_tokens=92)
    found = compress_twice(monkeypatch, GpuSelKV, SelKV)
    engine.add(prompts[3], max_tokens=3)
    engine.drain()
    check_idle(engine)
    ((copied, theirs, prompt, ours, _),) = found
    assert prompt.queries.shape == (2, 2, 8, 32)
    assert prompt.queries.isfinite().all()
    assert_same_places(theirs, ours)
    assert ours.num_entries.unique().tolist() == [int(0.4 * 80)]
    assert 0 < ours.details["merged"] < 1
    pool = formats.cpu_cells(prompt.kv_cache)
    for one, other in zip(
        entries_of(copied.kv_cache, copied.bias, copied.slab, theirs),
        entries_of(pool, prompt.bias, prompt.slab, ours),
        strict=True,
    ):
        assert torch.equal(one[0], other[0])
        torch.testing.assert_close(one[1], other[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one[2], other[2], atol=1e-5, rtol=1e-5)


def test_no_graph_replays_a_batch_whose_queries_are_kept(make_gpu_engine, prompts, monkeypatch):
    engine = make_gpu_engine(SELKV, max_num_batched_tokens=92)
    runner, answers = engine.runner, []
    gather = runner.gather_batch_req_state

    def record(scheduler_output, dummy_run):
        theirs = super(CompressionRunnerV2, runner).gather_batch_req_state(
            scheduler_output, dummy_run
        )
        ours = gather(scheduler_output, dummy_run)
        observes = bool(getattr(scheduler_output, ATTRIBUTE).observe)
        answers.append((observes, theirs[1], ours[1]))
        return ours

    monkeypatch.setattr(runner, "gather_batch_req_state", record, raising=False)
    engine.add(prompts[3], max_tokens=3, salt="alone")
    engine.drain()
    # whether queries are kept, vLLM's count of tokens in a uniform batch, and ours
    assert answers == [(True, None, None), (True, 1, None), (False, 1, 1), (False, 1, 1)]


@pytest.mark.slow
def test_aatc_has_the_rows_that_it_has_on_the_cpu(make_gpu_engine, prompts, artifact, monkeypatch):
    engine = make_gpu_engine(coded(AATC, artifact))
    found = compress_twice(monkeypatch, GpuAATC, aatc.AATC)
    engine.add(prompts[3], max_tokens=3)
    engine.drain()
    check_idle(engine)
    ((copied, theirs, prompt, ours, ours_pool),) = found
    assert_same_places(theirs, ours)
    assert torch.equal(theirs.first_code_cell, ours.first_code_cell)
    assert torch.equal(theirs.num_rows, ours.num_rows)
    assert ours.num_rows.flatten().tolist() == [80 - 2] * 2
    for layer, codecs in enumerate(engine.compressor.state.codecs):
        place = (int(ours.first_code_cell[layer, 0]), 78, codecs.groups[0].layout)
        mine = code_format.read_rows(ours_pool, prompt.slab, *place)
        other = code_format.read_rows(copied.kv_cache, prompt.slab, *place)
        # sums of the transform in another order: a channel between two levels may take either
        for one, two in ((mine.keys, other.keys), (mine.values, other.values)):
            difference = (one.int() - two.int()).abs()
            assert difference.max() <= 1
            assert difference.float().mean() < 1e-3
        torch.testing.assert_close(mine.scales.float(), other.scales.float(), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    "compression",
    [
        pytest.param(SELKV, marks=pytest.mark.slow),
        pytest.param(AATC, marks=pytest.mark.slow),
        METASOFT,
        pytest.param({**SELKV, "method": "selkv+aatc"}, marks=pytest.mark.slow),
        pytest.param({**SEMANTICACHE, "method": "semanticache+aatc"}, marks=pytest.mark.slow),
        pytest.param({**METASOFT, "method": "metasoft+aatc"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value["method"],
)
def test_the_engine_generates_what_the_simulation_does(
    make_gpu_engine, model, prompts, artifact, soft_tokens, compression
):
    compression = complete(compression, artifact, soft_tokens)
    engine = make_gpu_engine(compression)
    before = engine.planner._metrics.requests_compressed._value.get()
    answer = engine.generate([prompts[3]], max_tokens=6, salt="alone")
    assert engine.planner._metrics.requests_compressed._value.get() == before + 1
    assert answer[0][0] == simulate(model, compression, prompts[3], 6)
    check_idle(engine)


@pytest.mark.parametrize(
    "compression",
    [
        SEMANTICACHE,
        pytest.param(SELKV, marks=pytest.mark.slow),
        pytest.param(AATC, marks=pytest.mark.slow),
        pytest.param(METASOFT, marks=pytest.mark.slow),
        pytest.param({**SELKV, "method": "selkv+aatc"}, marks=pytest.mark.slow),
        pytest.param({**SEMANTICACHE, "method": "semanticache+aatc"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value["method"],
)
def test_no_kernel_is_compiled_once_warm(
    make_gpu_engine, prompts, artifact, soft_tokens, compression
):
    """By an engine in whose blocks and tables warming up has left nothing."""
    compression = complete(compression, artifact, soft_tokens)
    engine = make_gpu_engine(compression)
    state = engine.compressor.state
    pool = state.kv_cache.clone()
    with compiled_forms.recorded() as warm:
        engine.runner.warm_up_compression()
    assert state.num_requests == 0
    assert not state.slot_of_block.any()
    assert not state.kv_cache[state.kv_cache != pool].any()
    assert not engine.runner.block_tables.input_block_tables[0].any()
    before = engine.planner._metrics.requests_compressed._value.get()
    with compiled_forms.recorded() as used:
        engine.add(prompts[3], max_tokens=6)
        engine.add(prompts[3] + prompts[2][:13], max_tokens=6, salt="another")
        for _ in range(3):
            engine.step()
        assert state.num_requests == 2
        engine.add(prompts[2] + prompts[3], max_tokens=6, salt="while they decode")
        engine.drain()
    assert engine.planner._metrics.requests_compressed._value.get() == before + 3
    check_idle(engine)
    assert used
    assert not sorted(map(str, used - warm))


@pytest.mark.parametrize(
    "compression",
    [{**SEMANTICACHE, "min_prompt_tokens": 240}, {**RELOCATE, "method": "none"}],
    ids=["no room", "none"],
)
def test_nothing_to_warm_up(make_gpu_engine, compression):
    """No room for a prompt of the least length, and a method that compresses none."""
    engine = make_gpu_engine(compression, num_gpu_blocks_override=17)
    with compiled_forms.recorded() as warm:
        engine.runner.warm_up_compression()
    assert not warm


def simulate(model, compression, prompt, num_tokens):
    """Tokens that the plain torch simulation generates greedily."""
    config = parse_config(compression)
    method = create_method(config)
    method.bind_tokenizer(AutoTokenizer.from_pretrained(model))
    transformer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    simulation = Simulation(transformer, method, BLOCK_SIZE, str(model))
    packed = simulation.prefill(prompt, request_options({}, config))
    tokens = [int(packed.logits.argmax())]
    while len(tokens) < num_tokens:
        tokens.append(int(simulation.feed(packed, tokens[-1:])[-1].argmax()))
    return tokens


def test_graph_support_is_that_of_single_token_decode(make_gpu_engine):
    group = make_gpu_engine(RELOCATE).runner.attn_groups[0][0]
    spec, config = group.kv_cache_spec, make_gpu_engine(RELOCATE).runner.vllm_config
    single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    for builder in (
        backend_triton.CompressionTritonBuilder,
        backend_triton.CompressionFlashBuilder,
    ):
        assert builder.get_cudagraph_support(config, spec) == single
        # sliding-window layers of the same model are the host's alone
        stock = builder.get_cudagraph_support(config, object())
        assert stock == builder.__mro__[2].get_cudagraph_support(config, object())
        assert stock.value > single.value
    assert group.get_metadata_builder(0).get_cudagraph_support(config, spec) == single
    assert not backend_triton.CompressionTritonBackend.supports_batch_invariance()


def test_flash_attention_as_host(monkeypatch):
    """Its kernel runs on GPUs only; what it is called for does not depend on it."""
    calls = []
    monkeypatch.setattr(
        FlashAttentionImpl, "forward", lambda self, *args: calls.append(("host", args[5]))
    )
    monkeypatch.setattr(
        backend_triton, "attend", lambda query, output, rows, *rest: calls.append(("ours", rows))
    )
    impl = object.__new__(backend_triton.CompressionFlashImpl)
    impl.compression, impl.scale = object(), 1.0
    plain = SimpleNamespace()
    mixed, whole = SimpleNamespace(), SimpleNamespace()
    some = SimpleNamespace(has_other_rows=True)
    all_rows = SimpleNamespace(has_other_rows=False)
    setattr(mixed, ATTRIBUTE, some)
    setattr(whole, ATTRIBUTE, all_rows)
    for metadata in (None, plain, mixed, whole):
        impl.forward(None, None, None, None, None, metadata, None)
    assert calls == [
        ("host", None),
        ("host", plain),
        ("host", mixed),
        ("ours", some),
        ("ours", all_rows),
    ]
    assert backend_triton.CompressionFlashBackend.get_name() == "FLASH_ATTN"
    assert backend_triton.CompressionTritonBackend.get_name() == "TRITON_ATTN"


def test_the_doctors_attention_is_that_of_the_gpu_kernel():
    assert doctor._self_test(torch.device("cpu")) < 1e-5
