"""Results on disk, reports, and two runs compared."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvcompress_serving.evaluation import provenance, report
from kvcompress_serving.evaluation.cli import app
from kvcompress_serving.evaluation.results import SCORES, Measurement, Run, summarize


def measured(row: str, prompt: str, *, nll: float, size: float = 0.5, bypassed: str = ""):
    scores = {"nll": nll, "top1": 1.0 - nll / 10}
    return Measurement("niah", "1024 tokens", prompt, row, scores, 1000, size, size, size, bypassed)


def make_run(shift: float = 0.0, prompts: int = 6, **origin) -> Run:
    items = []
    for index in range(prompts):
        name = f"niah/1024/{index}#abc"
        items.append(measured("full", name, nll=0.1 * index, size=1.0))
        items.append(measured("a|b", name, nll=0.1 * index + 0.3 + shift + 0.01 * index))
    rows = {"full": {"method": "full"}, "a|b": {"method": "semanticache", "threshold": 0.9}}
    return Run({"seed": 0, "versions": {"torch": "1"}, **origin}, rows, items)


def test_runs_are_read_as_they_were_written(tmp_path):
    run = make_run()
    path = tmp_path / "deep" / "run.json"
    run.save(path)
    assert Run.load(path) == run
    body = json.loads(path.read_text())
    assert body["tables"][1]["scores"]["nll"]["mean"] == pytest.approx(0.25 + 0.3 + 0.025)
    path.write_text(json.dumps(body | {"format": "other/9"}))
    with pytest.raises(ValueError, match="format 'other/9', expected"):
        Run.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a results file"):
        Run.load(path)


def test_tables_pair_the_prompts():
    run = make_run()
    full, row = summarize(run.measurements)
    assert full.against == {}
    assert row.against["nll"].mean == pytest.approx(0.325)
    assert 0.3 <= row.against["nll"].low < row.against["nll"].high <= 0.35
    # alone the scores spread far more than the differences
    assert row.scores["nll"].high - row.scores["nll"].low > 0.2
    swapped = {line.row: line for line in summarize(run.measurements, "a|b")}
    assert swapped["full"].against["nll"].mean == pytest.approx(-0.325)
    assert swapped["a|b"].against == {}
    with pytest.raises(ValueError, match="measured on other prompts"):
        summarize(run.measurements[:-1])


def test_markdown_has_every_row_and_survives_bars_in_names():
    text = report.markdown(make_run())
    cells = [line for line in text.splitlines() if line.startswith("| a\\|b |")]
    assert len(cells) == 2
    assert "| 6 | 50.0% | 50.0% | 50.0% |" in cells[0]
    assert "+0.325 [+0.3" in cells[1]
    assert "difference to full" in text
    assert "difference to a|b" in report.markdown(make_run(), "a|b")
    with pytest.raises(ValueError, match=r"no row 'c' in this run; it has full, a\|b"):
        report.markdown(make_run(), "c")


def test_prompts_that_were_left_alone_are_counted():
    run = make_run()
    item = run.measurements[1]
    run.measurements[1] = measured(item.row, item.prompt, nll=0.3, size=1.0, bypassed="no_room")
    assert "| 6 (1 left alone) |" in report.markdown(run)


def test_comparison_is_paired_and_tells_what_differs():
    first, second = make_run(date="x"), make_run(0.05, date="y", versions={"torch": "2"})
    (full, row) = report.compare(first, second)
    assert full.scores["nll"].mean == full.scores["nll"].low == 0.0
    assert row.scores["nll"].mean == pytest.approx(0.05)
    assert row.scores["nll"].high - row.scores["nll"].low < 1e-9
    text = report.comparison_markdown(first, second)
    assert "| versions.torch | 1 | 2 |" in text
    assert "date" not in text
    assert "+0.050" in text


def test_only_shared_prompts_are_compared():
    (full, _) = report.compare(make_run(prompts=6), make_run(prompts=4))
    assert full.count == 4
    other = make_run()
    moved = [
        Measurement(**{**m.__dict__, "prompt": m.prompt.replace("#abc", "#xyz")})
        for m in other.measurements
    ]
    with pytest.raises(ValueError, match="share no row that was measured on the same prompts"):
        report.compare(make_run(), Run(other.provenance, other.rows, moved))


def test_the_page_needs_nothing_else():
    pytest.importorskip("matplotlib")
    page = report.html(make_run())
    assert page.count("<svg") == 1
    assert "a|b" in page
    for outside in ("http://", "https://", "src=", "<link", "<script"):
        assert outside not in page.replace("http://www.w3.org", "")
    assert page == report.html(make_run())


def test_the_page_escapes_what_users_name(monkeypatch):
    monkeypatch.setattr(report.plots, "require", lambda: None)
    monkeypatch.setattr(report.plots, "quality_against_memory", lambda lines, title: "<svg>1</svg>")
    run = make_run()
    items = [
        Measurement(**{**m.__dict__, "row": m.row.replace("a|b", "<b>&")}) for m in run.measurements
    ]
    page = report.html(Run(run.provenance, {"<b>&": {"method": "<i>"}}, items))
    assert "<svg>1</svg>" in page
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page
    assert "<i>" not in page


def test_a_page_without_plots_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = ["--model", str(tmp_path), "--row", "full", "--html", str(tmp_path / "x.html")]
    result = CliRunner().invoke(app, ["offline", *options])
    assert result.exit_code == 2
    assert "needs matplotlib" in result.output


def test_provenance_says_what_ran_where(model_path):
    origin = provenance.collect(model_path, 3, {"row": ["full"]})
    assert origin["seed"] == 3
    assert origin["model"]["name"] == model_path.name
    assert {"python", "torch", "transformers", "vllm-kvcompress"} <= origin["versions"].keys()
    assert origin["machine"]["cores"] >= 1
    assert str(model_path.parent) not in json.dumps(origin)


def test_scores_have_titles_and_directions():
    assert len({score.title for score in SCORES.values()}) == len(SCORES)


def test_the_command_line_from_run_to_comparison(tiny_model, tmp_path):
    runner = CliRunner()
    common = [
        *("offline", "--model", str(tiny_model()), "--row", "window=window:keep=0.5"),
        *("--prompt-tokens", "256", "--continuation-tokens", "8", "--greedy-tokens", "4"),
        *("--documents", "1", "--task", "qa", "--length", "512", "--samples", "1"),
    ]
    for name in ("a", "b"):
        out = [
            *("--out", str(tmp_path / f"{name}.json")),
            *("--markdown", str(tmp_path / f"{name}.md")),
        ]
        result = runner.invoke(app, [*common, *out])
        assert result.exit_code == 0, result.output
    run = Run.load(tmp_path / "a.json")
    assert {(m.task, m.group, m.row) for m in run.measurements} == {
        (task, group, row)
        for task, group in (
            ("fidelity", "prose"),
            ("fidelity", "code"),
            ("qa", "512 tokens, question after"),
        )
        for row in ("full", "window")
    }
    assert run.rows["window"] == {"method": "window", "keep": 0.5}
    assert run.provenance["flags"]["command"] == "offline"
    assert "## fidelity: code" in (tmp_path / "a.md").read_text()
    result = runner.invoke(app, ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert result.exit_code == 0, result.output
    assert all(
        estimate.mean == 0
        for difference in report.compare(run, Run.load(tmp_path / "b.json"))
        for estimate in difference.scores.values()
    )
    shown = runner.invoke(app, ["report", str(tmp_path / "a.json"), "--reference", "window"])
    assert shown.exit_code == 0
    assert "difference to window" in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--row", "semanticach"], "unknown method 'semanticach'"),
        (["--row", "full", "--task", "niah"], "unknown task ['niah']"),
        (["--row", "full", "--order", "later"], "unknown place of the question ['later']"),
        (["--row", "full", "--no-fidelity"], "nothing to measure"),
        (["--row", "full", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["--row", "full", "--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_options_end_with_one_line(tiny_model, options, message):
    result = CliRunner().invoke(app, ["offline", "--model", str(tiny_model()), *options])
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("cli", ["torch", "transformers", "vllm", "matplotlib"]),
        ("cli, endpoint, report", ["transformers", "vllm", "matplotlib"]),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(modules, unwanted):
    code = (
        f"import sys\nfrom kvcompress_serving.evaluation import {modules}\n"
        f"print([m for m in {unwanted} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
