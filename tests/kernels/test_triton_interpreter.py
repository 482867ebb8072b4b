"""Runs the tests of the Triton kernels under Triton's interpreter, in a process of their own.

The interpreter is chosen for a whole process when the kernels are defined, and vLLM defines kernels
of its own in the process of other tests.
"""

from __future__ import annotations

import pytest
import triton_interpreter

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "module", ["test_triton_segment_attention.py", "test_triton_cluster_merge.py"]
)
def test_kernels_under_the_interpreter(module: str) -> None:
    triton_interpreter.run_module(module)
