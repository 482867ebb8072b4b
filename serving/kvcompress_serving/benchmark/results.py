"""Measurements, their file, and medians over rounds with factors against stock vLLM."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvcompress_serving.benchmark.observe import PREFIX, Observation
from kvcompress_serving.benchmark.rows import STOCK

FORMAT = "vllm-kvcompress-benchmark/1"


@dataclass(frozen=True)
class Metric:
    """One measured quantity.

    Args:
        title: heading of its column, with the unit.
        better: 1 if more of it is better, -1 if less is, 0 if neither can be said.
        digits: after the decimal point.
    """

    title: str
    better: int = 0
    digits: int = 1


METRICS = {
    "output_tokens_per_s": Metric("output tokens/s", 1),
    "requests_per_s": Metric("requests/s", 1, 3),
    "total_tokens_per_s": Metric("tokens/s, prompts included", 1, 0),
    "seconds": Metric("seconds", -1),
    "ttft_ms": Metric("TTFT, ms", -1, 0),
    "ttft_p99_ms": Metric("TTFT p99, ms", -1, 0),
    "tpot_ms": Metric("TPOT, ms", -1),
    "tpot_p99_ms": Metric("TPOT p99, ms", -1),
    "itl_ms": Metric("ITL, ms", -1),
    "itl_p99_ms": Metric("ITL p99, ms", -1),
    "peak_running": Metric("at once, peak", 1, 0),
    "mean_running": Metric("at once, mean", 1),
    "preemptions": Metric("preemptions", -1, 0),
    "peak_usage": Metric("pool used, peak %", 0, 0),
    "prefix_hits": Metric("prefix cache hits, tokens", 0, 0),
    "prompt_tokens": Metric("prompt tokens", 0, 0),
    "pool_tokens": Metric("pool, tokens", 0, 0),
    "cache_full_mib": Metric("cache/request at first, MiB", 0),
    "cache_mib": Metric("cache/request, MiB", -1),
    "blocks": Metric("blocks/request", 0),
    "compressed": Metric("compressed", 0, 0),
    "kept_percent": Metric("entries kept, %", 0),
    "compress_ms": Metric("compress step, ms", 0),
    "compress_percent": Metric("compress step, % of prefill", 0, 2),
    "resident_mib": Metric("process memory, MiB", -1, 0),
}
"""Every quantity by its name in the file, in the order of columns."""


@dataclass(frozen=True)
class Measurement:
    """One load on one server.

    Args:
        row: name of the row.
        group: table that it belongs to.
        label: load within the table.
        x: its place on the axis of a plot.
        round: number of the repetition, from 0.
        values: by the names of `METRICS`.
        left_alone: requests that were not compressed, by reason.
        failed: compressions that were given up, by reason.
    """

    row: str
    group: str
    label: str
    x: float
    round: int
    values: dict[str, float]
    left_alone: dict[str, float] = field(default_factory=dict)
    failed: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Pool:
    """A server's KV cache as it reports it.

    Args:
        num_blocks: blocks, the null block included.
        block_size: tokens of a block.
        num_bytes: of all of it.
    """

    num_blocks: int
    block_size: int
    num_bytes: int

    @staticmethod
    def of(observed: Observation, num_bytes: int) -> Pool:
        """From ``vllm:cache_config_info``."""
        for name, labels in observed.after:
            if name == "vllm:cache_config_info":
                facts = dict(labels)
                return Pool(int(facts["num_gpu_blocks"]), int(facts["block_size"]), num_bytes)
        raise AssertionError("the server has no vllm:cache_config_info")


def from_serve(
    body: Mapping[str, Any], observed: Observation, pool: Pool
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Values, requests left alone and failures of one run of ``vllm bench serve``."""
    running = observed.gauges["running"]
    values = {
        "output_tokens_per_s": body["output_throughput"],
        "requests_per_s": body["request_throughput"],
        "total_tokens_per_s": body["total_token_throughput"],
        "seconds": body["duration"],
        "ttft_ms": body["median_ttft_ms"],
        "ttft_p99_ms": body["p99_ttft_ms"],
        "tpot_ms": body["median_tpot_ms"],
        "tpot_p99_ms": body["p99_tpot_ms"],
        "itl_ms": body["median_itl_ms"],
        "itl_p99_ms": body["p99_itl_ms"],
        "preemptions": observed.grown("vllm:num_preemptions_total"),
        "prefix_hits": observed.grown("vllm:prefix_cache_hits_total"),
        "prompt_tokens": body["total_input_tokens"] / body["completed"],
        "pool_tokens": float(pool.num_blocks * pool.block_size),
    }
    if running:
        values["peak_running"] = max(running)
        busy = [count for count in running if count]
        values["mean_running"] = statistics.fmean(busy) if busy else 0.0
    if usage := observed.gauges["usage"]:
        values["peak_usage"] = 100 * max(usage)
    block_mib = pool.num_bytes / pool.num_blocks / 2**20
    blocks = statistics.fmean(math.ceil(n / pool.block_size) for n in body["input_lens"])
    compressed = observed.grown(f"{PREFIX}requests_compressed_total")
    # per compression; after a preemption a request may be compressed again
    freed = observed.grown(f"{PREFIX}blocks_freed_total") / compressed if compressed else 0.0
    share = min(compressed / body["completed"], 1.0)
    values["blocks"] = blocks - freed * share
    values["cache_full_mib"] = blocks * block_mib
    values["cache_mib"] = values["blocks"] * block_mib
    return _with_compression(values, observed)


def from_throughput(
    body: Mapping[str, Any], observed: Observation, output_tokens: int
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Values, requests left alone and failures of one run of ``vllm bench throughput``."""
    seconds, requests = body["elapsed_time"], body["num_requests"]
    values = {
        "output_tokens_per_s": requests * output_tokens / seconds,
        "requests_per_s": body["requests_per_second"],
        "total_tokens_per_s": body["tokens_per_second"],
        "seconds": seconds,
        "prompt_tokens": body["total_num_tokens"] / requests - output_tokens,
    }
    return _with_compression(values, observed)


def _with_compression(
    values: dict[str, float], observed: Observation
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    compressed = observed.grown(f"{PREFIX}requests_compressed_total")
    values["compressed"] = compressed
    if compressed:
        tokens = observed.grown(f"{PREFIX}prompt_tokens_in_total")
        seconds = observed.grown(f"{PREFIX}compression_seconds_sum")
        values["kept_percent"] = 100 * observed.grown(f"{PREFIX}entries_kept_total") / tokens
        values["compress_ms"] = 1e3 * seconds / compressed
        if prefill := observed.grown("vllm:request_prefill_time_seconds_sum"):
            values["compress_percent"] = 100 * seconds / prefill
    if observed.resident_mib:
        values["resident_mib"] = max(observed.resident_mib)
    return (
        values,
        observed.grown_by(f"{PREFIX}requests_bypassed_total", "reason"),
        observed.grown_by(f"{PREFIX}requests_failed_total", "reason"),
    )


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest over the rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Line:
    """One row and load of a table.

    Args:
        group: see `Measurement`.
        label: see `Measurement`.
        x: see `Measurement`.
        row: see `Measurement`.
        rounds: how often it was measured.
        values: spread of each metric.
        gains: factor by which each metric is better than stock's in the same round; below 1 it is
            worse. Only of metrics that have a better direction and are not 0.
        left_alone: requests that were not compressed, by reason, over all rounds.
        failed: compressions given up, likewise.
    """

    group: str
    label: str
    x: float
    row: str
    rounds: int
    values: dict[str, Spread]
    gains: dict[str, Spread]
    left_alone: dict[str, float]
    failed: dict[str, float]

    def beyond_noise(self, metric: str) -> bool:
        """Whether every one of several rounds says the same about stock and this row."""
        gain = self.gains[metric]
        return self.rounds > 1 and not gain.low <= 1 <= gain.high


def summarize(measurements: Sequence[Measurement]) -> list[Line]:
    """Tables of all groups, in the order in which they were measured first."""
    lines = []
    stock = {(m.group, m.label, m.round): m for m in measurements if m.row == STOCK}
    groups = dict.fromkeys(m.group for m in measurements)
    for group in groups:
        members = [m for m in measurements if m.group == group]
        rows = dict.fromkeys(m.row for m in members if m.round == 0)
        for label in dict.fromkeys(m.label for m in members):
            for row in rows:
                own = [m for m in members if (m.label, m.row) == (label, row)]
                if own:
                    lines.append(_line(own, stock))
    return lines


def _line(own: list[Measurement], stock: Mapping[tuple[str, str, int], Measurement]) -> Line:
    first = own[0]
    names = [name for name in METRICS if all(name in m.values for m in own)]
    gains = {}
    for name in names:
        better = METRICS[name].better
        pairs = [(m, stock.get((m.group, m.label, m.round))) for m in own]
        factors = [
            (m.values[name] / base.values[name]) ** better
            for m, base in pairs
            if base is not None and m.values[name] and base.values.get(name)
        ]
        if better and first.row != STOCK and len(factors) == len(own):
            gains[name] = Spread.of(factors)
    return Line(
        group=first.group,
        label=first.label,
        x=first.x,
        row=first.row,
        rounds=len(own),
        values={name: Spread.of([m.values[name] for m in own]) for name in names},
        gains=gains,
        left_alone=_sum(m.left_alone for m in own),
        failed=_sum(m.failed for m in own),
    )


def _sum(parts: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


@dataclass(frozen=True)
class Run:
    """A file of results.

    Args:
        mode: see `plan.Mode`.
        provenance: versions, flags, seed, machine and commit.
        rows: what each row was made from, by name.
        measurements: everything that was measured.
        problems: what made the run fail, `expectations.check`.
    """

    mode: str
    provenance: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    measurements: list[Measurement]
    problems: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return 1 + max((m.round for m in self.measurements), default=0)

    def save(self, path: Path) -> None:
        """Write JSON, with the tables beside the measurements for readers without this code."""
        body = {
            "format": FORMAT,
            "mode": self.mode,
            "provenance": self.provenance,
            "rows": self.rows,
            "problems": self.problems,
            "tables": [asdict(line) for line in summarize(self.measurements)],
            "measurements": [asdict(m) for m in self.measurements],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Run:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is no such file, or of another format.
        """
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            if body["format"] != FORMAT:
                raise ValueError(f"format {body['format']!r}, expected {FORMAT!r}")
            items = [Measurement(**item) for item in body["measurements"]]
            return Run(body["mode"], body["provenance"], body["rows"], items, body["problems"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a benchmark's results file ({error})") from None
