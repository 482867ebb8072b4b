"""Triton's interpreter for the tests of the kernels: bfloat16 put right, and a process of its own.

The interpreter (of 3.7, of 3.9) keeps bfloat16 as uint16. Its `dot` multiplies those integers, its
conversion from float32 cuts bits off where every GPU rounds to nearest even. `repair` replaces both
with torch's conversions; it can go when Triton computes bfloat16 (`test_the_repair_is_needed`).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

_FOLDER = Path(__file__).parent


def is_on() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def require() -> None:
    """Skip the calling module unless Triton's kernels are interpreted in this process."""
    if not is_on():
        pytest.skip("run by test_triton_interpreter, in another process", allow_module_level=True)
    repair()


def run_modules(*names: str, marks: str = "not slow") -> None:
    """Run test modules of ``tests/kernels`` in one process with the interpreter on."""
    # numpy warns of overflows that a GPU makes in silence
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-m", marks]
    modules = [f"tests/kernels/{name}" for name in names]
    command = [sys.executable, "-m", "pytest", *options, *modules]
    result = subprocess.run(
        command,
        cwd=_FOLDER.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout, result.stdout
    assert "skipped" not in result.stdout, result.stdout


def load_module(name: str) -> ModuleType:
    """A test module of ``tests/kernels``, for the batches that it builds."""
    spec = importlib.util.spec_from_file_location(name, _FOLDER / "kernels" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _widen(data: np.ndarray) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32)


def _narrow(data: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


def repair() -> None:
    """Give the interpreter of this process the bfloat16 arithmetic of a GPU."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    builder: Any = InterpreterBuilder
    if hasattr(builder, "unrepaired_dot"):
        return
    unrepaired_dot, unrepaired_cast = builder.create_dot, builder.cast_impl
    unrepaired_fp_to_fp = builder.create_fp_to_fp

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (TensorHandle(_widen(x.data), tl.float32) for x in (a, b))
        return unrepaired_dot(self, a, b, d, *options)

    def cast(src: Any, dst_type: Any) -> Any:
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle(_widen(src.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return TensorHandle(_narrow(src.data), tl.bfloat16)
        return None

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        result = cast(src, dst_type)  # a handle, whose truth is that of its elements
        return unrepaired_cast(self, src, dst_type) if result is None else result

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        result = cast(src, dst_type)
        if result is None:
            result = unrepaired_fp_to_fp(self, src, dst_type, rounding_mode)
        return result

    builder.unrepaired_dot = unrepaired_dot
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
