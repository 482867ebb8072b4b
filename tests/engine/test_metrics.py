"""The counters with a reason: all are there before anything is counted."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from vllm_kvcompress import methods
from vllm_kvcompress.engine import metrics, scheduler, worker
from vllm_kvcompress.engine.metrics import BYPASS_REASONS, FAILURE_REASONS, CompressionMetrics


def test_every_reason_begins_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setattr(metrics, "_writing_registry", lambda _config: registry)
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))
    counters = CompressionMetrics(config, 0)
    counters.bypassed("no_room")

    def values(name: str) -> dict[str, float]:
        samples = [s for family in registry.collect() for s in family.samples if s.name == name]
        return {sample.labels["reason"]: sample.value for sample in samples}

    expected = dict.fromkeys(BYPASS_REASONS, 0.0) | {"no_room": 1.0}
    assert values("vllm_kvcompress:requests_bypassed_total") == expected
    assert values("vllm_kvcompress:requests_failed_total") == dict.fromkeys(FAILURE_REASONS, 0.0)


def test_no_reason_is_missing() -> None:
    """The reasons as they stand in the code that counts them."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(scheduler))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("_bypass", "_discard", "_postpone"):
                found |= _texts(node.args[-1])
        elif isinstance(node, ast.FunctionDef) and node.name == "_refuse":
            returns = (part for part in ast.walk(node) if isinstance(part, ast.Return))
            found |= {text for part in returns if part.value for text in _texts(part.value)}
    for file in Path(methods.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "IncompressibleError":
                found |= _texts(node.args[0])
    assert len(found) > 8
    assert found <= set(BYPASS_REASONS)
    given_up = {
        text
        for node in ast.walk(ast.parse(inspect.getsource(worker)))
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "reason"
        for text in _texts(node.value)
    }
    assert given_up == set(FAILURE_REASONS)


def _texts(node: ast.AST) -> set[str]:
    """Texts that an expression may be; what a condition compares is none of them."""
    if isinstance(node, ast.IfExp):
        return _texts(node.body) | _texts(node.orelse)
    if isinstance(node, ast.BoolOp):
        return {text for value in node.values for text in _texts(value)}
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
