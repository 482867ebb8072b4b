"""Which forms of our Triton kernels a GPU would have compiled, told under the interpreter.

The interpreter compiles nothing. On a GPU two launches share a compiled kernel if their arguments
look the same to Triton: data types, values of compile-time arguments, alignment of pointers, and
whether the numbers that a kernel is specialized by are 1 or divisible by 16.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import InterpretedFunction


@contextmanager
def recorded() -> Iterator[set[Any]]:
    """Forms of the kernels that are launched meanwhile."""
    forms: set[Any] = set()
    run = InterpretedFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("kvcompress_kernels."):
            forms.add(_form(self, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with mock.patch.object(InterpretedFunction, "run", record):
        yield forms


def _form(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parameters = inspect.signature(kernel.fn).parameters
    unspecialized = kernel.kwargs.get("do_not_specialize") or ()
    named = dict(zip(parameters, args, strict=False)) | kwargs
    looks = []
    for name, value in sorted(named.items()):
        # options of the launch, which are no parameters, count by their values too
        is_constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
        look = str(value) if is_constant else _look(value, name not in unspecialized)
        looks.append((name, look))
    return (f"{kernel.fn.__module__}.{kernel.fn.__name__}", *looks)


def _look(value: Any, is_specialized: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(_look(item, is_specialized) for item in value)
    if isinstance(value, int):
        width = 32 if -(2**31) <= value < 2**31 else 64
        return (width, value == 1, value % 16 == 0) if is_specialized else (width,)
    return type(value).__name__
