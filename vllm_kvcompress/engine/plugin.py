"""Entry point of the vLLM plugin group ``vllm.general_plugins``.

vLLM calls `register` in every process, possibly more than once. Installed is not active: this
module adds two command-line flags and looks at ``additional_config`` when an engine is configured.
Without the key ``kv_compression`` there, no other module of the plugin is imported and every vLLM
class stays the stock one.
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

KEY = "kv_compression"
GROUP = "kv-compression"

_registered = False


def register() -> None:
    """Offer ``--kv-compression`` and watch for it; safe to call again."""
    global _registered
    if _registered:
        return
    _registered = True

    from vllm.engine.arg_utils import EngineArgs

    # Both wraps stand in for hooks that vLLM does not offer to general plugins; the reasons and
    # when they can go are in compat.PATCHES.
    add_cli_args = EngineArgs.add_cli_args
    create_engine_config = EngineArgs.create_engine_config

    @functools.wraps(add_cli_args)
    def add_cli_args_with_flags(parser: Any) -> Any:
        parser = add_cli_args(parser)
        _add_flags(parser)
        return parser

    @functools.wraps(create_engine_config)
    def create_engine_config_with_compression(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.additional_config
        if not isinstance(config, dict) or config.get(KEY) is None:
            return create_engine_config(self, *args, **kwargs)
        from vllm_kvcompress.engine import settings

        return settings.create_engine_config(self, create_engine_config, *args, **kwargs)

    EngineArgs.add_cli_args = staticmethod(add_cli_args_with_flags)
    EngineArgs.create_engine_config = create_engine_config_with_compression


class _SetMethod(argparse.Action):
    """``--kv-compression METHOD``: writes ``additional_config["kv_compression"]["method"]``."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        _merge(namespace, {"method": values})


class _SetConfig(argparse.Action):
    """``--kv-compression-config JSON``: adds fields beside the method."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        shown = repr(values) if len(values) <= 80 else f"{values[:77]!r}..."
        try:
            fields = json.loads(values)
        except (ValueError, RecursionError) as error:  # not JSON, or too large to be read
            raise argparse.ArgumentError(self, f"{shown} is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise argparse.ArgumentError(self, f"{shown} is not a JSON object")
        _merge(namespace, fields)


class _StoreKeepingFlags(argparse.Action):
    """``--additional-config JSON``, without dropping what our flags have already put there."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        earlier = getattr(namespace, "additional_config", None)
        namespace.additional_config = values
        if isinstance(earlier, dict) and isinstance(values, dict) and KEY in earlier:
            fields = earlier[KEY]
            namespace.additional_config = {**values}
            _merge(namespace, fields if isinstance(fields, dict) else {"method": fields})


def _merge(namespace: Any, fields: dict[str, Any]) -> None:
    """Put fields on top of what stands under our key; the namespace's dict is replaced, since the
    parser's default dict is shared."""
    config = dict(getattr(namespace, "additional_config", None) or {})
    present = config.get(KEY) or {}
    if not isinstance(present, dict):
        present = {"method": present}
    config[KEY] = {**present, **fields}
    namespace.additional_config = config


def _add_flags(parser: Any) -> None:
    group = parser.add_argument_group(
        GROUP, "KV-cache compression after prefill (plugin vllm-kvcompress)."
    )
    group.add_argument(
        "--kv-compression",
        dest="additional_config",
        metavar="METHOD",
        action=_SetMethod,
        default=argparse.SUPPRESS,
        help="Compress the KV cache of each request after its prefill with this method: "
        "'semanticache' (merge similar keys between punctuation marks), 'none' (plugin active, "
        "nothing compressed), 'relocate' (diagnosis: copy without compressing). "
        'The same as --additional-config \'{"kv_compression": {"method": METHOD}}\'.',
    )
    group.add_argument(
        "--kv-compression-config",
        dest="additional_config",
        metavar="JSON",
        action=_SetConfig,
        default=argparse.SUPPRESS,
        help="Settings of the method as a JSON object, for instance "
        '\'{"threshold": 0.7, "max_keep": 0.5}\'. '
        "`vllm-kvcompress methods` lists them all.",
    )
    for action in parser._actions:
        if "--additional-config" in action.option_strings:
            action.__class__ = type("_StoreKeepingFlags", (_StoreKeepingFlags, type(action)), {})
