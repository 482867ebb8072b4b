"""Paged attention over the compressed segments and the raw tails of some rows of a batch."""

from __future__ import annotations

from kvcompress_kernels.segment_attention.api import segment_attention

__all__ = ["segment_attention"]
