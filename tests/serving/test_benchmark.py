"""The benchmark without a server: rows, prompts, plans, expectations, results, reports, plots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcompress_serving import SAMPLE_TEXT
from kvcompress_serving.benchmark import expectations, load, plan, plots, prompts, report, results
from kvcompress_serving.benchmark.cli import _places, app
from kvcompress_serving.benchmark.observe import Observation, OfflineObserver, _gauges
from kvcompress_serving.benchmark.plan import Mode, Sizes
from kvcompress_serving.benchmark.results import Measurement, Run, summarize
from kvcompress_serving.benchmark.rows import Row, rows_of, varied
from kvcompress_serving.benchmark.runner import Runner, num_steps

RECORDED = Path(__file__).parent.parent / "data" / "benchmark"


# rows


def test_stock_and_none_are_always_rows():
    rows = rows_of(["semanticache:threshold=0.9", "mild=selkv:keep=0.5,block_size=64"])
    assert [row.name for row in rows] == ["stock", "none", "semanticache:threshold=0.9", "mild"]
    stock, none, semanticache, mild = rows
    assert stock.flags == ()
    assert stock.environment == {"VLLM_PLUGINS": ""}
    assert none.flags == ("--kv-compression=none",)
    assert none.environment == {}
    assert semanticache.flags[0] == "--kv-compression=semanticache"
    assert json.loads(semanticache.flags[2]) == {"threshold": 0.9}
    assert mild.flags[-2:] == ("--block-size", "64")
    assert [row.compresses for row in rows] == [False, False, True, True]
    assert [row.name for row in rows_of(["a=aatc", "stock", "none"])] == ["stock", "none", "a"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["semanticach"], "unknown method 'semanticach'"),
        (["semanticache:treshold=0.9"], "threshold"),
        (["stock:threshold=0.5"], "stock vLLM has no threshold"),
        (["selkv:keep"], "expected key=value, got 'keep'"),
        (["a=selkv", "a=aatc"], "two rows are named a"),
        (["stock=selkv"], "a row named 'stock' or 'none' must be just that"),
        (["selkv:block_size=-1"], "block_size = -1"),
    ],
)
def test_wrong_rows_are_named(texts, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        rows_of(texts)


def test_every_combination_of_what_varies():
    rows = varied("semanticache:window=32", ["threshold=0.6|0.9", "max_keep=0.4|0.5"])
    assert [row.name for row in rows[:2]] == ["stock", "none"]
    found = [(row.settings["threshold"], row.settings["max_keep"]) for row in rows[2:]]
    assert found == [(0.6, 0.4), (0.6, 0.5), (0.9, 0.4), (0.9, 0.5)]
    assert all(row.settings["window"] == 32 for row in rows[2:])
    with pytest.raises(ValueError, match="nothing varies"):
        varied("semanticache", [])
    with pytest.raises(ValueError, match="compresses nothing"):
        varied("none", ["window=1|2"])
    with pytest.raises(ValueError, match=r"expected key=value\|value"):
        varied("semanticache", ["threshold"])


# prompts


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return prompts.load_tokenizer(str(model_path))


def test_stretches_have_the_length_and_different_starts(tokenizer):
    drawn = prompts.draw(prompts.read(None), tokenizer, [(5, 300), (3, 700)], seed=0)
    assert [len(group) for group in drawn.loads] == [5, 3]
    for group, wanted in zip(drawn.loads, (300, 700), strict=True):
        for prompt in group:
            assert abs(len(tokenizer.encode(prompt).ids) - wanted) <= 3
    starts = {prompt[:40] for group in drawn.loads for prompt in group}
    assert len(starts) == 8
    text = SAMPLE_TEXT.read_text(encoding="utf-8")
    assert all(prompt[10:200] in text for group in drawn.loads for prompt in group)
    again = prompts.draw(prompts.read(None), tokenizer, [(5, 300), (3, 700)], seed=0)
    assert again == drawn
    assert prompts.draw(prompts.read(None), tokenizer, [(5, 300), (3, 700)], seed=1) != drawn
    with pytest.raises(ValueError, match="too few for 100000 different prompts"):
        prompts.draw(prompts.read(None), tokenizer, [(100_000, 300)], seed=0)


def test_plain_files_and_folders(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("One fish. " * 400)
    (tmp_path / "b.md").write_text("Two fish. " * 400)
    source = prompts.read(tmp_path)
    assert "One fish" in source.text
    assert "Two fish" in source.text
    drawn = prompts.draw(prompts.read(tmp_path / "a.txt"), tokenizer, [(2, 50)], seed=0)
    assert all("fish" in prompt for prompt in drawn.loads[0])


def test_prompts_of_a_file_stay_as_they_are(tmp_path, tokenizer):
    path = tmp_path / "mine.jsonl"
    texts = [f"Question {i}: " + "why? " * (10 * i) for i in range(1, 7)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    drawn = prompts.draw(prompts.read(path), tokenizer, [(2, 100), (2, 100)], seed=0)
    sent = [prompt for group in drawn.loads for prompt in group]
    assert len(set(sent)) == 4
    assert set(sent) == set(texts[:4])
    assert drawn.dropped == 2
    with pytest.raises(ValueError, match="4 different prompts of at most 100 tokens, 5 are needed"):
        prompts.draw(prompts.read(path), tokenizer, [(5, 100)], seed=0)
    with pytest.raises(ValueError, match="cannot be cut to several lengths"):
        prompts.draw(prompts.read(path), tokenizer, [(1, 100), (1, 200)], seed=0)


def test_sharegpt_takes_all_before_the_last_answer(tmp_path):
    turns = [
        {"from": "human", "value": "Who?"},
        {"from": "gpt", "value": "Me."},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "Because."},
    ]
    path = tmp_path / "share.json"
    path.write_text(
        json.dumps(
            [
                {"id": "1", "conversations": turns},
                {"conversations": turns[:2]},
                {"conversations": turns[:1]},
                {"conversations": turns[1:2]},
            ]
        )
    )
    assert prompts.read(path).prompts == ("Who?\n\nMe.\n\nWhy?", "Who?")


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("a.json", '{"conversations": []}', "a list of conversations"),
        ("a.json", "[{}]", 'must have a list "conversations"'),
        ("a.json", "[]", "no prompt in it"),
        ("a.json", "nonsense", "cannot read prompts"),
        ("a.jsonl", '{"text": "x"}\n', 'an object with a text "prompt"'),
        ("a.txt", "  \n", "no text in it"),
    ],
)
def test_wrong_prompt_files_are_named(tmp_path, name, body, message):
    path = tmp_path / name
    path.write_text(body)
    with pytest.raises(ValueError, match=message) as caught:
        prompts.read(path)
    assert str(path) in str(caught.value)


# plans


def test_throughput_shows_a_tight_and_an_ample_pool(model_path):
    tight, ample = plan.make(Mode.THROUGHPUT, str(model_path), Sizes())
    # SmolLM2-135M: 30 layers, 3 KV heads of 64, bfloat16, keys and values
    per_token = 30 * 3 * 64 * 2 * 2
    assert plan.bytes_per_token(str(model_path)) == per_token
    assert tight.pool_bytes == int(3.4 * per_token * 2128)
    assert ample.pool_bytes > 16 * per_token * 2128
    assert [item.concurrency for item in tight.loads] == [1, 2, 4, 8, 16]
    assert [item.num_requests for item in tight.loads] == [2, 4, 8, 16, 32]
    assert tight.max_num_seqs == 16
    groups = {item.group for session in (tight, ample) for item in session.loads}
    assert groups == {
        "prompts of 2,000 + 128 tokens, pool for 3.4 of the longest prompts",
        "prompts of 2,000 + 128 tokens, ample pool",
    }


def test_latency_has_a_pass_with_cached_prompts(model_path):
    (session,) = plan.make(Mode.LATENCY, str(model_path), Sizes(concurrency=(4,)))
    (item,) = session.loads
    assert item.group.startswith("cold, ")
    assert item.cached_group.startswith("prompts cached, ")
    # what the first pass leaves in the cache and the second one needs
    assert session.pool_bytes >= 2 * 4 * plan.bytes_per_token(str(model_path)) * 4128
    rows = rows_of(["semanticache"])
    assert num_steps([session], rows, rounds=3) == 3 * 3 * (1 + 2)


def test_memory_has_one_pool_for_all_lengths(model_path):
    (session,) = plan.make(Mode.MEMORY, str(model_path), Sizes(prompt_tokens=(500, 1500)))
    assert [(item.label, item.x) for item in session.loads] == [
        ("500 tokens", 500.0),
        ("1,500 tokens", 1500.0),
    ]
    assert len({item.group for item in session.loads}) == 1


def test_impossible_plans_say_all_reasons(model_path, tmp_path):
    sizes = Sizes(concurrency=(1, 2), prompt_tokens=(1200,), pool_prompts=(0.5,))
    with pytest.raises(ValueError, match="leaves out prompts above 1024") as caught:
        plan.make(Mode.OFFLINE, str(model_path), sizes)
    assert "give --requests" in str(caught.value)
    assert "cannot hold the longest prompt" in str(caught.value)
    with pytest.raises(ValueError, match="give --pool-bytes"):
        plan.make(Mode.MEMORY, str(tmp_path), Sizes())
    (session,) = plan.make(Mode.MEMORY, str(tmp_path), Sizes(pool_bytes=1 << 28))
    assert session.flags[:2] == ("--kv-cache-memory-bytes", str(1 << 28))


def test_random_tokens_are_refused_for_methods_that_read(model_path):
    sessions = plan.make(Mode.MEMORY, str(model_path), Sizes(prompt_tokens=(100,)))
    source = prompts.read(Path("random"))
    with pytest.raises(ValueError, match="what semanticache keeps depends on what a prompt says"):
        Runner(str(model_path), rows_of(["semanticache"]), sessions, source, rounds=1, seed=0)
    runner = Runner(str(model_path), rows_of(["relocate"]), sessions, source, rounds=1, seed=0)
    assert runner.dropped == 0


# expectations


def measured(row: str, value: float = 10.0, number: int = 0, **more) -> Measurement:
    values = {"output_tokens_per_s": value, "tpot_ms": 1000 / value, "compressed": 0.0}
    values |= {key: more.pop(key) for key in list(more) if key in results.METRICS}
    return Measurement(row, more.pop("group", "g"), "8 clients", 8.0, number, values, **more)


ROWS = {row.name: row for row in rows_of(["semanticache"])}


@pytest.mark.parametrize(
    ("expected", "items", "problems"),
    [
        ("required", [measured("semanticache", compressed=8.0)], 0),
        ("required", [measured("semanticache", left_alone={"short_prompt": 8.0})], 1),
        ("required", [measured("semanticache", compressed=7.0, failed={"worker": 1.0})], 1),
        ("forbidden", [measured("semanticache", compressed=1.0)], 1),
        ("forbidden", [measured("semanticache"), measured("stock")], 0),
        ("any", [measured("semanticache"), measured("semanticache", compressed=8.0)], 0),
        ("any", [measured("none", compressed=1.0)], 1),
        ("required", [measured("stock", compressed=1.0)], 1),
    ],
)
def test_expectations(expected, items, problems):
    found = expectations.check(expectations.Expected(expected), ROWS, items)
    assert len(found) == problems


def test_a_missed_compression_says_why():
    item = measured("semanticache", left_alone={"short_prompt": 8.0})
    (problem,) = expectations.check(expectations.Expected.REQUIRED, ROWS, [item])
    assert problem == "semanticache, g, 8 clients, round 1: nothing compressed (short_prompt 8)"
    with pytest.raises(ValueError, match="no row has a method that compresses"):
        expectations.check_rows(expectations.Expected.REQUIRED, [Row.parse("none")])


# what is measured


def labelled(name: str, value: float, **labels: str):
    return {(name, frozenset(labels.items())): value}


def test_values_of_a_recorded_load():
    body = json.loads((RECORDED / "bench_serve.json").read_text())
    blocks = -(-body["input_lens"][0] // 32)
    count = body["completed"]
    prefix = "vllm_kvcompress:"
    before = labelled(f"{prefix}requests_compressed_total", 2.0, engine="0")
    after = {
        **labelled(f"{prefix}requests_compressed_total", 2.0 + count, engine="0"),
        **labelled(f"{prefix}blocks_freed_total", 10.0 * count),
        **labelled(f"{prefix}prompt_tokens_in_total", 700.0 * count),
        **labelled(f"{prefix}entries_kept_total", 280.0 * count),
        **labelled(f"{prefix}compression_seconds_sum", 0.01 * count),
        **labelled("vllm:request_prefill_time_seconds_sum", 1.0 * count),
        **labelled(f"{prefix}requests_bypassed_total", 1.0, reason="short_prompt", engine="0"),
        **labelled("vllm:num_preemptions_total", 3.0),
        **labelled("vllm:cache_config_info", 1.0, num_gpu_blocks="100", block_size="32"),
    }
    seen = Observation(before, after)
    seen.gauges["running"] += [0.0, 2.0, 4.0, 0.0]
    seen.gauges["usage"] += [0.5, 0.25]
    seen.resident_mib += [100.0, 120.0]
    pool = results.Pool.of(seen, 100 << 20)
    values, alone, failed = results.from_serve(body, seen, pool)
    assert set(values) <= set(results.METRICS)
    assert values["output_tokens_per_s"] == body["output_throughput"]
    assert values["tpot_ms"] == body["median_tpot_ms"]
    assert values["tpot_p99_ms"] >= values["tpot_ms"]
    assert (values["peak_running"], values["mean_running"]) == (4.0, 3.0)
    assert values["peak_usage"] == 50.0
    assert values["compressed"] == count
    assert values["kept_percent"] == pytest.approx(40.0)
    assert values["compress_ms"] == pytest.approx(10.0)
    assert values["compress_percent"] == pytest.approx(1.0)
    # blocks of 1 MiB
    assert values["cache_full_mib"] == pytest.approx(blocks, abs=1)
    assert values["cache_mib"] == pytest.approx(values["cache_full_mib"] - 10)
    # requests that were not compressed hold all of theirs
    after[f"{prefix}requests_compressed_total", frozenset({("engine", "0")})] = 3.0
    after[f"{prefix}blocks_freed_total", frozenset()] = 10.0
    values, alone, failed = results.from_serve(body, seen, pool)
    assert values["compressed"] == 1
    assert values["cache_mib"] == pytest.approx(values["cache_full_mib"] - 10 / count)
    assert values["pool_tokens"] == 3200
    assert values["preemptions"] == 3
    assert values["resident_mib"] == 120
    assert alone == {"short_prompt": 1.0}
    assert failed == {}


def test_values_of_a_recorded_offline_run():
    body = json.loads((RECORDED / "bench_throughput.json").read_text())
    values, _, _ = results.from_throughput(body, Observation(), output_tokens=24)
    assert values["output_tokens_per_s"] == pytest.approx(
        body["num_requests"] * 24 / body["elapsed_time"]
    )
    assert 0 < values["prompt_tokens"] <= 1024
    assert values["compressed"] == 0


def test_gauges_are_summed_over_engines():
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 2.0\n'
        'vllm:num_requests_running{engine="1"} 3.0\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        "vllm:other_total 7.0\n"
    )
    assert _gauges(text) == {"running": 5.0, "usage": 0.5}


def test_counters_of_an_engine_without_a_server(tmp_path):
    watcher = OfflineObserver(tmp_path)
    code = (
        "from prometheus_client import CollectorRegistry, Counter\n"
        "c = Counter('vllm_kvcompress:requests_compressed', 'x', ['e'], "
        "registry=CollectorRegistry())\n"
        "c.labels('0').inc(5)\n"
    )
    with watcher.observe() as seen:
        subprocess.run([sys.executable, "-c", code], env=dict(watcher.environment), check=True)
    assert seen.grown("vllm_kvcompress:requests_compressed_total") == 5


def test_a_failing_load_generator_shows_its_output(tmp_path):
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(load.LoadError, match=r"ended with 3\nthe reason"):
        load.run_tool(command, tmp_path / "log", {})


# results, reports, plots


def a_run(mode: str = "throughput", rounds: int = 3, **more) -> Run:
    items = []
    for number in range(rounds):
        for row, value in (("stock", 10.0), ("none", 10.0 - 0.1 * (number - 1)), ("a|b", 20.0)):
            for group in ("tight pool", "ample pool"):
                for clients in (1.0, 8.0):
                    values = {
                        "output_tokens_per_s": value * clients + number,
                        "ttft_ms": 900.0 / value,
                        "tpot_ms": 300.0 / value,
                        "peak_running": clients,
                        "preemptions": 0.0,
                        "cache_mib": 200.0 / value,
                        "compressed": 2 * clients if row == "a|b" else 0.0,
                    }
                    if row == "a|b":
                        values |= {"kept_percent": 40.0, "compress_ms": 12.0}
                    label = f"{clients:g} clients"
                    alone = {"short_prompt": 1.0} if row == "a|b" else {}
                    items.append(Measurement(row, group, label, clients, number, values, alone))
    rows = {name: {"method": name} for name in ("stock", "none")}
    rows["a|b"] = {"method": "semanticache", "threshold": 0.9}
    origin = {
        "seed": 0,
        "date": "2026-01-02T03:04:05",
        "model": {"name": "tiny"},
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"vllm": "1"},
        "commit": "abc",
        "flags": {"command": mode},
        **more,
    }
    return Run(mode, origin, rows, items)


def test_runs_are_read_as_they_were_written(tmp_path):
    run = a_run()
    run.problems.append("something")
    path = tmp_path / "deep" / "run.json"
    run.save(path)
    assert Run.load(path) == run
    body = json.loads(path.read_text())
    assert body["tables"][0]["values"]["tpot_ms"]["median"] == 30.0
    for key in ("versions", "flags", "seed", "machine", "commit"):
        assert key in body["provenance"]
    path.write_text(json.dumps(body | {"format": "other/9"}))
    with pytest.raises(ValueError, match="format 'other/9', expected"):
        Run.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a benchmark's results file"):
        Run.load(path)


def test_factors_are_against_stock_of_the_same_round():
    items = []
    for number, machine in enumerate((1.0, 2.0, 4.0)):  # the machine gets slower and slower
        items.append(measured("stock", 40 / machine, number))
        items.append(measured("semanticache", 60 / machine, number))
    stock, ours = summarize(items)
    assert stock.gains == {}
    gain = ours.gains["output_tokens_per_s"]
    assert (gain.low, gain.median, gain.high) == pytest.approx((1.5, 1.5, 1.5))
    # a lower time is better, so the factor is above 1 as well
    assert ours.gains["tpot_ms"].median == pytest.approx(1.5)
    assert ours.beyond_noise("tpot_ms")
    assert (ours.values["tpot_ms"].low, ours.values["tpot_ms"].high) == pytest.approx(
        (1000 / 60, 4000 / 60)
    )


def test_rounds_that_do_not_agree_are_marked():
    items = [measured("stock", 10.0, number) for number in range(3)]
    items += [measured("none", value, number) for number, value in enumerate((9.0, 10.5, 11.0))]
    items += [measured("a", value, number) for number, value in enumerate((8.0, 8.5, 9.0))]
    _, none, worse = summarize(items)
    assert not none.beyond_noise("output_tokens_per_s")
    assert report.cell(none, "output_tokens_per_s") == "10.5 [9.0, 11.0] (≈1.05×)"
    assert report.cell(worse, "output_tokens_per_s") == "8.5 [8.0, 9.0] (0.85×)"
    once = summarize([m for m in items if m.round == 0])[2]
    assert report.cell(once, "output_tokens_per_s") == "8.0 (≈0.80×)"


def test_markdown_has_every_row_and_survives_bars_in_names():
    run = a_run()
    run.problems.append("a row compressed nothing")
    text = report.markdown(run, ["run.svg"])
    assert text.count("| a\\|b |") == 2 * 2 + 2 * 2  # in both tables, and in that of the reasons
    assert "| 8 clients | stock | 81.0 [80.0, 82.0] |" in text
    assert "(2.00×)" in text
    assert "short_prompt 3" in text
    assert "- a row compressed nothing" in text
    assert "![run.svg](run.svg)" in text
    for fact in ("commit: abc", "machine: cpu a CPU", "versions: vllm 1", "seed: 0"):
        assert fact in text


def test_the_terminal_gets_a_line_for_each_quantity():
    first, *_, last = report.by_quantity(a_run())
    assert first.title == "tight pool, 1 clients"
    assert first.columns == ("", "stock", "none", "a|b")
    assert first.rows[2][:2] == ("TPOT, ms", "30.0")
    assert "not compressed" in last.title


@pytest.mark.parametrize("mode", [mode.value for mode in Mode])
def test_plots_show_every_row(tmp_path, mode):
    pytest.importorskip("matplotlib")
    from PIL import Image

    png, svg = plots.save(a_run(mode), tmp_path, "run")
    with Image.open(png) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
        assert image.width > 800
        assert len(colours) > 20
        white = max(count for count, _ in colours)
        assert white < 0.97 * image.width * image.height
    again = plots.save(a_run(mode), tmp_path, "again")
    assert svg.read_bytes() == again[1].read_bytes()
    figure = plots.draw(a_run(mode))
    text = _texts(figure)
    for shown in ("stock vLLM", "plugin, nothing compressed", "a|b", "tiny", "a CPU, 2 cores"):
        assert shown in text, shown
    assert "median of 3 rounds" in text
    assert "noise unknown" in _texts(plots.draw(a_run(mode, rounds=1)))
    for axes in figure.axes:
        assert axes.has_data()
        assert axes.get_xlabel()
    assert {axes.get_title() for axes in figure.axes} >= {"tight pool", "ample pool"}


def _texts(figure) -> str:
    from matplotlib.text import Text

    figure.draw_without_rendering()
    return "\n".join(item.get_text() for item in figure.findobj(Text))


def test_a_recorded_run_is_reported_again(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "report" / "recorded.md"
    options = ["report", str(RECORDED / "memory.json"), "--markdown", str(out)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    run = Run.load(RECORDED / "memory.json")
    lines = {line.row: line for line in summarize(run.measurements)}
    assert lines["semanticache"].gains["cache_mib"].median > 1.3
    assert lines["semanticache"].values["compressed"].median > 0
    assert lines["stock"].values["compressed"].median == 0
    assert "| semanticache |" in out.read_text()
    assert all((out.parent / f"recorded.{ending}").stat().st_size for ending in ("png", "svg"))


# command line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["latency", "--row", "semanticach"], "unknown method 'semanticach'"),
        (["latency", "--vary", "threshold=1"], "--vary belongs to ablation"),
        (["ablation", "--row", "aatc", "--row", "selkv"], "ablation varies one --row"),
        (["ablation", "--row", "aatc"], "nothing varies"),
        (["memory", "--expect-compression", "yes"], "expected one of required, forbidden, any"),
        (
            ["memory", "--row", "none", "--expect-compression", "required"],
            "no row has a method that compresses",
        ),
        (["memory", "--prompts", "nowhere.txt"], "cannot read prompts from nowhere.txt"),
        (["memory", "--prompts", "random"], "on random tokens, sizes and times would mean nothing"),
        (["offline", "--prompt-tokens", "4000"], "leaves out prompts above 1024"),
        (["latency", "--server-flags", "--kv-compression=aatc"], "cannot have --kv-compression"),
        (["memory", "--prompt-tokens", "100000"], "too few for"),
        (["report", "nowhere.json"], "not a benchmark's results file"),
    ],
)
def test_wrong_options_end_with_one_line(model_path, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    if options[0] != "report":
        options = [*options, "--model", str(model_path), "--no-plots"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_gets_the_whole_report(tmp_path):
    mode = Mode.LATENCY
    assert _places(tmp_path, None, mode) == (tmp_path / "latency.json", tmp_path / "latency.md")
    file = tmp_path / "mine.json"
    assert _places(file, None, mode) == (file, None)
    assert _places(tmp_path, file, mode) == (tmp_path / "latency.json", file)


def test_plots_are_refused_before_anything_runs(model_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["latency", "--model", str(model_path)])
    assert result.exit_code == 2
    assert "plots need matplotlib" in result.output


def test_the_command_line_imports_neither_torch_nor_vllm():
    code = (
        "import sys, kvcompress_serving.benchmark.cli\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
