"""The offline evaluation, its prompts shared out over the workers of a Ray cluster.

Prompts are drawn as in one process, and each worker takes some of them for all rows, so that the
measurements are the same and in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompress_serving.evaluation import fidelity, retrieval
from kvcompress_serving.evaluation.offline import Offline
from kvcompress_serving.evaluation.results import Measurement
from vllm_kvcompress.cluster import share_of_cpus

_PARTS_PER_WORKER = 4
EVALUATIONS: Mapping[str, Callable[..., list[Measurement]]] = {
    "fidelity": fidelity.evaluate,
    "retrieval": retrieval.evaluate,
}


@dataclass(frozen=True)
class Call:
    """A call of ``evaluate`` of one of the two modules.

    Args:
        name: ``fidelity`` or ``retrieval``.
        num_prompts: that it would go through by itself.
        arguments: but ``model``, ``places`` and ``on_step``.
    """

    name: str
    num_prompts: int
    arguments: Mapping[str, Any]


class _Worker:
    """A model in a process of the cluster."""

    def __init__(self, model: Path, options: Mapping[str, Any]) -> None:
        self._engine = Offline(model, **options)

    def evaluate(self, call: Call, places: range) -> list[Measurement]:
        return EVALUATIONS[call.name](self._engine, places=places, **call.arguments)


def parts(num_prompts: int, num_workers: int) -> list[range]:
    """Consecutive numbers of prompts, some parts for each worker, as equal as they can be."""
    count = min(num_prompts, num_workers * _PARTS_PER_WORKER)
    bounds = [num_prompts * index // count for index in range(count + 1)]
    return [range(*pair) for pair in itertools.pairwise(bounds)]


def evaluate(
    model: Path,
    options: Mapping[str, Any],
    calls: list[Call],
    num_workers: int,
    on_prompts: Callable[[Call, int], None] = lambda _call, _count: None,
) -> list[Measurement]:
    """The measurements of all calls, one after another.

    Args:
        model: folder, the same path on every machine of the connected cluster.
        options: of `Offline`.
        calls: what is evaluated.
        num_workers: processes with the model, spread over the machines.
        on_prompts: called with a call and the number of its prompts that are done.

    Raises:
        ValueError: as the calls do.
    """
    import ray
    from ray.exceptions import RayTaskError
    from ray.util import ActorPool

    worker = ray.remote(num_cpus=share_of_cpus(num_workers), scheduling_strategy="SPREAD")(_Worker)
    pool = ActorPool([worker.remote(model, options) for _ in range(num_workers)])
    tasks = [(call, part) for call in calls for part in parts(call.num_prompts, num_workers)]
    measured: list[Measurement] = []
    try:
        found = pool.map(lambda actor, task: actor.evaluate.remote(*task), tasks)
        for (call, part), measurements in zip(tasks, found, strict=True):
            measured += measurements
            on_prompts(call, len(part))
    except RayTaskError as error:
        if isinstance(error.cause, ValueError):
            raise error.cause from None
        raise
    return measured
