"""Command line of the pictures of one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Pictures of what a method does to a prompt."
)
console = Console()


@app.callback()
def _group() -> None:
    """Keep the command's name even where it is the only one."""


@app.command()
def prompt(
    model: Annotated[Path, typer.Option(envvar="KVC_MODEL", help="Model folder.")],
    row: Annotated[
        str, typer.Option(help="METHOD or METHOD:key=value,... as in the evaluation.")
    ] = "semanticache",
    text: Annotated[
        Path | None, typer.Option(help="Text file; the shipped prose when not given.")
    ] = None,
    num_tokens: Annotated[int, typer.Option(min=1, help="Tokens of it.")] = 1024,
    page: Annotated[Path | None, typer.Option(help="HTML page of merged tokens.")] = None,
    heatmap: Annotated[
        Path | None, typer.Option(help="Heat map of layers and heads, .png or .svg.")
    ] = None,
) -> None:
    """Show what a method makes of one prompt: a heat map of layers and heads, a page of tokens."""
    from kvcompress_serving import SAMPLE_TEXT
    from kvcompress_serving.evaluation.offline import Offline
    from kvcompress_serving.evaluation.rows import Row
    from kvcompress_serving.plots import heatmap as heatmaps
    from kvcompress_serving.plots import membership
    from kvcompress_serving.plots import page as pages

    try:
        if page is None and heatmap is None:
            raise ValueError("nothing to write: give --page, --heatmap or both")
        if text is not None and not text.is_file():
            raise ValueError(f"no text file {text}")
        shown = Row.parse(row)
        with console.status("loading the model"):
            engine = Offline(model)
        with console.status(f"compressing {num_tokens} tokens"):
            body = (text or SAMPLE_TEXT).read_text(encoding="utf-8")
            compressed = membership.compress(engine, shown, body, num_tokens)
        if heatmap is not None:
            heatmaps.save(compressed, model.name, heatmap)
            console.print(f"written: {heatmap}", markup=False, soft_wrap=True)
        if page is not None:
            rendered = pages.html(compressed, model.name)
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(rendered, encoding="utf-8")
            console.print(f"written: {page}", markup=False, soft_wrap=True)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    kept = compressed.kept
    console.print(
        f"{compressed.method}: {kept.mean():.1%} of {compressed.gap_end} tokens kept, "
        f"{kept.min():.0%} to {kept.max():.0%} by layer and head"
    )


def main() -> None:
    app(prog_name="vllm-kvcompress plots")
