"""Compare what the plugin stands on between two versions of vLLM, by their sources alone.

A version is a *fingerprint*: for every member of `compat.EXTENSION_POINTS` its signature or value,
and a hash of its body without comments and blank lines. The fingerprints of versions other than the
installed one are kept in ``tests/data``; to make one, unpack the wheel and run::

    python tests/vllm_sources.py FOLDER_THAT_HOLDS_vllm > tests/data/vllm-VERSION.json
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_kvcompress.engine.compat import EXTENSION_POINTS, ExtensionPoint

Member = dict[str, str]
Fingerprint = dict[str, Member]

GONE: Member = {"kind": "gone"}


class Sources:
    """The Python files of one vLLM.

    Args:
        folder: holds the package ``vllm``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cache  # noqa: B019 - lives as long as a test or a script
    def module(self, name: str) -> tuple[ast.Module, list[str]] | None:
        """Syntax tree and lines of a module; None when there is none of this name."""
        path = self._folder.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                text = file.read_text(encoding="utf-8")
                return ast.parse(text), text.splitlines()
        return None

    def find(self, target: str) -> tuple[str, ast.AST] | None:
        """Module and node of a qualified name, through the imports of the modules on the way."""
        module, _, name = target.rpartition(".")
        if self.module(target) is not None:
            return target, self.module(target)[0]
        if not module or self.module(module) is None:
            return None
        for node in _statements(self.module(module)[0].body):
            if name in _names(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(f"{_origin(module, self, node)}.{alias.name}")
        return None

    def member(self, target: str, name: str) -> tuple[str, ast.AST] | None:
        """Module and node of a member: of the class or one of its bases; of the module."""
        found = self.find(target)
        if found is None:
            return None
        module, node = found
        if isinstance(node, ast.Module):
            return self.find(f"{target}.{name}")
        if not isinstance(node, ast.ClassDef):
            return None
        for child in _statements(node.body):
            if name in _names(child):
                return module, child
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and any(
                _is_self(part, name) for part in ast.walk(method)
            ):
                return module, ast.Name(f"set in {method.name}")
        for base in node.bases:
            base_name = ast.unparse(base).split("[")[0]
            if inherited := self.member(f"{module}.{base_name}", name):
                return inherited
        return None


def _origin(module: str, sources: Sources, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    is_package = sources._folder.joinpath(*parts).is_dir()
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of the ``if`` and ``try`` blocks in it."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, block, []))


def _names(node: ast.AST) -> set[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _is_self(node: ast.AST, name: str) -> bool:
    """Whether this is ``self.name`` being assigned."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _describe(lines: list[str], node: ast.AST) -> Member:
    if isinstance(node, ast.FunctionDef):
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        decorators = " ".join(f"@{ast.unparse(d)}" for d in node.decorator_list)
        kept = _code(lines, node)
        return {
            "kind": "function",
            "signature": f"{decorators} ({ast.unparse(node.args)})".strip(),
            "body": hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16],
        }
    if isinstance(node, ast.ClassDef):
        return {"kind": "class", "signature": ", ".join(map(ast.unparse, node.bases))}
    if isinstance(node, ast.Name):
        return {"kind": "attribute", "signature": node.id}
    return {"kind": "value", "signature": ast.unparse(node)}


def _code(lines: list[str], node: ast.FunctionDef) -> list[str]:
    """Body without docstring, comment lines, blank lines and indentation: the same under every
    version of Python, which the printed syntax tree is not."""
    first = node.body[0]
    start = first.lineno
    if ast.get_docstring(node) is not None:
        start = (first.end_lineno or start) + 1
    body = (line.strip() for line in lines[start - 1 : node.end_lineno])
    return [line for line in body if line and not line.startswith("#")]


def _members(point: ExtensionPoint) -> Iterator[str]:
    yield from dict.fromkeys((*point.methods, *point.attributes, *point.fields))


def fingerprint(folder: Path) -> Fingerprint:
    """Of the vLLM in a folder: every member by its qualified name."""
    sources = Sources(folder)
    found: Fingerprint = {}
    for point in EXTENSION_POINTS:
        where = sources.find(point.target)
        if where is None:
            found[point.target] = GONE
            continue
        if isinstance(where[1], ast.ClassDef):
            found[point.target] = _describe([], where[1])
        for name in _members(point):
            place = sources.member(point.target, name) if name else where
            label = f"{point.target}.{name}" if name else point.target
            found[label] = (
                GONE if place is None else _describe(sources.module(place[0])[1], place[1])
            )
    return found


def differences(ours: Fingerprint, theirs: Fingerprint) -> dict[str, str]:
    """Members that differ, each with how: ``gone``, ``signature`` or ``body``."""
    found = {}
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name, GONE), theirs.get(name, GONE)
        if one["kind"] != other["kind"]:
            found[name] = "gone" if other is GONE or other["kind"] == "gone" else "kind"
        elif one.get("signature") != other.get("signature"):
            found[name] = "signature"
        elif one.get("body") != other.get("body"):
            found[name] = "body"
    return found


if __name__ == "__main__":
    json.dump(fingerprint(Path(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
