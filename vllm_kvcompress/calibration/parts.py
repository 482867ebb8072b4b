"""Statistics of a text part by part: one after another here, or by the workers of a Ray cluster.

A part is as many chunks as `PART_CHUNKS`; the last of a full part is held out. Parts are added in
the order of the text wherever they were made, so that both ways give the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from vllm_kvcompress.calibration.rope import Rotation
from vllm_kvcompress.calibration.statistics import CacheShape, Collector, Statistics
from vllm_kvcompress.cluster import share_of_cpus

PART_CHUNKS = 8

Pair = tuple[Statistics, Statistics]
"""Sums of a part, without and of the chunk that is held out."""


@dataclass(frozen=True)
class Work:
    """All that is collected.

    Args:
        shape: of the model's cache.
        token_ids: of each chunk.
        starts: position of each chunk's first token.
        seed: of the first chunk; each following one has the next.
        num_sink_tokens: see `Collector`.
        window: see `Collector`.
        rotation: see `Collector`.
    """

    shape: CacheShape
    token_ids: Sequence[list[int]]
    starts: Sequence[int]
    seed: int
    num_sink_tokens: int
    window: int
    rotation: Rotation | None = None

    def collector(self, network: Any) -> Collector:
        return Collector(
            network,
            self.shape,
            num_sink_tokens=self.num_sink_tokens,
            window=self.window,
            rotation=self.rotation,
        )

    def part(
        self, collector: Collector, first: int, on_chunk: Callable[[], None] = lambda: None
    ) -> Pair:
        """Sums of the part that begins with chunk ``first``."""
        sums = Statistics.empty(self.shape), Statistics.empty(self.shape)
        for index in range(first, min(first + PART_CHUNKS, len(self.token_ids))):
            held_out = (index + 1) % PART_CHUNKS == 0
            sums[held_out].add(
                collector.collect(self.token_ids[index], self.starts[index], self.seed + index)
            )
            on_chunk()
        return sums

    def firsts(self, done: int) -> range:
        """First chunks of the parts that are left after ``done`` chunks."""
        return range(done, len(self.token_ids), PART_CHUNKS)


def here(
    work: Work, network: Any, done: int, on_chunk: Callable[[], None] = lambda: None
) -> Iterator[Pair]:
    """The parts after ``done`` chunks, computed in this process."""
    collector = work.collector(network)
    for first in work.firsts(done):
        yield work.part(collector, first, on_chunk)


class _Worker:
    """A model in a process of the cluster."""

    def __init__(self, work: Work, folder: Path) -> None:
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._work, self._collector = work, work.collector(network)

    def part(self, first: int) -> Pair:
        return self._work.part(self._collector, first)


def over_ray(
    work: Work,
    folder: Path,
    num_workers: int,
    done: int,
    on_chunk: Callable[[], None] = lambda: None,
) -> Iterator[Pair]:
    """The same parts in the same order, computed by workers of the connected Ray cluster.

    Args:
        work: what is collected.
        folder: of the model, the same path on every machine.
        num_workers: processes with a float32 copy of the model each, spread over the machines.
        done: chunks that are left out.
        on_chunk: called once for each chunk when its part is there.
    """
    import ray
    from ray.util import ActorPool

    firsts = work.firsts(done)
    if not firsts:
        return
    worker = ray.remote(num_cpus=share_of_cpus(num_workers), scheduling_strategy="SPREAD")(_Worker)
    shared = ray.put(work)
    actors = [worker.remote(shared, folder) for _ in range(min(num_workers, len(firsts)))]
    for pair in ActorPool(actors).map(lambda actor, first: actor.part.remote(first), firsts):
        yield pair
        for _ in range(sum(int(item.num_chunks) for item in pair)):
            on_chunk()
