"""Judging selectors: the oracle is what it says, and tables are of what was measured."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_soft_tokens import make_soft_tokens
from typer.testing import CliRunner

from kvcompress_serving.evaluation import judge
from kvcompress_serving.evaluation.judge import Finding, Prompt, examine, gap_closed
from kvcompress_serving.evaluation.offline import Offline
from kvcompress_serving.evaluation.selectors import LAST, ORACLE, Chosen
from kvcompress_serving.evaluation.selectors import judge as judge_scores
from vllm_kvcompress.config import parse_config
from vllm_kvcompress.core import LayerView

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine(tiny_model):
    return Offline(tiny_model(), block_size=16)


@pytest.fixture(scope="module")
def prompt():
    ids = torch.randint(1000, 2000, (320,), generator=torch.Generator().manual_seed(0)).tolist()
    return Prompt("random", "first", ids[:300], ids[300:])


def test_scores(engine, prompt):
    run = engine.full(prompt.ids, prompt.continuation)
    judged = judge_scores(run, {"untrained": judge.untrained(engine, 4, 0)}, 224, 4)
    engine.model.set_attn_implementation("eager")
    with torch.no_grad():
        output = engine.model(
            torch.tensor([[*prompt.ids, *prompt.continuation]]), output_attentions=True
        )
    attention = torch.stack([a[0] for a in output.attentions]).unflatten(1, (2, -1))
    future = attention[:, :, :, 300:, :224].mean((2, 3))
    torch.testing.assert_close(judged.scores[ORACLE], future, atol=1e-6, rtol=1e-4)
    last = attention[:, :, :, 268:300, :224].sum((2, 3))
    torch.testing.assert_close(judged.scores[LAST], last, atol=1e-5, rtol=1e-4)
    both = judged.scores["untrained and last queries"] - judged.scores["untrained"]
    ratio = both / judged.scores[LAST]
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio), atol=1e-3, rtol=1e-2)
    assert judged.hit_rate(ORACLE, 0.25) == 1
    assert judged.hit_rate("random", 0.25) == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize("heads", ["union", "each", "adaptive"])
def test_the_choice(heads):
    scores = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(1))
    method = Chosen(parse_config({"method": "none", "heads": heads}), scores, 0.25)
    keys = torch.arange(3 * 40 * 2.0).reshape(3, 40, 2)
    segment = method.compress(LayerView(keys, -keys), None, 1)
    assert sum(segment.num_entries) == 30
    for head, kept in enumerate(segment.keys):
        assert torch.equal(kept[:4], keys[head, :4])
        assert torch.equal(segment.values[head], -kept)
        if heads == "each":
            best = scores[1, head, 4:].topk(6).indices.sort().values + 4
            assert torch.equal(kept[4:], keys[head, best])


def test_everything_kept_changes_nothing(engine, prompt):
    probes = {"untrained": judge.untrained(engine, 4, 0)}
    forced = {(name, keep) for name in (ORACLE, LAST) for keep in (1.0, 0.1)}
    findings = examine(engine, prompt, probes, [1.0, 0.1], forced, "each")
    of = {(f.selector, f.keep): f.scores for f in findings}
    assert of[LAST, 1.0]["kl"] == pytest.approx(0, abs=1e-6)
    assert of[LAST, 1.0]["top1"] == 1
    assert 1e-4 < of[ORACLE, 0.1]["kl"] < of[LAST, 0.1]["kl"]
    assert "kl" not in of["untrained", 0.1]
    assert of["untrained", 0.1]["hits"] < 1


def test_gap_closed():
    share, low, high = gap_closed([1.0, 2.0, 3.0], [0.6, 1.2, 1.8], [0.2, 0.4, 0.6])
    assert share == pytest.approx(0.5)
    assert low == pytest.approx(high)
    assert gap_closed([1.0, 2.0], [1.0, 2.0], [0.0, 0.5])[0] == 0


def test_tables():
    findings = [
        Finding("prose", f"{n}", name, 0.25, {"hits": hits + n / 10, "kl": kl})
        for n in range(3)
        for name, hits, kl in ((ORACLE, 1.0, 0.1), (LAST, 0.5, 0.5), ("static", 0.6, 0.3))
    ]
    text = judge.markdown(findings)
    assert "### prose, 25% kept" in text
    static = next(line for line in text.splitlines() if line.startswith("| static"))
    assert "+0.100 [+0.100, +0.100]" in static
    assert "| 50% [50%, 50%] |" in static


@pytest.mark.slow
def test_the_command(tiny_model, tmp_path):
    tokens = make_soft_tokens(tiny_model(), tmp_path / "tokens")
    command = ["--model", str(tiny_model()), "--artifact", str(tokens), "--out", str(tmp_path)]
    command += ["--documents", "2", "--needles", "1", "--prompt-tokens", "512", "--keep", "0.5"]
    command += ["--continuation-tokens", "8", "--forced-documents", "1"]
    result = CliRunner().invoke(judge.app, command)
    assert result.exit_code == 0, result.output
    findings = json.loads((tmp_path / "judge.json").read_text())["findings"]
    kinds = {f["kind"] for f in findings}
    assert kinds == {"prose", "code", "needle, question known", "needle, question not known"}
    with_nll = [f for f in findings if "nll" in f["scores"]]
    assert {f["kind"][:6] for f in with_nll} == {"needle"}
    assert sum("kl" in f["scores"] for f in findings) == 4 * 5
    assert "dynamic and last queries" in (tmp_path / "judge.md").read_text()
