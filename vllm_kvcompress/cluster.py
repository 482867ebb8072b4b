"""Connection to a Ray cluster, for commands that spread work over machines."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import threading
from collections.abc import Iterator

LOCAL = "local"
"""In place of an address: a Ray of this process's own, on this machine."""
_START_ATTEMPTS = 3
_TOO_SLOW = "timed out during startup"
"""What Ray says in an exception of no class of its own."""


@contextlib.contextmanager
def connected(address: str, num_cpus: int | None = None) -> Iterator[None]:
    """Connection to a cluster while the block runs; one that this process has already is used.

    Args:
        address: HOST:PORT, ``auto`` for the one of this machine, or `LOCAL`.
        num_cpus: of a local one; all of the machine's by default.

    Raises:
        ValueError: Ray is not installed, or there is no such cluster.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError("ray is missing: pip install 'vllm-kvcompress[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    import ray

    if ray.is_initialized():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    if address == LOCAL:
        _start(num_cpus)
    else:
        try:
            ray.init(address)
        except ConnectionError as error:
            raise ValueError(f"no Ray cluster at '{address}': {error}") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # the command's, which Ray replaces
    try:
        yield
    finally:
        ray.shutdown()


def _start(num_cpus: int | None) -> None:
    """Start Ray on this machine; it allows itself 30 s, which a busy machine may exceed."""
    import ray

    for attempt in range(_START_ATTEMPTS):
        try:
            ray.init(
                LOCAL,
                num_cpus=num_cpus,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                # by default workers, and servers that they start, give way to all else here
                _system_config={"worker_niceness": 0},
            )
            return
        except Exception as error:
            if _TOO_SLOW not in str(error) or attempt == _START_ATTEMPTS - 1:
                raise
            ray.shutdown()


def share_of_cpus(num_workers: int) -> float:
    """CPUs for each of some equal workers, so that all of them fit the connected cluster.

    They are spread over its machines; the one with the fewest CPUs decides.
    """
    import ray

    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    usable = [cpus for cpus in nodes if cpus]
    if not usable:
        raise ValueError("the Ray cluster has no CPUs")
    share = min(usable) / math.ceil(num_workers / len(usable))
    return float(int(share)) if share >= 1 else share


def num_machines() -> int:
    """Machines of the connected cluster that have CPUs."""
    import ray

    return sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
