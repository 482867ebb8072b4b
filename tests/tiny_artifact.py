"""Calibrations of tiny models, for tests of calibration and of methods with an artifact."""

from __future__ import annotations

from pathlib import Path

from vllm_kvcompress.calibration.run import Settings, calibrate
from vllm_kvcompress.calibration.texts import Source

TINY = Settings(num_tokens=16 * 160, chunk_tokens=160, window=32)
"""Settings that take a second."""


def make_artifact(model: Path, out: Path, text: str, settings: Settings = TINY) -> Path:
    """Calibrate a model on a text; the artifact's file."""
    return calibrate(str(model), out, [Source("text", text)], settings, plots=False)
