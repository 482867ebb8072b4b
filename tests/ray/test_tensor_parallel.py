"""Tensor-parallel ranks as Ray actors: the plugin reaches them, and the tokens are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

CPU_RAY = "kvcompress_serving.ray_executor.CPURayExecutor"
OFFLINE = """
import json, os, sys
import ray
from vllm import LLM, SamplingParams
import prometheus_client

def rank(worker):
    return {
        "class": type(worker.worker if hasattr(worker, "worker") else worker).__name__,
        "actor": ray.is_initialized() and ray.get_runtime_context().get_actor_id(),
        "variable": os.environ.get("KVC_TEST_VARIABLE"),
        "config": worker.vllm_config.additional_config,
    }

if __name__ == "__main__":
    model, method, backend, size, prompts = sys.argv[1:]
    if backend not in ("mp", "none"):
        ray.init(
            num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1",
            _system_config={"worker_niceness": 0},
        )
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    # started with Ray, workers do not have this process's variables by themselves
    os.environ["KVC_TEST_VARIABLE"] = "reached"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    config = {"min_prompt_tokens": 64, **json.loads(method)}
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=4,
        block_size=32, kv_cache_memory_bytes=1 << 28, tensor_parallel_size=int(size),
        distributed_executor_backend=None if backend == "none" else backend,
        disable_log_stats=False,
        **({"additional_config": {"kv_compression": config}} if "method" in config else {}),
    )
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in json.loads(prompts)], params)
    counts = {
        s.name: s.value for f in prometheus_client.REGISTRY.collect() for s in f.samples
        if f.name.startswith("vllm_kvcompress:") and "seconds" not in f.name
    }
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    result = {"tokens": tokens, "counts": counts, "ranks": llm.collective_rpc(rank)}
    print("RESULT " + json.dumps(result), flush=True)
"""


def run(
    model: Path,
    method: dict[str, Any],
    backend: str,
    size: int,
    prompts: list[list[int]],
    tmp_path: Path,
) -> dict:
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    arguments = (json.dumps(method), backend, str(size), json.dumps(prompts))
    done = subprocess.run(
        [sys.executable, str(script), str(model), *arguments],
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        pytest.fail(done.stdout[-4000:] + done.stderr[-4000:])
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


@pytest.fixture(scope="module")
def prompts(model_path: Path, texts: str) -> list[list[int]]:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(texts[:9000]).ids
    return [ids[:310], ids[600:1000]]


def test_ranks_in_ray_actors(
    tiny_model: Callable[..., Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    """A method that decides for each head by itself does the same wherever the heads are."""
    method = {"method": "selkv", "heads": "each", "keep": 0.4}
    alone = run(tiny_model(), method, "none", 1, prompts, tmp_path)
    processes = run(tiny_model(), method, "mp", 2, prompts, tmp_path)
    actors = run(tiny_model(), method, CPU_RAY, 2, prompts, tmp_path)
    ranks = actors["ranks"]
    assert [rank["class"] for rank in ranks] == ["CompressionCPUWorker"] * 2
    assert len({rank["actor"] for rank in ranks}) == 2
    assert all(rank["actor"] for rank in ranks)
    assert not any(rank["actor"] for rank in processes["ranks"])
    assert {rank["variable"] for rank in ranks} == {"reached"}
    assert all(rank["config"]["kv_compression"]["keep"] == 0.4 for rank in ranks)
    assert actors["counts"] == processes["counts"] == alone["counts"]
    assert actors["counts"]["vllm_kvcompress:requests_compressed_total"] == 2
    assert actors["counts"]["vllm_kvcompress:entries_kept_total"] > 0
    assert actors["tokens"] == processes["tokens"]
    assert processes["tokens"] == alone["tokens"]


def test_actors_do_what_processes_do(
    tiny_model: Callable[..., Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    """`max_keep` holds for the heads of a rank together, so one rank may keep other entries."""
    method = {"method": "semanticache", "threshold": 0.6}
    processes = run(tiny_model(), method, "mp", 2, prompts, tmp_path)
    actors = run(tiny_model(), method, CPU_RAY, 2, prompts, tmp_path)
    assert actors["counts"] == processes["counts"]
    assert actors["counts"]["vllm_kvcompress:requests_compressed_total"] == 2
    assert actors["tokens"] == processes["tokens"]


def test_vllm_s_own_name_for_it_is_not_for_cpus(
    tiny_model: Callable[..., Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    """Where this fails, vLLM has learned it, and `CPURayExecutor` can go."""
    with pytest.raises(pytest.fail.Exception, match="current platform cpu does not support ray"):
        run(tiny_model(), {}, "ray", 2, prompts, tmp_path)
