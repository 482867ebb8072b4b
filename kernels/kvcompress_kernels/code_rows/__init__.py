"""Quantizes transform channels of keys and values into packed rows (`code_format`)."""

from __future__ import annotations

from kvcompress_kernels.code_rows.api import code_rows, encode_prompt, encode_rows

__all__ = ["code_rows", "encode_prompt", "encode_rows"]
