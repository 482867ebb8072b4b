"""What may import what, checked on the code as it is and on code with a fault put in."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    ROOT / "vllm_kvcompress",
    ROOT / "kernels" / "kvcompress_kernels",
    ROOT / "serving" / "kvcompress_serving",
)


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in package.rglob("*.py"))


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of ``root / pyproject.toml`` on the packages in ``root``."""
    roots = [str(root), str(root / "kernels"), str(root / "serving")]
    code = "from importlinter.cli import lint_imports_command as run; run()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copied_tree(tmp_path: Path) -> Path:
    for package in PACKAGES:
        target = tmp_path / package.relative_to(ROOT)
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__", "data"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("vllm_kvcompress/methods/extra.py", "import vllm.config"),
        ("kernels/kvcompress_kernels/extra.py", "import vllm"),
        ("kernels/kvcompress_kernels/extra.py", "import vllm_kvcompress.core"),
        ("vllm_kvcompress/core_extra.py", "from vllm import LLM"),
        ("vllm_kvcompress/methods/extra.py", "import vllm_kvcompress.models"),
        ("vllm_kvcompress/methods/extra.py", "import kvcompress_serving"),
        ("vllm_kvcompress/models/extra.py", "import transformers"),
    ],
)
def test_import_contracts_notice_a_fault(copied_tree: Path, module: str, statement: str) -> None:
    (copied_tree / module).write_text(f'"""A fault."""\n\n{statement}\n')
    result = lint_imports(copied_tree)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


@pytest.mark.parametrize(
    "name",
    [
        "vllm_kvcompress",
        "vllm_kvcompress.config",
        "vllm_kvcompress.core",
        "vllm_kvcompress.methods",
        "vllm_kvcompress.methods.registry",
        "vllm_kvcompress.models.convert",
        "kvcompress_kernels",
        "kvcompress_kernels.build",
        "kvcompress_kernels.formats",
        "kvcompress_serving",
    ],
)
def test_importing_the_library_imports_no_engine(name: str) -> None:
    code = (
        f"import sys, {name}\n"
        "print([m for m in ('vllm', 'triton', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_every_module_has_a_docstring() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in modules()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not without


def test_every_folder_with_code_is_a_package() -> None:
    without = {
        str(path.parent.relative_to(ROOT))
        for path in modules()
        if not (path.parent / "__init__.py").exists()
    }
    assert not without


@pytest.mark.parametrize("name", ["kernels", "serving", "docker", "tests"])
def test_top_level_folders_hide_nobody_elses_package(name: str) -> None:
    """`kernels` is Hugging Face's, `docker` that of the Docker SDK.

    A folder without ``__init__.py`` gives way to a real package anywhere on the path.
    """
    code = (
        "import importlib.util\n"
        f"spec = importlib.util.find_spec({name!r})\n"
        "print(spec.origin if spec else None)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not result.stdout.startswith(str(ROOT)), result.stdout
    assert not (ROOT / name / "__init__.py").exists()
