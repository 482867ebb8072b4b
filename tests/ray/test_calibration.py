"""A calibration that is shared out gives what one process gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from vllm_kvcompress import cluster as clusters
from vllm_kvcompress.artifacts import identify
from vllm_kvcompress.calibration.parts import PART_CHUNKS
from vllm_kvcompress.calibration.run import Settings, cache_shape, collect
from vllm_kvcompress.calibration.statistics import Collector, Statistics
from vllm_kvcompress.calibration.texts import Chunk
from vllm_kvcompress.cli import app

SETTINGS = Settings(chunk_tokens=96, num_sink_tokens=3, window=16)
CHUNKS = [Chunk("text", list(range(start, start + 96))) for start in range(100, 100 + 19 * 50, 50)]


# one CPU for each worker, as for this process: float32 sums hang on the number of threads
@pytest.mark.slow
def test_statistics_are_the_same(
    cluster: None,
    one_thread: None,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_model()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shape, identity = cache_shape(network.config), identify(folder)

    def run(name: str, workers: int, chunks: list[Chunk] = CHUNKS) -> tuple[Statistics, Statistics]:
        file = tmp_path / name / "statistics"
        file.parent.mkdir(exist_ok=True)
        return collect(
            *(network, shape, chunks, SETTINGS, identity, file),
            folder=folder,
            ray_workers=workers,
        )

    alone = run("alone", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Collector, "collect", None)  # nothing is computed in this process
        shared = run("shared", 2)
    assert int(alone[1].num_chunks) == len(CHUNKS) // PART_CHUNKS == 2
    for ours, expected in zip(shared, alone, strict=True):
        for field in fields(Statistics):
            one, other = getattr(ours, field.name), getattr(expected, field.name)
            assert one.dtype == other.dtype
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-12, atol=0)
    # what was saved is read again, whoever goes on
    monkeypatch.setattr(Collector, "collect", None)
    again = run("shared", 0)
    assert torch.equal(again[0].key_moment, shared[0].key_moment)


@pytest.mark.slow
def test_all_workers_fit_the_machines(cluster: None) -> None:
    assert clusters.num_machines() == 1
    assert [clusters.share_of_cpus(count) for count in (1, 2, 4, 8)] == [2, 1, 0.5, 0.25]


def test_a_cluster_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str, **more: object) -> None:
        raise ConnectionError(f"ray cluster at {address}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    result = CliRunner().invoke(
        app, ["calibrate", "--model", "x", "--out", str(tmp_path), "--ray", "127.0.0.1:1"]
    )
    assert result.exit_code == 1
    assert "no Ray cluster at '127.0.0.1:1'" in " ".join(result.output.split())
