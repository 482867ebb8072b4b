"""Rows of a table: a method with its settings, or one of the bounds that stand beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcompress_kernels.formats import SlabGeometry
from kvcompress_serving.evaluation.peers import CACHE_TYPES
from vllm_kvcompress.config import (
    CompressionConfig,
    method_names,
    parse_config,
    request_options,
)
from vllm_kvcompress.core import (
    Budget,
    IncompressibleError,
    LayerView,
    PromptView,
    RequestOptions,
    Segment,
    TokenLayout,
)
from vllm_kvcompress.methods.base import Method
from vllm_kvcompress.methods.registry import create_method

FULL = "full"
PEER = "vllm"
WINDOW = "window"


class WindowOnly(Method):
    """Keeps the first tokens and the most recent ones (StreamingLLM, arXiv 2309.17453).

    The bound that looks at nothing: what a method is worth is what it does better at the same
    size. Positions stay as they are. ``keep`` is the share of the compressed tokens; 0 leaves the
    first tokens alone, so that with the raw window nothing of the prompt's middle is known.
    """

    name = WINDOW

    def __init__(self, config: CompressionConfig, keep: float, num_sink_tokens: int = 4) -> None:
        super().__init__(config)
        self._keep = keep
        self._num_sink_tokens = num_sink_tokens

    def _kept(self, num_tokens: int) -> tuple[int, int]:
        """Numbers of first and of most recent tokens among ``num_tokens``."""
        sinks = min(self._num_sink_tokens, num_tokens)
        return sinks, min(max(int(self._keep * num_tokens) - sinks, 0), num_tokens - sinks)

    def budget(
        self,
        num_tokens: int,
        layout: TokenLayout | None,
        keep: float | None,
        geometry: SlabGeometry,
    ) -> Budget:
        if num_tokens <= self._num_sink_tokens:
            raise IncompressibleError("no_room", f"{num_tokens} tokens are no more than the first")
        return Budget(geometry.cells(sum(self._kept(num_tokens))))

    def compress(self, layer: LayerView, prompt: PromptView, settings: Any) -> Segment:
        num_tokens = layer.keys.shape[1]
        sinks, recent = self._kept(num_tokens)
        index = torch.cat([torch.arange(sinks), torch.arange(num_tokens - recent, num_tokens)])
        bias = torch.zeros(len(index), dtype=torch.float32)
        return Segment(
            list(layer.keys[:, index]), list(layer.values[:, index]), [bias] * len(layer.keys)
        )


@dataclass(frozen=True)
class Row:
    """One row of the tables.

    Args:
        name: shown in the tables; unique among the rows of a run.
        method: with its configuration; None is the full cache. The tokenizer is bound later.
        options: what a request would ask for.
        settings: what the row was made from, for the report.
        cache_type: a cache type of vLLM's own in place of a method, an item of `CACHE_TYPES`.
    """

    name: str
    method: Method | None = None
    options: RequestOptions = field(default_factory=lambda: RequestOptions("none"))
    settings: Mapping[str, Any] = field(default_factory=dict)
    cache_type: str | None = None

    @property
    def is_full(self) -> bool:
        return self.method is None and self.cache_type is None

    @staticmethod
    def of(name: str, settings: Mapping[str, Any]) -> Row:
        """Row of a method by its configuration (`CompressionConfig`, or a bound's own keys).

        Raises:
            ValueError: unknown method or setting.
        """
        settings = dict(settings)
        method = settings.get("method")
        if method in (FULL, "none"):
            if extra := sorted(set(settings) - {"method"}):
                raise ValueError(f"row '{name}': the full cache has no settings; got {extra}")
            return Row(name, settings=settings)
        if method == WINDOW:
            return _window_row(name, settings)
        if method == PEER:
            return _peer_row(name, settings)
        if method not in method_names():
            allowed = ", ".join(f"'{other}'" for other in (FULL, WINDOW, PEER, *method_names()))
            raise ValueError(f"row '{name}': unknown method {method!r}; expected one of {allowed}")
        config = parse_config(settings)
        return Row(name, create_method(config), request_options({}, config), settings)

    @staticmethod
    def parse(text: str) -> Row:
        """Row from ``METHOD`` or ``METHOD:key=value,key=value`` as on the command line.

        Values are JSON where they can be read as such and text otherwise. ``NAME=METHOD:...``
        gives the row a name of its own.
        """
        head, _, tail = text.partition(":")
        name, _, method = head.rpartition("=")
        settings: dict[str, Any] = {"method": method.strip()}
        for part in filter(None, (part.strip() for part in tail.split(","))):
            key, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"row '{text}': expected key=value, got '{part}'")
            settings[key.strip()] = _value(value.strip())
        return Row.of(name.strip() or text.strip(), settings)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _window_row(name: str, settings: dict[str, Any]) -> Row:
    """The bound `WindowOnly`; ``window`` is the raw window of the other methods."""
    wrong = sorted(set(settings) - {"method", "keep", "window", "num_sink_tokens"})
    keep = settings.get("keep", 0.0)
    if wrong or isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 <= keep <= 1:
        raise ValueError(
            f"row '{name}': '{WINDOW}' takes keep (0 to 1, the share of the compressed tokens), "
            f"window and num_sink_tokens; got {settings}"
        )
    common = {key: settings[key] for key in ("window", "num_sink_tokens") if key in settings}
    config = parse_config({"method": "none"} | common)
    method = WindowOnly(config, float(keep), config.num_sink_tokens)
    return Row(name, method, RequestOptions(WINDOW, keep=float(keep)), settings)


def _peer_row(name: str, settings: dict[str, Any]) -> Row:
    """A cache of vLLM's own type: ``vllm:cache=fp8``."""
    cache_type = settings.get("cache")
    if set(settings) != {"method", "cache"} or cache_type not in CACHE_TYPES:
        raise ValueError(
            f"row '{name}': '{PEER}' takes cache, one of {', '.join(CACHE_TYPES)}; got {settings}"
        )
    return Row(name, settings=settings, cache_type=cache_type)


def rows_of(texts: list[str | Row]) -> list[Row]:
    """Rows from their texts; ``full`` comes first, asked for or not.

    Raises:
        ValueError: two rows have one name, or a row cannot be read.
    """
    rows = [Row.parse(item) if isinstance(item, str) else item for item in texts]
    if not any(row.is_full for row in rows):
        rows.insert(0, Row(FULL, settings={"method": FULL}))
    rows.sort(key=lambda row: not row.is_full)
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two rows are named {', '.join(twice)}; name them NAME=METHOD:...")
    return rows
