"""Method names and how to make them. One row here, one name in `config.MethodName`."""

from __future__ import annotations

from collections.abc import Callable

from vllm_kvcompress.config import CompressionConfig, method_names
from vllm_kvcompress.methods.base import Method


def _none(config: CompressionConfig) -> Method:
    from vllm_kvcompress.methods.none import NoCompression

    return NoCompression(config)


def _semanticache(config: CompressionConfig) -> Method:
    from vllm_kvcompress.methods.semanticache import SemantiCache

    return SemantiCache(config)


def _selkv(config: CompressionConfig) -> Method:
    from vllm_kvcompress.methods.selkv import SelKV

    return SelKV(config)


def _metasoft(config: CompressionConfig) -> Method:
    from vllm_kvcompress.methods.metasoft import MetaSoft

    return MetaSoft(config)


def _aatc(config: CompressionConfig) -> Method:
    from vllm_kvcompress.methods.aatc import AATC

    return AATC(config)


def _composed(first: str) -> Callable[[CompressionConfig], Method]:
    def create(config: CompressionConfig) -> Method:
        from vllm_kvcompress.methods.composed import Composed

        return Composed(config, _METHODS[first](config))

    return create


def _relocate(config: CompressionConfig) -> Method:
    from vllm_kvcompress.methods.relocate import Relocate

    return Relocate(config)


_METHODS: dict[str, Callable[[CompressionConfig], Method]] = {
    "none": _none,
    "semanticache": _semanticache,
    "selkv": _selkv,
    "metasoft": _metasoft,
    "aatc": _aatc,
    "semanticache+aatc": _composed("semanticache"),
    "selkv+aatc": _composed("selkv"),
    "metasoft+aatc": _composed("metasoft"),
    "relocate": _relocate,
}
assert tuple(_METHODS) == method_names()


def create_method(config: CompressionConfig, name: str | None = None) -> Method:
    """Make the method ``name`` (``config.method`` by default); its module is imported only now."""
    return _METHODS[name or config.method](config)
