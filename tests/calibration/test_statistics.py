"""Statistics equal a direct computation, and a cut pass equals a whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_artifact import TINY, make_artifact
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from vllm_kvcompress.calibration import run
from vllm_kvcompress.calibration.build import output_moments
from vllm_kvcompress.calibration.rope import Rotation
from vllm_kvcompress.calibration.run import Settings, cache_shape, output_weights
from vllm_kvcompress.calibration.statistics import CacheShape, Collector, Statistics, offsets

TOKENS = list(range(100, 180))
OFFSET, SKIP, WINDOW, SEED = 50, 3, 16, 7


@pytest.fixture(scope="module")
def network(tiny_model: Callable[..., Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def collected(network: Any) -> Statistics:
    shape = cache_shape(network.config)
    collector = Collector(network, shape, num_sink_tokens=SKIP, window=WINDOW, sample_stride=5)
    return collector.collect(TOKENS, OFFSET, SEED)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_moments_are_those_of_the_cache(network: Any, collected: Statistics) -> None:
    cache = DynamicCache(config=network.config)
    network.set_attn_implementation("eager")
    positions = torch.arange(OFFSET, OFFSET + len(TOKENS))[None]
    with torch.inference_mode():
        network(torch.tensor([TOKENS]), position_ids=positions, past_key_values=cache)
    assert int(collected.num_tokens) == len(TOKENS) - SKIP
    assert int(collected.num_chunks) == 1
    for index, layer in enumerate(cache.layers):
        for name, x in (("key", layer.keys[0]), ("value", layer.values[0])):
            rows = torch.stack([x[:, t].flatten() for t in range(SKIP, len(TOKENS))]).double()
            close(getattr(collected, f"{name}_sum")[index], rows.sum(0))
            close(getattr(collected, f"{name}_moment")[index], rows.T @ rows)
            sample = getattr(collected, f"{name}s")[index].double()
            torch.testing.assert_close(sample, rows[::5], rtol=2e-3, atol=1e-4)


def test_moments_before_rope_are_those_of_the_projection(
    network: Any, collected: Statistics
) -> None:
    rotation = Rotation.of_config(network.config.to_dict())
    projected = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda *call: projected.append(call[2][0]))
        for layer in network.model.layers
    ]
    try:
        found = Collector(
            network,
            cache_shape(network.config),
            num_sink_tokens=SKIP,
            window=WINDOW,
            sample_stride=5,
            rotation=rotation,
        ).collect(TOKENS, OFFSET, SEED)
    finally:
        for hook in hooks:
            hook.remove()
    for index, keys in enumerate(projected):
        rows = keys[SKIP:].detach().double()
        close(found.key_sum[index], rows.sum(0))
        close(found.key_moment[index], rows.T @ rows)
    # a rotation leaves lengths as they are, those of gradients and queries too
    for name in ("key_gradient", "query_moment"):
        before, after = (
            getattr(item, name).diagonal(dim1=-2, dim2=-1).sum(-1) for item in (found, collected)
        )
        close(before, after)
        assert not torch.allclose(getattr(found, name), getattr(collected, name))
    assert torch.equal(found.value_gradient, collected.value_gradient)


def test_rope_that_is_not_plain_is_refused(network: Any) -> None:
    plain = network.config.to_dict()
    for change in (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "yarn"}},
        {"rope_parameters": None, "rope_theta": None},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4}},
    ):
        with pytest.raises(ValueError, match="plain RoPE alone"):
            Rotation.of_config(plain | change)
    older = {"rope_parameters": None, "rope_theta": 1e4}
    assert Rotation.of_config(plain | older) == Rotation(1e4, network.config.head_dim)


class Direct:
    """Plain attention that keeps what the statistics are made of, for autograd to differentiate."""

    def __init__(self) -> None:
        self.queries: list[torch.Tensor] = []
        self.far: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        self.queries.append(query[0].detach())
        far_key, far_value = key.clone(), value.clone()
        for tensor in (far_key, far_value):
            tensor.retain_grad()
        self.far.append((far_key, far_value))
        ratio, length = query.shape[1] // key.shape[1], query.shape[2]
        position = torch.arange(length)
        distance = position[:, None] - position
        near = distance < WINDOW

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.repeat_interleave(ratio, 1)

        logits = torch.where(
            near, query @ heads(key).transpose(2, 3), query @ heads(far_key).transpose(2, 3)
        )
        weights = (logits * scaling).masked_fill(distance < 0, float("-inf")).softmax(-1)
        output = (weights * near) @ heads(value) + (weights * ~near) @ heads(far_value)
        return output.transpose(1, 2), None


def test_gradients_are_those_of_autograd_beyond_the_window(
    network: Any, collected: Statistics
) -> None:
    direct = Direct()
    AttentionInterface.register("kvcompress_direct", direct)
    network.set_attn_implementation("kvcompress_direct")
    inputs = network.get_input_embeddings()(torch.tensor([TOKENS])).requires_grad_(True)
    positions = torch.arange(OFFSET, OFFSET + len(TOKENS))[None]
    logits = network(inputs_embeds=inputs, position_ids=positions, use_cache=False).logits[0]
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
    logits.log_softmax(-1).gather(1, drawn).sum().backward()
    for index, (key, value) in enumerate(direct.far):
        for name, x in (("key", key), ("value", value)):
            assert x.grad is not None
            rows = x.grad[0, :, SKIP:].transpose(0, 1).flatten(1).double()
            assert float(rows.abs().max()) > 0
            close(getattr(collected, f"{name}_gradient")[index], rows.T @ rows)
        queries = direct.queries[index][:, SKIP:].double()
        ratio = len(queries) // key.shape[1]
        for head in range(key.shape[1]):
            own = queries[head * ratio : (head + 1) * ratio].flatten(0, 1)
            close(collected.query_moment[index, head], own.T @ own)


def test_output_moments_are_those_of_the_projection(network: Any) -> None:
    shape = cache_shape(network.config)
    moments = output_moments(output_weights(network, shape), shape)
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(shape.width, generator=generator, dtype=torch.float64)
    weight = network.model.layers[1].self_attn.o_proj.weight.double()
    ratio = shape.num_heads // shape.num_kv_heads
    expected = 0.0
    for head, part in enumerate(error.view(shape.num_kv_heads, shape.head_size)):
        for j in range(head * ratio, (head + 1) * ratio):
            own = weight[:, j * shape.head_size : (j + 1) * shape.head_size]
            expected += float((own @ part).square().sum())
    assert float(error @ moments[1] @ error) == pytest.approx(expected, rel=1e-9)


def test_statistics_add_up_and_survive_a_file(collected: Statistics, tmp_path: Path) -> None:
    total = Statistics.empty(CacheShape(2, 4, 2, 32))
    total.add(collected)
    total.add(collected)
    total.save(tmp_path / "statistics", {"digest": "x"})
    read, metadata = Statistics.load(tmp_path / "statistics")
    assert metadata["digest"] == "x"
    assert int(read.num_tokens) == 2 * int(collected.num_tokens)
    assert torch.equal(read.key_moment, 2 * collected.key_moment)
    assert torch.equal(read.values, torch.cat([collected.values] * 2, 1))


def test_an_interrupted_calibration_goes_on_and_ends_as_a_whole_one(
    tiny_model: Callable[..., Path], texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_artifact(tiny_model(), tmp_path / "whole", texts)
    collect = Collector.collect
    calls: list[int] = []

    def interrupted(self: Collector, token_ids: list[int], offset: int, seed: int) -> Statistics:
        calls.append(seed)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return collect(self, token_ids, offset, seed)

    monkeypatch.setattr(Collector, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_artifact(tiny_model(), tmp_path / "cut", texts)
    resumed = make_artifact(tiny_model(), tmp_path / "cut", texts)
    # the first eight chunks had been saved
    assert calls == [*range(11), *range(8, 16)]
    assert resumed.read_bytes() == whole.read_bytes()
    # all statistics are there: other bits need no further pass
    make_artifact(tiny_model(), tmp_path / "cut", texts, replace(TINY, bits=3.0))
    assert len(calls) == 19
    # other text does
    make_artifact(tiny_model(), tmp_path / "cut", texts[50_000:])
    assert len(calls) == 19 + 16


def test_a_damaged_checkpoint_is_not_used(
    tiny_model: Callable[..., Path], texts: str, tmp_path: Path
) -> None:
    first = make_artifact(tiny_model(), tmp_path, texts).read_bytes()
    file = tmp_path / run.STATISTICS_FILE
    file.write_bytes(file.read_bytes()[:-100])
    assert make_artifact(tiny_model(), tmp_path, texts).read_bytes() == first


def test_offsets_cover_what_the_model_reaches() -> None:
    found = offsets(64, 512, 8192)
    assert found[0] == 0
    assert max(found) > 7000
    assert max(found) + 512 <= 8192
    assert sorted(found)[32] < 1500
    assert set(offsets(5, 512, 300)) == {0}


def test_every_wrong_setting_is_named(
    tiny_model: Callable[..., Path], texts: str, tmp_path: Path
) -> None:
    wrong = Settings(bits=9.0, preset="worst", key_space="rope", group_sizes=(3,), num_tokens=100)
    with pytest.raises(ValueError, match="cannot calibrate") as error:
        make_artifact(tiny_model(), tmp_path, texts, wrong)
    for part in (
        "bits = 9",
        "preset = 'worst'",
        "key_space = 'rope'",
        "num_tokens = 100",
        "group size 3",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="give more text, or ask for fewer tokens"):
        make_artifact(tiny_model(), tmp_path, texts[:1000])
    assert not (tmp_path / "aatc.safetensors").exists()


def test_moments_are_float64(collected: Statistics) -> None:
    sums = [f.name for f in fields(Statistics) if f.name.endswith(("sum", "moment", "gradient"))]
    assert len(sums) == 7
    assert {getattr(collected, name).dtype for name in sums} == {torch.float64}
