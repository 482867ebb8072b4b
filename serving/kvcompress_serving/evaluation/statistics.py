"""Bootstrap confidence intervals over prompts, alone and paired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
_NORMAL = NormalDist()
_BATCH_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its confidence interval.

    Args:
        mean: of the values.
        low: lower end of the interval; equal to ``mean`` for a single value or equal values.
        high: upper end.
        count: prompts.
    """

    mean: float
    low: float
    high: float
    count: int


def bootstrap(
    values: Sequence[float],
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Mean and its bias-corrected and accelerated (BCa) bootstrap interval.

    Efron, "Better bootstrap confidence intervals", J. Amer. Statist. Assoc. 82 (1987), section 2:
    percentiles of the resampled means, moved by the bias ``z0`` and the acceleration ``a``, the
    latter from the jackknife. Prompts are what is resampled; the tokens of one prompt depend on
    each other. With fewer than ten prompts such an interval is too narrow.

    Args:
        values: one number per prompt.
        seed: of the resampling.
        num_resamples: number of resamples.
        confidence: probability that the interval claims to cover.

    Raises:
        ValueError: there are no values, or one is not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError(f"expected at least one value, all finite; got {values!r}")
    mean = float(sample.mean())
    if sample.size == 1 or np.ptp(sample) == 0:
        return Estimate(mean, mean, mean, sample.size)
    means = _resampled_means(sample, num_resamples, np.random.default_rng(seed))
    below = (means < mean).mean() + (means == mean).mean() / 2
    bias = _NORMAL.inv_cdf(float(np.clip(below, 1 / num_resamples, 1 - 1 / num_resamples)))
    # leaving out one value moves the mean by (mean - value) / (count - 1)
    moved = sample - mean
    acceleration = (moved**3).sum() / (6 * (moved**2).sum() ** 1.5)
    ends = []
    for tail in ((1 - confidence) / 2, (1 + confidence) / 2):
        z = bias + _NORMAL.inv_cdf(tail)
        ends.append(_NORMAL.cdf(bias + z / (1 - acceleration * z)))
    low, high = np.quantile(means, ends)
    return Estimate(mean, float(low), float(high), sample.size)


def paired(a: Sequence[float], b: Sequence[float], **settings: Any) -> Estimate:
    """Mean of ``a - b`` over the prompts that both were measured on, pair by pair.

    Raises:
        ValueError: the two are not equally long.
    """
    if len(a) != len(b):
        raise ValueError(f"pairs need equally many values; got {len(a)} and {len(b)}")
    return bootstrap(np.subtract(a, b).tolist(), **settings)


def _resampled_means(
    sample: np.ndarray, num_resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """Means of samples drawn with replacement; ``[num_resamples]``."""
    batch = max(_BATCH_ELEMENTS // sample.size, 1)
    means = []
    for start in range(0, num_resamples, batch):
        count = min(batch, num_resamples - start)
        index = generator.integers(0, sample.size, (count, sample.size))
        means.append(sample[index].mean(axis=1))
    return np.concatenate(means)
