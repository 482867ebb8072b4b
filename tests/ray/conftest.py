"""A Ray of this process's own for all tests of this folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from vllm_kvcompress.cluster import LOCAL, connected

# Ray asks for a token of its clients and would keep one in the home folder
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    with connected(LOCAL, num_cpus=2):
        yield
