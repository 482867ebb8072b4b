"""`code_rows` in plain torch, and its inverse."""

from __future__ import annotations

import torch

from kvcompress_kernels import code_format
from kvcompress_kernels.code_format import (
    SCALE_DTYPE,
    SMALLEST_SCALE,
    WIDTHS,
    Codes,
    Counts,
    GroupCodec,
    SideCodec,
)


def transform(x: torch.Tensor, side: SideCodec) -> torch.Tensor:
    """Channels of keys or values: ``[group_size, m, D] -> float32 [m, r]``."""
    flat = x.transpose(0, 1).flatten(1).float()
    return (flat - side.mean) @ side.encode


def _scale(raw: torch.Tensor) -> torch.Tensor:
    return raw.float().clamp(SMALLEST_SCALE, torch.finfo(SCALE_DTYPE).max).to(SCALE_DTYPE)


def quantize(z: torch.Tensor, side: SideCodec) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`quantize_channels` with the counts of ``side``."""
    return quantize_channels(z, side.counts)


def quantize_channels(z: torch.Tensor, counts: Counts) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Codes uint8 ``[m, r]`` of channels ``z [m, r]``, and their scales, each float16 ``[m]``.

    Channels of up to 4 bits share a scale, their root mean square, and take the nearest level; the
    8-bit channels share another, their largest magnitude over 128, and are rounded. The mean is
    taken in float64, so that the scale does not depend on the order of the sum.
    """
    codes = torch.empty(z.shape, dtype=torch.uint8)
    scales = []
    wide = counts[0]
    if wide < z.shape[1]:
        scale = _scale(z[:, wide:].double().square().mean(1).sqrt())
        scales.append(scale)
        start = wide
        for count, width in zip(counts[1:], WIDTHS[1:], strict=True):
            part = z[:, start : start + count] / scale.float()[:, None]
            found = torch.bucketize(part.contiguous(), code_format.thresholds(width))
            codes[:, start : start + count] = found.to(torch.uint8)
            start += count
    if wide:
        scale = _scale(z[:, :wide].abs().amax(1) / 128)
        scales.append(scale)
        level = (z[:, :wide] / scale.float()[:, None]).round().clamp(-128, 127)
        codes[:, :wide] = (level + 128).to(torch.uint8)
    return codes, scales


def dequantize(codes: torch.Tensor, scales: list[torch.Tensor], side: SideCodec) -> torch.Tensor:
    """What the codes stand for: float32 ``[m, r]``, before the decoding matrix."""
    wide = side.counts[0]
    remaining = list(scales)
    z = torch.empty(codes.shape, dtype=torch.float32)
    if wide < codes.shape[1]:
        scale = remaining.pop(0).float()[:, None]
        start = wide
        for count, width in zip(side.counts[1:], WIDTHS[1:], strict=True):
            index = codes[:, start : start + count].long()
            z[:, start : start + count] = code_format.levels(width)[index] * scale
            start += count
    if wide:
        z[:, :wide] = code_format.levels(8)[codes[:, :wide].long()]
        z[:, :wide] *= remaining.pop(0).float()[:, None]
    return z


def encode(
    keys: torch.Tensor, values: torch.Tensor, codec: GroupCodec, bias: torch.Tensor | None = None
) -> Codes:
    """Code rows.

    Args:
        keys: ``[group_size, m, D]``.
        values: ``[group_size, m, D]``.
        codec: of the group.
        bias: ``[m]``; given exactly if the codec's rows carry one.
    """
    assert (bias is not None) == codec.has_bias
    key_codes, scales = quantize(transform(keys, codec.keys), codec.keys)
    value_codes, value_scales = quantize(transform(values, codec.values), codec.values)
    scales += value_scales
    if bias is not None:
        scales.append(bias.to(SCALE_DTYPE))
    return Codes(key_codes, value_codes, torch.stack(scales))


def decode(
    codes: Codes, codec: GroupCodec, head_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values ``[group_size, m, D]`` and biases ``[m]`` that rows stand for, float32."""
    names = list(codec.layout.scales())
    scales = dict(zip(names, codes.scales, strict=True))

    def side(name: str, table: torch.Tensor, part: SideCodec) -> torch.Tensor:
        own = [scales[n] for n in names if n.startswith(name)]
        flat = part.mean + dequantize(table, own, part) @ part.decode
        return flat.unflatten(1, (-1, head_size)).transpose(0, 1)

    bias = scales["bias"].float() if codec.has_bias else torch.zeros(codes.num_rows)
    return side("key", codes.keys, codec.keys), side("value", codes.values, codec.values), bias
