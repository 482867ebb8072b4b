"""What each channel loses at each width, measured on real rows with the coder's own rules.

The scale of a row is shared by its channels, so the loss of one depends on the widths of the
others: widths are dealt out and losses are measured in turn until both fit each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompress_kernels import code_format
from vllm_kvcompress.calibration.allocation import CHOICES

CODED = CHOICES[1:]
"""The widths that a table has a column for: 1, 2, 4, 8."""

_RANGE_QUANTILE = 0.999
_FEWEST_CHANNELS = 8


@dataclass(frozen=True)
class Losses:
    """Losses of the channels of one side of a group, whose samples have variance 1.

    Args:
        distortion: float64 ``[n, 4]``, mean squared error at each of `CODED`.
        gain: float64 ``[n, 4]``, what a decoded number is multiplied with for the least error.
        range: float64 ``[n]``, size of a channel's large numbers: 8-bit channels are divided by it
            before they share a scale.
    """

    distortion: torch.Tensor
    gain: torch.Tensor
    range: torch.Tensor

    def table(self) -> torch.Tensor:
        """float64 ``[n, 5]``, relative error at each of `CHOICES`."""
        return torch.cat([torch.ones_like(self.range)[:, None], self.distortion], 1)


def channel_range(z: torch.Tensor) -> torch.Tensor:
    """`Losses.range` of samples ``[S, n]``."""
    return z.abs().quantile(_RANGE_QUANTILE, dim=0).clamp_min(1e-6)


def measure(z: torch.Tensor, widths: torch.Tensor) -> Losses:
    """Losses at every width, while the scales of the rows are those that ``widths`` make.

    Args:
        z: float64 ``[S, n]``, rows of channels with variance 1, by falling importance.
        widths: int64 ``[n]``, items of `CHOICES`.
    """
    ranges = channel_range(z)
    low, high = (widths > 0) & (widths < 8), widths == 8
    if not low.any():
        low[:_FEWEST_CHANNELS] = True
    if not high.any():
        high[:_FEWEST_CHANNELS] = True
    rms = z[:, low].square().mean(1, keepdim=True).sqrt().clamp_min(code_format.SMALLEST_SCALE)
    relative = (z / ranges).abs()
    # a channel that is not among those of 8 bits would widen their scale if it joined them
    peak = torch.maximum(relative[:, high].amax(1, keepdim=True), relative) / 128
    peak = peak.clamp_min(code_format.SMALLEST_SCALE)
    distortion, gain = [], []
    for width in CODED:
        if width == 8:
            unit = peak * ranges
            decoded = (z / unit).round().clamp(-128, 127) * unit
        else:
            edges = code_format.thresholds(width).to(z.dtype)
            index = torch.bucketize((z / rms).contiguous(), edges)
            decoded = code_format.levels(width).to(z.dtype)[index] * rms
        energy = decoded.square().sum(0)
        factor = torch.where(energy > 0, (z * decoded).sum(0) / energy.clamp_min(1e-30), 1.0)
        gain.append(factor)
        distortion.append((z - factor * decoded).square().mean(0))
    return Losses(torch.stack(distortion, 1), torch.stack(gain, 1), ranges)
