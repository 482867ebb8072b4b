"""``python -m kvcompress_serving.demo``: one question about a long document, with and without.

Starts ``vllm serve`` with ``--kv-compression=semanticache``, asks through the openai client, and
shows what the compression did. The second run is the same request with compression switched off
for it, under another cache salt, so that both prefill the document.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from openai import OpenAI
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvcompress_serving import SAMPLE_TEXT
from kvcompress_serving.processes import terminate_as_interrupt
from kvcompress_serving.server import Server, ServerError, cpu_environment, serve

_PREFIX = "vllm_kvcompress:"
_QUESTION = (
    "\n\nAnswer in three sentences: what does the text above say about how domestic animals and "
    "plants vary?"
)
_BLOCK_SIZE = 32
_SETTLED = 12
"""Tokens after which pool usage is read: the compression is long done."""

console = Console()


@dataclass
class Answer:
    """One streamed answer and what was measured around it."""

    text: str
    prompt_tokens: int
    ttft_seconds: float
    tpot_seconds: float
    pool_usage: float
    metrics: dict[str, float]


def _document(server: Server, num_tokens: int) -> str:
    """The first ``num_tokens`` tokens of the sample text, as text."""
    text = SAMPLE_TEXT.read_text(encoding="utf-8")
    cut = text[: num_tokens * 6]
    reply = httpx.post(
        f"{server.url}/tokenize", json={"model": server.model, "prompt": cut}, timeout=60
    )
    tokens = reply.raise_for_status().json()["tokens"][:num_tokens]
    reply = httpx.post(
        f"{server.url}/detokenize", json={"model": server.model, "tokens": tokens}, timeout=60
    )
    return str(reply.raise_for_status().json()["prompt"])


def _ask(server: Server, prompt: str, max_tokens: int, salt: str, **xargs: object) -> Answer:
    """Stream one chat answer; pool usage is read when the first tokens have come."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    before = server.metrics()
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": salt, "vllm_xargs": xargs},
    )
    pieces: list[str] = []
    times: list[float] = []
    pool_usage, prompt_tokens = 0.0, 0
    for event in stream:
        if event.usage is not None:
            prompt_tokens = event.usage.prompt_tokens
        if not event.choices or not event.choices[0].delta.content:
            continue
        times.append(time.perf_counter())
        pieces.append(event.choices[0].delta.content)
        if len(times) == _SETTLED:
            pool_usage = server.metrics()["vllm:kv_cache_usage_perc"]
    steps = [b - a for a, b in itertools.pairwise(times[1:])]
    later = server.metrics()
    return Answer(
        text="".join(pieces),
        prompt_tokens=prompt_tokens,
        ttft_seconds=times[0] - started,
        tpot_seconds=statistics.median(steps),
        pool_usage=pool_usage,
        metrics={name: value - before.get(name, 0.0) for name, value in later.items()},
    )


def _table(packed: Answer, plain: Answer, method: str) -> Table:
    table = Table("", f"--kv-compression={method}", "off", title="the same request twice")
    entries = packed.metrics[f"{_PREFIX}entries_kept_total"]
    tokens = packed.metrics[f"{_PREFIX}prompt_tokens_in_total"]
    freed = packed.metrics[f"{_PREFIX}blocks_freed_total"]
    blocks = math.ceil(packed.prompt_tokens / _BLOCK_SIZE)
    raw = packed.prompt_tokens - tokens
    rows = [
        ("prompt tokens", f"{packed.prompt_tokens}", f"{plain.prompt_tokens}"),
        ("entries kept", f"{entries:.0f} + {raw:.0f} raw", f"{plain.prompt_tokens}"),
        ("blocks after prefill", f"{blocks}", f"{blocks}"),
        ("blocks while answering", f"{blocks - freed:.0f}", f"{blocks}"),
        ("pool usage while answering", f"{packed.pool_usage:.1%}", f"{plain.pool_usage:.1%}"),
        ("time to first token", f"{packed.ttft_seconds:.2f} s", f"{plain.ttft_seconds:.2f} s"),
        (
            "time per output token",
            f"{packed.tpot_seconds * 1e3:.1f} ms",
            f"{plain.tpot_seconds * 1e3:.1f} ms",
        ),
        (
            "compression took",
            f"{packed.metrics[f'{_PREFIX}compression_seconds_sum'] * 1e3:.0f} ms",
            "",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _run(model: Path, method: str, num_tokens: int, max_tokens: int, log: Path) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def stage(text: str) -> None:
            for task in progress.tasks:
                progress.update(task.id, total=1, completed=1)
            progress.add_task(text, total=None)
            if not console.is_terminal:
                console.print(text)

        stage(f"starting vllm serve --kv-compression={method} (log: {log})")
        flags = (
            f"--kv-compression={method}",
            *("--block-size", str(_BLOCK_SIZE)),
            *("--max-model-len", "8192", "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(1 << 29)),
        )
        with serve(model, *flags, log=log, environment=cpu_environment()) as server:
            stage("warming up")
            _ask(server, "Say hello.", 8, "warm-up")
            prompt = _document(server, num_tokens) + _QUESTION
            stage(f"asking about a document of {num_tokens} tokens, compressed")
            packed = _ask(server, prompt, max_tokens, "packed")
            stage("the same request, compression off")
            plain = _ask(server, prompt, max_tokens, "plain", kv_compression="none")
            stage("stopping the server")
    console.print(f"\n[bold]question[/bold]{_QUESTION}\n")
    console.print("[bold]answer, compressed[/bold]")
    console.print(packed.text.strip() + "\n", markup=False)
    console.print("[bold]answer, compression off[/bold]")
    console.print(plain.text.strip() + "\n", markup=False)
    console.print(_table(packed, plain, method))
    console.print(
        "Both CPU cores, greedy, SmolLM2-135M unless KVC_MODEL says otherwise: the answers of a "
        "model this small are weak with and without compression; the numbers are the point."
    )


def main(
    model: Annotated[Path, typer.Option(envvar="KVC_MODEL", help="Model folder.")],
    method: Annotated[str, typer.Option(help="Compression method.")] = "semanticache",
    num_tokens: Annotated[int, typer.Option(help="Tokens of the document.")] = 6000,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 96,
    log: Annotated[Path | None, typer.Option(help="File for the server's output.")] = None,
) -> None:
    """Ask one question about a long document, with and without compression."""
    log = log or Path(tempfile.gettempdir()) / "vllm-kvcompress-demo.log"
    try:
        with terminate_as_interrupt():
            _run(model, method, num_tokens, max_tokens, log)
    except KeyboardInterrupt:
        console.print("interrupted; the server has been stopped")
        sys.exit(130)
    except ServerError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
