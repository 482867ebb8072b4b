"""vLLM's V2 model runner and its Triton kernels on a CPU, in a process of their own.

vLLM's CPU build takes the V2 runner only where Triton has a driver for CPUs. Triton from PyPI has
none, but its interpreter needs none either: an object that says it is active is enough.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

_FOLDER = Path(__file__).parent
_VARIABLES = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "OMP_NUM_THREADS": "1",
    "KVC_GPU_STAND_IN": "1",
}


def run_module(name: str, marks: str = "not slow") -> None:
    """Run a test module of ``tests/engine`` in a process with the stand-in."""
    # numpy warns of overflows that a GPU makes in silence
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-m", marks]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"tests/engine/{name}"],
        cwd=_FOLDER.parent,
        env={**os.environ, **_VARIABLES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout, result.stdout
    assert "skipped" not in result.stdout, result.stdout


def require() -> None:
    """Skip the calling module unless this process has the stand-in; before vLLM is imported."""
    if os.environ.get("KVC_GPU_STAND_IN") != "1":
        pytest.skip("run by test_gpu_stand_in, in another process", allow_module_level=True)
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends.setdefault("cpu", SimpleNamespace(driver=driver))


def shrink_vocabulary(folder: Path, target: Path, vocab_size: int) -> Path:
    """Copy a model, with its first tokens only: vLLM's sampler takes seconds for all of them."""
    import shutil

    from transformers import LlamaForCausalLM

    shutil.copytree(folder, target, dirs_exist_ok=True)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(vocab_size)
    model.save_pretrained(target)
    return target
