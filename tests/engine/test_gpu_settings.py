"""What a start on a GPU chooses and refuses, and what the doctor says of one.

Only what decides is played: the platform's own words, and that vLLM has Triton.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcompress_kernels import formats
from vllm_kvcompress.config import method_names, parse_config
from vllm_kvcompress.engine import backend_triton, doctor, settings, worker_gpu
from vllm_kvcompress.engine.protocol import ATTRIBUTE
from vllm_kvcompress.engine.spec import CompressedFullAttentionSpec
from vllm_kvcompress.engine.state import stack_layers
from vllm_kvcompress.engine.worker import _check_layer
from vllm_kvcompress.methods.gpu import create_gpu_method, why_not_on_gpus

load_general_plugins()


class Gpu(Platform):
    """As much of a GPU as can be had without one."""

    _enum = PlatformEnum.CUDA
    device_type = "cuda"
    capability = (9, 0)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(*cls.capability) if cls.capability else None


@pytest.fixture
def gpu(monkeypatch):
    """The settings module on a GPU, in a vLLM whose runner is V2."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setattr(settings, "current_platform", Gpu())
    monkeypatch.setattr(Gpu, "capability", (9, 0))
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    return Gpu


def create(model, compression, **arguments):
    return EngineArgs(
        model=str(model),
        max_model_len=256,
        block_size=16,
        additional_config={"kv_compression": compression},
        **arguments,
    ).create_engine_config()


@pytest.mark.parametrize("method", ["semanticache", "selkv", "relocate", "none"])
def test_a_gpu_gets_its_worker_and_one_warning(tiny_model, gpu, monkeypatch, method):
    warnings = []
    monkeypatch.setattr(settings.logger, "warning_once", lambda *args: warnings.append(args[0]))
    config = create(tiny_model(), method)
    assert config.parallel_config.worker_cls == settings.GPU_WORKER
    assert config.scheduler_config.scheduler_cls == settings.SCHEDULER
    assert config.cache_config.block_size == 16
    (warning,) = warnings
    assert "verified on GPUs by Triton's interpreter" in warning


def test_every_method_has_a_form_for_gpus():
    config = parse_config("none")
    for method in method_names():
        assert why_not_on_gpus(config.model_copy(update={"method": method})) is None


@pytest.mark.parametrize("method", ["metasoft", "metasoft+aatc"])
def test_flow_is_refused_on_a_gpu(tiny_model, gpu, method):
    with pytest.raises(ValueError, match="flow 'convex' on a GPU") as error:
        create(tiny_model(), {"method": method, "flow": "convex"}, enable_dbo=True)
    for expected in ("set flow to 'none'", "--enable-dbo"):
        assert expected in str(error.value)
    with pytest.raises(ValueError, match="set flow to 'none'"):
        create_gpu_method(parse_config({"method": method, "flow": "convex"}))


def test_coded_rows_need_an_artifact_on_a_gpu_as_well(tiny_model, gpu):
    with pytest.raises(ValueError, match="aatc: no artifact is shipped for the model"):
        create(tiny_model(), "aatc")


def test_the_v1_runner_is_refused(tiny_model, gpu, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="the V1 model runner on a GPU") as error:
        create(tiny_model(), "semanticache")
    assert "unset VLLM_USE_V2_MODEL_RUNNER" in str(error.value)


def test_everything_else_is_refused_at_once(tiny_model, gpu, monkeypatch):
    monkeypatch.setattr(gpu, "capability", (7, 5))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="cannot be used here") as error:
        create(
            tiny_model(),
            {"method": "metasoft", "flow": "mass"},
            attention_backend="FLASHINFER",
            worker_cls=settings.CPU_WORKER,
        )
    for word in (
        "compute capability 7.5",
        "VLLM_BATCH_INVARIANT",
        "--attention-backend FLASHINFER: use FLASH_ATTN or TRITON_ATTN",
        "flow 'mass' on a GPU",
        f"--worker-cls {settings.CPU_WORKER}",
    ):
        assert word in str(error.value)


def test_a_layer_with_another_backend_is_refused_with_the_remedy():
    layer = SimpleNamespace(impl=object(), backend=SimpleNamespace(name="FLASHINFER"))
    with pytest.raises(ValueError, match=r"FLASHINFER. Set --attention-backend to FLASH_ATTN"):
        _check_layer("model.layers.0", layer)


@pytest.mark.parametrize(
    ("num_heads", "has_gpu_cells", "refused"),
    [(32, True, False), (34, True, True), (34, False, False)],
)
def test_a_ratio_that_the_gpu_kernel_does_not_take(num_heads, has_gpu_cells, refused):
    impl = SimpleNamespace(
        has_gpu_cells=has_gpu_cells,
        num_heads=num_heads,
        num_kv_heads=2,
        alibi_slopes=None,
        sinks=None,
        logits_soft_cap=0,
        sliding_window=(-1, -1),
        head_size=64,
    )
    layer = SimpleNamespace(impl=impl)
    if not refused:
        return _check_layer("a", layer)
    with pytest.raises(ValueError, match="17 query heads for each KV head"):
        _check_layer("a", layer)


def test_backends_are_overridden_while_a_model_is_loaded():
    """Under their own names, so that vLLM chooses as always and `--attention-backend` works."""
    flash, triton = AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN
    stock = flash.get_class(), triton.get_class()
    seen = []

    def fail():
        with worker_gpu.overridden_backends():
            seen.extend((flash.get_class(), triton.get_class()))
            raise KeyError("a model that cannot be loaded")

    with pytest.raises(KeyError):
        fail()
    assert seen == [backend_triton.CompressionFlashBackend, backend_triton.CompressionTritonBackend]
    for ours, theirs in zip(seen, stock, strict=True):
        assert issubclass(ours, theirs)
        assert ours.get_name() == theirs.get_name()
    assert (flash.get_class(), triton.get_class()) == stock


def test_the_gpu_worker_leaves_room_for_bias_and_splits(tiny_model, gpu, monkeypatch):
    worker = object.__new__(worker_gpu.CompressionGPUWorker)
    worker.vllm_config = create(tiny_model(), "semanticache", dtype="float16")
    worker.device = torch.device("meta")
    spec = CompressedFullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16
    )
    worker.model_runner = SimpleNamespace(get_kv_cache_spec=lambda: {"a": spec, "b": spec})
    monkeypatch.setattr(worker_gpu.Worker, "determine_available_memory", lambda self: 100_000_000)
    max_num_seqs = worker.vllm_config.scheduler_config.max_num_seqs
    buffers = backend_triton.SplitBuffers(max_num_seqs, 4, 2, 32, worker.device)
    taken = buffers._partial.nbytes + buffers._stats.nbytes
    assert backend_triton.SplitBuffers.num_bytes(worker.vllm_config, worker.device) == taken
    # a float32 bias for each slot of 32 keys and values in float16
    assert worker.determine_available_memory() == (100_000_000 - taken) * 128 // (128 + 4)
    config = worker.vllm_config.additional_config
    config["kv_compression"] = {"method": "selkv+aatc", "bits": 2.0}
    codecs = worker_gpu.codec_bytes(worker.vllm_config)
    # two layers of 64 numbers that may all be channels: to fold and unfold, and to encode
    assert codecs > 2 * 64 * 64 * (2 * 2 + 2 * 4)
    taken += codecs
    assert worker.determine_available_memory() == (100_000_000 - taken) * 128 // (128 + 4)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_gpu_worker_warms_up_before_compilations_are_watched(monkeypatch, enabled):
    calls = []
    worker = object.__new__(worker_gpu.CompressionGPUWorker)
    kernels = SimpleNamespace(enable_jit_warmup=enabled)
    worker.vllm_config = SimpleNamespace(kernel_config=kernels)
    worker.model_runner = SimpleNamespace(warm_up_compression=lambda: calls.append("ours"))
    monkeypatch.setattr(
        worker_gpu.Worker, "compile_or_warm_up_model", lambda self: calls.append("vLLM's")
    )
    worker.compile_or_warm_up_model()
    assert calls == ["ours"] * enabled + ["vLLM's"]


@pytest.fixture
def card(monkeypatch):
    """A card as torch describes one."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


def gpu_checks():
    names = {"gpu", "gpu runner", "gpu layout", "GPU kernels"}
    return {check.name: check for check in doctor._gpu() if check.name in names}


def test_the_doctor_of_a_gpu(card, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    checks = gpu_checks()
    assert checks["gpu"].found == "NVIDIA H100 80GB HBM3, compute capability 9.0"
    assert not checks["gpu"].remedy
    assert checks["gpu runner"] == doctor.Check("gpu runner", "V2")
    assert checks["gpu layout"].found.startswith("NHD")
    # the card is played, so the kernel cannot run, and that is said
    assert checks["GPU kernels"].found.startswith("failed")
    assert checks["GPU kernels"].remedy


def test_the_doctor_has_remedies(card, monkeypatch):
    card.major = 7
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    checks = gpu_checks()
    assert "8.0 or newer" in checks["gpu"].remedy
    assert checks["gpu runner"].remedy == "unset VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "nvidia-smi" in gpu_checks()["gpu"].remedy


class Host:
    """A metadata builder of vLLM's, as far as ours calls it."""

    def __init__(self, *arguments):
        pass

    def build(self, common_prefix_len, common, fast_build):
        return SimpleNamespace(common=common)


class Builder(backend_triton._Builder, Host):
    pass


@pytest.mark.parametrize("indices", [[0], [1, 2]])
def test_metadata_are_built_without_waiting_for_the_device(indices, monkeypatch):
    """On tensors without data, as far away as those of a GPU: to read one is an error, and so is to
    mix it with one on the CPU."""
    # vLLM's V2 runner for CPUs, once imported, puts a function in its place that copies nothing
    monkeypatch.setattr(
        backend_triton,
        "async_tensor_h2d",
        lambda data, device, dtype: torch.tensor(data, dtype=dtype, device="cpu").to(device),
    )
    impl = SimpleNamespace(num_heads=8, num_kv_heads=2, head_size=64)
    impl.compression = SimpleNamespace(state=SimpleNamespace(compressed_rows=lambda: indices))
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        compilation_config=SimpleNamespace(
            static_forward_context={"a": SimpleNamespace(impl=impl)}
        ),
    )
    starts = torch.tensor([0, 1, 4, 5, 25], dtype=torch.int32)
    spec = object.__new__(CompressedFullAttentionSpec)
    with torch.device("meta"):
        builder = Builder(spec, ["a"], config, torch.device("meta"))
        common = CommonAttentionMetadata(
            query_start_loc=starts.to("meta"),
            query_start_loc_cpu=starts,
            seq_lens=torch.empty(4, dtype=torch.int32),
            num_reqs=4,
            num_actual_tokens=25,
            max_query_len=20,
            max_seq_len=500,
            block_table_tensor=torch.empty((4, 64), dtype=torch.int32),
            slot_mapping=torch.empty(25, dtype=torch.int64),
        )
    with pytest.raises((RuntimeError, NotImplementedError)):
        common.seq_lens.tolist()
    metadata = builder.build(0, common)
    compressed = getattr(metadata, ATTRIBUTE)
    assert compressed.seq_lens is common.seq_lens
    assert metadata.common.seq_lens is not common.seq_lens
    assert compressed.has_other_rows
    lengths = {0: (1, 1), 1: (5, 3)}
    assert (compressed.num_tokens, compressed.max_query_len) == lengths[indices[0]]
    assert compressed.rows.shape == (len(indices),)
    for tensor in (compressed.rows, metadata.common.seq_lens, compressed.workspace.partial):
        assert tensor.device.type == "meta"


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_split_buffers_hold_every_batch(monkeypatch, num_kv_heads):
    from kvcompress_kernels.segment_attention.triton import choose_num_splits

    monkeypatch.setattr(backend_triton, "num_processors", lambda device: 132)
    buffers = backend_triton.SplitBuffers(256, 32, num_kv_heads, 128, torch.device("meta"))
    for rows in range(1, 257):
        splits = choose_num_splits(rows, num_kv_heads, 132)
        workspace = buffers.workspace(rows, rows)
        if splits == 1:
            assert workspace is None
            continue
        assert workspace.num_splits == splits
        assert workspace.partial.shape == (rows, 32, splits, 128)
        assert workspace.stats.shape == (rows, 32, splits, 2)
    # few compressed rows behind many others: fewer splits, in the same memory
    behind = buffers.workspace(256, 1)
    assert behind is None or behind.num_splits < choose_num_splits(1, num_kv_heads, 132)
    assert buffers.workspace(8192, 1) is None


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_every_layout_that_vllm_negotiates_is_one_pool(layout):
    sizes = {"L": 3, "B": 4, "H": 2, "N": 16, "C": 32}
    memory = torch.arange(3 * 4 * 2 * 16 * 32).view(*(sizes[letter] for letter in layout))
    whole = memory.permute(*(layout.index(letter) for letter in "LBHNC"))
    pool = formats.gpu_pool(stack_layers(list(whole), head_major=False))
    assert pool.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert torch.equal(pool[0], whole[..., :16])
    assert torch.equal(pool[1], whole[..., 16:])
    if layout.endswith("NHC"):
        with pytest.raises(ValueError, match="head-major"):
            stack_layers(list(whole))
