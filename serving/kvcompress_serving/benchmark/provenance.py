"""Where a benchmark's numbers come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcompress_serving.evaluation import provenance


def collect(model: str, seed: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Versions, machine, commit, flags and seed; `evaluation.provenance` says what exactly.

    Args:
        model: folder or name of the model.
        seed: of the prompts.
        flags: what the command was called with.
    """
    folder = Path(model) if (Path(model) / "config.json").is_file() else None
    origin = provenance.collect(folder, seed, flags)
    if folder is None:
        origin["model"] = {"name": model}
    return origin
