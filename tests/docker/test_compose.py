"""``compose.yaml`` and ``.env.example`` are valid, agree, and name things that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import typer
import yaml
from compose_spec import PyCompose

from kvcompress_serving.benchmark.cli import app

PROFILES = {
    "server-cpu": "serve-cpu",
    "server-gpu": "serve-gpu",
    "bench-cpu": "bench-cpu",
    "bench-gpu": "bench-gpu",
    "prometheus": "observe",
    "grafana": "observe",
}
SERVERS = ("server-cpu", "server-gpu")

# vLLM's own parser with the plugin's flags, as `vllm serve` makes it
_PARSE = """
import sys
from vllm_kvcompress.engine.plugin import register
register()
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
print(args.additional_config, args.served_model_name, args.max_model_len)
"""


def test_only_one_form_of_variables(compose):
    rest = compose.interpolated()
    assert "$" not in rest


@pytest.mark.parametrize("settings", [{}, {"GPU_COUNT": "all", "SERVE_ARGS": "--seed 1"}])
def test_compose_specification_accepts_it(compose, settings):
    content = compose.load(**settings)
    spec = PyCompose.from_yaml(yaml.safe_dump(content)).to_spec()
    assert spec.services.keys() == PROFILES.keys()


@pytest.mark.parametrize(
    ("service", "key", "value"),
    [
        ("server-cpu", "healthchek", {}),
        ("server-cpu", "volumes", [{"type": "bind", "sauce": "x"}]),
        ("server-cpu", "ports", {"8000": 1}),
        ("prometheus", "restart", "sometimes"),
    ],
)
def test_compose_specification_refuses_mistakes(compose, service, key, value):
    content = compose.load()
    content["services"][service][key] = value
    with pytest.raises(ValueError, match=r"."):
        PyCompose.from_yaml(yaml.safe_dump(content)).to_spec()


def test_every_service_has_its_profile(compose):
    services = compose.load()["services"]
    assert {name: service["profiles"] for name, service in services.items()} == {
        name: [profile] for name, profile in PROFILES.items()
    }


def test_example_documents_every_variable_with_its_default(compose):
    documented, explained = {}, False
    for line in (compose.folder / ".env.example").read_text().splitlines():
        if match := re.fullmatch(r"(\w+)=(.*)", line):
            assert explained, f"{match[1]} is not explained"
            documented[match[1]] = match[2]
        else:
            explained = line.startswith("#") or (explained and not line)
            assert re.fullmatch(r"(#.*)?", line)
    assert documented == compose.defaults


def test_files_and_volumes_exist(compose):
    content = compose.load()
    used = set()
    for name, service in content["services"].items():
        if build := service.get("build"):
            context = (compose.folder / build["context"]).resolve()
            assert (context / build["dockerfile"]).is_file(), name
            declared = re.findall(
                r"^ARG (\w+)", (context / build["dockerfile"]).read_text(), re.MULTILINE
            )
            assert set(build["args"]) <= set(declared), name
        for volume in service.get("volumes", []):
            if isinstance(volume, dict):
                assert volume["source"] == compose.defaults["MODEL_DIR"], name
                assert volume["read_only"], name
                continue
            source, _, mode = volume.partition(":")
            if source.startswith("."):
                assert (compose.folder / source).exists(), volume
                assert mode.endswith(":ro"), volume
            else:
                used.add(source)
    assert used == set(content["volumes"])


def test_ports_are_this_machines_alone_unless_asked(compose):
    for name, service in compose.load()["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    opened = compose.load(BIND_ADDRESS="0.0.0.0")["services"]
    assert all(port.startswith("0.0.0.0:") for s in opened.values() for port in s.get("ports", []))


def test_services_have_no_privileges_to_spare(compose):
    for name, service in compose.load()["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert "privileged" not in service, name


def test_prometheus_scrapes_the_server(compose):
    services = compose.load(PORT="1234")["services"]
    config = yaml.safe_load((compose.folder / "prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    for name in SERVERS:
        assert host in services[name]["networks"]["default"]["aliases"]
        assert services[name]["ports"] == [f"127.0.0.1:1234:{port}"]
        dockerfile = services[name]["build"]["dockerfile"]
        assert f"EXPOSE {port}\n" in (compose.folder.parent / dockerfile).read_text()


@pytest.mark.parametrize("service", SERVERS)
def test_vllm_accepts_the_servers_flags(compose, service):
    more = {
        "MODEL_NAME": "small",
        "SERVE_ARGS": "--max-model-len 4096 --kv-compression-config '{}'",
    }
    command = compose.load(**more)["services"][service]["command"]
    arguments = shlex.split(command)
    result = subprocess.run(
        [sys.executable, "-c", _PARSE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    expected = "{'kv_compression': {'method': 'semanticache'}} ['small'] 4096"
    assert result.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize("service", ["bench-cpu", "bench-gpu"])
def test_benchmark_accepts_its_arguments(compose, service):
    content = compose.load()["services"][service]
    assert content["entrypoint"] == ["python3", "-m", "kvcompress_serving.benchmark"]
    name, *arguments = shlex.split(content["command"])
    subcommand = typer.main.get_command(app).commands[name]
    context = subcommand.make_context(name, arguments)
    assert context.params["model"] == "/model"
    mounts = [v.split(":")[1] for v in content["volumes"] if isinstance(v, str)]
    assert str(context.params["out"]) in mounts
    assert f"/{context.params['logs'].parts[1]}" in mounts
