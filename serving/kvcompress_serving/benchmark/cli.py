"""``vllm-kvcompress bench``: the command line of the benchmarks."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvcompress_serving.benchmark.plan import Mode

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Speed and memory of compression methods, stock vLLM beside them.",
)

_HELP = {
    Mode.THROUGHPUT: "Output tokens per second as the load rises, in a tight and an ample pool.",
    Mode.LATENCY: "Time to first token and per output token at a fixed number of requests.",
    Mode.MEMORY: "How many requests of a given length run at once in the same pool.",
    Mode.ABLATION: "Speed and cache size over settings of a method (--vary). For quality: eval.",
    Mode.OFFLINE: "`vllm bench throughput`: all prompts at once, without a server.",
}

console = Console()


@contextlib.contextmanager
def _ends() -> Iterator[None]:
    """What the user can mend as one line and status 2; an interrupt as status 130."""
    from kvcompress_serving.benchmark.load import LoadError
    from kvcompress_serving.processes import terminate_as_interrupt
    from kvcompress_serving.server import ServerError

    try:
        with terminate_as_interrupt():
            yield
    except (ValueError, LoadError, ServerError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("interrupted; servers and load generators have been stopped, nothing written")
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar; called with what comes next. Lines instead of a bar where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
    started = False
    with bar:
        task = bar.add_task("", total=total)

        def step(text: str) -> None:
            nonlocal started
            bar.update(task, description=text, advance=int(started))
            started = True
            if not console.is_terminal:
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield step
        bar.update(task, completed=total)


def _flags(context: typer.Context) -> dict[str, Any]:
    """The command's options, paths as their last part."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return value.name
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    shown = {key: plain(value) for key, value in context.params.items()}
    shown["model"] = Path(shown["model"]).name
    return {"command": context.info_name, **shown}


def _server_flags(text: str) -> list[str]:
    flags = shlex.split(text)
    taken = ("--kv-compression", "--kv-cache-memory-bytes", "--max-model-len", "--max-num-seqs")
    if wrong := [flag for flag in flags if flag.startswith((*taken, "--additional-config"))]:
        raise ValueError(
            f"--server-flags cannot have {', '.join(wrong)}: rows and sizes are the same for all "
            "but for what --row says; use --row, --pool-bytes, --prompt-tokens, --concurrency"
        )
    return flags


def _places(out: Path, markdown: Path | None, mode: Mode) -> tuple[Path, Path | None]:
    """JSON and Markdown file; a folder gets both."""
    if out.is_dir():
        return out / f"{mode.value}.json", markdown or out / f"{mode.value}.md"
    return out, markdown


def _show(run: Any) -> None:
    from kvcompress_serving.benchmark import report

    for item in report.by_quantity(run):
        table = Table(*item.columns, title=item.title)
        for row in item.rows:
            table.add_row(*row)
        console.print(table)
    for problem in run.problems:
        console.print(f"failed: {problem}", style="red", markup=False, highlight=False)


def _write(run: Any, out: Path | None, markdown: Path | None, with_plots: bool) -> None:
    from kvcompress_serving.benchmark import plots, report

    written: list[Path] = []
    if out is not None:
        run.save(out)
        written.append(out)
    pictures: list[Path] = []
    if with_plots:
        beside = markdown or out
        assert beside is not None
        pictures = plots.save(run, beside.parent, beside.stem)
        written += pictures
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        shown = [path.name for path in pictures if path.suffix == ".svg"]
        markdown.write_text(report.markdown(run, shown), encoding="utf-8")
        written.append(markdown)
    _show(run)
    if written:
        console.print(f"written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)


def _command(mode: Mode) -> Callable[..., None]:
    def command(
        context: typer.Context,
        model: Annotated[
            str, typer.Option(envvar="KVC_MODEL", help="Model folder, or a name on the hub.")
        ],
        row: Annotated[
            list[str],
            typer.Option(
                help="METHOD or METHOD:key=value,...; NAME=METHOD:... names it; block_size=N "
                "may be among the keys. 'stock' and 'none' are always there. Repeatable."
            ),
        ] = ["semanticache"],  # noqa: B006 - typer reads it, nobody changes it
        vary: Annotated[
            list[str],
            typer.Option(help="ablation: key=value|value|... of the one --row. Repeatable."),
        ] = [],  # noqa: B006
        prompts: Annotated[
            Path | None,
            typer.Option(
                help="Text file or folder to cut prompts from; .jsonl with a prompt a line; .json "
                "in ShareGPT's format; 'random'. The shipped prose when not given."
            ),
        ] = None,
        prompt_tokens: Annotated[
            list[int], typer.Option(min=1, help="Tokens of a prompt. Repeatable.")
        ] = [],  # noqa: B006
        output_tokens: Annotated[
            int | None, typer.Option(min=2, help="Tokens of each answer.")
        ] = None,
        concurrency: Annotated[
            list[int], typer.Option(min=1, help="Requests open at a time. Repeatable.")
        ] = [],  # noqa: B006
        requests: Annotated[int | None, typer.Option(min=1, help="Requests of each load.")] = None,
        pool_prompts: Annotated[
            list[float],
            typer.Option(min=0, help="Size of the pool in longest requests; 0: ample. Repeatable."),
        ] = [],  # noqa: B006
        pool_bytes: Annotated[
            int | None, typer.Option(min=1, help="Size of the pool, in place of that.")
        ] = None,
        rounds: Annotated[
            int, typer.Option(min=1, help="Repetitions of everything; one cannot tell noise.")
        ] = 3,
        expect_compression: Annotated[
            str, typer.Option(help="required, forbidden or any; else the run fails.")
        ] = "any",
        server_flags: Annotated[
            str, typer.Option(help="Further flags of `vllm serve` for every row, in quotes.")
        ] = "",
        cores: Annotated[
            int | None, typer.Option(min=1, help="Cores for vLLM's CPU build; all by default.")
        ] = None,
        out: Annotated[
            Path,
            typer.Option(help="JSON file to write, or a folder for MODE.json, MODE.md and plots."),
        ] = Path("bench.json"),
        markdown: Annotated[
            Path | None, typer.Option("--markdown", help="Markdown file to write.")
        ] = None,
        plots: Annotated[
            bool, typer.Option(help="PNG and SVG beside the Markdown or JSON file.")
        ] = True,
        logs: Annotated[
            Path | None, typer.Option(help="Folder to keep the servers' output in.")
        ] = None,
        seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
        ray: Annotated[
            str | None,
            typer.Option(
                help="Ray cluster over whose machines the rounds are spread, one at a time on "
                "each: HOST:PORT, 'auto', 'local'."
            ),
        ] = None,
    ) -> None:
        with _ends():
            from kvcompress_serving.benchmark import expectations, over_ray, plan, provenance, rows
            from kvcompress_serving.benchmark import plots as plotting
            from kvcompress_serving.benchmark import prompts as prompting
            from kvcompress_serving.benchmark.results import Run
            from kvcompress_serving.benchmark.runner import Runner, num_steps
            from vllm_kvcompress import cluster

            if expect_compression not in list(expectations.Expected):
                raise ValueError(
                    f"--expect-compression {expect_compression}: expected one of "
                    f"{', '.join(expectations.Expected)}"
                )
            expected = expectations.Expected(expect_compression)
            json_file, markdown_file = _places(out, markdown, mode)
            if plots:
                plotting.require()
            if mode is Mode.ABLATION:
                if len(row) != 1:
                    raise ValueError("ablation varies one --row")
                compared = rows.varied(row[0], vary)
            elif vary:
                raise ValueError("--vary belongs to ablation")
            else:
                compared = rows.rows_of(row)
            expectations.check_rows(expected, compared)
            sizes = plan.Sizes(
                *(tuple(concurrency), tuple(prompt_tokens), output_tokens, requests),
                *(tuple(pool_prompts), pool_bytes),
            )
            sessions = plan.make(mode, model, sizes)
            source = prompting.read(prompts)
            more = _server_flags(server_flags)
            started = os.getloadavg()[0]
            make = functools.partial(
                Runner,
                model,
                compared,
                sessions,
                source,
                rounds=rounds,
                seed=seed,
                flags=more,
                cores=cores,
                logs=logs,
                offline=mode is Mode.OFFLINE,
            )
            machines: list[str] = []
            if ray is None:
                with _progress(num_steps(sessions, compared, rounds)) as step:
                    runner = make(on_step=step)
                    measured, dropped = runner.run(), runner.dropped
            else:
                with cluster.connected(ray), _progress(rounds) as step:
                    measured, dropped, machines = over_ray.run(make, rounds, step)
            origin = provenance.collect(model, seed, _flags(context))
            origin["load_average"] = [round(started, 1), round(os.getloadavg()[0], 1)]
            origin["prompts"] = {"source": source.name, "too_long_and_left_out": dropped}
            if machines:
                origin["machines"] = machines
            by_name = {item.name: item for item in compared}
            problems = expectations.check(expected, by_name, measured)
            described = {name: item.described() for name, item in by_name.items()}
            run = Run(mode.value, origin, described, measured, problems)
            _write(run, json_file, markdown_file, plots)
        raise typer.Exit(1 if run.problems else 0)

    return command


for _mode in Mode:
    app.command(_mode.value, help=_HELP[_mode])(_command(_mode))


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="JSON file of a run.")],
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Markdown file to write, plots beside it.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="PNG and SVG beside the Markdown file.")] = True,
) -> None:
    """Show a run again, and write its report."""
    with _ends():
        from kvcompress_serving.benchmark import plots as plotting
        from kvcompress_serving.benchmark.results import Run

        wanted = plots and markdown is not None
        if wanted:
            plotting.require()
        _write(Run.load(results), None, markdown, wanted)


def main() -> None:
    app(prog_name="vllm-kvcompress bench")
