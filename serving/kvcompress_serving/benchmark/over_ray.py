"""Rounds of a benchmark on the machines of a Ray cluster, one at a time on each machine.

A round has all rows, stock vLLM among them, and rows are compared within a round, so that machines
need not be equal. A round takes all CPUs of its machine.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

from kvcompress_serving.benchmark.load import LoadError
from kvcompress_serving.benchmark.results import Measurement
from kvcompress_serving.benchmark.runner import Runner
from kvcompress_serving.server import ServerError
from vllm_kvcompress.cluster import num_machines, share_of_cpus

Round = tuple[list[Measurement], int, str]


def _round(make: Callable[[], Runner], number: int) -> Round:
    """One round on this machine: measurements, prompts left out, the machine's name."""
    runner = make()
    return runner.run_round(number), runner.dropped, platform.node()


def run(
    make: Callable[[], Runner], rounds: int, on_step: Callable[[str], None]
) -> tuple[list[Measurement], int, list[str]]:
    """All rounds, as if one machine had run them one after another.

    Args:
        make: the runner, made on the machine that uses it.
        rounds: how many.
        on_step: called before each round that is waited for.

    Returns:
        measurements in order, prompts left out, and the machine of each round.

    Raises:
        ValueError: wrong settings.
        ServerError: a server did not start.
        LoadError: a load generator failed.
    """
    import ray
    from ray.exceptions import RayTaskError

    task = ray.remote(num_cpus=share_of_cpus(num_machines()), max_retries=0)(_round)
    made = ray.put(make)
    waiting = [task.remote(made, number) for number in range(rounds)]
    measured: list[Measurement] = []
    dropped, machines = 0, []
    for number, item in enumerate(waiting):
        on_step(f"round {number + 1}")
        try:
            part, dropped, machine = ray.get(item)
        except RayTaskError as error:
            if isinstance(error.cause, ValueError | LoadError | ServerError):
                raise error.cause from None
            raise
        measured += part
        machines.append(machine)
    return measured, dropped, machines
