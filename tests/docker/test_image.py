"""The CPU image is built on a bare Debian, and a container of it serves without a network.

Needs root, buildah and debootstrap, a network for the build, and about 15 GB of disk. Variables:

``KVC_BUILD_OPTIONS``
    options for ``buildah build``, split like a shell would: mirrors to mount, ``TORCH_INDEX``.
``KVC_BUILD_ROOT``
    folder that keeps what is built, so that the next run only builds what has changed.
``KVC_IMAGE``
    image in that folder to test as it is, instead of building one.
``KVC_DEBIAN_MIRROR``
    mirror for debootstrap, which knows one by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from kvcompress_serving import processes

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(5400)]

BASE = "localhost/kvc-debian"
IMAGE = os.environ.get("KVC_IMAGE") or "localhost/kvc-cpu"
FLAGS = "--max-model-len 2048 --max-num-seqs 4"
_GIB = 1 << 30

# a client in the container's network, on standard output: the answer and the metrics
_CLIENT = """
import json, sys, urllib.request
request = json.loads(sys.stdin.read())
def call(route, body=None):
    data = body and json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request("http://127.0.0.1:8000" + route, data, headers)
    with urllib.request.urlopen(asked, timeout=600) as answer:
        return answer.read().decode()
answer = json.loads(call("/v1/completions", request))
print(json.dumps({"answer": answer, "metrics": call("/metrics")}))
"""


class Builder:
    """buildah with a storage of its own.

    Args:
        root: folder of the storage.
        scratch: folder for the Debian base while it is made.
    """

    def __init__(self, root, scratch):
        self.scratch = scratch
        self.command = ["buildah", "--root", f"{root}/storage", "--runroot", f"{root}/run"]

    def __call__(self, *arguments, **more):
        return subprocess.run(
            [*self.command, *arguments], check=True, stdout=subprocess.PIPE, text=True, **more
        ).stdout.strip()

    def has(self, image):
        return image in self("images", "--format", "{{.Name}}").splitlines()

    def build_base(self):
        """A Debian with nothing but its essential packages, imported as an image."""
        folder, archive = self.scratch / "debian", self.scratch / "debian.tar"
        mirror = [m] if (m := os.environ.get("KVC_DEBIAN_MIRROR")) else []
        command = ["debootstrap", "--variant=minbase", "bookworm", str(folder), *mirror]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["tar", "-C", str(folder), "-cf", str(archive), "."], check=True)
        container = self("from", "scratch")
        self("add", "--quiet", container, str(archive), "/")
        self("commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(folder)
        archive.unlink()

    def build(self, root):
        dockerfile = root / "docker/Dockerfile.cpu"
        self(
            *("build", "--isolation", "chroot", "--layers", "--format", "docker"),
            *("--file", str(dockerfile), "--ignorefile", f"{dockerfile}.dockerignore"),
            *("--build-arg", f"BASE_IMAGE={BASE}", "--tag", IMAGE),
            *shlex.split(os.environ.get("KVC_BUILD_OPTIONS", "")),
            str(root),
        )

    def run(self, container, *command, volumes=(), environment=()):
        """Command line that runs a command in a container as its user."""
        options = [f"--volume={volume}" for volume in volumes]
        options += [f"--env={variable}" for variable in environment]
        return [*self.command, "run", "--isolation", "chroot", *options, container, "--", *command]


@pytest.fixture(scope="module")
def builder(tmp_path_factory, docker_folder):
    missing = [tool for tool in ("buildah", "debootstrap") if not shutil.which(tool)]
    if os.getuid() != 0 or missing:
        pytest.skip("needs root, buildah and debootstrap")
    scratch = tmp_path_factory.mktemp("image")
    root = os.environ.get("KVC_BUILD_ROOT") or str(scratch)
    if shutil.disk_usage(root).free < 15 * _GIB:
        pytest.skip(f"needs 15 GiB of disk in {root}")
    builder = Builder(root, scratch)
    try:
        if not os.environ.get("KVC_IMAGE"):
            if not builder.has(BASE):
                builder.build_base()
            builder.build(docker_folder.parent)
        yield builder
    finally:
        if root == str(scratch):
            builder("rm", "--all")
            builder("rmi", "--all", "--force")
            shutil.rmtree(scratch)


@pytest.fixture(scope="module")
def container(builder):
    name = builder("from", "--pull-never", IMAGE)
    yield name
    builder("rm", name)


@pytest.fixture(scope="module")
def config(builder):
    return json.loads(builder("inspect", "--type", "image", IMAGE))["Docker"]["config"]


@pytest.fixture(scope="module")
def offline(builder, container, config, compose, model_path, tmp_path_factory):
    """The image's server with compose's command, in a network of loopback alone; its process."""
    log = tmp_path_factory.mktemp("offline") / "server.log"
    service = compose.load(SERVE_ARGS=FLAGS)["services"]["server-cpu"]
    environment = {**service["environment"], "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = builder.run(
        container,
        *config["Entrypoint"],
        *shlex.split(service["command"]),
        volumes=[f"{model_path}:/model:ro"],
        environment=[f"{name}={value}" for name, value in environment.items()],
    )
    loopback = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*loopback, *run], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    process.log = log
    family = set()
    try:
        deadline = time.monotonic() + 1500
        while not _healthy(builder, container, config, process):
            assert process.poll() is None, processes.tail(log)
            assert time.monotonic() < deadline, processes.tail(log)
            time.sleep(5)
        family = processes.descendants(process.pid)
        yield process
    finally:
        processes.stop(process)
        for pid in family:  # a runner of its own may have put them into another process group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def _inside_network(process, command, **more):
    enter = ["nsenter", "--net", "--target", str(process.pid), "--"]
    return subprocess.run([*enter, *command], capture_output=True, text=True, check=False, **more)


def _healthy(builder, container, config, process):
    """What the image's own health check says."""
    kind, *command = config["Healthcheck"]["Test"]
    assert kind == "CMD"
    return _inside_network(process, builder.run(container, *command)).returncode == 0


def test_configuration(config):
    assert config["Entrypoint"] == ["vllm", "serve"]
    assert config["User"] == "10001"
    assert not config.get("Cmd")
    assert list(config["ExposedPorts"]) == ["8000/tcp"]


def test_container_is_not_root_and_its_checks_pass(builder, container):
    run = builder.run(container, "sh", "-c", "id -u && touch /reports/x && vllm-kvcompress doctor")
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[0] == "10001"


def test_health_check_fails_without_a_server(builder, container, config):
    _, *command = config["Healthcheck"]["Test"]
    run = builder.run(container, *command)
    assert subprocess.run(run, capture_output=True, check=False).returncode == 1


def test_server_answers_compressed_without_a_network(offline, texts):
    request = {"model": "model", "prompt": texts[:5000], "max_tokens": 24, "temperature": 0}
    client = [sys.executable, "-c", _CLIENT]
    result = _inside_network(offline, client, input=json.dumps({**request, "ignore_eos": True}))
    assert result.returncode == 0, result.stderr + processes.tail(offline.log)
    outcome = json.loads(result.stdout)
    assert outcome["answer"]["usage"]["completion_tokens"] == 24
    samples = dict(
        line.rsplit(" ", 1)
        for line in outcome["metrics"].splitlines()
        if line.startswith("vllm_kvcompress:")
    )
    found = {name.split("{")[0].split(":")[1]: float(value) for name, value in samples.items()}
    assert found["requests_compressed_total"] == 1
    assert found["blocks_freed_total"] > 0
    log = offline.log.read_text()
    assert "KV-cache compression is on: method 'semanticache'" in log
    # they were compiled when the image was built
    assert "compiling the CPU kernels" not in log
    # the container really had nothing but loopback
    links = _inside_network(offline, ["ip", "-brief", "link"]).stdout.splitlines()
    assert [line.split()[0] for line in links] == ["lo"]
