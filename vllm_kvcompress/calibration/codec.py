"""The outcome of calibration, and codecs made of it for any number of bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcompress_kernels.code_format import WIDTHS, GroupCodec, SideCodec
from vllm_kvcompress.artifacts import Artifact, ModelIdentity, tensor_problems
from vllm_kvcompress.calibration.allocation import CHOICES, GroupWidths, allocate

_SIDES = ("key", "value")


@dataclass(frozen=True)
class SideTables:
    """Channels of the keys or the values of all groups: ``L`` layers, ``P`` groups of a layer,
    ``w`` numbers of a group, ``w`` channels.

    Args:
        mean: float32 ``[L, P, w]``.
        basis: float16 ``[L, P, w, w]``, columns of length 1.
        scale: float32 ``[L, P, w]``; the channels ``(x - mean) @ (basis * scale)`` have variance 1
            on the calibration text.
        weight: float32 ``[L, P, w]``, what losing a channel costs, in one unit for all.
        range: float32 ``[L, P, w]``, see `distortion.Losses`.
        distortion: float32 ``[L, P, w, 4]``, relative cost at 1, 2, 4 and 8 bits.
        gain: float32 ``[L, P, w, 4]``, see `distortion.Losses`.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    scale: torch.Tensor
    weight: torch.Tensor
    range: torch.Tensor
    distortion: torch.Tensor
    gain: torch.Tensor

    @staticmethod
    def shapes(num_layers: int, num_groups: int, width: int) -> dict[str, tuple[int, ...]]:
        rows = (num_layers, num_groups, width)
        names = ("mean", "scale", "weight", "range")
        tables = ("distortion", "gain")
        return {
            **dict.fromkeys(names, rows),
            "basis": (*rows, width),
            **dict.fromkeys(tables, (*rows, len(WIDTHS))),
        }

    def costs(self, layer: int, group: int) -> np.ndarray:
        """float64 ``[w, 5]``, the cost of each channel at each of `CHOICES`."""
        relative = self.distortion[layer, group].double()
        table = torch.cat([torch.ones(len(relative), 1, dtype=torch.float64), relative], 1)
        return (self.weight[layer, group].double()[:, None] * table).numpy()

    def encoder(self, layer: int, group: int) -> torch.Tensor:
        """float64 ``[w, w]``: ``(x - mean) @ encoder`` are the channels, with variance 1."""
        return self.basis[layer, group].double() * self.scale[layer, group].double()

    def codec(self, layer: int, group: int, widths: np.ndarray) -> SideCodec:
        """Codec of one group with the given widths of channels, int ``[w]``."""
        encode = self.encoder(layer, group)
        decode = torch.linalg.inv(encode)
        order = [torch.from_numpy(np.flatnonzero(widths == width)) for width in WIDTHS]
        counts = tuple(len(part) for part in order)
        chosen = torch.cat(order)
        encode, decode = encode[:, chosen], decode[chosen]
        gains = [
            self.gain[layer, group, part, CHOICES.index(width) - 1].double()
            for part, width in zip(order, WIDTHS, strict=True)
        ]
        ranges = self.range[layer, group, order[0]].double()
        encode[:, : counts[0]] /= ranges
        decode[: counts[0]] *= ranges[:, None]
        decode *= torch.cat(gains)[:, None]
        return SideCodec(
            (counts[0], counts[1], counts[2], counts[3]),
            self.mean[layer, group].clone(),
            encode.float().contiguous(),
            decode.float().contiguous(),
        )


@dataclass(frozen=True)
class Transforms:
    """Both sides of all groups of one size.

    Args:
        group_size: KV heads that share a transform.
        keys: of the keys.
        values: of the values.
    """

    group_size: int
    keys: SideTables
    values: SideTables

    @staticmethod
    def _name(group_size: int, side: str, field: str) -> str:
        return f"group{group_size}.{side}.{field}"

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names that an artifact has for them."""
        return {
            self._name(self.group_size, side, field): tensor
            for side, tables in zip(_SIDES, (self.keys, self.values), strict=True)
            for field, tensor in vars(tables).items()
        }

    @staticmethod
    def expected(
        group_size: int, num_layers: int, num_kv_heads: int, head_size: int
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of `tensors`."""
        shapes = SideTables.shapes(num_layers, num_kv_heads // group_size, group_size * head_size)
        return {
            Transforms._name(group_size, side, field): shape
            for side in _SIDES
            for field, shape in shapes.items()
        }

    @staticmethod
    def read(group_size: int, tensors: Mapping[str, torch.Tensor]) -> Transforms:
        """The inverse of `tensors`."""
        keys, values = (
            SideTables(
                **{
                    field: tensors[Transforms._name(group_size, side, field)]
                    for field in SideTables.__dataclass_fields__
                }
            )
            for side in _SIDES
        )
        return Transforms(group_size, keys, values)

    def widths(
        self,
        layers: Sequence[int],
        groups: Sequence[int],
        bits: float,
        cell_bytes: int,
        has_bias: bool = False,
    ) -> list[list[GroupWidths]]:
        """Widths of the channels of some layers and groups; see `allocation.allocate`.

        Returns:
            for each of ``layers`` one item for each of ``groups``.
        """
        places = [(layer, group) for layer in layers for group in groups]
        found = allocate(
            [self.keys.costs(*place) for place in places],
            [self.values.costs(*place) for place in places],
            bits,
            cell_bytes,
            has_bias,
        )
        return [found[start : start + len(groups)] for start in range(0, len(found), len(groups))]

    def codec(
        self, layer: int, group: int, widths: GroupWidths, has_bias: bool = False
    ) -> GroupCodec:
        """Codec of one group."""
        return GroupCodec(
            self.keys.codec(layer, group, widths.keys),
            self.values.codec(layer, group, widths.values),
            has_bias,
        )


ARTIFACT_KIND = "aatc"
ARTIFACT_VERSION = 1
ARTIFACT_FILE = "aatc.safetensors"
SHIPPED = Path(__file__).parent / "shipped"
"""Folder with a folder for each model that an artifact is shipped for."""

PRESETS = ("best", "paper")
KEY_SPACES = ("post_rope", "pre_rope")


@dataclass(frozen=True)
class Calibration:
    """All that calibration found out about a model.

    Args:
        num_layers: of the model.
        num_heads: query heads of a layer.
        num_kv_heads: KV heads of a layer.
        head_size: ``D``.
        preset: an item of `PRESETS`.
        group_size: KV heads of a group, where nothing speaks against it.
        transforms: by group size.
        key_space: an item of `KEY_SPACES`.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    preset: str
    group_size: int
    transforms: Mapping[int, Transforms]
    key_space: str = "post_rope"

    def artifact(self, model: ModelIdentity, settings: Mapping[str, Any]) -> Artifact:
        """As it is stored.

        Args:
            model: that was calibrated.
            settings: how, beside what is in the fields.
        """
        tensors: dict[str, torch.Tensor] = {}
        for transforms in self.transforms.values():
            tensors.update(transforms.tensors())
        own = {name: getattr(self, name) for name in _SETTINGS}
        group_sizes = sorted(self.transforms)
        stored = {**settings, **own, "group_sizes": group_sizes, "key_space": self.key_space}
        return Artifact(ARTIFACT_KIND, ARTIFACT_VERSION, model, stored, tensors)

    @staticmethod
    def read(artifact: Artifact) -> Calibration:
        """The inverse of `artifact`.

        Raises:
            ValueError: all that is wrong with its settings and tensors.
        """
        settings = artifact.settings
        integers = [name for name in _SETTINGS if name != "preset"]
        problems = [
            f"the setting '{name}' is {settings.get(name)!r}, not a count"
            for name in integers
            if type(settings.get(name)) is not int or settings[name] < 1
        ]
        if settings.get("preset") not in PRESETS:
            problems.append(f"the preset is {settings.get('preset')!r}, not one of {PRESETS}")
        key_space = settings.get("key_space", "post_rope")
        if key_space not in KEY_SPACES:
            problems.append(f"the key space is {key_space!r}, not one of {KEY_SPACES}")
        sizes: Any = settings.get("group_sizes")
        if not isinstance(sizes, list) or settings.get("group_size") not in sizes:
            problems.append(f"its group sizes are {sizes!r}")
        if problems:
            raise ValueError("; ".join(problems))
        L, H, D = (settings[k] for k in ("num_layers", "num_kv_heads", "head_size"))
        for size in sizes:
            if type(size) is not int or size < 1 or H % size:
                raise ValueError(f"a group size is {size!r}, with {H} KV heads")
            expected = Transforms.expected(size, L, H, D)
            problems += tensor_problems(artifact.tensors, expected)
            problems += [
                f"'{name}' holds a number that is not above 0"
                for name in expected
                if name.endswith((".scale", ".weight", ".range"))
                and name in artifact.tensors
                and not bool((artifact.tensors[name] > 0).all())
            ]
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError("; ".join(problems[:5]) + more)
        return Calibration(
            **{name: settings[name] for name in _SETTINGS},
            transforms={size: Transforms.read(size, artifact.tensors) for size in sizes},
            key_space=key_space,
        )


_SETTINGS = ("num_layers", "num_heads", "num_kv_heads", "head_size", "preset", "group_size")
