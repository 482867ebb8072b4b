"""Fixtures on the files under ``docker/``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


class ComposeFile:
    """``compose.yaml`` and the defaults that stand in it."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        self.text = path.read_text()
        self.defaults: dict[str, str] = {}
        for name, default in _VARIABLE.findall(self.text):
            assert self.defaults.setdefault(name, default) == default, f"two defaults of {name}"

    def interpolated(self, **settings: str) -> str:
        """The text with ``${NAME:-default}`` replaced, the only form that the file uses."""
        assert settings.keys() <= self.defaults.keys()
        return _VARIABLE.sub(lambda match: settings.get(match[1]) or match[2], self.text)

    def load(self, **settings: str) -> dict[str, Any]:
        content: dict[str, Any] = yaml.safe_load(self.interpolated(**settings))
        return content


class Dashboard:
    """The Grafana dashboard and its queries.

    Args:
        content: the JSON.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.panels: list[dict[str, Any]] = content["panels"]
        self.plots = [panel for panel in self.panels if panel["type"] != "row"]
        self.variables: dict[str, dict[str, Any]] = {
            variable["name"]: variable for variable in content["templating"]["list"]
        }

    def queries(self, interval: str = "1m", span: str = "30m") -> list[tuple[str, str]]:
        """Panel title and PromQL of every query, as Grafana would send it with all chosen.

        Args:
            interval: what stands for ``$__rate_interval``.
            span: what stands for ``$__range``.
        """
        return [
            (panel["title"], self.substituted(target["expr"], interval, span))
            for panel in self.plots
            for target in panel["targets"]
        ]

    def substituted(self, query: str, interval: str = "1m", span: str = "30m") -> str:
        values = {"__rate_interval": interval, "__range": span}
        values |= {name: variable.get("allValue") for name, variable in self.variables.items()}
        return re.sub(r"\$(\w+)", lambda match: str(values[match[1]]), query)

    def label_queries(self) -> dict[str, tuple[str, str]]:
        """Selector and label of each variable that asks for a label's values."""
        found = {}
        for name, variable in self.variables.items():
            if variable["type"] == "query":
                match = re.fullmatch(
                    r"label_values\((.+), (\w+)\)", self.substituted(variable["query"]["query"])
                )
                assert match, variable["query"]
                found[name] = (match[1], match[2])
        return found


@pytest.fixture(scope="session")
def docker_folder() -> Path:
    return ROOT / "docker"


@pytest.fixture(scope="session")
def compose(docker_folder: Path) -> ComposeFile:
    return ComposeFile(docker_folder / "compose.yaml")


@pytest.fixture(scope="session")
def dashboard(docker_folder: Path) -> Dashboard:
    path = docker_folder / "grafana/dashboards/vllm-kvcompress.json"
    return Dashboard(json.loads(path.read_text()))
