"""The published recipe (arXiv 2608.14191), as far as keys after RoPE allow, to compare with.

Principal components, one scale per row and side, uniform levels, and bits by reverse water-filling
on the product of weight and variance, with the stabilizers of the paper: both are divided by the
95th percentile of their layer (the weights of values are not), and the first three layers get the
mean bits, their keys one more. Codes of any width up to 16 bits are no format of ours, so this
exists in the simulation only: rows are coded and decoded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvcompress.calibration.codec import SideTables, Transforms

_MAX_BITS = 16
_PROTECTED_LAYERS = 3
_SCALE_BITS = 16
_STEPS = 50


def water_fill(product: np.ndarray, budget: int) -> np.ndarray:
    """Bits of each channel by reverse water-filling.

    Args:
        product: float ``[c]``, weight times variance.
        budget: sum of all bits.

    Returns:
        int64 ``[c]``, each of 0 to 16, with the sum ``min(budget, 16 c)``.
    """
    log = np.log2(np.maximum(product, 1e-300)) / 2
    low, high = log.min() - _MAX_BITS - 1, log.max() + 1
    for _ in range(_STEPS):
        middle = (low + high) / 2
        used = np.clip(np.round(log - middle), 0, _MAX_BITS).sum()
        low, high = (middle, high) if used > budget else (low, middle)
    bits = np.clip(np.round(log - high), 0, _MAX_BITS).astype(np.int64)
    # what is left goes to the channels that rounding cost most
    while bits.sum() < min(budget, _MAX_BITS * len(bits)):
        missing = min(budget, _MAX_BITS * len(bits)) - int(bits.sum())
        lack = np.where(bits < _MAX_BITS, (log - high) - bits, -np.inf)
        chosen = np.argsort(-lack, kind="stable")[:missing]
        bits[chosen[np.isfinite(lack[chosen])]] += 1
    return bits


def side_widths(
    tables: SideTables, layers: Sequence[int], groups: Sequence[int], bits: float, is_key: bool
) -> np.ndarray:
    """Bits of all channels of one side: int64 ``[layers, groups, w]``."""
    at = np.ix_(list(layers), list(groups))
    variance = 1 / tables.scale.double().numpy()[at] ** 2
    weight = tables.weight.double().numpy()[at] / variance
    variance = variance / np.quantile(variance, 0.95, axis=(1, 2), keepdims=True)
    if is_key:
        weight = weight / np.quantile(weight, 0.95, axis=(1, 2), keepdims=True)
    product = variance * weight
    num_layers, per_layer = len(product), product[0].size
    total = round(bits * product.size)
    widths = np.zeros(product.shape, dtype=np.int64)
    protected = _PROTECTED_LAYERS if num_layers > 2 * _PROTECTED_LAYERS else 0
    own = round((bits + is_key) * per_layer)
    for layer in range(protected):
        widths[layer] = water_fill(product[layer].ravel(), own).reshape(product[layer].shape)
    rest = product[protected:]
    widths[protected:] = water_fill(rest.ravel(), total - protected * own).reshape(rest.shape)
    return widths


@dataclass(frozen=True)
class PublishedSide:
    """Keys or values of one group.

    Args:
        basis: float64 ``[w, w]``, orthonormal columns.
        unit: float64 ``[w]``, the size of a channel's large numbers.
        widths: int64 ``[w]``.
    """

    basis: torch.Tensor
    unit: torch.Tensor
    widths: torch.Tensor

    @property
    def row_bits(self) -> int:
        return int(self.widths.sum()) + _SCALE_BITS

    def recode(self, x: torch.Tensor) -> torch.Tensor:
        """What is left of rows ``[group_size, m, D]`` after coding and decoding."""
        head_size = x.shape[-1]
        h = x.transpose(0, 1).flatten(1).double() @ self.basis / self.unit
        active = self.widths > 0
        peak = h[:, active].abs().amax(1, keepdim=True).half().double().clamp_min(2.0**-14)
        step = 2 * peak / 2.0**self.widths
        half = 2.0 ** (self.widths - 1)
        code = torch.minimum((h / step).round().maximum(-half), half - 1)
        flat = (code * step * self.unit * active) @ self.basis.T
        return flat.unflatten(1, (-1, head_size)).transpose(0, 1).to(x.dtype)


@dataclass(frozen=True)
class PublishedGroup:
    """Keys and values of one group."""

    keys: PublishedSide
    values: PublishedSide

    def recode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is left of keys and values ``[group_size, m, D]`` after coding and decoding."""
        return self.keys.recode(keys), self.values.recode(values)

    def rows_per_cell(self, cell_bytes: int) -> int:
        """Rows that fit a cell, were they packed without a gap."""
        return 8 * cell_bytes // (self.keys.row_bits + self.values.row_bits)


def published_groups(
    transforms: Transforms, layers: Sequence[int], groups: Sequence[int], bits: float
) -> list[list[PublishedGroup]]:
    """The coder of each layer and group."""
    sides = []
    for tables, is_key in ((transforms.keys, True), (transforms.values, False)):
        widths = side_widths(tables, layers, groups, bits, is_key)
        sides.append(
            [
                [
                    PublishedSide(
                        tables.basis[layer, group].double(),
                        (tables.range[layer, group] / tables.scale[layer, group]).double(),
                        torch.from_numpy(widths[i, j]),
                    )
                    for j, group in enumerate(groups)
                ]
                for i, layer in enumerate(layers)
            ]
        )
    return [
        [PublishedGroup(*pair) for pair in zip(*layer, strict=True)]
        for layer in zip(*sides, strict=True)
    ]
