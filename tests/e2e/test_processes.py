"""Several processes: tensor and data parallel ranks, several API servers in front of an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from tiny_soft_tokens import make_soft_tokens

from kvcompress_serving.server import serve

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
import prometheus_client

if __name__ == "__main__":
    model, (method, num_ranks, settings), prompts = sys.argv[1], *map(json.loads, sys.argv[2:])
    config = {"method": method, "min_prompt_tokens": 64, "threshold": 0.6, **settings}
    extra = {} if method == "stock" else {"additional_config": {"kv_compression": config}}
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=4,
        block_size=32, kv_cache_memory_bytes=1 << 28, tensor_parallel_size=num_ranks,
        disable_log_stats=False, **extra,
    )
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    counts = {
        s.name: s.value for f in prometheus_client.REGISTRY.collect() for s in f.samples
        if f.name.startswith("vllm_kvcompress:")
    }
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    print("RESULT " + json.dumps({"tokens": tokens, "counts": counts}), flush=True)
"""


def run_offline(model, method, prompts, tmp_path, num_ranks=2, **settings):
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    done = subprocess.run(
        [
            *(sys.executable, str(script), str(model)),
            *(json.dumps([method, num_ranks, settings]), json.dumps(prompts)),
        ],
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[:num_ranks])},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def test_tensor_parallel_ranks_agree(tiny_model, model_path, texts, tmp_path):
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(texts[:9000]).ids
    prompts = [ids[:310], ids[600:1000]]
    stock = run_offline(tiny_model(), "stock", prompts, tmp_path)
    moved = run_offline(tiny_model(), "relocate", prompts, tmp_path)
    assert moved["tokens"] == stock["tokens"]
    packed = run_offline(tiny_model(), "semanticache", prompts, tmp_path)
    assert packed["counts"]["vllm_kvcompress:requests_compressed_total"] == 2
    assert packed["counts"]["vllm_kvcompress:blocks_freed_total"] > 0


@pytest.mark.timeout(900)  # ranks wait for each other by spinning, which a busy machine feels
def test_probes_run_on_every_rank(tiny_model, model_path, texts, tmp_path):
    """Every head keeps its own tokens, so that two ranks keep what one does."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(texts[:9000]).ids
    prompts = [ids[:310], ids[600:1000]]
    folder = str(make_soft_tokens(tiny_model(), tmp_path / "soft_tokens"))
    settings = {"soft_tokens": folder, "probes": "dynamic", "heads": "each", "keep": 0.4}
    one, two = (
        run_offline(tiny_model(), "metasoft", prompts, tmp_path, num_ranks, **settings)
        for num_ranks in (1, 2)
    )
    assert two["tokens"] == one["tokens"]
    for found in (one, two):
        assert found["counts"]["vllm_kvcompress:requests_compressed_total"] == 2
        assert not found["counts"].get("vllm_kvcompress:requests_failed_total", 0)


def test_metrics_with_two_api_servers(model_path, texts, tmp_path):
    flags = (
        "--kv-compression=semanticache",
        "--enforce-eager",
        "--max-model-len",
        "4096",
        "--kv-cache-memory-bytes",
        str(200 << 20),
        "--api-server-count",
        "2",
    )
    with serve(model_path, *flags, log=tmp_path / "log") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for _ in range(4):
            client.completions.create(
                model=server.model, prompt=texts[:5000], max_tokens=20, temperature=0
            )
        metrics = server.metrics()
        assert metrics["vllm_kvcompress:requests_compressed_total"] == 4
        assert metrics["vllm_kvcompress:blocks_freed_total"] > 0


@pytest.mark.timeout(900)  # three servers of two engines each
def test_data_parallel_engines(tiny_model, texts, tmp_path):
    """Each engine has a scheduler, a pool and metrics of its own; requests are spread over them."""
    prompts = [texts[start : start + 1500] for start in range(0, 8000, 1000)]

    def answers(method):
        config = {"method": method, "min_prompt_tokens": 64, "threshold": 0.6}
        flags = (
            *("--data-parallel-size", "2", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", "32"),
            *("--kv-cache-memory-bytes", str(64 << 20)),
            *(() if method == "stock" else ("--kv-compression-config", json.dumps(config))),
        )
        # the engines share the cores: binding each to one of its own needs as many as engines
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        log = tmp_path / f"{method}.log"
        with serve(tiny_model(), *flags, log=log, environment=environment) as server:
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none")

            def answer(prompt):
                reply = client.completions.create(
                    model=server.model,
                    prompt=prompt,
                    max_tokens=30,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                return reply.choices[0].text

            with ThreadPoolExecutor(4) as pool:
                return list(pool.map(answer, prompts)), server.samples()

    stock, _ = answers("stock")
    moved, samples = answers("relocate")
    assert moved == stock
    assert set(by_engine(samples, "requests_compressed_total")) == {"0", "1"}
    _, samples = answers("semanticache")
    compressed = by_engine(samples, "requests_compressed_total")
    assert set(compressed) == {"0", "1"}
    assert min(compressed.values()) > 0
    assert sum(compressed.values()) == len(prompts)
    assert min(by_engine(samples, "blocks_freed_total").values()) > 0
    assert set(by_engine(samples, "slab_blocks").values()) == {0}


def by_engine(samples, name):
    """A metric of ours by engine."""
    return {
        dict(labels)["engine"]: value
        for (metric, labels), value in samples.items()
        if metric == f"vllm_kvcompress:{name}"
    }
