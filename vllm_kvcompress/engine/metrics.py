"""Prometheus metrics of the plugin, prefix ``vllm_kvcompress:``, on the server's own ``/metrics``.

What is counted happens in the engine-core process, ``/metrics`` is served by another. The engine
core writes prometheus_client's multi-process files into a folder named after the engine's
``instance_id``; the front end registers a collector that reads them. With several API servers vLLM
has already set up such a folder for all its processes, and then ours are simply in it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from vllm.config import VllmConfig

PREFIX = "vllm_kvcompress:"
_ENVIRONMENT = "PROMETHEUS_MULTIPROC_DIR"
BYPASS_REASONS = (
    *("method_none", "opted_out", "invalid_options", "pooling", "streaming_input", "multimodal"),
    *("prompt_embeds", "short_prompt", "short_output", "context_end", "no_room"),
    *("shared_prefix", "no_free_blocks", "finished_early"),
)
"""Every reason for which the scheduler leaves a request uncompressed."""
FAILURE_REASONS = ("slab_overflow", "out_of_memory", "probe_failed")
"""Every reason for which the worker gives a compression up."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def _folder(vllm_config: VllmConfig) -> Path:
    root = Path(tempfile.gettempdir()) / f"vllm-kvcompress-{os.getuid()}"
    return root / vllm_config.instance_id


class CompressionMetrics:
    """The engine-core side. One object per engine; several in one process share the counters.

    Args:
        vllm_config: names the folder and the labels.
        engine_index: data-parallel rank of the engine.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int) -> None:
        names = ("model_name", "engine")
        labels = (vllm_config.model_config.served_model_name, str(engine_index))
        if isinstance(labels[0], list):
            labels = (labels[0][0], labels[1])
        registry = _writing_registry(vllm_config)

        def counter(name: str, text: str, *more: str) -> Counter:
            return _once(registry, Counter, PREFIX + name, text, (*names, *more))

        self._labels = labels
        self.requests_compressed = counter(
            "requests_compressed", "Prompts compressed (again after a preemption counts again)."
        ).labels(*labels)
        self._bypassed = counter(
            "requests_bypassed", "Requests that were left uncompressed, by reason.", "reason"
        )
        self._failed = counter(
            "requests_failed", "Compressions that the worker gave up, by reason.", "reason"
        )
        # a counter that begins with 1 has not grown yet for Prometheus: all begin with 0
        for reason in BYPASS_REASONS:
            self._bypassed.labels(*labels, reason)
        for reason in FAILURE_REASONS:
            self._failed.labels(*labels, reason)
        self.blocks_freed = counter(
            "blocks_freed", "KV-cache blocks that requests gave up by compression, net of slabs."
        ).labels(*labels)
        self.tokens_in = counter(
            "prompt_tokens_in", "Tokens that were compressed (the raw window not included)."
        ).labels(*labels)
        self.entries_kept = counter(
            "entries_kept", "Entries that stand for them, mean over layers and KV heads."
        ).labels(*labels)
        self.seconds: Histogram = _once(
            registry,
            Histogram,
            PREFIX + "compression_seconds",
            "Time the worker spent on compressing one prompt.",
            names,
            buckets=_SECONDS,
        ).labels(*labels)
        self.slab_blocks: Gauge = _once(
            registry,
            Gauge,
            PREFIX + "slab_blocks",
            "KV-cache blocks in use as slabs of compressed prompts.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(*labels)

    def bypassed(self, reason: str) -> None:
        self._bypassed.labels(*self._labels, reason).inc()

    def failed(self, reason: str) -> None:
        self._failed.labels(*self._labels, reason).inc()


def _once(registry: CollectorRegistry, kind: type, name: str, text: str, labels: tuple, **more):  # type: ignore[no-untyped-def]
    """The metric of that name in the registry, made if it is not there yet."""
    existing = registry._names_to_collectors.get(name)
    return existing or kind(name, text, labels, registry=registry, **more)


_own_registry: CollectorRegistry | None = None


def _writing_registry(vllm_config: VllmConfig) -> CollectorRegistry:
    """A registry whose metrics `expose` can see from the front end."""
    global _own_registry
    if multiprocessing.parent_process() is None:
        # the engine core runs inside the front end, whose registry is read directly
        return prometheus_client.REGISTRY
    if _own_registry is None:
        _own_registry = CollectorRegistry()
        if _ENVIRONMENT not in os.environ:
            folder = _folder(vllm_config)
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[_ENVIRONMENT] = str(folder)
            # prometheus_client chose its value class when it was imported, without the folder
            values.ValueClass = values.MultiProcessValue()
    return _own_registry


class _FolderCollector(Collector):
    """Reads the files that engine cores of this front end have written."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def collect(self) -> Iterable[Metric]:
        for folder in self.folders:
            if folder.is_dir():
                yield from MultiProcessCollector(None, path=str(folder)).collect()


_collector: _FolderCollector | None = None


def expose(vllm_config: VllmConfig) -> None:
    """Front end: show the engine core's metrics on this process's ``/metrics``."""
    global _collector
    if _ENVIRONMENT in os.environ:
        return
    if _collector is None:
        _collector = _FolderCollector()
        prometheus_client.REGISTRY.register(_collector)
    folder = _folder(vllm_config)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent.stat().st_uid != os.getuid():
        raise ValueError(
            f"--kv-compression keeps its metrics in {folder.parent}, which is another user's; "
            "remove it or set TMPDIR"
        )
    _collector.folders.append(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
