"""Command line ``vllm-kvcompress``: doctor, verify, methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_kvcompress.config import OPTION_KEYS, CompressionConfig, method_names, parse_config

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="KV-cache compression for vLLM: check this machine, verify the engine, list the methods.",
)


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
def methods() -> None:
    """List the methods, their settings and the per-request keys."""
    from vllm_kvcompress.methods.registry import create_method

    console = Console()
    table = Table("method", "what it does", title="--kv-compression METHOD")
    for name in method_names():
        method = create_method(parse_config(name))
        table.add_row(name, (type(method).__doc__ or "").strip().splitlines()[0])
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


def main() -> None:
    app()
