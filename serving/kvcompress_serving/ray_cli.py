"""``vllm-kvcompress ray``: replicas of a server over the machines of a Ray cluster."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_kvcompress.cluster import LOCAL, connected

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Servers over the machines of a Ray cluster. Needs vllm-kvcompress[ray].",
)
console = Console()


@app.callback()
def _group() -> None:
    """Keeps `serve` a command of its own while it is the only one."""


@app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Model folder, the same path on every machine, or a name.")
    ],
    address: Annotated[
        str, typer.Option(help="Ray cluster: HOST:PORT, 'auto', or 'local' for one of its own.")
    ] = LOCAL,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas; the fewest if it scales.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Most replicas; they follow the load up to it.")
    ] = None,
    target_requests: Annotated[
        float, typer.Option(help="Requests of a replica above which another is added.")
    ] = 8,
    cpus: Annotated[float, typer.Option(help="CPUs that Ray sets aside for a replica.")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs, likewise.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for the servers' output; the temporary one if not.")
    ] = None,
) -> None:
    """Replicas of `vllm serve MODEL` behind one address, until interrupted.

    Options that are not listed go to each `vllm serve`, for instance --kv-compression METHOD.
    """
    from kvcompress_serving.processes import terminate_as_interrupt

    try:
        with terminate_as_interrupt(), connected(address):
            from ray import serve

            from kvcompress_serving import ray_app

            settings = ray_app.Settings(
                model=model,
                flags=tuple(context.args),
                num_replicas=replicas,
                max_replicas=max_replicas,
                target_ongoing_requests=target_requests,
                num_cpus=cpus,
                num_gpus=gpus,
                logs=None if logs is None else str(logs.resolve()),
            )
            serve.start(http_options={"host": host, "port": port})
            try:
                serve.run(ray_app.app(settings))
                console.print(f"ready: http://{host}:{port}", markup=False)
                threading.Event().wait()
            finally:
                serve.shutdown()
    except (ValueError, RuntimeError) as error:  # RuntimeError: Ray Serve gave the replicas up
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("interrupted; the servers have been stopped")
        raise typer.Exit(130) from None
