"""Mixed load on a real server for a while; what is left behind, and which answers changed."""

from __future__ import annotations

import pytest

from kvcompress_serving.soak import run

pytestmark = pytest.mark.e2e


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["semanticache", "relocate"])
def test_soak(model_path, tmp_path, method):
    report = run(model_path, method, seconds=30, seed=7, most=15, log=tmp_path / "log")
    assert report.problems == []
    assert report.jobs["answered"] > 10
    assert report.jobs["closed"] > 0
    assert report.compared >= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_soak_for_half_an_hour(model_path, tmp_path):
    report = run(model_path, "semanticache", seconds=1800, seed=1, most=150, log=tmp_path / "log")
    assert report.problems == []
