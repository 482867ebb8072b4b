"""vLLM's own load generators, run as child processes that end with this one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcompress_serving import processes
from kvcompress_serving.benchmark.plan import Load
from kvcompress_serving.server import Server

_VLLM = str(Path(sys.executable).parent / "vllm")


class LoadError(RuntimeError):
    """A load generator failed; the message ends with the last lines of its output."""


def run_tool(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    on_start: Callable[[int], None] = lambda _pid: None,
) -> None:
    """Run a command to its end, and end all that it started if this is interrupted.

    Args:
        command: program and arguments.
        log: file for its output, overwritten.
        environment: all of its variables.
        on_start: called with its process id.

    Raises:
        LoadError: it failed.
    """
    process = processes.start(command, log, environment)
    try:
        on_start(process.pid)
        code = process.wait()
    finally:
        if process.poll() is None:
            processes.stop(process)
    if code != 0:
        raise LoadError(f"{' '.join(command[:3])} ended with {code}\n{processes.tail(log)}")


def bench_serve(
    server: Server,
    tokenizer: str,
    load: Load,
    prompts: Sequence[str] | None,
    folder: Path,
    environment: Mapping[str, str],
    seed: int,
) -> dict[str, Any]:
    """One run of ``vllm bench serve``: greedy, exactly ``load.output_tokens`` each.

    Args:
        server: to send to.
        tokenizer: folder or name of the model.
        load: what to send.
        prompts: its prompts; None for vLLM's random tokens.
        folder: for files in between.
        environment: variables of the tool.
        seed: of random tokens.

    Returns:
        what ``--save-result --save-detailed`` writes.

    Raises:
        LoadError: it failed, or a request did.
    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [
        *(_VLLM, "bench", "serve", "--backend", "openai"),
        *("--base-url", server.url, "--endpoint", "/v1/completions"),
        *("--model", server.model, "--tokenizer", tokenizer),
        *_dataset(load, prompts, folder, seed),
        *("--ignore-eos", "--temperature", "0"),
        *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder)),
        *("--result-filename", result.name, "--disable-tqdm"),
    ]
    run_tool(command, folder / "load.log", environment)
    body = dict(json.loads(result.read_text(encoding="utf-8")))
    if body["completed"] != load.num_requests:
        errors = sorted({error[:300] for error in body.get("errors", []) if error})
        raise LoadError(
            f"{body['completed']} of {load.num_requests} requests were answered: "
            f"{'; '.join(errors[:3])}"
        )
    return body


def _dataset(load: Load, prompts: Sequence[str] | None, folder: Path, seed: int) -> tuple[str, ...]:
    if prompts is None:
        return (
            *("--dataset-name", "random", "--seed", str(seed)),
            *("--random-input-len", str(load.prompt_tokens)),
            *("--random-output-len", str(load.output_tokens)),
        )
    file = folder / "prompts.jsonl"
    lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    file.write_text("".join(lines), encoding="utf-8")
    return (
        *("--dataset-name", "custom", "--dataset-path", str(file)),
        *("--skip-chat-template", "--disable-shuffle", "--no-oversample"),
        *("--custom-output-len", str(load.output_tokens)),
    )


def bench_throughput(
    model: str,
    flags: Sequence[str],
    load: Load,
    prompts: Sequence[str] | None,
    folder: Path,
    environment: Mapping[str, str],
    seed: int,
    on_start: Callable[[int], None],
) -> dict[str, Any]:
    """One run of ``vllm bench throughput``: all prompts at once in an engine without a server.

    Arguments as for `bench_serve`; ``flags`` are those of the engine.

    Raises:
        LoadError: it failed, or did not run all prompts.
    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    if prompts is None:
        data: tuple[str, ...] = (
            *("--dataset-name", "random", "--seed", str(seed)),
            *("--random-input-len", str(load.prompt_tokens)),
            *("--random-output-len", str(load.output_tokens)),
        )
    else:
        # the one format of it that takes text from a file; the second turn only gives a length
        file = folder / "prompts.json"
        entries = [{"conversations": [{"value": p}, {"value": "answer"}]} for p in prompts]
        file.write_text(json.dumps(entries), encoding="utf-8")
        data = ("--dataset-name", "sharegpt", "--dataset-path", str(file), "--no-oversample")
        data += ("--output-len", str(load.output_tokens))
    command = [
        *(_VLLM, "bench", "throughput", "--backend", "vllm", "--model", model),
        *data,
        *("--num-prompts", str(load.num_requests), "--output-json", str(result)),
        *flags,
    ]
    run_tool(command, folder / "load.log", environment, on_start)
    body = dict(json.loads(result.read_text(encoding="utf-8")))
    if body["num_requests"] != load.num_requests:
        raise LoadError(
            f"`vllm bench throughput` ran {body['num_requests']} of {load.num_requests} prompts; "
            "it leaves out prompts above 1024 tokens: give a smaller --prompt-tokens"
        )
    return body
