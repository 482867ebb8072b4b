"""The float64 yardstick: a kernel may be as wrong as plain torch in the same dtype, not more."""

from __future__ import annotations

import torch


def eager_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attention of one head, every step in ``dtype``; in float64 it is the yardstick.

    Args:
        query: ``[q, D]``.
        keys: ``[m, D]``.
        values: ``[m, D]``.
        bias: ``[q, m]``, added to the logits; -inf hides a key.
        scale: factor of the logits.
        dtype: dtype of every intermediate result.

    Returns:
        ``[q, D]`` in ``dtype``; 0 for a query that sees no key.
    """
    logits = query.to(dtype) @ keys.to(dtype).T * scale + bias.to(dtype)
    blind = (bias == -torch.inf).all(dim=1, keepdim=True)
    weights = logits.masked_fill(blind, 0).softmax(dim=1).masked_fill(blind, 0)
    return weights @ values.to(dtype)


def max_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference; infinite if anything in ``actual`` is not finite."""
    difference = (actual.double() - exact.double()).abs()
    return difference.nan_to_num(nan=torch.inf).max().item()


def assert_no_worse_than_eager(
    actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor
) -> None:
    """Error of ``actual`` at most that of ``eager`` plus one rounding unit of the output.

    In float32 a kernel has no wider type to sum in and differs from plain torch in the order of
    its sums only. Either may be lucky with it, so there twice the error of ``eager`` is allowed.

    Args:
        actual: result of a kernel.
        eager: result of plain torch in the same dtype.
        exact: result in float64.
    """
    assert exact.dtype == torch.float64
    unit = torch.finfo(actual.dtype).eps * exact.abs().max().item()
    factor = 2 if actual.dtype == torch.float32 else 1
    bound = factor * max_error(eager, exact) + unit
    error = max_error(actual, exact)
    assert error <= bound, f"error {error:.3g}, plain torch and one unit make {bound:.3g}"
