"""Runs the tests of the Triton kernels under Triton's interpreter, in a process of their own.

The interpreter is chosen for a whole process when the kernels are defined, and vLLM defines kernels
of its own in the process of other tests.
"""

from __future__ import annotations

import pytest
import triton_interpreter

pytest.importorskip("triton")


MODULES = {
    "attention": ("test_triton_segment_attention.py",),
    "clusters": ("test_triton_cluster_merge.py",),
    "selection": ("test_triton_window_scores.py", "test_triton_select_merge.py"),
    "xformers": ("test_triton_xformers.py",),
    "codes": ("test_triton_code_rows.py", "test_triton_coded_attention.py"),
}


@pytest.mark.parametrize("name", MODULES)
def test_kernels_under_the_interpreter(name: str) -> None:
    triton_interpreter.run_modules(*MODULES[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODULES)
def test_more_shapes_under_the_interpreter(name: str) -> None:
    triton_interpreter.run_modules(*MODULES[name], marks="slow")
