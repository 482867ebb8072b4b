"""Fixtures that all tests share: a real model, tiny random ones, and a long text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcompress_serving import SAMPLE_TEXT
from vllm_kvcompress.models import DEFAULT_MODEL, default_cache

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def pytest_configure(config: pytest.Config) -> None:
    # tests run in several processes at once: each keeps to one core of its own, engines and servers
    # included, which vLLM would otherwise all bind to the first
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        cores = sorted(os.sched_getaffinity(0))
        core = cores[int(worker.removeprefix("gw")) % len(cores)]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # vLLM forbids setting the number of threads once an engine has run in a process, so the tests
    # with engines in this process come last
    items.sort(key=lambda item: "engine" in item.path.parent.name)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only where a test asks for it: collecting tests stays quick

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny tensors and models: threads would spend the time waiting for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Folder of the real model: `KVC_MODEL`, or what `make setup` has put into the cache."""
    folder = Path(os.environ.get("KVC_MODEL") or default_cache() / DEFAULT_MODEL)
    if not (folder / "config.json").is_file():
        pytest.fail(f"no model in {folder}; run `make setup`, or set KVC_MODEL to a model folder")
    return folder


@pytest.fixture(scope="session")
def tiny_model(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function that writes a random Llama and returns its folder; equal arguments, same folder.

    The models are float32 and have the tokenizer of the real one, so that text works. What they
    generate depends on the whole prompt. Keyword arguments: `num_layers`, `hidden_size` (a
    multiple of `num_heads`), `num_heads`, `num_kv_heads`, `head_size`, `max_position`, `seed`.
    """
    made: dict[tuple[int, ...], Path] = {}

    def make(
        *,
        num_layers: int = 2,
        hidden_size: int = 64,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_size: int = 32,
        max_position: int = 8192,
        seed: int = 0,
    ) -> Path:
        key = (num_layers, hidden_size, num_heads, num_kv_heads, head_size, max_position, seed)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny_model")
            _write_tiny_model(made[key], model_path, *key)
        return made[key]

    return make


def _write_tiny_model(
    folder: Path,
    tokenizer_from: Path,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_position: int,
    seed: int,
) -> None:
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    real = AutoConfig.from_pretrained(tokenizer_from)
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_size,
        max_position_embeddings=max_position,
        vocab_size=real.vocab_size,
        bos_token_id=real.bos_token_id,
        eos_token_id=real.eos_token_id,
        pad_token_id=real.pad_token_id,
        tie_word_embeddings=True,
        # Attention that looks at some tokens more than at others, and logits far apart: with the
        # usual 0.02 all of them are nearly equal and greedy output hangs on rounding.
        initializer_range=1.6 / hidden_size**0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).float().save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copy(tokenizer_from / name, folder / name)


@pytest.fixture(scope="session")
def texts() -> str:
    """200 kB of English prose, one string; about 40,000 tokens of the real model."""
    return SAMPLE_TEXT.read_text(encoding="utf-8")
