"""An evaluation and a benchmark whose parts are spread give what one machine gives in order."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcompress_serving.benchmark import over_ray as benchmark
from kvcompress_serving.benchmark.load import LoadError
from kvcompress_serving.benchmark.results import Measurement
from kvcompress_serving.evaluation import over_ray
from kvcompress_serving.evaluation.cli import app


def test_parts_are_all_prompts_in_order() -> None:
    for count in (1, 5, 8, 97):
        for workers in (1, 2, 7):
            made = over_ray.parts(count, workers)
            assert [number for part in made for number in part] == list(range(count))
            sizes = {len(part) for part in made}
            assert max(sizes) - min(sizes) <= 1
            assert len(made) == min(count, 4 * workers)


@pytest.mark.slow
def test_measurements_are_the_same(
    cluster: None, one_thread: None, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    def run(name: str, *more: str) -> dict[str, object]:
        out = tmp_path / f"{name}.json"
        options = [
            *("offline", "--model", str(tiny_model()), "--out", str(out), *more),
            *("--row", "semanticache:min_prompt_tokens=64", "--row", "window:keep=0.5"),
            *("--documents", "2", "--prompt-tokens", "256", "--continuation-tokens", "16"),
            *("--greedy-tokens", "4", "--task", "niah_single_2", "--task", "qa"),
            *("--length", "512", "--samples", "2", "--order", "after", "--order", "known"),
        ]
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 0, result.output
        return dict(json.loads(out.read_text()))

    alone = run("alone")["measurements"]
    # one CPU for each worker, as for this process: float32 sums hang on the number of threads
    shared = run("shared", "--ray", "local", "--ray-workers", "2")["measurements"]
    assert len(alone) == 3 * (2 * 2 + 2 * 2 * 2)
    assert shared == alone


class Runner:
    """Stands in for `runner.Runner`."""

    def __init__(self, wrong: int = -1) -> None:
        self.dropped = 3
        self._wrong = wrong

    def run_round(self, number: int) -> list[Measurement]:
        if number == self._wrong:
            raise LoadError("a load generator failed")
        return [Measurement("stock", "g", "l", 1.0, number, {"tpot_ms": 10.0 + number})]


@pytest.mark.slow
def test_rounds_come_back_in_order(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    steps: list[str] = []
    measured, dropped, machines = benchmark.run(Runner, 3, steps.append)
    assert [(m.round, m.values["tpot_ms"]) for m in measured] == [(0, 10), (1, 11), (2, 12)]
    assert dropped == 3
    assert len(machines) == 3
    assert steps == ["round 1", "round 2", "round 3"]
    with pytest.raises(LoadError, match="a load generator failed"):
        benchmark.run(functools.partial(Runner, wrong=1), 2, steps.append)
