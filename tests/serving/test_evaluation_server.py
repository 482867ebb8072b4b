"""``eval server`` against a real server with compression."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvcompress_serving.evaluation.cli import app
from kvcompress_serving.evaluation.results import Run, summarize
from kvcompress_serving.server import cpu_environment, serve

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1200)]


def test_full_and_compressed_answers_of_one_server(model_path, tmp_path):
    flags = (
        *("--kv-compression=semanticache", "--kv-compression-config", '{"max_keep": 0.9}'),
        *("--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", str(1 << 28), "--enforce-eager"),
    )
    out = tmp_path / "server.json"
    with serve(model_path, *flags, log=tmp_path / "log", environment=cpu_environment()) as server:
        result = CliRunner().invoke(
            app,
            [
                *("server", "--url", server.url, "--out", str(out)),
                *("--row", "mild=semanticache:threshold=0.9"),
                *("--row", "hard=semanticache:keep=0.25"),
                *("--task", "niah_single_2", "--samples", "4"),
            ],
        )
    assert result.exit_code == 0, result.output
    run = Run.load(out)
    full, mild, hard = summarize(run.measurements)
    assert (full.row, mild.row, hard.row) == ("full", "mild", "hard")
    assert full.bytes_ratio == full.kept == 1.0
    assert full.scores["same_prefix"].mean == 1.0
    assert full.scores["match"].mean >= 0.75
    assert mild.bypassed == hard.bypassed == 0
    assert hard.blocks_ratio < mild.blocks_ratio < 1.0
    assert hard.kept < 0.4
    # what compression costs shows in the text: the needle survives a mild one
    assert mild.scores["match"].mean >= hard.scores["match"].mean
    assert hard.scores["same_prefix"].mean < 1.0
