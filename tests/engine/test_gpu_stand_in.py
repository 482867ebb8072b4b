"""Runs what needs vLLM's V2 model runner or Triton's interpreter in processes of their own."""

from __future__ import annotations

import gpu_stand_in
import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("module", ["test_v2_runner.py", "test_backend_triton.py"])
def test_in_a_process_with_the_stand_in(module: str) -> None:
    gpu_stand_in.run_module(module)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_other_methods_with_the_stand_in() -> None:
    gpu_stand_in.run_module("test_backend_triton.py", marks="slow")
