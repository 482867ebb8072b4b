"""Building the C++ operations: the messages, the cache, and two processes at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompress_kernels import build

SOURCE = 'extern "C" int kvcompress_toy_{name}() {{ return 1; }}\n'

# A compiler that writes a line for each call and then does the work.
COMPILER = """#!/bin/sh
echo "$@" >> {log}
exec {compiler} "$@"
"""

# A compiler whose compilations wait, for 20 s at most, until two of them have started.
PATIENT_COMPILER = """#!/bin/sh
case "$*" in *" -c "*)
    touch {folder}/started.$$
    for _ in $(seq 200); do
        [ "$(ls {folder} | grep -c started)" -ge 2 ] && exec {compiler} "$@"
        sleep 0.1
    done
    echo "the other compilation did not start" >&2
    exit 1
esac
exec {compiler} "$@"
"""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package of one tiny source that takes the place of the real one, and an empty cache."""
    package = tmp_path / "package"
    (package / "one").mkdir(parents=True)
    (package / "one" / "cpu.cpp").write_text(SOURCE.format(name="one"))
    monkeypatch.setattr(build, "_PACKAGE", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return package


def install(path: Path, script: str, **values: object) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    path.write_text(script.format(compiler=compiler, **values))
    path.chmod(0o755)
    return path


def compilations(log: Path) -> list[str]:
    """Calls that compiled a source; torch asks the compiler for its version as well."""
    return [call for call in log.read_text().splitlines() if " -c " in call]


def leftovers(library: Path) -> list[str]:
    return sorted(path.name for path in library.parent.iterdir() if path.name != ".building")


def test_no_compiler(toy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CompilerNotFoundError, match=r"looked for g\+\+.*apt-get install g"):
        build.build()


def test_a_chosen_compiler_that_does_not_exist(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -pipe")
    with pytest.raises(build.CompilerNotFoundError, match="CXX=no-such-compiler -pipe"):
        build.build()


def test_a_cached_library_needs_no_compiler(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.build()
    assert leftovers(library) == [library.name]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build() == library


def test_options_of_the_chosen_compiler(
    toy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "calls"
    monkeypatch.setenv("CXX", f"{install(tmp_path / 'cxx', COMPILER, log=log)} -DCHOSEN")
    build.build()
    (call,) = compilations(log)
    assert " -DCHOSEN " in call


def test_errors_of_the_compiler_are_shown(toy: Path) -> None:
    (toy / "one" / "cpu.cpp").write_text("int broken = no_such_name;\n")
    with pytest.raises(RuntimeError, match=r"no_such_name.*declared|undeclared") as error:
        build.build()
    assert "one.cpp" in str(error.value)
    assert leftovers(build.library_path(build.cpu_capability())) == []


def test_a_change_of_source_or_header_is_another_library(toy: Path) -> None:
    paths = [build.library_path("AVX2")]
    (toy / "csrc").mkdir()
    (toy / "csrc" / "x.h").write_text("// 1")
    paths.append(build.library_path("AVX2"))
    (toy / "csrc" / "x.h").write_text("// 2")
    paths.append(build.library_path("AVX2"))
    (toy / "one" / "cpu.cpp").write_text("// 3")
    paths.append(build.library_path("AVX2"))
    assert len(set(paths)) == len(paths)
    assert build.library_path("AVX2") != build.library_path("AVX512")


def test_sources_compile_at_the_same_time(
    toy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (toy / "two").mkdir()
    (toy / "two" / "cpu.cpp").write_text(SOURCE.format(name="two"))
    compiler = install(tmp_path / "cxx", PATIENT_COMPILER, folder=tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    build.build()


def test_two_processes_build_once(toy: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    compiler = install(tmp_path / "cxx", "#!/bin/sh\nsleep 0.5\n" + COMPILER[10:], log=log)
    program = (
        "import pathlib, sys; from kvcompress_kernels import build; "
        "build._PACKAGE = pathlib.Path(sys.argv[1]); print(build.build())"
    )
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(toy)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0].splitlines()[-1] == printed[1].splitlines()[-1]
    assert Path(printed[0].splitlines()[-1]).exists()
    assert len(compilations(log)) == 1


def test_a_process_holds_one_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", "AVX512")
    build.load()
    build.load("AVX512")
    with pytest.raises(RuntimeError, match=r"loaded the AVX512 build.*cannot load the AVX2 build"):
        build.load("AVX2")


def test_a_cpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse2", "avx"}))
    with pytest.raises(RuntimeError, match="need an x86-64 CPU with AVX2, FMA and F16C"):
        build.cpu_capability()
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    assert build.cpu_capability() == "AVX2"
