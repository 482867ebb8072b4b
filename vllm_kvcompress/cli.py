"""Command line ``vllm-kvcompress``: doctor, verify, calibrate, train, methods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from vllm_kvcompress.config import OPTION_KEYS, CompressionConfig, method_names, parse_config

_COMMANDS = "vllm_kvcompress.commands"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="KV-cache compression for vLLM: check this machine, verify the engine, list the methods.",
)


Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Text files or folders, as PATH or PATH=SHARE, like what is served; a mix of "
        "prose, code and languages when not given."
    ),
]


@contextmanager
def _user_errors(console: Console) -> Iterator[None]:
    """Say a ValueError in one line and exit with status 1."""
    try:
        yield
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None


@app.command()
def doctor() -> None:
    """Check versions, vLLM's extension points, compiler and kernels; exit 1 if one fails."""
    from vllm_kvcompress.engine.doctor import examine

    console = Console()
    table = Table("check", "found", "", title="vllm-kvcompress doctor")
    findings = list(examine())
    for finding in findings:
        mark = "[red]problem[/red]" if finding.remedy else "[green]ok[/green]"
        table.add_row(finding.name, finding.found, mark)
    console.print(table)
    problems = [finding for finding in findings if finding.remedy]
    for finding in problems:
        console.print(f"{finding.name}: {finding.remedy}", style="red", markup=False)
    raise typer.Exit(1 if problems else 0)


@app.command()
def verify(
    model: Annotated[
        Path | None, typer.Option(help="Model folder; the demo's SmolLM2-135M when not given.")
    ] = None,
    method: Annotated[str, typer.Option(help="Compression method.")] = "semanticache",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line.")
    ] = False,
) -> None:
    """Run one long prompt through the real engine and check that compression does what it says."""
    if method not in method_names():
        raise typer.BadParameter(
            f"unknown method {method!r}; expected one of {', '.join(method_names())}"
        )
    from vllm_kvcompress.engine.verify import run
    from vllm_kvcompress.models import model_path

    folder = model or model_path()
    result = run(folder, method)
    console = Console()
    if as_json:
        typer.echo(json.dumps(result))
    else:
        table = Table("quantity", "value", title=f"vllm-kvcompress verify: {method}")
        for key, value in result.items():
            if key != "failures":
                table.add_row(key, str(value))
        console.print(table)
        for failure in result["failures"]:
            console.print(f"failed: {failure}", style="red", markup=False)
    raise typer.Exit(0 if result["ok"] else 1)


@app.command()
def calibrate(
    model: Annotated[str, typer.Option(help="Model folder, or a name in the Hugging Face cache.")],
    out: Annotated[Path, typer.Option(help="Folder for the artifact, its report and statistics.")],
    data: Data = None,
    bits: Annotated[float, typer.Option(help="Mean bits of a number that it is made for.")] = 2.5,
    preset: Annotated[
        str, typer.Option(help="best; or paper, the published recipe, to be evaluated only.")
    ] = "best",
    key_space: Annotated[
        str, typer.Option(help="post_rope; or pre_rope, keys before RoPE, to be evaluated only.")
    ] = "post_rope",
    group_size: Annotated[
        list[int] | None,
        typer.Option(help="KV heads that share a transform; several times for several sizes."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of text that are looked at.")] = 20_480,
    plots: Annotated[bool, typer.Option(help="Draw the report's plots (matplotlib).")] = True,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster that shares the pass over the text: HOST:PORT, 'auto', 'local'."
        ),
    ] = None,
    ray_workers: Annotated[
        int | None, typer.Option(min=1, help="Its processes; one for each machine by default.")
    ] = None,
) -> None:
    """Make the artifact that the method aatc needs for a model; goes on where it stopped."""
    from vllm_kvcompress import cluster
    from vllm_kvcompress.calibration.run import Settings
    from vllm_kvcompress.calibration.run import calibrate as run
    from vllm_kvcompress.calibration.texts import default_sources, read_sources

    settings = Settings(
        bits=bits,
        preset=preset,
        key_space=key_space,
        group_sizes=tuple(group_size or ()),
        num_tokens=tokens,
    )
    console = Console()
    with _user_errors(console):
        sources = read_sources(data) if data else default_sources()
        with cluster.connected(ray) if ray else nullcontext():
            workers = (ray_workers or cluster.num_machines()) if ray else 0
            file = run(
                *(model, out, sources, settings),
                console=console,
                plots=plots,
                ray_workers=workers,
            )
    console.print(f"artifact: {file}; report: {out / 'report.md'}", markup=False)


train_app = typer.Typer(no_args_is_help=True, help="Train what a method has to learn.")
app.add_typer(train_app, name="train")


@train_app.command()
def metasoft(
    model: Annotated[str, typer.Option(help="Model folder, or a name in the Hugging Face cache.")],
    out: Annotated[
        Path, typer.Option(help="Folder for the artifact, its report, samples and checkpoints.")
    ],
    data: Data = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="static, dynamic; several times for both.")
    ] = None,
    default: Annotated[
        str | None,
        typer.Option(
            help="Kind that is served unless asked otherwise; that with the higher hit rate on "
            "held-out prompts when not given."
        ),
    ] = None,
    num_tokens: Annotated[int, typer.Option("--k", help="Soft tokens.")] = 32,
    rows: Annotated[int, typer.Option(help="Rows of the library of dynamic tokens.")] = 512,
    selection_width: Annotated[int, typer.Option(help="Width in which rows are chosen.")] = 32,
    pieces: Annotated[int, typer.Option(help="Pieces of text, validation included.")] = 120,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest prompt.")] = 256,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 768,
    cuts: Annotated[int, typer.Option(help="Prompts made of a piece of plain text.")] = 4,
    responses: Annotated[
        str,
        typer.Option(help="text: the text's own continuation; or model: the model's own answers."),
    ] = "text",
    responses_per_prompt: Annotated[
        int, typer.Option(help="The model's answers to each prompt.")
    ] = 1,
    response_tokens: Annotated[int, typer.Option(help="Tokens of a response.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of the model's own answers.")] = 0.7,
    epochs: Annotated[int, typer.Option(help="Epochs in which everything is learned.")] = 4,
    selector_epochs: Annotated[
        int, typer.Option(help="Further epochs of dynamic tokens with the library frozen.")
    ] = 1,
    batch_size: Annotated[int, typer.Option(help="Prompts of a step, over all processes.")] = 4,
    learning_rate: Annotated[
        float, typer.Option(help="Relative to the size of what is learned.")
    ] = 0.1,
    loss: Annotated[str, typer.Option(help="cross_entropy, or mse, the published one.")] = (
        "cross_entropy"
    ),
    window: Annotated[int, typer.Option(help="Recent tokens that stay raw when served.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of the model: float32, bfloat16, float16.")] = (
        "float32"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    store: Annotated[
        bool, typer.Option(help="Keep keys and values on disk; else compute them at every step.")
    ] = True,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoints in the folder.")] = False,
    plots: Annotated[bool, typer.Option(help="Draw the report's plot (matplotlib).")] = True,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
) -> None:
    """Train the soft tokens that the method metasoft needs for a model.

    Several processes share the work, on a folder that all of them see: torchrun
    --nproc-per-node 8 --no-python vllm-kvcompress train metasoft, with the same options.
    """
    from vllm_kvcompress.calibration.texts import default_sources, read_sources
    from vllm_kvcompress.soft_tokens.collect import Responses
    from vllm_kvcompress.soft_tokens.model import KINDS
    from vllm_kvcompress.soft_tokens.prompts import Lengths
    from vllm_kvcompress.soft_tokens.run import train
    from vllm_kvcompress.soft_tokens.settings import Optimization, Settings

    settings = Settings(
        kinds=cast(Any, tuple(kind or KINDS)),
        num_tokens=num_tokens,
        num_rows=rows,
        selection_width=selection_width,
        pieces=pieces,
        lengths=Lengths(shortest, longest, cuts, response_tokens),
        responses=Responses(
            source=cast(Any, responses),
            per_prompt=responses_per_prompt,
            temperature=temperature,
            seed=seed,
        ),
        optimization=Optimization(
            epochs=epochs,
            selector_epochs=selector_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            loss=cast(Any, loss),
            seed=seed,
        ),
        window=window,
        dtype=dtype,
        store=store,
        default=cast(Any, default),
    )
    console = Console()
    with _user_errors(console):
        sources = read_sources(data) if data else default_sources()
        file = train(
            model,
            out,
            sources,
            settings,
            device=device,
            console=console,
            resume=resume,
            plots=plots,
        )
    console.print(f"artifact: {file}; report: {out / 'report.md'}", markup=False)


@app.command()
def methods() -> None:
    """List the methods, their settings and the per-request keys."""
    from vllm_kvcompress.methods.registry import create_method

    console = Console()
    table = Table(
        "method",
        "what it does",
        "what is left",
        "needs",
        "settings",
        title="--kv-compression METHOD",
    )
    for name in method_names():
        method = create_method(parse_config(name))
        table.add_row(
            name,
            (type(method).__doc__ or "").strip().splitlines()[0],
            method.size,
            ", ".join(sorted(signal.value for signal in method.needs)),
            ", ".join(method.settings),
        )
    console.print(table)
    table = Table("key", "default", "meaning", title="--kv-compression-config JSON")
    for name, field in CompressionConfig.model_fields.items():
        if name != "method":
            table.add_row(name, str(field.default), field.description)
    console.print(table)
    table = Table("key", "type", title="per request, in vllm_xargs")
    for name, types in OPTION_KEYS.items():
        table.add_row(name, "text" if str in types else "number")
    console.print(table)


def _add_commands() -> None:
    """Command groups of the packages above, which this one may not import."""
    for point in sorted(entry_points(group=_COMMANDS), key=lambda point: point.name):
        app.add_typer(point.load(), name=point.name)


def main() -> None:
    _add_commands()
    app()
