"""Statistics to transforms: bases, weights, and measured losses, for groups of one size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_kvcompress.calibration import distortion
from vllm_kvcompress.calibration.allocation import GroupWidths
from vllm_kvcompress.calibration.codec import SideTables, Transforms
from vllm_kvcompress.calibration.statistics import CacheShape, Statistics
from vllm_kvcompress.calibration.transform import (
    Basis,
    covariance,
    group_slices,
    principal,
    whitened,
)

ROUNDS = 3
"""Times that widths are dealt out and losses measured with them."""

_ROWS_PER_CELL = 128
_ATTENTION_SHARE = 0.1
"""How far the measured gradients are pulled towards the shape of attention's own metric."""


def build(
    statistics: Statistics,
    shape: CacheShape,
    output_moment: torch.Tensor,
    *,
    group_size: int,
    bits: float,
    preset: str = "best",
    progress: Callable[[], None] = lambda: None,
) -> Transforms:
    """Make the transforms of all groups.

    Args:
        statistics: of the model.
        shape: of its cache.
        output_moment: float64 ``[L, n, n]``, see `output_moments`.
        group_size: KV heads that share a transform, a divisor of their number.
        bits: mean bits of an index at which losses are measured.
        preset: "best": a basis whitened by what an error does to the model's output, see `metric`;
            "paper": principal components of the second moment, weighted by attention's metric.
        progress: called `ROUNDS` times, each time that losses have been measured.
    """
    builder = _Builder(statistics, shape, output_moment, group_size, preset)
    # a cell of many rows, so that their length comes in small steps
    row_bits = bits * 2 * group_size * shape.head_size + 64
    cell_bytes = int(_ROWS_PER_CELL * row_bits / 8)
    widths = None
    for _ in range(ROUNDS):
        transforms = builder.measured(widths)
        layers, groups = range(shape.num_layers), range(builder.num_groups)
        widths = transforms.widths(layers, groups, bits, cell_bytes)
        progress()
    return builder.measured(widths)


def metric(gradient: torch.Tensor, attention: torch.Tensor, cov: torch.Tensor) -> torch.Tensor:
    """What an error costs: float64 ``[n, n]``, in the squared change of log probabilities.

    The moment of gradients says how much the errors of a layer matter, to the model's output and
    against those of other layers, but few tokens draw most of the attention, so it is estimated
    from few rows and fits the calibration text too well. A share of it is replaced by attention's
    own metric, which all tokens contribute to, scaled to the same total cost.

    Args:
        gradient: float64 ``[n, n]``, mean of ``g g^T`` over tokens.
        attention: float64 ``[n, n]``, second moment of queries, or `output_moments`.
        cov: float64 ``[n, n]``, covariance of the keys or values.
    """
    scale = (gradient * cov).sum() / (attention * cov).sum().clamp_min(1e-300)
    return (1 - _ATTENTION_SHARE) * gradient + _ATTENTION_SHARE * scale * attention


def output_moments(weights: list[torch.Tensor], shape: CacheShape) -> torch.Tensor:
    """What an error of the values does to the output of attention: float64 ``[L, n, n]``.

    Args:
        weights: for each layer that of the output projection, ``[hidden, num_heads * D]``.
        shape: of the cache.

    Returns:
        block-diagonal, for each KV head the sum of ``W_j W_j^T`` over its query heads ``j``.
    """
    ratio = shape.num_heads // shape.num_kv_heads
    moments = []
    for weight in weights:
        heads = weight.double().T.reshape(shape.num_kv_heads, ratio, shape.head_size, -1)
        moments.append(torch.block_diag(*torch.einsum("hgdo,hgeo->hde", heads, heads)))
    return torch.stack(moments)


class _Builder:
    def __init__(
        self,
        statistics: Statistics,
        shape: CacheShape,
        output_moment: torch.Tensor,
        group_size: int,
        preset: str,
    ) -> None:
        self._shape = shape
        self._slices = group_slices(shape.num_kv_heads, shape.head_size, group_size)
        self._group_size = group_size
        count = int(statistics.num_tokens)
        self._sides = []
        for side in ("key", "value"):
            samples = getattr(statistics, f"{side}s")
            total = getattr(statistics, f"{side}_sum")
            moment = getattr(statistics, f"{side}_moment")
            gradient = getattr(statistics, f"{side}_gradient")
            groups = []
            for layer in range(shape.num_layers):
                if side == "key":
                    attention = torch.block_diag(*statistics.query_moment[layer]) / count
                else:
                    attention = output_moment[layer]
                mean = total[layer] / count
                cov = covariance(total[layer], moment[layer], count)
                cost = metric(gradient[layer] / count, attention, cov)
                for part in self._slices:
                    if preset == "paper":
                        basis = principal(moment[layer][part, part] / count, attention[part, part])
                    else:
                        basis = whitened(mean[part], cov[part, part], cost[part, part])
                    groups.append(_Channels(basis, samples[layer][:, part].double() - basis.mean))
            self._sides.append(groups)

    @property
    def num_groups(self) -> int:
        return len(self._slices)

    def measured(self, widths: list[list[GroupWidths]] | None) -> Transforms:
        tables = []
        for side, groups in enumerate(self._sides):
            losses = []
            for place, channels in enumerate(groups):
                layer, group = divmod(place, self.num_groups)
                if widths is None:
                    own = torch.full((len(channels.scale),), 2, dtype=torch.int64)
                else:
                    found = widths[layer][group]
                    own = torch.from_numpy(found.values if side else found.keys)
                losses.append(distortion.measure(channels.z, own))
            tables.append(self._table(groups, losses))
        return Transforms(self._group_size, *tables)

    def _table(self, groups: list[_Channels], losses: list[distortion.Losses]) -> SideTables:
        lead = (self._shape.num_layers, self.num_groups)

        def stack(items: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(items).unflatten(0, lead).float()

        return SideTables(
            mean=stack([g.mean for g in groups]),
            basis=torch.stack([g.basis for g in groups]).unflatten(0, lead),
            scale=stack([g.scale for g in groups]),
            weight=stack([g.weight for g in groups]),
            range=stack([item.range for item in losses]),
            distortion=stack([item.distortion for item in losses]),
            gain=stack([item.gain for item in losses]),
        )


class _Channels:
    """A basis as it is stored, in half precision, and sample rows seen through it.

    Args:
        basis: of a group.
        rows: float64 ``[S, w]``, centred.
    """

    def __init__(self, basis: Basis, rows: torch.Tensor) -> None:
        length = basis.encode.norm(dim=0)
        self.mean = basis.mean
        self.basis = (basis.encode / length).half()
        self.scale = length.float()
        self.weight = basis.weight
        self.z = rows @ (self.basis.double() * self.scale.double())
