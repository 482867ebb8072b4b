"""Builds the C++ operations on the machine that runs them, once, and loads them.

The shared library holds every ``<op>/cpu.cpp`` of this package and registers the namespace
``torch.ops.kvcompress``. It is cached under `cache_dir` by torch version, compiler flags, CPU
flags and source, so neither a copied home folder nor an upgrade can load code made for something
else.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import torch

logger = logging.getLogger("vllm.kvcompress.build")

_PACKAGE = Path(__file__).parent
_LIBRARY = "kvcompress_cpu.so"

_loaded: str | None = None  # capability of the library that this process holds
_load_lock = threading.Lock()


class CompilerNotFoundError(RuntimeError):
    """No usable C++ compiler; the message says what is missing and how to get it."""


def cache_dir() -> Path:
    """Folder of compiled libraries and converted models (XDG cache, per user)."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "vllm-kvcompress"


def sources() -> list[Path]:
    return sorted(_PACKAGE.glob("*/cpu.cpp"))


def find_compiler() -> list[str]:
    """Command of the C++ compiler: ``CXX`` if set, else g++, else clang++.

    Raises:
        CompilerNotFoundError: none was found.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["g++"], ["clang++"]]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    looked_for = f"CXX={shlex.join(chosen)}" if chosen else "g++ and clang++ on PATH"
    raise CompilerNotFoundError(
        "the CPU kernels of vllm-kvcompress are compiled on first use and no C++ compiler was "
        f"found (looked for {looked_for}). Install one, on Debian or Ubuntu: apt-get install g++, "
        "or name one in the environment variable CXX"
    )


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of this CPU as the kernel lists them."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def cpu_capability() -> str:
    """``AVX512`` or ``AVX2``: which vector width the kernels are compiled for.

    Raises:
        RuntimeError: the machine has neither.
    """
    flags = cpu_flags()
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"} <= flags:
        return "AVX512"
    if {"avx2", "fma", "f16c"} <= flags:
        return "AVX2"
    raise RuntimeError(
        "the CPU kernels of vllm-kvcompress need an x86-64 CPU with AVX2, FMA and F16C; this one "
        f"is {platform.machine()} without them"
    )


def compile_flags(capability: str) -> list[str]:
    """Compiler flags; ``capability`` as `cpu_capability` returns it."""
    march = (
        ["-march=native"]
        if capability == "AVX512"
        else ["-march=x86-64", "-mtune=generic", "-mavx2", "-mfma", "-mf16c"]
    )
    return [
        "-O3",
        "-std=c++20",
        "-fopenmp",
        "-fno-math-errno",
        "-fvisibility=hidden",
        f"-DCPU_CAPABILITY={capability}",
        f"-DCPU_CAPABILITY_{capability}",
        *march,
    ]


def _fingerprint(flags: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (torch.__version__, *flags, *sorted(cpu_flags())):
        digest.update(part.encode() + b"\0")
    for path in sorted([*sources(), *_PACKAGE.glob("**/*.h")]):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library_path(capability: str) -> Path:
    """Where the library for this machine, torch and source is, or will be after a build."""
    fingerprint = _fingerprint(compile_flags(capability))
    return cache_dir() / f"torch{torch.__version__}-{capability}-{fingerprint}" / _LIBRARY


def build(capability: str | None = None) -> Path:
    """Compile the library unless it is cached; safe to call from many processes at once.

    Args:
        capability: ``AVX2`` forces the narrower build (tests); None takes the best.

    Returns:
        Path of the shared library.

    Raises:
        CompilerNotFoundError: nothing is cached and there is no compiler.
        RuntimeError: compilation failed (with the compiler's output), or the CPU is too old.
    """
    capability = capability or cpu_capability()
    library = library_path(capability)
    if not library.exists():
        compiler = find_compiler()
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.parent / ".building", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library, compiler, compile_flags(capability))
    return library


def load(capability: str | None = None) -> None:
    """Make ``torch.ops.kvcompress`` available, compiling it if this machine has not yet.

    Args:
        capability: ``AVX2`` forces the narrower build (tests); None takes the best. One process
            can hold one of them, the first that it loads.

    Raises:
        CompilerNotFoundError: nothing is cached and there is no compiler.
        RuntimeError: compilation failed (with the compiler's output), the CPU is too old, or the
            process holds a build for another capability.
    """
    global _loaded
    if _loaded and capability in (None, _loaded):
        return
    with _load_lock:
        capability = capability or _loaded or cpu_capability()
        if _loaded and _loaded != capability:
            raise RuntimeError(
                f"this process has loaded the {_loaded} build of the CPU kernels and cannot load "
                f"the {capability} build as well"
            )
        if not _loaded:
            torch.ops.load_library(str(build(capability)))
            _loaded = capability


def _compile(library: Path, compiler: list[str], flags: list[str]) -> None:
    """Compile and link with torch's own tool; ``library`` appears whole or not at all.

    torch loads what it has built. The file is renamed afterwards and stays the same file, so that
    loading it under its new name does not load it twice.
    """
    # imported here: it is needed for a build only, and brings setuptools along
    from torch.utils import cpp_extension

    start = time.monotonic()
    logger.info("compiling the CPU kernels of vllm-kvcompress into %s", library.parent)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        # object files are named after their sources, and all of ours are called cpu.cpp
        copies = [shutil.copy(path, f"{scratch}/{path.parent.name}.cpp") for path in sources()]
        # ninja is installed beside the interpreter, which need not be on PATH
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        with mock.patch.dict(os.environ, {"CXX": compiler[0], "PATH": path}):
            cpp_extension.load(
                name=library.stem,
                sources=copies,
                extra_cflags=[*compiler[1:], *flags],
                extra_ldflags=["-fopenmp"],
                extra_include_paths=[str(_PACKAGE)],
                build_directory=scratch,
                is_python_module=False,
            )
        # a second build in one process gets a version number in its name
        (built,) = Path(scratch).glob("*.so")
        os.replace(built, library)
    logger.info("compiled in %.0f s", time.monotonic() - start)
