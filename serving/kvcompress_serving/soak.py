"""``python -m kvcompress_serving.soak``: a server under mixed load for a while, then an inventory.

Prompts of many lengths, languages and kinds, random budgets and opt-outs, connections closed at any
moment, and a pool that is too small for all of it. In the end nothing may be left: no blocks, no
state, no growth of the processes; and each answer whose tokens compression must not change is asked
for again, alone, and has to be the same. Float32, since in lower precision the batch decides ties.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import openai
import typer
from rich.console import Console

from kvcompress_serving import SAMPLE_TEXT
from kvcompress_serving.processes import resident_mib, terminate_as_interrupt
from kvcompress_serving.server import Server, serve

_PREFIX = "vllm_kvcompress:"
_CONCURRENCY = 10
_IDLE_SECONDS = 60
_OTHER_TEXTS = (
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。",
    "吾輩は猫である。名前はまだ無い。どこで生れたか見当がつかぬ。",
    "كان يا ما كان، في قديم الزمان؟ حدث شيء غريب؛ ",
    "एक समय की बात है। एक राजा था॥ ",
    "for i in range(10):\n    print({'a': [i, i * 2]});\n",
    '{"name":"x","values":[1,2,3],"nested":{"ok":true}}',
    "QmFzZTY0IGlzIG5vdCBhIGNpcGhlcg",
    "🎉 👩‍👩‍👧‍👦 ok ",
)

console = Console()


@dataclass
class Job:
    """One request, and what came of it.

    Args:
        prompt: its text.
        max_tokens: length of the answer.
        xargs: per-request values for the plugin.
        close_after: streamed pieces after which the connection is closed; None: read to the end.
    """

    prompt: str
    max_tokens: int
    xargs: dict[str, Any]
    close_after: int | None
    answer: str | None = None


@dataclass
class Report:
    """What a soak found; `problems` is empty when all is well."""

    seconds: float
    jobs: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)
    resident_mib: list[float] = field(default_factory=list)
    compared: int = 0
    problems: list[str] = field(default_factory=list)


def make_job(rng: random.Random, text: str) -> Job:
    """Draw a request."""
    kind = rng.random()
    if kind < 0.2:
        piece = rng.choice(_OTHER_TEXTS)
        prompt = (f"{rng.random()} " + piece * rng.randrange(1, 60))[:600]
    else:
        # a few common starts, so that prefixes are shared
        start = rng.choice([0, 0, 30_000, rng.randrange(len(text) - 9000)])
        prompt = text[start : start + rng.choice([20, 400, 1500, 3000, 6000, 8000])]
    xargs: dict[str, Any] = {}
    if rng.random() < 0.2:
        xargs["kv_compression"] = "none"
    elif rng.random() < 0.4:
        xargs["kv_compression_keep"] = rng.choice([0.1, 0.25, 0.5, 0.8])
    close_after = rng.randrange(0, 40) if rng.random() < 0.2 else None
    return Job(prompt, rng.choice([1, 8, 24, 48, 96]), xargs, close_after)


async def ask(client: openai.AsyncOpenAI, server: Server, job: Job) -> str | None:
    """Send a request; the text of the answer, or None if the connection was closed before."""
    stream = await client.completions.create(
        model=server.model,
        prompt=job.prompt,
        max_tokens=job.max_tokens,
        temperature=0,
        stream=True,
        extra_body={"vllm_xargs": job.xargs, "ignore_eos": True},
    )
    pieces: list[str] = []
    async for event in stream:
        if job.close_after is not None and len(pieces) >= job.close_after:
            await stream.close()
            return None
        pieces.extend(choice.text for choice in event.choices)
    return "".join(pieces)


async def _load(
    client: openai.AsyncOpenAI, server: Server, rng: random.Random, report: Report
) -> list[Job]:
    """Keep the server busy for ``report.seconds``; the jobs that were answered."""
    text = SAMPLE_TEXT.read_text(encoding="utf-8")
    deadline = time.monotonic() + report.seconds
    done: list[Job] = []

    async def client_loop() -> None:
        while time.monotonic() < deadline:
            job = make_job(rng, text)
            try:
                job.answer = await ask(client, server, job)
            except openai.APIError as error:
                report.jobs["failed"] += 1
                report.problems.append(f"a request failed: {type(error).__name__}: {error}")
                return
            report.jobs["closed" if job.answer is None else "answered"] += 1
            if job.answer is not None:
                done.append(job)

    async def watch() -> None:
        while time.monotonic() < deadline:
            report.resident_mib.append(resident_mib(server.pid))
            await asyncio.sleep(max(report.seconds / 60, 1))

    await asyncio.gather(watch(), *(client_loop() for _ in range(_CONCURRENCY)))
    return done


def _wait_idle(server: Server) -> dict[str, float]:
    """Metrics once no request runs or waits."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while True:
        metrics = server.metrics()
        busy = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        if not busy or time.monotonic() > deadline:
            return metrics
        time.sleep(0.5)


def must_be_equal(job: Job, method: str) -> bool:
    """Whether this answer must not depend on when, or whether, the request was compressed."""
    return method in ("none", "relocate") or job.xargs.get("kv_compression") == "none"


async def _compare(
    client: openai.AsyncOpenAI, server: Server, jobs: list[Job], report: Report
) -> None:
    for job in jobs:
        alone = await ask(client, server, Job(job.prompt, job.max_tokens, job.xargs, None))
        report.compared += 1
        if alone != job.answer:
            report.problems.append(
                f"an answer differs from the same request alone: {job.answer!r} and {alone!r}"
            )


async def _soak(server: Server, method: str, seed: int, most: int, report: Report) -> None:
    rng = random.Random(seed)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
    done = await _load(client, server, rng, report)
    _wait_idle(server)
    candidates = [job for job in done if must_be_equal(job, method)]
    await _compare(client, server, rng.sample(candidates, min(most, len(candidates))), report)
    await client.close()
    # the next step after the last request carries its release to the worker and sets the gauges
    httpx.post(
        f"{server.url}/v1/completions",
        json={"model": server.model, "prompt": "The end", "max_tokens": 1},
        timeout=60,
    ).raise_for_status()
    metrics = _wait_idle(server)
    for name in ("vllm:kv_cache_usage_perc", f"{_PREFIX}slab_blocks"):
        if metrics[name]:
            report.problems.append(f"{name} is {metrics[name]} when nothing runs")
    for name, value in metrics.items():
        if (name.startswith(_PREFIX) and not name.endswith("_bucket")) or "preemptions" in name:
            report.metrics[name] = value
    if not report.metrics.get(f"{_PREFIX}requests_compressed_total"):
        report.problems.append("nothing was compressed")
    if failed := report.metrics.get(f"{_PREFIX}requests_failed_total"):
        report.problems.append(f"{failed:.0f} compressions failed")
    # a short load may happen to fit
    if report.seconds >= 300 and not report.metrics.get("vllm:num_preemptions_total"):
        report.problems.append("the pool was not tight enough to preempt anything")
    settled = report.resident_mib[len(report.resident_mib) // 3 :]
    if settled and settled[-1] > min(settled[: len(settled) // 2 + 1]) * 1.1 + 64:
        report.problems.append(f"resident memory grew: {settled[0]:.0f} to {settled[-1]:.0f} MiB")


def run(model: Path, method: str, seconds: float, seed: int, most: int, log: Path) -> Report:
    """Soak one server.

    Args:
        model: model folder.
        method: compression method.
        seconds: how long to load it.
        seed: of all that is drawn.
        most: answers to ask for again.
        log: file for the server's output.
    """
    report = Report(seconds)
    flags = (
        f"--kv-compression={method}",
        *("--kv-compression-config", '{"min_prompt_tokens": 128, "min_output_tokens": 4}'),
        *("--dtype", "float32", "--enforce-eager", "--seed", "0"),
        *("--max-model-len", "2304", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
        *("--num-gpu-blocks-override", "100", "--kv-cache-memory-bytes", str(1 << 29)),
    )
    with serve(model, *flags, log=log) as server:
        asyncio.run(_soak(server, method, seed, most, report))
    return report


def main(
    model: Annotated[Path, typer.Option(envvar="KVC_MODEL", help="Model folder.")],
    method: Annotated[str, typer.Option(help="Compression method.")] = "semanticache",
    seconds: Annotated[float, typer.Option(help="How long to load the server.")] = 1800,
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn.")] = 0,
    most: Annotated[int, typer.Option(help="Answers to ask for again, alone.")] = 200,
    log: Annotated[Path, typer.Option(help="Server's output.")] = Path("build/soak.log"),
) -> None:
    """Load a server for a while and report what is left behind."""
    with terminate_as_interrupt():
        report = run(model, method, seconds, seed, most, log)
    console.print_json(json.dumps(report.__dict__))
    raise typer.Exit(1 if report.problems else 0)


if __name__ == "__main__":
    typer.run(main)
