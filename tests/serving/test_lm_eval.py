"""lm-evaluation-harness against a server, where it is installed (it is in no extra)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompress_serving.server import serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval[api]; docs/evaluation.md"
    ),
]

TASK = """
task: towns
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{next}}}}"
generation_kwargs:
  until: ["###"]
  max_gen_toks: 32
  do_sample: false
  temperature: 0
metric_list:
  - metric: bleu
"""


def test_a_task_that_generates_runs_on_compressed_prompts(
    model_path: Path, texts: str, tmp_path: Path
) -> None:
    data = tmp_path / "towns.jsonl"
    starts = range(0, 12_000, 3000)
    lines = [{"text": texts[s : s + 4000], "next": texts[s + 4000 : s + 4100]} for s in starts]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "towns.yaml").write_text(TASK.format(data=data))
    flags = (
        *("--kv-compression", "semanticache", "--enforce-eager", "--max-model-len", "2048"),
        *("--kv-cache-memory-bytes", str(200 << 20)),
    )
    with serve(model_path, *flags, log=tmp_path / "server.log") as server:
        arguments = {
            "model": server.model,
            "base_url": f"{server.url}/v1/completions",
            "num_concurrent": "2",
            "tokenizer": str(model_path),
            "max_length": "2048",
        }
        done = subprocess.run(
            [
                *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
                *("--model_args", ",".join(f"{k}={v}" for k, v in arguments.items())),
                *("--tasks", "towns", "--include_path", str(tmp_path)),
                *("--output_path", str(tmp_path / "out"), "--log_samples"),
            ],
            env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        metrics = server.metrics()
    assert metrics["vllm_kvcompress:requests_compressed_total"] == len(lines)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert "bleu,none" in json.loads(results.read_text())["results"]["towns"]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    answers = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    assert len(answers) == len(lines)
    assert all(answer.strip() for answer in answers)
