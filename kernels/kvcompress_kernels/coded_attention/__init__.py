"""Attention over coded rows, as a partial softmax that the raw entries are added to."""

from __future__ import annotations

from kvcompress_kernels.coded_attention.api import LayerCodecs, coded_attention

__all__ = ["LayerCodecs", "coded_attention"]
