"""Files made from a model: tensors with their provenance, checked when they are read.

An artifact is one safetensors file. Its metadata says what it is, for which model, and how it was
made; a digest covers the metadata and every tensor, so that a damaged file is never used. Which
tensors there are is the business of the method that reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

_FORMAT = "vllm-kvcompress"
_SAMPLE_BYTES = 64

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_CONFIG_KEYS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
)


@dataclass(frozen=True)
class ModelIdentity:
    """What tells one model from another, whatever folder it lies in.

    Args:
        config: values of its configuration that fix the shape of its cache, and its RoPE.
        weights: sha256 over the name, shape and data type of every tensor, and over a few bytes
            from its middle: another model of the same shape, a fine-tuned one for instance,
            differs.
    """

    config: dict[str, Any]
    weights: str

    def differences(self, other: ModelIdentity) -> list[str]:
        """What ``other`` has that this has not, in words; empty if they are the same model."""
        found = [
            f"{key} is {other.config.get(key)!r}, not {self.config.get(key)!r}"
            for key in sorted({*self.config, *other.config})
            if self.config.get(key) != other.config.get(key)
        ]
        if self.weights != other.weights:
            found.append("the weights are others")
        return found


def model_folder(model: str) -> Path:
    """Folder of a model that is served: itself, or the snapshot in the Hugging Face cache.

    Raises:
        ValueError: there is no such folder.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as error:  # not in the cache; no valid name
        raise ValueError(
            f"'{model}' is neither a folder nor a model in the Hugging Face cache"
        ) from error


def identify(folder: Path) -> ModelIdentity:
    """Identity of the model in a folder; reads a few kilobytes of its weights.

    Raises:
        ValueError: no readable ``config.json`` or no safetensors weights.
    """
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"no readable config.json in {folder}: {error}") from error
    try:
        text = raw.get("text_config") or raw
        config = {key: text[key] for key in _CONFIG_KEYS}
        heads = config["num_attention_heads"]
        config["num_key_value_heads"] = text.get("num_key_value_heads") or heads
        config["head_dim"] = text.get("head_dim") or config["hidden_size"] // heads
        config.update({key: text[key] for key in _ROPE_KEYS if text.get(key) is not None})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}/config.json describes no model with attention: {error}"
        ) from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors weights in {folder}")
    entries: dict[str, bytes] = {}
    for file in files:
        entries.update(_samples(file))
    digest = hashlib.sha256()
    for name in sorted(entries):
        digest.update(name.encode() + b"\0" + entries[name])
    return ModelIdentity(config, digest.hexdigest())


def _samples(file: Path) -> dict[str, bytes]:
    """Shape, data type and a few bytes of each tensor of a safetensors file."""
    try:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            found = {}
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                count = min(_SAMPLE_BYTES, stop - start)
                stream.seek(8 + length + start + (stop - start - count) // 2)
                label = json.dumps([entry["dtype"], entry["shape"]]).encode()
                found[name] = label + stream.read(count)
            return found
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"{file} is no readable safetensors file: {error}") from error


@dataclass(frozen=True)
class Artifact:
    """Tensors made from a model, and how they were made.

    Args:
        kind: which method it is for, and what it is.
        version: of the tensors' names and meaning; a reader accepts one version.
        model: that it was made from.
        settings: how it was made; anything that JSON can hold.
        tensors: by name.
    """

    kind: str
    version: int
    model: ModelIdentity
    settings: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def _metadata(self) -> dict[str, str]:
        """All but the digest."""
        return {
            "format": _FORMAT,
            "kind": self.kind,
            "version": str(self.version),
            "model": json.dumps(asdict(self.model), sort_keys=True),
            "settings": json.dumps(self.settings, sort_keys=True),
        }

    @property
    def digest(self) -> str:
        """sha256 of everything in it."""
        return _digest(self._metadata(), self.tensors)

    def save(self, path: Path) -> None:
        """Write the file; equal artifacts give equal bytes, and a crash leaves no half file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: self.tensors[name].contiguous() for name in sorted(self.tensors)}
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        content = save(tensors, {**self._metadata(), "digest": self.digest})
        scratch.write_bytes(_sorted_header(content))
        scratch.replace(path)


def _sorted_header(content: bytes) -> bytes:
    """The same safetensors file with its header in order; the library writes metadata in any."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_artifact(path: Path, kind: str, version: int) -> Artifact:
    """Read an artifact.

    Raises:
        ValueError: there is none, it is damaged, or of another kind or version.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} was not made by vllm-kvcompress")
    stated = metadata.pop("digest", None)
    if _digest(metadata, tensors) != stated:
        raise ValueError(f"{path} is damaged: its content does not match its digest")
    reasons = []
    if metadata["kind"] != kind:
        reasons.append(f"it is an artifact of kind '{metadata['kind']}', not '{kind}'")
    if metadata["version"] != str(version):
        reasons.append(f"it has version {metadata['version']}, this release reads {version}")
    if reasons:
        raise ValueError(f"{path}: {'; '.join(reasons)}")
    model = json.loads(metadata["model"])
    return Artifact(
        kind,
        version,
        ModelIdentity(model["config"], model["weights"]),
        json.loads(metadata["settings"]),
        tensors,
    )


def find_artifact(
    model: str, named: str | None, shipped: Path, file_name: str, kind: str, version: int, what: str
) -> tuple[Path, Artifact]:
    """The artifact of a model that is served, and its file.

    Args:
        model: folder, or name of a model in the Hugging Face cache.
        named: file, or folder with it; None for the one that is shipped for the model.
        shipped: folder with a folder for each model that an artifact is shipped for.
        file_name: of artifacts in folders.
        kind: see `Artifact`.
        version: see `Artifact`.
        what: is missing where none is shipped, with its verb.

    Raises:
        ValueError: all reasons why there is none to be used.
    """
    identity = identify(model_folder(model))
    if named is None:
        for file in sorted(shipped.glob(f"*/{file_name}")):
            found = load_artifact(file, kind, version)
            if found.model == identity:
                return file, found
        raise ValueError(f"no {what} shipped for the model '{model}'")
    path = Path(named).expanduser()
    file = path / file_name if path.is_dir() else path
    found = load_artifact(file, kind, version)
    if differences := found.model.differences(identity):
        raise ValueError(
            f"{file} was made from another model than '{model}': {'; '.join(differences)}"
        )
    return file, found


def tensor_problems(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """What is wrong with the tensors of an artifact, in words: missing ones, other shapes, numbers
    that are not finite."""
    problems = []
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            problems.append(f"the tensor '{name}' is missing")
        elif tuple(tensor.shape) != shape:
            problems.append(f"'{name}' has shape {list(tensor.shape)}, not {list(shape)}")
        elif not math.isfinite(float(tensor.double().sum())):
            problems.append(f"'{name}' holds numbers that are not finite")
    return problems
