"""xformers' split-K decode as an independent peer: over pages, and with an additive bias.

Its Triton kernels need Triton below 3.8, which still has block pointers (torch 2.13 for CUDA brings
3.7), and its compiled extensions are not needed. xformers wants a CUDA device before it offers
them; under Triton's interpreter the kernels themselves do not, and `Peer` says for it that there
is one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


class Peer:
    """Calls of xformers' kernel, which take keys and values as they lie.

    Raises:
        ImportError: xformers is not installed.
    """

    def __init__(self) -> None:
        self._is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        with mock.patch.dict(os.environ, {"XFORMERS_ENABLE_TRITON": "1"}):
            self._fmha: Any = importlib.import_module("xformers.ops.fmha")
            self._masks: Any = importlib.import_module("xformers.ops.fmha.attn_bias")

    def paged(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_table: torch.Tensor,
        lengths: list[int],
        scale: float,
    ) -> Callable[[], torch.Tensor]:
        """Decode of one query a row, without biases.

        Args:
            query: ``[rows, Hq, D]``.
            keys: ``[blocks, N, H, D]`` whose slots lie evenly spaced; N a multiple of 16.
            values: like ``keys``.
            block_table: int32 ``[rows, blocks of a row]``.
            lengths: keys of each row.

        Returns:
            A launch that gives ``[rows, Hq, D]``.
        """
        rows, num_heads, head_size = query.shape
        num_kv_heads, block_size = keys.shape[2], keys.shape[1]
        ratio = num_heads // num_kv_heads
        mask = self._masks.BlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * rows,
            kv_seqlen=lengths,
            kv_padding=block_table.shape[1] * block_size,
            device=query.device,
        ).make_paged(
            block_tables=block_table,
            page_size=block_size,
            paged_type=self._masks.PagedBlockDiagonalPaddedKeysMask,
        )
        inputs = self._fmha.Inputs(
            query=query.view(1, rows, num_kv_heads, ratio, head_size),
            key=_shared(keys.flatten(0, 1)[None], ratio),
            value=_shared(values.flatten(0, 1)[None], ratio),
            attn_bias=mask,
            scale=scale,
        )
        return lambda: self._apply(inputs, min(64, block_size)).view(query.shape)

    def biased(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor,
        scale: float,
    ) -> Callable[[], torch.Tensor]:
        """Decode of one query a row over keys in one piece, with an additive bias.

        Args:
            query: ``[rows, Hq, D]``.
            keys: ``[rows, m, H, D]``.
            values: like ``keys``.
            bias: ``[rows, H, m]``.

        Returns:
            A launch that gives ``[rows, Hq, D]``.
        """
        rows, num_heads, head_size = query.shape
        num_kv_heads, count = keys.shape[2], keys.shape[1]
        ratio = num_heads // num_kv_heads
        inputs = self._fmha.Inputs(
            query=query.view(rows, 1, num_kv_heads, ratio, head_size),
            key=_shared(keys, ratio),
            value=_shared(values, ratio),
            attn_bias=bias.to(query.dtype)[:, :, None, None].expand(-1, -1, ratio, 1, count),
            scale=scale,
        )
        return lambda: self._apply(inputs, 64).view(query.shape)

    def _apply(self, inputs: Any, tile: int) -> torch.Tensor:
        operator = self._fmha.triton_splitk.FwOp
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(operator, "BLOCK_N", tile))
            if self._is_interpreted:
                ampere = mock.Mock(return_value=(8, 0))
                stack.enter_context(mock.patch("torch.cuda.get_device_capability", ampere))
                stack.enter_context(mock.patch("torch.cuda.device", contextlib.nullcontext))
            else:
                reasons = operator.not_supported_reasons(inputs)
                if reasons:
                    raise NotImplementedError("; ".join(reasons))
            output, _ = operator.apply(inputs, needs_gradient=False)
        return output


def _shared(x: torch.Tensor, ratio: int) -> torch.Tensor:
    """``[..., H, D]`` as ``ratio`` query heads see it: ``[..., H, ratio, D]``."""
    return x[..., None, :].expand(*x.shape[:-1], ratio, -1)
