"""The flag in all its forms, and that an installed plugin is not an active one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module

import pytest
import transformers
from vllm import ModelRegistry
from vllm.platforms.interface import Platform, PlatformEnum

PROBE = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.engine.arg_utils import EngineArgs
args = EngineArgs(model=sys.argv[1], max_model_len=256, additional_config=json.loads(sys.argv[2]))
config = args.create_engine_config()
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(json.dumps({
    "modules": sorted(m for m in sys.modules if m.startswith(("vllm_kvcompress", "kvcompress_"))),
    "scheduler": str(config.scheduler_config.scheduler_cls),
    "worker": str(config.parallel_config.worker_cls),
    "block_size": config.cache_config.block_size,
    "backend": AttentionBackendEnum.CPU_ATTN.get_path(),
    "verify": SamplingParams._verify_extra_args.__module__,
    "wrapped": hasattr(SamplingParams._verify_extra_args, "__wrapped__"),
}))
"""


def _probe(model, additional_config):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(model), json.dumps(additional_config)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_installed_is_not_active(tiny_model):
    found = _probe(tiny_model(), {})
    assert found["modules"] == [
        "vllm_kvcompress",
        "vllm_kvcompress.engine",
        "vllm_kvcompress.engine.plugin",
    ]
    assert found["scheduler"] == "None"
    assert found["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert found["block_size"] == 128
    assert found["backend"] == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert not found["wrapped"]


def test_active_chooses_scheduler_worker_and_block_size(tiny_model):
    found = _probe(tiny_model(), {"kv_compression": "semanticache"})
    assert found["scheduler"] == "vllm_kvcompress.engine.scheduler.create_scheduler"
    assert found["worker"] == "vllm_kvcompress.engine.worker.CompressionCPUWorker"
    assert found["block_size"] == 32
    assert found["wrapped"]
    # the backend is exchanged in the worker, and only while a model is loaded
    assert found["backend"] == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


@pytest.fixture
def parse():
    """Parse a ``vllm serve`` command line; the resulting ``additional_config``."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def parse(*arguments: str):
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        namespace = parser.parse_args(list(arguments))
        return AsyncEngineArgs.from_cli_args(namespace).additional_config

    return parse


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-compression=semanticache", "--kv-compression-config", '{"threshold": 0.7}'],
        ["--kv-compression-config", '{"threshold": 0.7}', "--kv-compression", "semanticache"],
        ["--kv_compression", "semanticache", "--kv_compression_config", '{"threshold": 0.7}'],
        ["--additional-config", '{"kv_compression": {"method": "semanticache", "threshold": 0.7}}'],
        [
            "--additional-config.kv_compression.method",
            "semanticache",
            "--additional-config.kv_compression.threshold",
            "0.7",
        ],
        [
            "--kv-compression=semanticache",
            "--additional-config",
            '{"kv_compression": {"method": "none", "threshold": 0.7}}',
        ],
        ["--kv-compression=semanticache", "--kv-compression-config.threshold", "0.7"],
    ],
)
def test_every_way_to_say_it(parse, arguments):
    assert parse(*arguments) == {"kv_compression": {"method": "semanticache", "threshold": 0.7}}


def test_flags_keep_what_else_is_configured(parse):
    assert parse("--kv-compression=none", "--additional-config", '{"other": 1}') == {
        "other": 1,
        "kv_compression": {"method": "none"},
    }
    assert parse("--additional-config", '{"other": 1}', "--kv-compression=none") == {
        "other": 1,
        "kv_compression": {"method": "none"},
    }
    assert not parse()  # the parser's default is not written to


def test_yaml_config(parse, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "kv-compression: semanticache\nkv-compression-config:\n  threshold: 0.7\n  max_keep: 0.5\n"
    )
    assert parse("--config", str(file)) == {
        "kv_compression": {"method": "semanticache", "threshold": 0.7, "max_keep": 0.5}
    }


@pytest.mark.parametrize("value", ["{", "[1]", "0.7"])
def test_config_flag_that_is_no_object(parse, value, capsys):
    with pytest.raises(SystemExit):
        parse("--kv-compression-config", value)
    assert "--kv-compression-config" in capsys.readouterr().err


def test_help_shows_the_flags(tiny_model):
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "--help=kv-compression"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--kv-compression METHOD" in done.stdout
    assert "--kv-compression-config JSON" in done.stdout
    assert "semanticache" in done.stdout


def _create(model, compression, **settings):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        max_model_len=256,
        additional_config={"kv_compression": compression},
        **settings,
    ).create_engine_config()


@pytest.mark.parametrize(
    ("compression", "word"),
    [
        ("semanticach", "did you mean 'semanticache'"),
        ({"method": "semanticache", "thresold": 0.5}, "did you mean 'threshold'"),
        ({"method": "semanticache", "threshold": 7}, "threshold = 7"),
        ({"method": "semanticache", "window": "64"}, "window = '64'"),
    ],
)
def test_wrong_configuration_stops_the_start(tiny_model, compression, word):
    with pytest.raises(ValueError, match=word):
        _create(tiny_model(), compression)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, ["--scheduler-cls"]),
        ({"worker_cls": "a.b"}, ["--worker-cls a.b"]),
        ({"block_size": 24}, ["--block-size 24", "multiple of 32"]),
        ({"skip_tokenizer_init": True}, ["--skip-tokenizer-init"]),
        ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype fp8", "use auto"]),
        ({"pipeline_parallel_size": 2}, ["--pipeline-parallel-size"]),
        ({"enable_dbo": True, "worker_cls": "a.b"}, ["--enable-dbo", "--worker-cls a.b"]),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            ["--kv-transfer-config"],
        ),
        (
            {
                "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
                "block_size": 24,
            },
            ["disaggregated prefill", "--block-size 24"],
        ),
        ({"kv_offloading_size": 1.0}, ["offloading"]),
        ({"kv_sharing_fast_prefill": True}, ["--kv-sharing-fast-prefill"]),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 3,
                },
                "block_size": 24,
            },
            ["speculative decoding", "--block-size 24"],
        ),
    ],
)
def test_unsupported_settings_are_refused_all_at_once(tiny_model, settings, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        _create(tiny_model(), "semanticache", **settings)
    for word in [*words, "start without --kv-compression"]:
        assert word in str(error.value)


class Xpu(Platform):
    """As much of such a device as can be had without one: what it says of itself."""

    _enum = PlatformEnum.XPU
    device_type = "xpu"


def test_other_platforms_are_refused_before_anything_is_touched(tiny_model, monkeypatch):
    from vllm_kvcompress.engine import settings

    monkeypatch.setattr(settings, "current_platform", Xpu())
    with pytest.raises(ValueError, match=r"platform 'xpu' is not supported.*CPU") as error:
        _create(tiny_model(), "semanticache", worker_cls="a.b")
    assert "start without --kv-compression" in str(error.value)


@pytest.fixture
def with_triton(monkeypatch):
    """A vLLM that has Triton for CPUs: without, it has no V2 runner, and no diffusion models."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)


@pytest.mark.parametrize("asked_for", [False, True])
def test_the_v2_runner_is_refused(tiny_model, with_triton, monkeypatch, asked_for):
    if asked_for:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="set VLLM_USE_V2_MODEL_RUNNER=0") as error:
        _create(tiny_model(), "semanticache", block_size=24)
    assert "--block-size 24" in str(error.value)


SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
MODELS = {
    "MLA": (
        "deepseek_v2.DeepseekV3ForCausalLM",
        "DeepseekV3",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
        },
        "multi-head latent attention",
    ),
    "state space": ("mamba.MambaForCausalLM", "Mamba", {"hidden_size": 64}, "state-space layers"),
    "hybrid": (
        "granitemoehybrid.GraniteMoeHybridForCausalLM",
        "GraniteMoeHybrid",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
        },
        "state-space layers",
    ),
    # vLLM knows no such class and takes Transformers' own
    "hybrid of Transformers": (
        "transformers.TransformersForCausalLM",
        "Bamba",
        {**SIZES, "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 8},
        "state-space layers",
    ),
    "encoder-decoder": (
        "whisper.WhisperForConditionalGeneration",
        "Whisper",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
        },
        "encoder-decoder",
    ),
    "ALiBi": ("bloom.BloomForCausalLM", "Bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    "soft cap": (
        "gemma2.Gemma2ForCausalLM",
        "Gemma2",
        {**SIZES, "num_key_value_heads": 2, "head_dim": 32},
        "soft cap",
    ),
}


@pytest.fixture
def write_config(model_path, tmp_path):
    """Write the configuration of a model, without weights; its folder."""

    def write(implementation, family, **sizes):
        module, name = implementation.split(".")
        implemented = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
        # vLLM would otherwise start a process to look at the class
        ModelRegistry.register_model(name, implemented)
        architecture = f"{family}ForCausalLM" if module == "transformers" else name
        # one token beyond the tokenizer's, for the ids that a family expects in it
        vocab = {"vocab_size": 60_000, "architectures": [architecture]}
        getattr(transformers, f"{family}Config")(**sizes, **vocab).save_pretrained(tmp_path)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model_path / file, tmp_path)
        return tmp_path

    return write


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_are_refused_by_their_configuration(write_config, kind):
    implementation, family, sizes, word = MODELS[kind]
    folder = write_config(implementation, family, **sizes)
    with pytest.raises(ValueError, match="--kv-compression cannot be used here") as error:
        _create(folder, "semanticache", skip_tokenizer_init=True)
    for expected in (word, "--skip-tokenizer-init", "start without --kv-compression"):
        assert expected in str(error.value)


def test_attention_sinks_are_refused(write_config, make_engine):
    """No configuration names them alike: the layers themselves are asked."""
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 2}
    folder = write_config("gpt_oss.GptOssForCausalLM", "GptOss", **sizes)
    with pytest.raises(ValueError, match=r"layer .*attention sinks.*without --kv-compression"):
        make_engine(folder, "relocate", load_format="dummy")


def test_pooling_is_refused(tiny_model):
    with pytest.raises(ValueError, match="pooling models generate nothing"):
        _create(tiny_model(), "semanticache", runner="pooling")


def test_diffusion_is_refused(tiny_model, with_triton):
    """By the one field that makes vLLM treat a model as one that diffuses."""
    with pytest.raises(ValueError, match="diffusion language models"):
        _create(tiny_model(), "semanticache", hf_overrides={"canvas_length": 32})


def test_context_parallelism_is_refused(tiny_model):
    model = tiny_model(num_kv_heads=1)  # vLLM has it for KV heads that ranks share
    with pytest.raises(ValueError, match="context parallelism"):
        _create(model, "semanticache", decode_context_parallel_size=2, tensor_parallel_size=2)


def test_the_ledger_of_patches_gives_reasons():
    from vllm_kvcompress.engine.compat import PATCHES

    assert all(len(patch.why) > 40 and len(patch.remove_when) > 20 for patch in PATCHES)


def test_this_vllm_is_as_expected():
    from vllm_kvcompress.engine import compat

    assert compat.problems() == []


def test_a_different_vllm_is_refused_with_what_differs(tiny_model, monkeypatch):
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.delattr(BlockPool, "get_num_free_blocks")
    with pytest.raises(ValueError, match=r"BlockPool: method get_num_free_blocks is gone"):
        _create(tiny_model(), "semanticache")
