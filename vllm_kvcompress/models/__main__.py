"""``python -m vllm_kvcompress.models [NAME] [--cache DIR]``: get a model, print its folder."""

import argparse
import logging
import sys
from pathlib import Path

from vllm_kvcompress.models.fetch import (
    DEFAULT_MODEL,
    MODELS,
    ModelFetchError,
    default_cache,
    model_path,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvcompress.models",
        description="Fetch a small model, convert it to a Hugging Face folder and print that.",
    )
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, choices=list(MODELS))
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="default: %(default)s", metavar="DIR"
    )
    options = parser.parse_args()
    # stdout carries the folder alone, for scripts
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.info("cache folder: %s", options.cache)
    try:
        print(model_path(options.name, options.cache))
    except ModelFetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
