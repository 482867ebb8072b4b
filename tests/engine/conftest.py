"""Engines for the tests of this folder."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import prometheus_client
import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _in_process() -> Iterator[None]:
    """Keep the engine core in this process, where tests can see it."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    # tiny models: two OpenMP threads spend their time waiting for each other
    torch.set_num_threads(1)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def _engines() -> Iterator[dict[str, Any]]:
    """Engines of a module, by what they were made from; starting one takes seconds."""
    engines: dict[str, Any] = {}
    yield engines
    # vLLM collects garbage for each engine that it shuts down; once for all of them is enough
    with mock.patch("gc.collect"):
        for engine in engines.values():
            engine.close()
    engines.clear()
    gc.collect()


@pytest.fixture
def make_engine(_engines: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Makes engines (see `harness.Engine`), or takes the module's one of the same settings.

    An engine that a test leaves with work to do is not used again.
    """
    from harness import Engine

    def make(model: Path, compression: Any = None, **settings: Any) -> Engine:
        key = repr((model, compression, sorted(settings.items())))
        if key not in _engines:
            _engines[key] = Engine(model, compression, **settings)
        return _engines[key]

    yield make
    for key, engine in list(_engines.items()):
        if engine.engine.has_unfinished_requests():
            _engines.pop(key).close()


@pytest.fixture(scope="session")
def token_ids(model_path: Path, texts: str) -> list[int]:
    """The long text as tokens of the real model's tokenizer."""
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(texts).ids)


def _dispositions() -> dict[str, float]:
    """Requests compressed, and left alone by reason."""
    found: dict[str, float] = {}
    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name == "vllm_kvcompress:requests_compressed_total":
                found["compressed"] = found.get("compressed", 0) + sample.value
            if sample.name == "vllm_kvcompress:requests_bypassed_total":
                reason = sample.labels["reason"]
                found[reason] = found.get(reason, 0) + sample.value
    return found


@pytest.fixture
def changes() -> Callable[[], dict[str, float]]:
    """How many requests were compressed, and left alone by reason, since the test began."""
    before = _dispositions()

    def changes() -> dict[str, float]:
        after = {k: v - before.get(k, 0) for k, v in _dispositions().items()}
        return {k: v for k, v in after.items() if v}

    return changes


def pytest_configure() -> None:
    # the engine starts no server and talks to nobody, but vLLM binds its distributed store
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
