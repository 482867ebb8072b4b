"""Collecting: prompts are read, answered by the model itself, and the answers' attention is kept.

Only the plain forward of the frozen model is needed, so this is done once for any number of
trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vllm_kvcompress.soft_tokens.frozen import FrozenModel, PromptCache
from vllm_kvcompress.soft_tokens.prompts import Piece
from vllm_kvcompress.soft_tokens.store import Sample, is_complete, piece_file, save_piece

ResponseSource = Literal["model", "text"]
RESPONSE_SOURCES: tuple[ResponseSource, ...] = ("model", "text")


@dataclass(frozen=True)
class Responses:
    """How prompts are answered.

    Args:
        source: "model", by the model itself, which takes most of the time; or "text", by the text's
            own continuation.
        per_prompt: responses to each prompt; their attention is averaged.
        temperature: at which the model answers; 0 is greedy.
        batch_size: pieces that are answered at once.
        seed: of the answers.
    """

    source: ResponseSource = "text"
    per_prompt: int = 1
    temperature: float = 0.7
    batch_size: int = 8
    seed: int = 0


def collect(
    model: FrozenModel,
    pieces: Sequence[Piece],
    indices: Sequence[int],
    responses: Responses,
    folder: Path,
    dtype: torch.dtype,
    on_piece: Callable[[], Any] = lambda: None,
) -> None:
    """Collect pieces to a folder; those that are there already are left out.

    Args:
        model: that reads and answers.
        pieces: of the whole collection.
        indices: of the pieces to collect, those of this rank.
        responses: how prompts are answered.
        folder: to write to.
        dtype: of stored keys and values.
        on_piece: called after each piece.
    """
    missing = [i for i in indices if not is_complete(piece_file(folder, i), pieces[i])]
    for _ in range(len(indices) - len(missing)):
        on_piece()
    for start in range(0, len(missing), responses.batch_size):
        batch = missing[start : start + responses.batch_size]
        found = read_and_answer(model, [pieces[i] for i in batch], responses, batch)
        for index, (cache, golds) in zip(batch, found, strict=True):
            file = piece_file(folder, index)
            save_piece(file, pieces[index], cache.to("cpu", dtype), golds)
            on_piece()


def read_and_answer(
    model: FrozenModel, pieces: Sequence[Piece], responses: Responses, indices: Sequence[int]
) -> list[tuple[PromptCache, list[torch.Tensor]]]:
    """Caches of pieces, and the attention of the response to each prompt of each.

    Args:
        model: that reads and answers.
        pieces: to be read.
        responses: how they are answered.
        indices: numbers of the pieces.

    Returns:
        for each piece its cache and, for each of its cuts, float32 ``[L, H, cut]``.
    """
    if responses.source == "text":
        assert all(piece.is_answered for piece in pieces), "the text has the responses"
        return [model.read(torch.tensor(piece.token_ids), piece.spans) for piece in pieces]
    prompts = [torch.tensor(piece.token_ids[: piece.cuts[-1]]) for piece in pieces]
    caches = [model.prefill(ids) for ids in prompts]
    return list(zip(caches, answer(model, pieces, caches, responses, indices), strict=True))


def answer(
    model: FrozenModel,
    pieces: Sequence[Piece],
    caches: Sequence[PromptCache],
    responses: Responses,
    indices: Sequence[int],
) -> list[list[torch.Tensor]]:
    """Attention of the model's own responses to each prompt of each piece.

    The responses of a prompt depend on the seed and the piece's number alone, whatever else is in
    the batch.

    Args:
        pieces: to be answered.
        caches: of the pieces.
        responses: how.
        indices: numbers of the pieces.

    Returns:
        for each piece, for each of its cuts, float32 ``[L, H, cut]``.
    """
    golds: list[list[torch.Tensor]] = [[] for _ in pieces]
    for length in sorted({piece.response_tokens for piece in pieces}):
        places = [
            (number, cut)
            for number, piece in enumerate(pieces)
            if piece.response_tokens == length
            for cut in piece.cuts
        ]
        prompts = [
            PromptCache(caches[number].keys[:, :, :cut], caches[number].values[:, :, :cut])
            for number, cut in places
        ]
        generators = [
            torch.Generator().manual_seed(responses.seed * 1_000_003 + indices[number] * 1009 + cut)
            for number, cut in places
        ]
        # the last token again, over the prompt without it: its logits come from the cache alone
        last = [pieces[number].token_ids[cut - 1] for number, cut in places]
        found = [torch.zeros(())] * len(places)
        for _ in range(responses.per_prompt):
            parts = model.respond(prompts, last, length, responses.temperature, generators)[1]
            found = [a + b / responses.per_prompt for a, b in zip(found, parts, strict=True)]
        for (number, _), gold in zip(places, found, strict=True):
            golds[number].append(gold)
    return golds


class FreshSamples:
    """Samples that are computed whenever they are asked for; nothing is kept on disk.

    Args:
        model: that reads and answers.
        indices: of the pieces to take.
        pieces: all of the collection.
        responses: how prompts are answered.
        dtype: of keys and values.
    """

    def __init__(
        self,
        model: FrozenModel,
        indices: Sequence[int],
        pieces: Sequence[Piece],
        responses: Responses,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._responses, self._dtype = model, responses, dtype
        self._places = [(i, pieces[i], cut) for i in indices for cut in pieces[i].cuts]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sample:
        number, piece, cut = self._places[index]
        end = cut + piece.response_tokens if piece.is_answered else cut
        alone = replace(piece, token_ids=piece.token_ids[:end], cuts=(cut,))
        ((cache, golds),) = read_and_answer(self._model, [alone], self._responses, [number])
        prompt = PromptCache(cache.keys[:, :, :cut], cache.values[:, :, :cut])
        ids = torch.tensor(alone.token_ids[:cut])
        return Sample(ids, prompt.to(self._model.device, self._dtype), golds[0])
