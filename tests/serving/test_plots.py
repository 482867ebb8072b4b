"""Pictures of one prompt: owners agree with what the methods keep, and the page needs nothing."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from typer.testing import CliRunner

from kvcompress_serving.evaluation.offline import Offline
from kvcompress_serving.evaluation.rows import Row
from kvcompress_serving.plots import heatmap, membership, page
from kvcompress_serving.plots.cli import app
from kvcompress_serving.plots.membership import DROPPED

ROWS = {
    "semanticache": "semanticache:threshold=0.6",
    "selkv": "selkv:keep=0.3",
    "selkv each": "each=selkv:keep=0.3,heads=each",
    "selkv without merging": "plain=selkv:keep=0.3,merge=false",
}


@pytest.fixture(scope="module")
def engine(tiny_model):
    return Offline(tiny_model())


@pytest.fixture(scope="module")
def compressed(engine, texts):
    made = {}

    def make(name: str) -> membership.Compressed:
        if name not in made:
            made[name] = membership.compress(engine, Row.parse(ROWS[name]), texts, 400)
        return made[name]

    return make


@pytest.mark.parametrize("name", ROWS)
def test_owners_are_the_entries(compressed, name):
    shown = compressed(name)
    num_layers, num_heads, num_tokens = shown.owners.shape
    assert shown.gap_end == num_tokens == 320
    own = shown.owners == np.arange(num_tokens)
    assert np.array_equal(own.sum(-1), shown.entries)
    assert np.array_equal(shown.weights > 0, own)
    assert 0.05 < shown.kept.mean() < 0.95
    # whoever owns a token owns itself
    held = shown.owners != DROPPED
    for layer in range(num_layers):
        for head in range(num_heads):
            owners = shown.owners[layer, head]
            assert own[layer, head][owners[held[layer, head]]].all()


def test_weights_of_semanticache_are_sizes_of_clusters(compressed):
    shown = compressed("semanticache")
    assert (shown.owners != DROPPED).all()
    for layer, head in np.ndindex(*shown.entries.shape):
        sizes = np.bincount(shown.owners[layer, head], minlength=shown.gap_end)
        assert shown.weights[layer, head] == pytest.approx(sizes, rel=1e-5)
    assert shown.weights.max() >= 2


def test_merging_of_selkv_stays_in_its_bucket(compressed):
    merging = compressed("selkv")
    plain = compressed("selkv without merging")
    tokens = np.arange(merging.gap_end)
    joined = (merging.owners != DROPPED) & (merging.owners != tokens)
    assert joined.any()
    assert (merging.owners // 32 == tokens // 32)[joined].all()
    assert not ((plain.owners != DROPPED) & (plain.owners != tokens)).any()
    assert set(np.unique(plain.weights)) == {0.0, 1.0}
    assert merging.weights.max() > 1


def test_pieces_are_the_text(engine):
    text = "Ein Satz, 天地玄黄 and 👩‍👩‍👧 emoji.  Two  spaces\n\tand a tab. " * 12
    ids = engine.encode(text)
    pieces = membership._pieces(engine.tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == engine.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def page_data(text: str) -> dict:
    return json.loads(re.search(r'<script id="data" [^>]*>(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_holds_all_and_needs_nothing(engine, compressed):
    shown = compressed("semanticache")
    text = page.html(shown, "<tiny> & model")
    data = page_data(text)
    assert data["tokens"] == shown.tokens
    owners = np.frombuffer(base64.b64decode(data["owners"]), "<i4").reshape(shown.owners.shape)
    assert np.array_equal(owners, shown.owners)
    weights = np.frombuffer(base64.b64decode(data["weights"]), "<f4")
    assert np.array_equal(weights, shown.weights.ravel())
    assert "<tiny>" not in text
    for outside in ("http:", "https:", "src=", "<link", "@import", "url("):
        assert outside not in text


def test_a_prompt_cannot_leave_its_place_in_the_page(engine):
    text = "</script><script>alert(1)</script> & <b>bold</b>. " * 60
    row = Row.parse("semanticache")
    rendered = page.html(membership.compress(engine, row, text, 400), "tiny")
    assert "alert(1)" not in re.sub(r'<script id="data".*?</script>', "", rendered, flags=re.DOTALL)
    assert rendered.count("</script>") == 2
    assert "".join(page_data(rendered)["tokens"]).startswith("</script><script>alert(1)")


def test_the_scripts_of_the_page_parse(compressed, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    text = page.html(compressed("selkv"), "tiny")
    script = tmp_path / "page.js"
    script.write_text(re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[-1])
    done = subprocess.run([node, "--check", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_heat_map_shows_every_layer_and_head(compressed, tmp_path):
    pytest.importorskip("matplotlib")
    shown = compressed("selkv each")
    figure = heatmap.draw(shown, "tiny")
    axes = figure.axes[0]
    assert np.allclose(axes.images[0].get_array(), 100 * shown.kept.T)
    written = {item.get_text() for item in axes.texts}
    assert written == {f"{100 * share:.0f}" for share in shown.kept.ravel()}
    assert "selkv" in axes.get_title()
    assert "tiny" in axes.get_title()
    for ending in ("png", "svg"):
        heatmap.save(shown, "tiny", tmp_path / f"deep/kept.{ending}")
        assert (tmp_path / f"deep/kept.{ending}").stat().st_size > 5000


def test_the_command_line(tiny_model, tmp_path):
    out = tmp_path / "out" / "page.html"
    options = ["prompt", "--model", str(tiny_model()), "--num-tokens", "400", "--page", str(out)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert len(page_data(out.read_text())["tokens"]) == 400
    assert "of 320 tokens kept" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to write"),
        (["--row", "semanticach"], "unknown method 'semanticach'"),
        (["--row", "full"], "compresses nothing"),
        (["--row", "relocate"], "methods that can: selkv, semanticache"),
        (["--text", "nowhere.txt"], "no text file nowhere.txt"),
        (["--num-tokens", "100"], "leaves 100 tokens alone"),
    ],
)
def test_wrong_options_end_with_one_line(tiny_model, tmp_path, options, message):
    where = ["--page", str(tmp_path / "page.html")] if options else []
    result = CliRunner().invoke(app, ["prompt", "--model", str(tiny_model()), *where, *options])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())
