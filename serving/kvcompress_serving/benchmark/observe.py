"""What load generators do not see: counters and gauges of the server, memory of its processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from kvcompress_serving.processes import resident_mib
from kvcompress_serving.server import Server

PREFIX = "vllm_kvcompress:"
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "usage": "vllm:kv_cache_usage_perc",
    "slab_blocks": f"{PREFIX}slab_blocks",
}
_SECONDS = 0.5

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Observation:
    """Metrics around and during one load.

    Args:
        before: every sample when it began.
        after: every sample when it had ended.
        gauges: for each of `GAUGES` its values meanwhile, twice a second.
        resident_mib: memory of the server's processes meanwhile, shared pages not counted.
    """

    before: Samples = field(default_factory=dict)
    after: Samples = field(default_factory=dict)
    gauges: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in GAUGES})
    resident_mib: list[float] = field(default_factory=list)

    def grown(self, name: str) -> float:
        """By how much a counter grew, summed over its labels."""
        return _total(self.after, name) - _total(self.before, name)

    def grown_by(self, name: str, label: str) -> dict[str, float]:
        """By how much a counter grew for each value of a label; those that did not are left out."""
        grown: dict[str, float] = {}
        for samples, sign in ((self.after, 1), (self.before, -1)):
            for (sample, labels), value in samples.items():
                if sample == name:
                    key = dict(labels)[label]
                    grown[key] = grown.get(key, 0.0) + sign * value
        return {key: value for key, value in grown.items() if value}

    def has(self, name: str) -> bool:
        return any(sample == name for sample, _ in self.after)


def _total(samples: Samples, name: str) -> float:
    return sum(value for (sample, _), value in samples.items() if sample == name)


@contextlib.contextmanager
def observe(server: Server) -> Iterator[Observation]:
    """Watch a server while the block runs."""
    seen = Observation(before=server.samples())

    def sample() -> None:
        seen.resident_mib.append(resident_mib(server.pid))
        values = _gauges(httpx.get(f"{server.url}/metrics", timeout=30).text)
        for name, value in values.items():
            seen.gauges[name].append(value)

    with _repeat(sample):
        yield seen
    seen.after = server.samples()


def _gauges(text: str) -> dict[str, float]:
    """The gauges alone: parsing all of ``/metrics`` twice a second takes time from the server."""
    names = tuple(GAUGES.values())
    lines = "\n".join(line for line in text.splitlines() if line.startswith(names))
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return {name: totals[full] for name, full in GAUGES.items() if full in totals}


class OfflineObserver:
    """Watches an engine without a server, whose counters are files of prometheus_client.

    Args:
        folder: empty; the engine's ``PROMETHEUS_MULTIPROC_DIR``.
    """

    def __init__(self, folder: Path) -> None:
        self.environment: Mapping[str, str] = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
        self.seen = Observation()
        self._folder = folder
        self._pid: int | None = None

    def started(self, pid: int) -> None:
        self._pid = pid

    @contextlib.contextmanager
    def observe(self) -> Iterator[Observation]:
        """Watch while the block runs the engine."""

        def sample() -> None:
            if self._pid is not None:
                self.seen.resident_mib.append(resident_mib(self._pid))

        with _repeat(sample):
            yield self.seen
        for metric in MultiProcessCollector(None, path=str(self._folder)).collect():
            for item in metric.samples:
                self.seen.after[item.name, frozenset(item.labels.items())] = item.value


@contextlib.contextmanager
def _repeat(sample: Callable[[], None]) -> Iterator[None]:
    """Call a function twice a second, in a thread, while the block runs."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(_SECONDS):
            # a busy server may be slow to answer; the next sample will do
            with contextlib.suppress(httpx.HTTPError):
                sample()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
