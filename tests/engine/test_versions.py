"""Other versions of vLLM, by their sources: what of all the plugin touches is different there."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import vllm
from vllm_sources import differences, fingerprint

import vllm_kvcompress.engine
from vllm_kvcompress.engine import compat

ROOT = Path(__file__).parents[2]
INSTALLED = Path(vllm.__file__).parents[1]
OTHERS = sorted((ROOT / "tests" / "data").glob("vllm-*.json"))
TARGETS = {point.target for point in compat.EXTENSION_POINTS}
MEMBERS = {
    f"{point.target}.{name}"
    for point in compat.EXTENSION_POINTS
    for name in (*point.methods, *point.attributes, *point.fields)
}
ENGINE = [
    importlib.import_module(f"vllm_kvcompress.engine.{module.name}")
    for module in pkgutil.iter_modules(vllm_kvcompress.engine.__path__)
]
NOT_COMPARED = {
    "vllm.LLM",  # `verify` is a user of vLLM like any other
    "vllm.SamplingParams",
    "vllm.logger.init_logger",
    "vllm.platforms.current_platform",  # an object; its class is in the list
}


@pytest.fixture(scope="module")
def ours():
    return fingerprint(INSTALLED)


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def known_differences(version):
    """Rows of the version's table in the documentation: name and kind of difference."""
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert f"### vLLM {version}\n" in text
    section = re.split(r"^#+ ", text.split(f"### vLLM {version}\n")[1], flags=re.MULTILINE)[0]
    return dict(re.findall(r"^\| `(vllm\.[\w.]+)` \| (\w+) \|", section, flags=re.MULTILINE))


def test_all_extension_points_are_found_in_the_installed_sources(ours):
    assert not MEMBERS - ours.keys() - {f"{name}." for name in TARGETS}
    assert not [name for name, member in ours.items() if member["kind"] == "gone"]


@pytest.mark.parametrize("file", OTHERS, ids=lambda file: file.stem)
def test_every_difference_is_known(ours, file):
    found = differences(ours, read(file))
    assert found, "a version without differences needs no file"
    assert found == known_differences(file.stem.removeprefix("vllm-"))


@pytest.mark.parametrize("file", OTHERS, ids=lambda file: file.stem)
def test_the_probes_would_pass(file):
    """What `compat.probe` asks of the running vLLM, asked of the other version's sources."""
    theirs = read(file)
    assert not [name for name, member in theirs.items() if member["kind"] == "gone"]
    for point in compat.EXTENSION_POINTS:
        for method, parameters in point.methods.items():
            label = f"{point.target}.{method}".rstrip(".")
            signature = theirs[label]["signature"]
            assert set(parameters) <= set(re.findall(r"\w+", signature)), (label, signature)


@pytest.mark.parametrize("module", ENGINE, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_import_of_the_engine_is_compared(module):
    tree = ast.parse(inspect.getsource(module))
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    for name in imported - NOT_COMPARED - TARGETS:
        # or under the name of the module that defines it, or by its members
        used = compat.resolve(name)
        assert any(_same(used, target) for target in TARGETS) or any(
            target.startswith(f"{name}.") for target in TARGETS
        ), name


def _same(used, target):
    try:
        return compat.resolve(target) is used
    except (ImportError, AttributeError):
        return False


def _subclasses_of_vllm():
    for module in ENGINE:
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                for base in cls.__mro__[1:]:
                    if base.__module__.startswith("vllm."):
                        yield pytest.param(cls, base, id=f"{cls.__name__}-{base.__name__}")


@pytest.mark.parametrize(("cls", "base"), _subclasses_of_vllm())
def test_every_override_is_compared(cls, base):
    """A method of ours that hides one of vLLM's is in the list, for that class or one below."""
    listed = {
        name
        for point in compat.EXTENSION_POINTS
        for name in point.methods | dict.fromkeys(point.attributes)
        if issubclass(cls, _class(point.target)) or issubclass(_class(point.target), base)
    }
    written = {name for part in _parts(cls) for name in vars(part) if _is_written(part, name)}
    assert not (written & vars(base).keys()) - listed


def _class(target):
    found = compat.resolve(target)
    return found if inspect.isclass(found) else type(None)


def _parts(cls):
    return [part for part in cls.__mro__ if part.__module__.startswith("vllm_kvcompress.")]


def _is_written(cls, name):
    """Whether a class's source defines this method or property: a dataclass gets some by itself."""
    if name.startswith("__") and name != "__init__":
        return False
    value = vars(cls)[name]
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return inspect.isfunction(function) and function.__code__.co_filename != "<string>"


def test_a_change_is_noticed(ours, tmp_path):
    """The installed sources with one name, one signature and one body changed."""
    changes = {
        "v1/core/block_pool.py": ("def get_num_free_blocks(self)", "def num_free_blocks(self)"),
        "v1/core/kv_cache_manager.py": (
            "def free(self, request",
            "def free(self, at_once, request",
        ),
        "v1/worker/cpu_worker.py": ("self.device = torch.device", "self.device = device"),
    }
    shutil.copytree(
        INSTALLED / "vllm",
        tmp_path / "vllm",
        copy_function=os.symlink,
        ignore=lambda folder, names: [n for n in names if Path(n).suffix not in ("", ".py")],
    )
    for file, (old, new) in changes.items():
        path = tmp_path / "vllm" / file
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.unlink()
        path.write_text(text.replace(old, new), encoding="utf-8")
    assert differences(ours, fingerprint(tmp_path)) == {
        "vllm.v1.core.block_pool.BlockPool.get_num_free_blocks": "gone",
        "vllm.v1.core.kv_cache_manager.KVCacheManager.free": "signature",
        "vllm.v1.worker.cpu_worker.CPUWorker.init_device": "body",
    }


def test_the_tested_version_is_the_installed_one():
    assert compat.vllm_version() in compat.TESTED_VERSIONS
    assert metadata.version("vllm").split("+")[0] == compat.vllm_version()
