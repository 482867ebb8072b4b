"""What training needs of each piece of text, kept on disk or computed again when it is asked for.

A file holds keys and values of one piece and, for each of its prompts, what the responses attend
to. Training goes over it many times; an 8B model with 32 layers of 8 KV heads of 128 takes 128 KiB
a token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_kvcompress.artifacts import ModelIdentity
from vllm_kvcompress.soft_tokens.frozen import PromptCache
from vllm_kvcompress.soft_tokens.prompts import Piece


@dataclass(frozen=True)
class Sample:
    """One prompt with the attention of its response.

    Args:
        token_ids: int64 ``[T]``.
        cache: of the prompt.
        gold: float32 ``[L, H, T]``, attention of the response to the prompt.
    """

    token_ids: torch.Tensor
    cache: PromptCache
    gold: torch.Tensor


class Samples(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def collection_digest(
    model: ModelIdentity, pieces: Sequence[Piece], settings: dict[str, Any]
) -> str:
    """Names what is collected: equal digests, equal content."""
    text = json.dumps([asdict(model), [asdict(piece) for piece in pieces], settings])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cache_bytes(pieces: Sequence[Piece], bytes_per_token: int) -> int:
    """Bytes that the keys and values of pieces take on disk."""
    return sum(len(piece.token_ids) for piece in pieces) * bytes_per_token


def save_piece(path: Path, piece: Piece, cache: PromptCache, golds: Sequence[torch.Tensor]) -> None:
    """Write one piece; a crash leaves no half file.

    Args:
        path: file to write.
        piece: what it is.
        cache: of all of its tokens.
        golds: for each of its cuts float32 ``[L, H, cut]``.
    """
    tensors = {"keys": cache.keys.cpu().contiguous(), "values": cache.values.cpu().contiguous()}
    tensors["token_ids"] = torch.tensor(piece.token_ids)
    for cut, gold in zip(piece.cuts, golds, strict=True):
        tensors[f"gold.{cut}"] = gold.cpu().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, scratch)
    scratch.replace(path)


def is_complete(path: Path, piece: Piece) -> bool:
    """Whether a file holds all of a piece."""
    try:
        with safe_open(path, framework="pt") as file:
            return {f"gold.{cut}" for cut in piece.cuts} <= set(file.keys())
    except (SafetensorError, OSError):  # none yet, or damaged
        return False


class StoredSamples:
    """Samples of pieces that were collected to a folder.

    Args:
        folder: that holds `piece_file` of each.
        indices: of the pieces to take.
        pieces: all of the collection.
    """

    def __init__(self, folder: Path, indices: Sequence[int], pieces: Sequence[Piece]) -> None:
        self._places = [
            (piece_file(folder, index), cut) for index in indices for cut in pieces[index].cuts
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sample:
        path, cut = self._places[index]
        with safe_open(path, framework="pt") as file:
            keys = file.get_slice("keys")[:, :, :cut]
            values = file.get_slice("values")[:, :, :cut]
            ids = file.get_slice("token_ids")[:cut]
            gold = file.get_tensor(f"gold.{cut}")
        return Sample(ids, PromptCache(keys, values), gold)


def piece_file(folder: Path, index: int) -> Path:
    """File of a piece."""
    return folder / f"{index:05d}.safetensors"
