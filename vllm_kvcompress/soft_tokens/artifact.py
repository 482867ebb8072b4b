"""Soft tokens as files: stored, found for a model, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_kvcompress.artifacts import Artifact, ModelIdentity, find_artifact, tensor_problems
from vllm_kvcompress.soft_tokens.model import KINDS, DynamicTokens, Kind, SoftTokens, StaticTokens

ARTIFACT_KIND = "metasoft"
ARTIFACT_VERSION = 1
ARTIFACT_FILE = "metasoft.safetensors"
SHIPPED = Path(__file__).parent / "shipped"
"""Folder with a folder for each model that an artifact is shipped for."""

_COUNTS = ("num_tokens", "hidden_size", "num_rows", "selection_width", "hidden_width")


def _create(kind: Kind, sizes: Mapping[str, int]) -> SoftTokens:
    """Soft tokens of a kind with the right shapes and any content."""
    zeros = torch.zeros(sizes["num_tokens"], sizes["hidden_size"])
    if kind == "static":
        return StaticTokens(zeros)
    library = torch.zeros(sizes["num_rows"], sizes["hidden_size"])
    widths = sizes["selection_width"], sizes["hidden_width"]
    return DynamicTokens(library, zeros, zeros[:, 0], 0.0, *widths)


def _sizes(found: Mapping[Kind, SoftTokens]) -> dict[str, int]:
    """What `_create` needs to know."""
    first = next(iter(found.values()))
    sizes = {"num_tokens": first.num_tokens, "hidden_size": first.hidden_size}
    if isinstance(dynamic := found.get("dynamic"), DynamicTokens):
        sizes["num_rows"] = dynamic.library.shape[0]
        sizes["selection_width"] = dynamic.row_keys.out_features
        sizes["hidden_width"] = dynamic.state_dict()["selector.0.weight"].shape[0]
    return sizes


def save_soft_tokens(
    path: Path,
    model: ModelIdentity,
    found: Mapping[Kind, SoftTokens],
    default: Kind,
    settings: Mapping[str, Any],
    dtype: torch.dtype = torch.float16,
) -> Artifact:
    """Write an artifact.

    Args:
        path: file to write.
        model: that the tokens were trained for.
        found: the trained ones, of one number of tokens.
        default: which of them is used unless a user asks for the other.
        settings: how they were made, for the record.
        dtype: of the stored numbers.
    """
    assert default in found, "the default is one of the trained kinds"
    assert len({tokens.num_tokens for tokens in found.values()}) == 1, "one number of tokens"
    tensors = {
        f"{kind}.{name}": value.detach().cpu().to(dtype)
        for kind, tokens in found.items()
        for name, value in tokens.state_dict().items()
    }
    own = {**settings, **_sizes(found), "kinds": sorted(found), "default": default}
    artifact = Artifact(ARTIFACT_KIND, ARTIFACT_VERSION, model, own, tensors)
    artifact.save(path)
    return artifact


def read_soft_tokens(artifact: Artifact) -> dict[Kind, SoftTokens]:
    """All kinds that an artifact holds, in evaluation mode.

    Raises:
        ValueError: all that is wrong with its settings and tensors.
    """
    settings = artifact.settings
    kinds = settings.get("kinds")
    if not isinstance(kinds, list) or not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"its kinds are {kinds!r}, not some of {', '.join(KINDS)}")
    problems = []
    if settings.get("default") not in kinds:
        problems.append(f"its default is {settings.get('default')!r}, not one of {kinds}")
    needed = _COUNTS if "dynamic" in kinds else _COUNTS[:2]
    problems += [
        f"the setting '{name}' is {settings.get(name)!r}, not a count"
        for name in needed
        if type(settings.get(name)) is not int or settings[name] < 1
    ]
    hidden_size = artifact.model.config.get("hidden_size")
    if settings.get("hidden_size") != hidden_size:
        problems.append(
            f"its tokens have {settings.get('hidden_size')!r} numbers, the model's embeddings "
            f"{hidden_size!r}"
        )
    if problems:
        raise ValueError("; ".join(problems))
    found: dict[Kind, SoftTokens] = {}
    for kind in (kind for kind in KINDS if kind in kinds):
        tokens = _create(kind, settings)
        shapes = {f"{kind}.{n}": tuple(v.shape) for n, v in tokens.state_dict().items()}
        if wrong := tensor_problems(artifact.tensors, shapes):
            raise ValueError("; ".join(wrong))
        tokens.load_state_dict(
            {n: artifact.tensors[f"{kind}.{n}"].float() for n in tokens.state_dict()}
        )
        found[kind] = tokens.eval().requires_grad_(False)
    return found


def load_soft_tokens(model: str, artifact: str | None, probes: Kind | None) -> SoftTokens:
    """Soft tokens for a model that is served.

    Args:
        model: folder, or name of a model in the Hugging Face cache.
        artifact: file, or folder with it, that ``vllm-kvcompress train metasoft`` wrote; None for
            the one that is shipped for the model.
        probes: which kind; None for the artifact's default.

    Returns:
        In evaluation mode, float32, without gradients.

    Raises:
        ValueError: there are none for this model; the reason and the command that makes them.
    """
    try:
        file, found = find_artifact(
            model,
            artifact,
            SHIPPED,
            ARTIFACT_FILE,
            ARTIFACT_KIND,
            ARTIFACT_VERSION,
            "soft tokens are",
        )
        kinds = read_soft_tokens(found)
        chosen: Kind = probes or found.settings["default"]
        if chosen not in kinds:
            raise ValueError(f"{file} has {', '.join(kinds)} soft tokens, none of kind '{chosen}'")
        return kinds[chosen]
    except ValueError as error:
        raise ValueError(
            f"{error}; make soft tokens with: vllm-kvcompress train metasoft --model {model} "
            "--out FOLDER, and name FOLDER as 'soft_tokens' in the configuration"
        ) from error
