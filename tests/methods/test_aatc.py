"""AATC: budgets that are exact, one result for both forms, and artifacts that are checked."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_artifact import TINY, make_artifact

from kvcompress_kernels.code_format import read_rows
from kvcompress_kernels.formats import cell_keys, cell_values, read_segment
from vllm_kvcompress.artifacts import Artifact, identify, load_artifact
from vllm_kvcompress.calibration.codec import ARTIFACT_KIND, ARTIFACT_VERSION, Calibration
from vllm_kvcompress.calibration.run import STATISTICS_FILE
from vllm_kvcompress.calibration.statistics import Statistics
from vllm_kvcompress.config import parse_config
from vllm_kvcompress.core import (
    IncompressibleError,
    LayerView,
    ModelShape,
    PagedPrompt,
    PromptView,
    RequestOptions,
)
from vllm_kvcompress.methods.aatc import AATC

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 2, 4, 2, 32, 32
OPTIONS = RequestOptions("aatc", keep=0.1)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def artifact(model: Path, texts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(model, tmp_path_factory.mktemp("artifact"), texts)


def shape_of(model: Path, **changes: Any) -> ModelShape:
    layers = tuple(range(LAYERS))
    shape = ModelShape(str(model), layers, HEADS, KV_HEADS, HEAD_SIZE, torch.bfloat16, BLOCK_SIZE)
    return replace(shape, **changes)


def bound(model: Path, artifact: Path | str | None, **config: Any) -> AATC:
    shape = config.pop("shape", shape_of(model))
    named = {} if artifact is None else {"artifact": str(artifact)}
    method = AATC(parse_config({"method": "aatc", **named, **config}))
    method.bind_model(shape)
    return method


def layers(num_tokens: int, seed: int = 0) -> list[LayerView]:
    generator = torch.Generator().manual_seed(seed)

    def random_rows() -> torch.Tensor:
        size = (KV_HEADS, num_tokens, HEAD_SIZE)
        return torch.randn(size, generator=generator).bfloat16()

    return [LayerView(random_rows(), random_rows()) for _ in range(LAYERS)]


@pytest.mark.parametrize("bits", [1.5, 2.5, 4.0])
@pytest.mark.parametrize("num_sinks", [0, 4, 40])
def test_the_budget_is_exact(model: Path, artifact: Path, bits: float, num_sinks: int) -> None:
    method = bound(model, artifact, bits=bits, num_sink_tokens=num_sinks)
    shape = shape_of(model)
    geometry = shape.geometry
    sizes = []
    for num_tokens in (320, 352, 1024, 4096):
        budget = method.budget(num_tokens, None, 0.1, geometry)
        num_cells = budget.num_blocks * geometry.cells_per_block
        prompt = PromptView(layers(num_tokens), OPTIONS, None, geometry, num_cells)
        segments = list(method.compress_prompt(prompt))
        used = sum(s.num_cells(geometry, shape.cell_bytes) for s in segments)
        assert geometry.blocks(used) == budget.num_blocks
        assert all(s.num_entries == [num_sinks] * KV_HEADS for s in segments)
        assert {len(s.dense().keys[0]) for s in segments} == {num_tokens}
        sizes.append(budget.num_blocks)
    assert sizes == sorted(sizes)
    # keys and values of both heads share a row: scales and padding are 64 bits of 128 numbers
    assert sizes[-1] <= (bits + 0.5) / 16 * 4096 / BLOCK_SIZE + 3


def test_more_bits_come_nearer_to_the_prompt(model: Path, artifact: Path) -> None:
    sample, _ = Statistics.load(artifact.with_name(STATISTICS_FILE))
    keys, values = (
        x[0, :256].unflatten(1, (KV_HEADS, HEAD_SIZE)).transpose(0, 1).bfloat16()
        for x in (sample.keys, sample.values)
    )
    # sinks follow the rows
    order = torch.cat([torch.arange(4, 256), torch.arange(4)])
    errors = []
    for bits in (1.0, 2.0, 3.0, 5.0):
        method = bound(model, artifact, bits=bits)
        prompt = PromptView(
            [LayerView(keys, values)] * LAYERS, OPTIONS, None, shape_of(model).geometry, 1000
        )
        dense = next(iter(method.compress_prompt(prompt))).dense()
        error = torch.stack(dense.values) - values[:, order]
        errors.append(float(error.float().norm() / values.float().norm()))
        assert torch.equal(dense.values[0][-4:], values[0, :4])
        assert torch.equal(dense.keys[1][-4:], keys[1, :4])
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 4


def paged(view: list[LayerView], num_blocks: int) -> PagedPrompt:
    """The prompt in a pool, its blocks and the slab out of order; free cells hold NaN."""
    num_source = view[0].keys.shape[1] // BLOCK_SIZE
    shape = shape_of(Path())
    size = (LAYERS, num_source + num_blocks + 1, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    kv_cache = torch.full(size, torch.nan, dtype=torch.bfloat16)
    blocks = torch.randperm(size[1] - 1, generator=torch.Generator().manual_seed(1)).int() + 1
    source, slab = blocks[:num_source], blocks[num_source:]
    for index, layer in enumerate(view):
        for place, block in enumerate(source.tolist()):
            part = slice(place * BLOCK_SIZE, (place + 1) * BLOCK_SIZE)
            for head in range(KV_HEADS):
                cell = kv_cache[index, block, head]
                cell_keys(cell)[:] = layer.keys[head, part].T
                cell_values(cell)[:] = layer.values[head, part]
    bias = torch.full((size[1], LAYERS, KV_HEADS, BLOCK_SIZE), torch.nan)
    return PagedPrompt(
        kv_cache,
        bias,
        source,
        torch.empty(0, dtype=torch.int32),
        num_source * BLOCK_SIZE,
        slab,
        OPTIONS,
        None,
        shape.geometry,
    )


@pytest.mark.parametrize("group_size", [1, 2])
def test_both_forms_give_the_same_codes(
    model: Path, texts: str, tmp_path: Path, artifact: Path, group_size: int
) -> None:
    if group_size == 1:
        settings = replace(TINY, group_sizes=(1,))
        artifact = make_artifact(model, tmp_path, texts, settings)
    method = bound(model, artifact)
    view = layers(320)
    budget = method.budget(320, None, None, shape_of(model).geometry)
    prompt = paged(view, budget.num_blocks)
    usage = method.compress_into(prompt)
    assert usage.first_code_cell is not None
    assert usage.num_rows is not None
    assert usage.num_rows.tolist() == [[316] * (KV_HEADS // group_size)] * LAYERS
    assert usage.num_entries.tolist() == [[4] * KV_HEADS] * LAYERS
    assert prompt.geometry.blocks(usage.num_cells) == budget.num_blocks
    dense = PromptView(view, OPTIONS, None, prompt.geometry, prompt.num_cells)
    for index, segment in enumerate(method.compress_prompt(dense)):
        for head in range(KV_HEADS):
            first = int(usage.first_cell[index, head])
            keys, values, bias = read_segment(prompt.kv_cache, prompt.bias, prompt.slab, first, 4)
            assert torch.equal(keys, segment.keys[head])
            assert torch.equal(values, segment.values[head])
            assert not bias.any()
        assert len(segment.rows) == KV_HEADS // group_size
        for group, rows in enumerate(segment.rows):
            first = int(usage.first_code_cell[index, group])
            codes = read_rows(prompt.kv_cache, prompt.slab, first, 316, rows.codec.layout)
            # sums in another order may turn a tie
            for found, expected in (
                (codes.keys, rows.codes.keys),
                (codes.values, rows.codes.values),
            ):
                assert float((found == expected).float().mean()) > 0.999


def test_ranks_have_their_own_heads_and_one_budget(model: Path, artifact: Path) -> None:
    ranks = [
        bound(
            model, artifact, shape=shape_of(model, num_heads=2, num_kv_heads=1, rank=r, num_ranks=2)
        )
        for r in range(2)
    ]
    geometry = shape_of(model, num_kv_heads=1).geometry
    assert len({method.budget(1024, None, None, geometry) for method in ranks}) == 1
    first, second = (method.codecs()[0][0] for method in ranks)
    assert not torch.equal(first.keys.mean, second.keys.mean)
    # more ranks than KV heads: neighbours hold the same head
    four = [
        bound(
            model, artifact, shape=shape_of(model, num_heads=1, num_kv_heads=1, rank=r, num_ranks=4)
        )
        for r in range(4)
    ]
    means = [method.codecs()[0][0].keys.mean for method in four]
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[2], means[3])
    assert torch.equal(means[0], first.keys.mean)
    assert torch.equal(means[3], second.keys.mean)


def test_a_prompt_that_would_not_shrink_is_left_alone(model: Path, artifact: Path) -> None:
    method = bound(model, artifact, bits=8.0, num_sink_tokens=64)
    with pytest.raises(IncompressibleError) as error:
        method.budget(64, None, None, shape_of(model).geometry)
    assert error.value.reason == "no_room"


def test_the_published_recipe_is_for_evaluation_only(
    model: Path, texts: str, tmp_path: Path
) -> None:
    file = make_artifact(model, tmp_path, texts, replace(TINY, preset="paper"))
    method = bound(model, file, bits=3.0)
    geometry = shape_of(model).geometry
    view = layers(320)
    budget = method.budget(320, None, None, geometry)
    prompt = PromptView(view, OPTIONS, None, geometry, 1000)
    segments = list(method.compress_prompt(prompt))
    used = sum(s.num_cells(geometry, shape_of(model).cell_bytes) for s in segments)
    assert geometry.blocks(used) == budget.num_blocks
    (dense, *_) = segments
    error = torch.stack(dense.keys)[:, :316] - view[0].keys[:, 4:]
    assert 0 < float(error.float().square().mean()) < 0.5
    with pytest.raises(ValueError, match=r"can be evaluated, not served.*calibrate --model"):
        method.codecs()


def test_keys_before_rope_are_for_evaluation_only(model: Path, texts: str, tmp_path: Path) -> None:
    file = make_artifact(model, tmp_path, texts, replace(TINY, key_space="pre_rope"))
    coarse, fine = (bound(model, file, bits=bits) for bits in (3.0, 8.0))
    geometry = shape_of(model).geometry
    view = layers(320)
    budget = coarse.budget(320, None, None, geometry)
    errors = []
    for method in (coarse, fine):
        prompt = PromptView(view, OPTIONS, None, geometry, 1000)
        segments = list(method.compress_prompt(prompt))
        (dense, *_) = segments
        error = torch.stack(dense.keys)[:, :316] - view[0].keys[:, 4:]
        errors.append(float(error.float().square().mean()))
        if method is coarse:
            used = sum(s.num_cells(geometry, shape_of(model).cell_bytes) for s in segments)
            assert geometry.blocks(used) == budget.num_blocks
    assert errors[1] < errors[0] / 4 < 0.125, "rotated back to where they were"
    with pytest.raises(ValueError, match=r"can be evaluated, not served.*calibrate --model"):
        coarse.codecs()


def test_a_missing_or_foreign_artifact_says_how_to_make_the_right_one(
    model: Path, artifact: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    command = "vllm-kvcompress calibrate --model"
    with pytest.raises(ValueError, match=f"no artifact is shipped.*{command}"):
        bound(model, None)
    with pytest.raises(ValueError, match=f"there is no file.*{command}"):
        bound(model, tmp_path / "nothing")
    with pytest.raises(ValueError, match=f"neither a folder nor.*{command}"):
        bound(model, artifact, shape=shape_of(tmp_path / "no model"))
    other = tiny_model(seed=1)
    with pytest.raises(ValueError, match=f"from another model.*weights are others.*{command}"):
        bound(other, artifact, shape=shape_of(other))
    larger = tiny_model(num_layers=3, num_heads=8)
    with pytest.raises(ValueError, match="num_attention_heads is 8, not 4; num_hidden_layers is 3"):
        bound(larger, artifact, shape=shape_of(larger))


def test_the_fingerprint_sees_small_changes(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert identify(copy) == identify(model)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] *= 2  # says nothing about keys and values
    (copy / "config.json").write_text(json.dumps(config))
    assert identify(copy) == identify(model)
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    start, stop = header["model.layers.1.self_attn.k_proj.weight"]["data_offsets"]
    content[8 + length + (start + stop) // 2] ^= 1
    file.write_bytes(content)
    assert identify(copy) != identify(model)


def broken(artifact: Path, target: Path, **changes: Any) -> Path:
    """A whole artifact, digest and all, with other content."""
    found = load_artifact(artifact, ARTIFACT_KIND, ARTIFACT_VERSION)
    tensors = {**found.tensors, **changes.pop("tensors", {})}
    settings = {**found.settings, **changes.pop("settings", {})}
    for name in changes.pop("without", ()):
        del tensors[name]
    replace(found, tensors=tensors, settings=settings, **changes).save(target)
    return target


def test_artifacts_are_checked_when_they_are_read(
    model: Path, artifact: Path, tmp_path: Path
) -> None:
    file = tmp_path / "aatc.safetensors"
    found = load_artifact(artifact, ARTIFACT_KIND, ARTIFACT_VERSION)
    assert broken(artifact, file).read_bytes() == artifact.read_bytes()
    mean = found.tensors["group2.key.mean"]
    nan = mean.clone()
    nan[0, 0, 3] = float("nan")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"version": 9}, "it has version 9, this release reads 1"),
        ({"kind": "selkv"}, "of kind 'selkv', not 'aatc'"),
        ({"tensors": {"group2.key.mean": nan}}, "'group2.key.mean' holds numbers that are not"),
        ({"tensors": {"group2.key.mean": mean[:, :, 1:]}}, "has shape .2, 1, 63., not .2, 1, 64."),
        ({"without": ["group1.value.gain"]}, "the tensor 'group1.value.gain' is missing"),
        (
            {"tensors": {"group1.key.scale": -found.tensors["group1.key.scale"]}},
            "'group1.key.scale' holds a number that is not above 0",
        ),
        ({"settings": {"num_layers": "two"}}, "'num_layers' is 'two', not a count"),
        ({"settings": {"group_sizes": [3], "group_size": 3}}, "a group size is 3, with 2 KV heads"),
        ({"settings": {"preset": "secret"}}, "the preset is 'secret'"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            bound(model, broken(artifact, file, **changes))
        assert "vllm-kvcompress calibrate" in str(error.value)
    with pytest.raises(ValueError, match=r"heads of 32, those of the model are 64"):
        bound(model, artifact, shape=shape_of(model, head_size=64))
    with pytest.raises(ValueError, match="2 layers, the model has layer 7; 2 KV heads"):
        bound(model, artifact, shape=shape_of(model, layers=(0, 7), num_kv_heads=4))


def test_damaged_files_are_refused_in_one_clear_way(
    model: Path, artifact: Path, tmp_path: Path
) -> None:
    file = tmp_path / "aatc.safetensors"
    content = artifact.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    generator = random.Random(0)
    header = [generator.randrange(8 + length) for _ in range(60)]
    body = [generator.randrange(len(content)) for _ in range(20)]
    for place in (*header, *body):
        damaged = bytearray(content)
        damaged[place] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="vllm-kvcompress calibrate --model"):
            bound(model, file)
    for size in (0, 7, 8, 100, 8 + length, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match="vllm-kvcompress calibrate --model"):
            bound(model, file)
    save_file({"x": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match="not made by vllm-kvcompress"):
        bound(model, file)


def test_artifacts_round_trip(artifact: Path, tmp_path: Path) -> None:
    found = load_artifact(artifact, ARTIFACT_KIND, ARTIFACT_VERSION)
    calibration = Calibration.read(found)
    assert sorted(calibration.transforms) == [1, 2]
    assert calibration.group_size == 2
    own = set(vars(calibration)) - {"transforms"} | {"group_sizes"}
    settings = {k: v for k, v in found.settings.items() if k not in own}
    again = calibration.artifact(found.model, settings)
    assert isinstance(again, Artifact)
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == artifact.read_bytes()
    assert found.settings["texts"][0]["name"] == "text"


def test_the_sample_model_needs_no_artifact_of_the_user(model_path: Path) -> None:
    shape = ModelShape(str(model_path), tuple(range(30)), 9, 3, 64, torch.bfloat16, 32)
    for bits, most in ((2.0, 0.15), (2.5, 0.18)):
        method = bound(model_path, None, shape=shape, bits=bits)
        blocks = method.budget(5920, None, None, shape.geometry).num_blocks
        assert blocks / (5920 / 32) < most
    assert {len(layer) for layer in method.codecs()} == {1}
