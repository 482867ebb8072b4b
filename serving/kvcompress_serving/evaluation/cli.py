"""``vllm-kvcompress eval``: the command line of the evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Quality of compression methods, the full cache beside them: fidelity and retrieval.",
)

Rows = Annotated[
    list[str],
    typer.Option(
        "--row",
        help="METHOD or METHOD:key=value,...; NAME=METHOD:... names it. Beside the methods: "
        "'full', 'window' (first and most recent tokens; keep=SHARE). Repeatable.",
    ),
]
Tasks = Annotated[
    list[str], typer.Option("--task", help="Retrieval task; 'ruler' for all. Repeatable.")
]
Lengths = Annotated[
    list[int], typer.Option("--length", help="Tokens of a retrieval prompt. Repeatable.")
]
Samples = Annotated[int, typer.Option(min=1, help="Samples of each task and length.")]
Haystack = Annotated[
    Path | None, typer.Option(help="Text file for haystacks; the shipped prose when not given.")
]
Seed = Annotated[int, typer.Option(help="Seed of tasks and statistics.")]
Out = Annotated[Path, typer.Option(help="JSON file to write.")]
MarkdownOut = Annotated[Path | None, typer.Option("--markdown", help="Markdown file to write.")]
HtmlOut = Annotated[Path | None, typer.Option("--html", help="HTML page to write.")]

console = Console()


_OPTIONAL = ("httpx", "jinja2", "matplotlib")


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Show what the user can mend as one line, and end with status 2."""
    from kvcompress_serving.evaluation.results import EndpointError

    try:
        yield
    except (ValueError, EndpointError) as error:
        message = str(error)
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL:
            raise
        message = f"{error.name} is missing: pip install 'vllm-kvcompress[bench]'"
    else:
        return
    console.print(f"error: {message}", style="red", markup=False, highlight=False)
    raise typer.Exit(2)


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar; called once for each step. Lines instead of a bar where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    if not console.is_terminal:
        console.print(f"{name}: {total} steps")
    with bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.update(task, advance=1)


def _task_names(tasks: list[str]) -> list[str]:
    from kvcompress_serving.evaluation.tasks import TASKS

    named = [name for task in tasks for name in (TASKS if task == "ruler" else (task,))]
    if wrong := [name for name in named if name not in TASKS]:
        raise ValueError(f"unknown task {wrong}; expected 'ruler' or one of {', '.join(TASKS)}")
    return list(dict.fromkeys(named))


def _orders(texts: list[str]) -> list[Any]:
    from kvcompress_serving.evaluation.prompts import ORDERS

    if wrong := [text for text in texts if text not in ORDERS]:
        raise ValueError(f"unknown place of the question {wrong}; expected {', '.join(ORDERS)}")
    return texts


def _read_haystack(path: Path | None) -> str | None:
    from kvcompress_serving.evaluation.texts import read_sources

    return None if path is None else read_sources([str(path)])[0].text


def _write(
    run: Any, out: Path | None, markdown: Path | None, html: Path | None, reference: str | None
) -> None:
    from kvcompress_serving.evaluation import report

    tables = report.tables(run, reference=reference)
    written = []
    if out is not None:
        run.save(out)
        written.append(out)
    for path, render in ((markdown, report.markdown), (html, report.html)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(run, reference), encoding="utf-8")
            written.append(path)
    _show(tables)
    if written:
        console.print(f"written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)


def _show(tables: list[Any]) -> None:
    for item in tables:
        table = Table(*item.columns, title=item.title)
        for row in item.rows:
            table.add_row(*row)
        console.print(table)


def _flags(context: typer.Context) -> dict[str, Any]:
    """The command's options, paths as their last part."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return value.name
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    return {"command": context.info_name, **{k: plain(v) for k, v in context.params.items()}}


def _evaluate_here(engine: Any, calls: list[Any], rows: list[Any]) -> list[Any]:
    """The measurements of `over_ray.Call`s, in this process."""
    from kvcompress_serving.evaluation.over_ray import EVALUATIONS

    measurements = []
    for call in calls:
        with _progress(call.name, call.num_prompts * len(rows)) as step:
            measurements += EVALUATIONS[call.name](engine, on_step=step, **call.arguments)
    return measurements


def _evaluate_over_ray(
    address: str, num_workers: int | None, model: Path, options: Any, calls: list[Any]
) -> list[Any]:
    from kvcompress_serving.evaluation import over_ray
    from vllm_kvcompress import cluster

    with cluster.connected(address):
        workers = num_workers or cluster.num_machines()
        total = sum(call.num_prompts for call in calls)
        with _progress(f"prompts over {workers} workers", total) as step:

            def on_prompts(_call: Any, count: int) -> None:
                for _ in range(count):
                    step()

            return over_ray.evaluate(
                *(model.expanduser().resolve(), options, calls, workers), on_prompts
            )


@app.command()
def offline(
    context: typer.Context,
    model: Annotated[Path, typer.Option(envvar="KVC_MODEL", help="Model folder.")],
    row: Rows,
    out: Out = Path("eval.json"),
    markdown: MarkdownOut = None,
    html: HtmlOut = None,
    fidelity: Annotated[bool, typer.Option(help="Measure fidelity.")] = True,
    text: Annotated[
        list[str],
        typer.Option(
            help="PATH or KIND=PATH of fidelity texts, file or folder; prose and code when not "
            "given. Repeatable."
        ),
    ] = [],  # noqa: B006 - typer reads it, nobody changes it
    documents: Annotated[int, typer.Option(min=1, help="Stretches of each kind of text.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a fidelity prompt.")] = 1536,
    continuation_tokens: Annotated[int, typer.Option(min=2, help="Tokens forced after it.")] = 128,
    greedy_tokens: Annotated[
        int, typer.Option(min=0, help="Greedy tokens compared; 0: none.")
    ] = 64,
    task: Tasks = [],  # noqa: B006
    length: Lengths = [1024],  # noqa: B006
    samples: Samples = 10,
    order: Annotated[
        list[str],
        typer.Option(
            help="Where the question stands: after (compression cannot know it), before (in front "
            "of the context), known (compressed with it). Repeatable."
        ),
    ] = ["after"],  # noqa: B006
    haystack: Haystack = None,
    two_questions: Annotated[bool, typer.Option(help="Ask two questions of a context.")] = False,
    generate: Annotated[bool, typer.Option(help="Also score generated answers; slow.")] = False,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template in tasks.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    block_size: Annotated[int, typer.Option(min=1, help="Block size of the engine.")] = 32,
    seed: Seed = 0,
    ray: Annotated[
        str | None,
        typer.Option(help="Ray cluster that shares the prompts: HOST:PORT, 'auto', 'local'."),
    ] = None,
    ray_workers: Annotated[
        int | None, typer.Option(min=1, help="Its processes; one for each machine by default.")
    ] = None,
) -> None:
    """Evaluate methods on a Hugging Face model in this process, without a server."""
    with _user_errors():
        from kvcompress_serving.evaluation import offline as offline_module
        from kvcompress_serving.evaluation import over_ray, plots, provenance, texts
        from kvcompress_serving.evaluation.results import Run
        from kvcompress_serving.evaluation.rows import rows_of

        if html is not None:
            plots.require()
        names, orders = _task_names(task), _orders(order)
        if not fidelity and not names:
            raise ValueError("nothing to measure: give --task, or leave out --no-fidelity")
        rows = rows_of(list(row))
        sources = texts.read_sources(text) if text else texts.default_sources()
        options: dict[str, Any] = {
            "dtype": offline_module.data_type(dtype),
            "block_size": block_size,
        }
        calls = []
        if fidelity:
            arguments = {
                "rows": list(row),
                "documents": sources,
                "prompt_tokens": prompt_tokens,
                "continuation_tokens": continuation_tokens,
                "greedy_tokens": greedy_tokens,
                "per_kind": documents,
            }
            kinds = len({source.kind for source in sources})
            calls.append(over_ray.Call("fidelity", kinds * documents, arguments))
        if names:
            arguments = {
                "rows": list(row),
                "tasks": names,
                "lengths": length,
                "num_samples": samples,
                "orders": orders,
                "text": _read_haystack(haystack),
                "two_questions": two_questions,
                "generate": generate,
                "chat": chat,
                "seed": seed,
            }
            total = len(names) * len(length) * samples * len(orders)
            calls.append(over_ray.Call("retrieval", total, arguments))
        if ray is None:
            measurements = _evaluate_here(offline_module.Offline(model, **options), calls, rows)
        else:
            measurements = _evaluate_over_ray(ray, ray_workers, model, options, calls)
        origin = provenance.collect(model.expanduser(), seed, _flags(context))
        settings = {item.name: dict(item.settings) for item in rows}
        _write(Run(origin, settings, measurements), out, markdown, html, None)


@app.command()
def server(
    context: typer.Context,
    row: Rows,
    task: Tasks,
    url: Annotated[str, typer.Option(help="Root of a running server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Served model name.")] = None,
    out: Out = Path("eval.json"),
    markdown: MarkdownOut = None,
    html: HtmlOut = None,
    length: Lengths = [1024],  # noqa: B006
    samples: Samples = 10,
    order: Annotated[
        list[str], typer.Option(help="Where the question stands: known or before. Repeatable.")
    ] = ["known"],  # noqa: B006
    haystack: Haystack = None,
    seed: Seed = 0,
) -> None:
    """Evaluate generated answers of a running server that nobody else uses meanwhile.

    A row is what the requests carry: METHOD:keep=SHARE,threshold=NUMBER of the server's own method.
    """
    with _user_errors():
        from kvcompress_serving.evaluation import endpoint as endpoint_module
        from kvcompress_serving.evaluation import plots, provenance
        from kvcompress_serving.evaluation.results import Run

        if html is not None:
            plots.require()
        names, orders = _task_names(task), _orders(order)
        rows = endpoint_module.rows_of(row)
        endpoint = endpoint_module.Endpoint(url, model)
        total = len(names) * len(length) * samples * len(orders) * len(rows)
        with _progress("retrieval", total) as step:
            measurements = endpoint_module.evaluate(
                endpoint,
                rows,
                names,
                lengths=length,
                num_samples=samples,
                orders=orders,
                text=_read_haystack(haystack),
                seed=seed,
                on_step=step,
            )
        origin = provenance.collect(None, seed, _flags(context))
        origin["served_model"] = endpoint.model
        settings = {item.name: dict(item.xargs) for item in rows}
        _write(Run(origin, settings, measurements), out, markdown, html, None)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="JSON file of a run.")],
    markdown: MarkdownOut = None,
    html: HtmlOut = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Row to compare the others with; the full cache if not given."),
    ] = None,
) -> None:
    """Show a run again, and write its report."""
    with _user_errors():
        from kvcompress_serving.evaluation import plots
        from kvcompress_serving.evaluation.results import Run

        if html is not None:
            plots.require()
        _write(Run.load(results), None, markdown, html, reference)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="JSON file of a run.")],
    second: Annotated[Path, typer.Argument(help="JSON file of another.")],
    markdown: MarkdownOut = None,
) -> None:
    """Second run minus first, paired by prompt; rows are matched by name."""
    with _user_errors():
        from kvcompress_serving.evaluation import report as report_module
        from kvcompress_serving.evaluation.results import Run

        runs = Run.load(first), Run.load(second)
        _show(report_module.comparison(*runs))
        if markdown is not None:
            markdown.write_text(report_module.comparison_markdown(*runs), encoding="utf-8")
            console.print(f"written: {markdown}", markup=False)


def main() -> None:
    app(prog_name="vllm-kvcompress eval")
