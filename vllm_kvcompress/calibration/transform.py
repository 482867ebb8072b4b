"""Bases of transform coding: which channels the keys or the values of a group become.

With ``x`` a key or value of a group (its heads one after another, ``n`` numbers), and ``M`` a
metric, so that an error ``e`` costs ``e^T M e``, the channels are ``z = (x - mean) E`` with
``E = M^(1/2) Q`` and ``Q`` the eigenvectors of ``M^(1/2) C M^(1/2)``, ``C`` the covariance. They
are uncorrelated, and the cost of an error is the sum of the squares of the errors of the channels,
so bits can be dealt out channel by channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_RIDGE = 1e-4
_SMALLEST_VARIANCE = 1e-9


@dataclass(frozen=True)
class Basis:
    """Channels of one side of a group, by falling variance.

    Args:
        mean: float64 ``[n]``.
        encode: float64 ``[n, n]``; ``(x - mean) @ encode`` has variance 1 in every channel.
        weight: float64 ``[n]``, what an error of one standard deviation costs.
    """

    mean: torch.Tensor
    encode: torch.Tensor
    weight: torch.Tensor


def covariance(total: torch.Tensor, moment: torch.Tensor, count: int) -> torch.Tensor:
    """Of sums ``[n]`` and sums of products ``[n, n]`` over ``count`` tokens."""
    mean = total / count
    return moment / count - mean[:, None] * mean[None]


def whitened(mean: torch.Tensor, cov: torch.Tensor, metric: torch.Tensor) -> Basis:
    """The basis of the module's description.

    Args:
        mean: float64 ``[n]``.
        cov: float64 ``[n, n]``, symmetric, positive semidefinite.
        metric: the same; a ten-thousandth of its mean diagonal is added to the diagonal.
    """
    size = len(mean)
    ridge = _RIDGE * float(metric.diagonal().mean().clamp_min(1e-30))
    values, vectors = torch.linalg.eigh(metric + ridge * torch.eye(size, dtype=metric.dtype))
    root = vectors @ (values.clamp_min(ridge).sqrt()[:, None] * vectors.T)
    variances, rotation = torch.linalg.eigh(root @ cov @ root)
    variances, rotation = variances.flip(0), rotation.flip(1)
    variances = variances.clamp_min(_SMALLEST_VARIANCE * float(variances[0].clamp_min(1e-30)))
    encode = root @ rotation
    # a fixed sign, whatever the solver of the machine returns
    largest = encode.abs().argmax(0)
    encode = encode * encode[largest, torch.arange(size)].sign()
    return Basis(mean, encode / variances.sqrt(), variances)


def principal(moment: torch.Tensor, metric: torch.Tensor) -> Basis:
    """Principal components of the second moment ``[n, n]``, about zero; the weights are those of
    single channels in a metric ``[n, n]``."""
    size = len(moment)
    basis = whitened(torch.zeros(size, dtype=moment.dtype), moment, torch.eye(size).double())
    # the inverse of an orthogonal basis with columns of any length
    decode = (basis.encode / basis.encode.square().sum(0)).T
    return Basis(basis.mean, basis.encode, ((decode @ metric) * decode).sum(1))


def group_slices(num_kv_heads: int, head_size: int, group_size: int) -> list[slice]:
    """Where the numbers of each group lie among those of the layer."""
    width = group_size * head_size
    return [slice(start, start + width) for start in range(0, num_kv_heads * head_size, width)]
