"""Rows of a benchmark: stock vLLM, the plugin without a method, and what is compared to them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.config import method_names, parse_config

STOCK = "stock"
NONE = "none"
_MOVES_ONLY = (STOCK, NONE, "relocate")


@dataclass(frozen=True)
class Row:
    """One side of a comparison.

    Args:
        name: shown in tables; unique in a run.
        method: a compression method, or ``stock`` for vLLM without the plugin.
        settings: fields of `CompressionConfig` on top of the method.
        block_size: tokens of a KV block; None leaves it to vLLM or the plugin.
    """

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    block_size: int | None = None

    @property
    def compresses(self) -> bool:
        return self.method not in (STOCK, NONE)

    @property
    def reads_meaning(self) -> bool:
        """Whether what the method keeps depends on what the prompt says."""
        return self.method not in _MOVES_ONLY

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of ``vllm serve`` and ``vllm bench throughput``."""
        flags: list[str] = []
        if self.method != STOCK:
            flags.append(f"--kv-compression={self.method}")
        if self.settings:
            flags += ["--kv-compression-config", json.dumps(dict(self.settings))]
        if self.block_size is not None:
            flags += ["--block-size", str(self.block_size)]
        return tuple(flags)

    @property
    def environment(self) -> dict[str, str]:
        """Stock vLLM does not even load the plugin's module."""
        return {"VLLM_PLUGINS": ""} if self.method == STOCK else {}

    def described(self) -> dict[str, Any]:
        """What it was made from, for the report."""
        described = {"method": self.method, **self.settings}
        return described | ({"block_size": self.block_size} if self.block_size else {})

    @staticmethod
    def of(name: str, values: Mapping[str, Any]) -> Row:
        """Row of a method and its settings; ``block_size`` may stand among them.

        Raises:
            ValueError: unknown method or setting.
        """
        settings = dict(values)
        method = settings.pop("method")
        block_size = settings.pop("block_size", None)
        if block_size is not None and (type(block_size) is not int or block_size < 1):
            raise ValueError(
                f"row '{name}': block_size = {block_size!r}: expected a positive number"
            )
        if method == STOCK:
            if settings:
                raise ValueError(f"row '{name}': stock vLLM has no {', '.join(settings)}")
        elif method not in method_names():
            allowed = ", ".join(f"'{other}'" for other in (STOCK, *method_names()))
            raise ValueError(f"row '{name}': unknown method {method!r}; expected one of {allowed}")
        else:
            parse_config({"method": method} | settings)
        return Row(name, method, settings, block_size)

    @staticmethod
    def parse(text: str) -> Row:
        """Row from ``METHOD`` or ``METHOD:key=value,...``; ``NAME=METHOD:...`` names it.

        Values are JSON where they can be read as such and text otherwise.
        """
        head, _, tail = text.partition(":")
        name, _, method = head.rpartition("=")
        values: dict[str, Any] = {"method": method.strip()}
        for part in filter(None, (part.strip() for part in tail.split(","))):
            values.update(_pair(part, f"row '{text}'"))
        return Row.of(name.strip() or text.strip(), values)


def rows_of(texts: Iterable[str]) -> list[Row]:
    """Rows from their texts, with `STOCK` and `NONE` in front, asked for or not.

    Raises:
        ValueError: a row cannot be read, or two have one name.
    """
    return _with_baselines(Row.parse(text) for text in texts)


def varied(base: str, variations: Iterable[str]) -> list[Row]:
    """Rows for every combination of varied settings.

    Args:
        base: a row's text.
        variations: ``key=value|value|...``; the combinations of all of them are made.

    Raises:
        ValueError: a variation cannot be read, or a combination is no valid row.
    """
    start = Row.parse(base)
    if not start.compresses:
        raise ValueError(f"row '{base}' compresses nothing, so there is nothing to vary")
    axes: list[list[dict[str, Any]]] = []
    for text in variations:
        key, equals, values = text.partition("=")
        if not equals or not all(part.strip() for part in values.split("|")):
            raise ValueError(f"--vary '{text}': expected key=value|value|...")
        axes.append([_pair(f"{key}={value}", f"--vary '{text}'") for value in values.split("|")])
    if not axes:
        raise ValueError("nothing varies: give --vary key=value|value|...")
    rows = []
    for choice in itertools.product(*axes):
        changes = {key: value for part in choice for key, value in part.items()}
        label = ", ".join(f"{key}={value}" for key, value in changes.items())
        rows.append(Row.of(f"{start.name} {label}", start.described() | changes))
    return _with_baselines(rows)


def _with_baselines(rows: Iterable[Row]) -> list[Row]:
    made = list(rows)
    for method in (NONE, STOCK):
        if not any(row.name == method for row in made):
            made.insert(0, Row(method, method))
    made.sort(key=lambda row: (row.name != STOCK, row.name != NONE))
    if made[0].method != STOCK or made[1].method != NONE:
        raise ValueError("a row named 'stock' or 'none' must be just that; choose another name")
    names = [row.name for row in made]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two rows are named {', '.join(twice)}; name them NAME=METHOD:...")
    return made


def _pair(text: str, where: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{where}: expected key=value, got '{text}'")
    try:
        return {key.strip(): json.loads(value)}
    except json.JSONDecodeError:
        return {key.strip(): value.strip()}
