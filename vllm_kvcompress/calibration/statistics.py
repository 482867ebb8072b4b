"""Moments of keys, values, queries and gradients of a model, collected in one pass over text.

Everything is taken as it goes into attention: after projection, normalization and RoPE, so any
model whose attention transformers can replace will do. With a `Rotation` that RoPE is undone. Sums
are float64 and are added chunk by chunk, so that a pass can be cut, resumed, and shared between
machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AttentionInterface

from vllm_kvcompress.calibration.rope import Rotation

_ATTENTION = "kvcompress_calibration"


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a model's cache and of what is collected from it.

    Args:
        num_layers: ``L``.
        num_heads: query heads.
        num_kv_heads: ``H``.
        head_size: ``D``.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def width(self) -> int:
        """Numbers in the key of a token, all heads (``n``)."""
        return self.num_kv_heads * self.head_size


@dataclass
class Statistics:
    """Sums over tokens; ``n = H * D`` runs over the heads of a layer in order.

    Args:
        num_tokens: int64 ``[1]``, tokens summed.
        num_chunks: int64 ``[1]``, chunks of text summed.
        key_sum: float64 ``[L, n]``.
        key_moment: float64 ``[L, n, n]``, sum of ``k k^T``.
        value_sum: float64 ``[L, n]``.
        value_moment: float64 ``[L, n, n]``.
        query_moment: float64 ``[L, H, D, D]``, summed over the query heads of a KV head too.
        key_gradient: float64 ``[L, n, n]``, sum of ``g g^T``, with ``g`` the gradient of the log
            probability of tokens drawn from the model itself by a token's key, through the
            attention of queries that lie further away than the window.
        value_gradient: float64 ``[L, n, n]``.
        keys: float16 ``[L, S, n]``, a sample of keys, in the order of the text.
        values: float16 ``[L, S, n]``, values of the same tokens.
    """

    num_tokens: torch.Tensor
    num_chunks: torch.Tensor
    key_sum: torch.Tensor
    key_moment: torch.Tensor
    value_sum: torch.Tensor
    value_moment: torch.Tensor
    query_moment: torch.Tensor
    key_gradient: torch.Tensor
    value_gradient: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def empty(shape: CacheShape) -> Statistics:
        L, n, H, D = shape.num_layers, shape.width, shape.num_kv_heads, shape.head_size

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.float64)

        return Statistics(
            num_tokens=torch.zeros(1, dtype=torch.int64),
            num_chunks=torch.zeros(1, dtype=torch.int64),
            key_sum=zeros(L, n),
            key_moment=zeros(L, n, n),
            value_sum=zeros(L, n),
            value_moment=zeros(L, n, n),
            query_moment=zeros(L, H, D, D),
            key_gradient=zeros(L, n, n),
            value_gradient=zeros(L, n, n),
            keys=torch.zeros(L, 0, n, dtype=torch.float16),
            values=torch.zeros(L, 0, n, dtype=torch.float16),
        )

    def add(self, other: Statistics) -> None:
        """Add the sums of later text, in place."""
        for item in fields(self):
            own, its = getattr(self, item.name), getattr(other, item.name)
            if item.name in ("keys", "values"):
                setattr(self, item.name, torch.cat([own, its], 1))
            else:
                own += its

    def save(self, path: Path, metadata: dict[str, str]) -> None:
        """Write to a safetensors file, whole or not at all."""
        scratch = path.with_name(f".{path.name}.part")
        tensors = {f.name: getattr(self, f.name).contiguous() for f in fields(self)}
        save_file(tensors, scratch, metadata)
        scratch.replace(path)

    @staticmethod
    def load(path: Path) -> tuple[Statistics, dict[str, str]]:
        """Read what `save` wrote."""
        with safe_open(path, framework="pt") as file:
            tensors = {f.name: file.get_tensor(f.name) for f in fields(Statistics)}
            return Statistics(**tensors), dict(file.metadata() or {})


class Collector:
    """Runs a model over chunks of text and sums what goes through its attention.

    Args:
        model: a transformers causal language model, float32, whose layers all have full attention.
        shape: of its cache.
        num_sink_tokens: first tokens of a chunk that are left out: compression keeps them raw, and
            they are unlike all others.
        window: tokens nearest to a query, whose gradient is left out: they are raw as well.
        sample_stride: every how many tokens one goes into the sample.
        rotation: taken off keys, their gradients and queries; None leaves them rotated.
    """

    def __init__(
        self,
        model: Any,
        shape: CacheShape,
        *,
        num_sink_tokens: int = 4,
        window: int = 64,
        sample_stride: int = 8,
        rotation: Rotation | None = None,
    ) -> None:
        self._model = model
        self._rotation = rotation
        self._offset = 0
        self._shape = shape
        self._skip = num_sink_tokens
        self._window = window
        self._stride = sample_stride
        self._sum = Statistics.empty(shape)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        model.requires_grad_(False)
        AttentionInterface.register(_ATTENTION, self._attend)
        model.set_attn_implementation(_ATTENTION)

    def collect(self, token_ids: list[int], offset: int, seed: int) -> Statistics:
        """Statistics of one chunk.

        Args:
            token_ids: of the chunk.
            offset: position of its first token, so that keys are seen at all angles of RoPE.
            seed: of the tokens that are drawn from the model.
        """
        self._sum = Statistics.empty(self._shape)
        self._offset = offset
        embed = self._model.get_input_embeddings()
        inputs = embed(torch.tensor([token_ids])).detach().requires_grad_(True)
        positions = torch.arange(offset, offset + len(token_ids))[None]
        logits = self._model(inputs_embeds=inputs, position_ids=positions, use_cache=False).logits[
            0
        ]
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
        loss = logits.float().log_softmax(-1).gather(1, drawn).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total = self._sum
        total.num_chunks += 1
        total.num_tokens += len(token_ids) - self._skip
        layers = range(self._shape.num_layers)
        total.keys = torch.stack([self._keys[index] for index in layers])
        total.values = torch.stack([self._values[index] for index in layers])
        return total

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = module.layer_idx
        with torch.no_grad():
            self._add_moments(layer, self._turn(query[0]), self._turn(key[0]), value[0])
        scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5

        def record(key_gradient: torch.Tensor, value_gradient: torch.Tensor) -> None:
            for total, part in (
                (self._sum.key_gradient, self._turn(key_gradient)),
                (self._sum.value_gradient, value_gradient),
            ):
                rows = self._rows(part)
                total[layer] += rows.T @ rows

        output = _Attention.apply(  # type: ignore[no-untyped-call]
            query[0], key[0], value[0], scale, self._window, record
        )
        return output.transpose(0, 1)[None], None

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """``[heads, T, D]`` without RoPE, if that is asked for."""
        return x if self._rotation is None else self._rotation.undo(x, self._offset)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[H, T, D] -> float64 [T - skipped, n]``."""
        return x[:, self._skip :].transpose(0, 1).flatten(1).double()

    def _add_moments(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        total = self._sum
        keys, values = self._rows(key), self._rows(value)
        total.key_sum[layer] += keys.sum(0)
        total.key_moment[layer] += keys.T @ keys
        total.value_sum[layer] += values.sum(0)
        total.value_moment[layer] += values.T @ values
        num_kv_heads = key.shape[0]
        queries = query[:, self._skip :].double().reshape(num_kv_heads, -1, query.shape[-1])
        total.query_moment[layer] += queries.transpose(1, 2) @ queries
        self._keys[layer] = keys[:: self._stride].half()
        self._values[layer] = values[:: self._stride].half()


class _Attention(torch.autograd.Function):
    """Causal attention of one sequence, whose backward pass also reports the gradients of keys and
    values that come through queries beyond the window."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        record: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.window, ctx.record = scale, window, record
        return torch.nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key, value = ctx.saved_tensors
        ratio, length = query.shape[0] // key.shape[0], query.shape[1]
        ones = torch.ones(length, length, dtype=torch.bool)
        future, far = ones.triu(1), ones.tril(-ctx.window)
        grads = [torch.zeros_like(x) for x in (query, key, value, key, value)]
        grad_query, grad_key, grad_value, far_key, far_value = grads
        for head in range(query.shape[0]):
            own = head // ratio
            logits = (query[head] @ key[own].T * ctx.scale).masked_fill_(future, float("-inf"))
            weights = logits.softmax(-1)
            grad_weights = grad[head] @ value[own].T
            mean = (grad_weights * weights).sum(-1, keepdim=True)
            grad_logits = weights * (grad_weights - mean) * ctx.scale
            grad_query[head] = grad_logits @ key[own]
            grad_key[own] += grad_logits.T @ query[head]
            grad_value[own] += weights.T @ grad[head]
            far_key[own] += (grad_logits * far).T @ query[head]
            far_value[own] += (weights * far).T @ grad[head]
        ctx.record(far_key, far_value)
        return grad_query, grad_key, grad_value, None, None, None


def offsets(num_chunks: int, chunk_tokens: int, max_position: int) -> list[int]:
    """Positions at which chunks begin.

    They cover all that the model can reach, but more densely near 0, since every prompt has tokens
    there and few have them at the end: half of the chunks begin in the first eighth.
    """
    room = max(max_position - chunk_tokens, 0)
    # multiples of the golden ratio fall evenly into [0, 1)
    return [int(room * (index * 0.6180339887498949 % 1.0) ** 3) for index in range(num_chunks)]
