"""Several processes: which one this is, and what they tell each other.

``torchrun`` starts them; without it there is one process and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist


def rank() -> int:
    """Number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def started(device: str) -> Iterator[torch.device]:
    """Join the processes of ``torchrun``, if it started this one, and leave them at the end.

    Args:
        device: "cpu" or "cuda".

    Returns:
        the device of this process.
    """
    if not dist.is_torchelastic_launched():
        yield torch.device(device)
        return
    own = torch.device(device)
    if own.type == "cuda":
        own = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield own
    finally:
        dist.destroy_process_group()


def wait() -> None:
    """Until all are here."""
    if dist.is_initialized():
        dist.barrier()


def total(values: Sequence[float], device: torch.device) -> list[float]:
    """Sum of each number over all processes."""
    found = torch.tensor(values, dtype=torch.float32 if device.type == "mps" else torch.float64)
    found = found.to(device)
    if dist.is_initialized():
        dist.all_reduce(found)
    return found.tolist()
