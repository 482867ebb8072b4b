"""Exit 0 if the server of this container answers its health route, 1 otherwise.

``HEALTH_URL`` is the route; set it where the server listens on another port. Proxies that the
environment names are not used.
"""

from __future__ import annotations

import os
import sys
import urllib.request


def healthy(url: str, timeout: float = 8.0) -> bool:
    """Whether a GET of the URL answers 200 within ``timeout`` seconds."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            return bool(answer.status == 200)
    except OSError as error:  # refused, timed out, or an HTTP status that is an error
        print(f"{url}: {error}", file=sys.stderr)  # noqa: T201
        return False


if __name__ == "__main__":
    sys.exit(0 if healthy(os.environ["HEALTH_URL"]) else 1)
