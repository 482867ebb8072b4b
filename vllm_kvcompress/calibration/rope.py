"""Rotary position embedding, undone: keys as they are before it (arXiv 2104.09864)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Rotation:
    """The rotation of a model with plain RoPE over the whole head, in the two-halves form.

    Args:
        theta: base of the wavelengths.
        head_size: ``D``.
    """

    theta: float
    head_size: int

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> Rotation:
        """Of what a model's ``config.json`` says.

        Raises:
            ValueError: its RoPE is scaled or covers a part of the head.
        """
        config = config.get("text_config") or config
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope.setdefault("rope_theta", config.get("rope_theta"))
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        plain = rope.get("rope_type", rope.get("type", "default")) == "default" and part == 1.0
        if rope["rope_theta"] is None or not plain:
            raise ValueError(f"keys before RoPE are known for plain RoPE alone, not for {rope}")
        head_size = config.get("head_dim")
        return Rotation(
            float(rope["rope_theta"]),
            int(head_size or config["hidden_size"] // config["num_attention_heads"]),
        )

    @staticmethod
    def of_model(folder: Path) -> Rotation:
        """Of a model's folder; see `of_config`."""
        return Rotation.of_config(json.loads((folder / "config.json").read_text()))

    def apply(self, x: torch.Tensor, first_position: int) -> torch.Tensor:
        """Rotate ``[..., T, D]``, whose tokens stand at ``first_position`` and after it."""
        return self._turn(x, first_position, 1.0)

    def undo(self, x: torch.Tensor, first_position: int) -> torch.Tensor:
        """The inverse of `apply`, which for a gradient is its way back through it."""
        return self._turn(x, first_position, -1.0)

    def _turn(self, x: torch.Tensor, first_position: int, sign: float) -> torch.Tensor:
        half = self.head_size // 2
        inverse = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        positions = first_position + torch.arange(x.shape[-2], dtype=torch.float64)
        angles = positions[:, None] * inverse
        cos, sin = angles.cos(), sign * angles.sin()
        first, second = x.double().split(half, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.to(x.dtype)
