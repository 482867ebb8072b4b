"""vLLM's own cache types as rows: what they store, what they take, and what is fed over them."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvcompress_serving.evaluation.offline import Offline
from kvcompress_serving.evaluation.peers import CACHE_TYPES, CacheType, hadamard
from kvcompress_serving.evaluation.rows import Row, rows_of

HEAD_SIZE = 64
# key and value of a token in a head of 64: codes, then lengths, scales and lower ends
SLOT_BYTES = {
    "fp8": 64 + 64,
    "int8_per_token_head": 64 + 4 + 64 + 4,
    "turboquant_k8v4": 64 + 32 + 4,
    "turboquant_4bit_nc": 32 + 2 + 32 + 4,
    "turboquant_k3v4_nc": 24 + 2 + 32 + 4,
    "turboquant_3bit_nc": 24 + 2 + 24 + 4,
}
# largest relative squared error of Gaussian keys: of Lloyd-Max levels (Max, 1960) and of e4m3
KEY_ERROR = {"fp8": 1.1e-3, "int8": 5e-5, "4bit": 0.0115, "3bit": 0.0385}


def gaussian(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found - true).square().sum() / true.square().sum())


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_sizes_and_errors_are_those_of_the_format(name: str) -> None:
    kind = CacheType.of(name, HEAD_SIZE)
    assert kind.slot_bytes == SLOT_BYTES[name]
    x = 3 * gaussian(1, 2, 500, HEAD_SIZE)
    coder = {"fp8": "fp8", "int8_per_token_head": "int8", "turboquant_k8v4": "fp8"}.get(
        name, "4bit" if "4bit" in name else "3bit"
    )
    error = relative_error(kind.keys(x), x)
    assert 0 < error < KEY_ERROR[coder]
    assert error > KEY_ERROR[coder] / 20, "no finer than its bits"
    torch.testing.assert_close(kind.keys(x[:, :, 7:8]), kind.keys(x)[:, :, 7:8])  # token by token
    levels = kind.values(x)[0, 0, 0].unique()
    if name.startswith("turboquant"):
        assert len(levels) <= (8 if name == "turboquant_3bit_nc" else 16)
        assert float(levels.min()) == pytest.approx(float(x[0, 0, 0].min()), rel=1e-3)


def test_the_rotation_is_orthonormal() -> None:
    matrix = hadamard(HEAD_SIZE)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(HEAD_SIZE))
    assert len(matrix.abs().unique()) == 1


def test_float8_saturates_and_rounds_to_three_bits() -> None:
    kind = CacheType.of("fp8", HEAD_SIZE)
    assert kind.keys(torch.tensor([1e4, -1e4, 1.0, 1.06, 1.07])).tolist() == [
        448.0,
        -448.0,
        1.0,
        1.0,
        1.125,
    ]


@pytest.fixture(scope="module")
def engine(tiny_model):
    return Offline(tiny_model(num_layers=6), block_size=32)


@pytest.fixture(scope="module")
def run(engine, texts):
    ids = engine.encode(texts[:3000])[:232]
    return engine.full(ids[:200], ids[200:])


@pytest.mark.parametrize("name", ["fp8", "turboquant_3bit_nc"])
def test_a_row_feeds_over_a_cache_of_its_type(engine, run, name: str) -> None:
    row = Row.parse(f"vllm:cache={name}")
    packed = engine.compress(row, run)
    kind = CacheType.of(name, engine.shape.head_size)
    cache = DynamicCache(config=engine.model.config)
    raw = {0, 1, 4, 5} if name.startswith("turboquant") else set()
    for index, layer in enumerate(run.cache.layers):
        same = index in raw
        cache.update(
            layer.keys if same else kind.keys(layer.keys),
            layer.values if same else kind.values(layer.values),
            index,
        )
    engine.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        token = torch.tensor([run.continuation[:1]])
        expected = engine.model(token, past_key_values=cache, use_cache=True).logits[0]
    found = packed.feed(run.continuation[:1])
    full = run.logits[:1]
    # the same but for the new token, which is attended to as it is stored
    assert 0 < relative_error(found, expected) < relative_error(found, full) / 2
    assert torch.equal(packed.feed(run.continuation[:1]), found), "the prompt stays as it is"
    slots = sum(engine.shape.slot_bytes if index in raw else kind.slot_bytes for index in range(6))
    assert packed.bytes.kept == 200 * engine.shape.num_kv_heads * slots
    assert packed.bytes.ratio < 1
    assert packed.bytes.blocks == -(-7 * packed.bytes.kept // packed.bytes.raw)


def test_rows_are_named_and_checked() -> None:
    rows = rows_of(["vllm:cache=fp8", "selkv:keep=0.5"])
    assert [row.is_full for row in rows] == [True, False, False]
    for wrong in ("vllm", "vllm:cache=fp9", "vllm:cache=fp8,keep=1"):
        with pytest.raises(ValueError, match="takes cache, one of fp8"):
            Row.parse(wrong)
    with pytest.raises(ValueError, match="power of two"):
        CacheType.of("turboquant_3bit_nc", 80)
    with pytest.raises(ValueError, match="unknown cache type"):
        CacheType.of("auto", 64)
