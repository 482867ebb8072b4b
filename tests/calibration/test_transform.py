"""Bases whiten, their weights are the cost of errors, and measured losses are the coder's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcompress_kernels.code_rows import reference
from vllm_kvcompress.calibration import distortion
from vllm_kvcompress.calibration.build import metric
from vllm_kvcompress.calibration.codec import SideTables
from vllm_kvcompress.calibration.transform import covariance, group_slices, principal, whitened


def rows(seed: int, count: int, size: int) -> torch.Tensor:
    """Correlated rows away from zero, with directions of very different size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64)
    spread = torch.logspace(0.5, -0.5, size, dtype=torch.float64)
    noise = torch.randn(count, size, generator=generator, dtype=torch.float64)
    return 5 + (noise * spread) @ mixing


def random_metric(seed: int, size: int) -> torch.Tensor:
    x = rows(seed, 4 * size, size)
    return x.T @ x / len(x)


def test_channels_are_uncorrelated_and_errors_cost_what_the_weights_say() -> None:
    x, cost = rows(0, 500, 24), random_metric(1, 24)
    mean = x.mean(0)
    basis = whitened(mean, covariance(x.sum(0), x.T @ x, len(x)), cost)
    z = (x - mean) @ basis.encode
    torch.testing.assert_close(z.T @ z / len(x), torch.eye(24).double(), rtol=0, atol=1e-6)
    assert (basis.weight.diff() <= 0).all()
    error = torch.randn(24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    channels = error @ basis.encode
    expected = float(error @ cost @ error)
    assert float((channels.square() * basis.weight).sum()) == pytest.approx(expected, rel=1e-2)


def test_principal_components_weigh_single_channels() -> None:
    x, cost = rows(3, 500, 16), random_metric(4, 16)
    basis = principal(x.T @ x / len(x), cost)
    direction = basis.encode / basis.encode.norm(dim=0)
    torch.testing.assert_close(direction.T @ direction, torch.eye(16).double(), rtol=0, atol=1e-9)
    for channel in (0, 7, 15):
        unit = direction[:, channel]
        variance = float((x @ unit).square().mean())
        expected = float(unit @ cost @ unit) * variance
        assert float(basis.weight[channel]) == pytest.approx(expected, rel=1e-6)


def test_a_side_that_never_varies_is_no_problem() -> None:
    basis = whitened(
        torch.zeros(4).double(), torch.zeros(4, 4).double(), torch.zeros(4, 4).double()
    )
    assert torch.isfinite(basis.encode).all()
    assert torch.isfinite(basis.weight).all()


def test_the_metric_keeps_the_total_cost() -> None:
    gradient, attention, cov = (random_metric(seed, 12) for seed in (5, 6, 7))
    found = metric(gradient, 1000 * attention, cov)
    assert float((found * cov).sum()) == pytest.approx(float((gradient * cov).sum()), rel=1e-9)
    assert torch.allclose(found, found.T)


def test_groups_divide_the_numbers_of_a_layer() -> None:
    assert group_slices(4, 8, 2) == [slice(0, 16), slice(16, 32)]
    assert len(group_slices(3, 64, 1)) == 3


def test_measured_losses_are_those_of_the_coder() -> None:
    generator = torch.Generator().manual_seed(8)
    z = torch.randn(3000, 32, generator=generator, dtype=torch.float64)
    # heavy tails where many bits go
    z[:, :4] = z[:, :4] ** 3 / 15**0.5
    widths = np.array([8] * 4 + [4] * 8 + [2] * 8 + [1] * 8 + [0] * 4)
    losses = distortion.measure(z, torch.from_numpy(widths))
    ones = torch.ones(1, 1, 32)
    tables = SideTables(
        mean=torch.zeros(1, 1, 32),
        basis=torch.eye(32).half()[None, None],
        scale=ones,
        weight=ones,
        range=losses.range.float()[None, None],
        distortion=losses.distortion.float()[None, None],
        gain=losses.gain.float()[None, None],
    )
    codec = tables.codec(0, 0, widths)
    codes, scales = reference.quantize((z.float() - codec.mean) @ codec.encode, codec)
    decoded = reference.dequantize(codes, scales, codec) @ codec.decode
    error = (z - decoded.double()).square().mean(0)
    expected = tables.costs(0, 0)[np.arange(32), np.searchsorted([0, 1, 2, 4, 8], widths)]
    # a channel that is dropped loses its variance, 1 in the tables
    np.testing.assert_allclose(error[:28], expected[:28], rtol=0.02)
    np.testing.assert_allclose(error[28:], z[:, 28:].square().mean(0), rtol=1e-6)
    assert (losses.distortion.diff(dim=1) < 0).all()


def test_gains_take_the_bias_out_of_coarse_levels() -> None:
    generator = torch.Generator().manual_seed(9)
    z = torch.rand(5000, 16, generator=generator, dtype=torch.float64) * 12**0.5 - 3**0.5
    losses = distortion.measure(z, torch.full((16,), 2))
    # one bit of a uniform variable: levels at half of its range, error (range / 2)^2 / 12
    assert float(losses.distortion[:, 0].mean()) == pytest.approx(0.25, rel=0.15)
