"""The Grafana dashboard asks only for what servers offer, and lies on its grid."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import promql_parser
import pytest
import yaml

# Builds both registries as a server does, and prints name, type and labels of every metric. In a
# process of its own, since vLLM drops what is registered under its names whenever it does this.
_REGISTRY = """
import json, sys
import prometheus_client
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm_kvcompress.engine.metrics import CompressionMetrics

config = EngineArgs(model=sys.argv[1], max_model_len=256).create_engine_config()
PrometheusStatLogger(config, [0])
CompressionMetrics(config, 0)
collectors = set(prometheus_client.REGISTRY._names_to_collectors.values())
found = {c._name: (c._type, c._labelnames) for c in collectors if hasattr(c, "_labelnames")}
print(json.dumps(found))
"""
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def series(model_path):
    """Labels of every time series that a scrape finds, by name."""
    command = [sys.executable, "-c", _REGISTRY, str(model_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    found = {}
    for name, (kind, labels) in json.loads(result.stdout.splitlines()[-1]).items():
        for suffix in _SUFFIXES[kind]:
            more = {"instance", "job"} | ({"le"} if suffix == "_bucket" else set())
            found[name + suffix] = set(labels) | more
    return found


def _walk(query, visit):
    promql_parser.walk(promql_parser.parse(query), lambda expression: visit(expression))


def _selectors(query):
    found = []

    def visit(expression):
        if isinstance(expression, promql_parser.VectorSelector):
            found.append(expression)
        elif isinstance(expression, promql_parser.MatrixSelector):
            found.append(expression.vector_selector)

    _walk(query, visit)
    unique = {id(selector): selector for selector in found}
    return list(unique.values())


def _everything_asked(dashboard):
    return [
        *dashboard.queries(),
        *((name, q) for name, (q, _) in dashboard.label_queries().items()),
    ]


def test_queries_name_metrics_and_labels_that_servers_offer(dashboard, series):
    problems = []
    for title, query in _everything_asked(dashboard):
        selectors = _selectors(query)
        assert selectors, query
        for selector in selectors:
            matched = {matcher.name for matcher in selector.matchers.matchers}
            if selector.name not in series:
                problems.append(f"{title}: no metric {selector.name}")
            elif missing := matched - series[selector.name]:
                problems.append(f"{title}: {selector.name} has no label {sorted(missing)}")
    for name, (selector, label) in dashboard.label_queries().items():
        if label not in series[_selectors(selector)[0].name]:
            problems.append(f"variable {name}: no label {label}")
    assert not problems


def test_groups_and_legends_name_labels_of_the_metric(dashboard, series):
    problems = []
    for panel in dashboard.plots:
        for target in panel["targets"]:
            query = dashboard.substituted(target["expr"])
            grouped = set()

            def visit(expression, grouped=grouped, title=panel["title"]):
                if isinstance(expression, promql_parser.AggregateExpr) and expression.modifier:
                    labels = set(expression.modifier.labels)
                    grouped |= labels
                    for selector in _selectors(expression.expr.prettify()):
                        if missing := labels - series[selector.name]:
                            problems.append(f"{title}: {selector.name} has no {sorted(missing)}")

            _walk(query, visit)
            legend = target["legendFormat"]
            named = {part.split("}}")[0] for part in legend.split("{{")[1:]}
            if not named <= grouped:
                problems.append(f"{panel['title']}: legend {legend} of {sorted(grouped)}")
    assert not problems


def test_every_metric_of_the_plugin_is_shown(dashboard, series):
    asked = {s.name for _, query in dashboard.queries() for s in _selectors(query)}
    ours = {name for name in series if name.startswith("vllm_kvcompress:")}
    assert len(ours) >= 8
    # a histogram is shown when its buckets are
    shown = asked | {n.removesuffix("_bucket") + s for n in asked for s in ("_sum", "_count")}
    assert ours <= shown


def test_counters_are_read_as_rates_and_quantiles_keep_le(dashboard):
    problems = []
    for title, query in dashboard.queries():
        covered = set()

        def visit(expression, title=title, covered=covered):
            if not isinstance(expression, promql_parser.Call):
                return
            name = expression.func.name
            if name in ("rate", "increase"):
                covered |= {s.name for s in _selectors(expression.prettify())}
            if name == "histogram_quantile":
                aggregate = expression.args[1]
                if "le" not in aggregate.modifier.labels:
                    problems.append(f"{title}: histogram_quantile without le")

        _walk(query, visit)
        for selector in _selectors(query):
            cumulative = selector.name.endswith(("_total", "_bucket", "_sum", "_count"))
            if cumulative != (selector.name in covered):
                problems.append(f"{title}: {selector.name} in {query}")
    assert not problems


def test_parser_finds_faults():
    for query in ("sum(rate(a[1m])", "rate(a)", "histogram_quantile(a)", "sum by le (a)"):
        with pytest.raises(ValueError, match=r"."):
            promql_parser.parse(query)


def test_panels_lie_on_the_grid_without_overlap(dashboard):
    ids = [panel["id"] for panel in dashboard.panels]
    assert len(set(ids)) == len(ids)
    for panel in dashboard.panels:
        place = panel["gridPos"]
        assert place["x"] >= 0, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
    for one, other in itertools.combinations(dashboard.panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (one["title"], other["title"])


def test_panels_are_explained_and_use_the_chosen_data_source(dashboard):
    assert {panel["type"] for panel in dashboard.plots} == {"stat", "timeseries"}
    assert "datasource" in dashboard.variables
    for panel in dashboard.plots:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_provisioning_finds_dashboard_and_data_source(dashboard, compose):
    services = compose.load()["services"]
    grafana = services["grafana"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in grafana["volumes"])
    provider = yaml.safe_load(
        (compose.folder / "grafana/provisioning/dashboards/dashboards.yaml").read_text()
    )["providers"][0]
    folder = compose.folder / mounts[provider["options"]["path"]]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert json.loads((folder / home.rsplit("/", 1)[1]).read_text()) == dashboard.content
    (source,) = yaml.safe_load(
        (compose.folder / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    assert source["type"] == dashboard.variables["datasource"]["query"]
    assert source["uid"] == dashboard.variables["datasource"]["current"]["value"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert services[host]["ports"][0].endswith(f":{port}")
