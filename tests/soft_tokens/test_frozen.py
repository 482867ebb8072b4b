"""What is computed over a stored cache is what the model computes in one piece."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_kvcompress.soft_tokens.frozen import FrozenModel, PromptCache


def whole(network, embeddings):
    """Plain attention of every layer, ``[L, H * g, n, n]``, of a forward pass of all at once."""
    network.set_attn_implementation("eager")
    with torch.no_grad():
        output = network(inputs_embeds=embeddings[None], output_attentions=True, use_cache=True)
    cache = output.past_key_values
    return torch.stack([a[0] for a in output.attentions]), cache, output.logits[0]


def per_kv_head(attention, num_kv_heads):
    """Mean over the queries of a KV head and over the tokens: ``[L, H, n]``."""
    return attention.unflatten(1, (num_kv_heads, -1)).mean((2, 3))


@pytest.fixture(scope="module")
def text():
    return torch.randint(300, (57,), generator=torch.Generator().manual_seed(3))


def test_soft_tokens_attend_as_in_one_pass(network, frozen, text):
    generator = torch.Generator().manual_seed(1)
    lengths = (57, 40)
    soft = torch.randn(2, 6, 32, generator=generator) * 0.5
    caches = [frozen.prefill(text[:n]) for n in lengths]
    found = frozen.probe(soft, caches)
    for b, n in enumerate(lengths):
        attention, _, _ = whole(network, torch.cat([frozen.embed(text[:n]), soft[b]]))
        part = attention[:, :, n:, :n]
        expected = per_kv_head(part / part.sum(-1, keepdim=True), 2)
        torch.testing.assert_close(found[b], expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found[b].sum(-1), torch.ones(3, 2))
    # it looks somewhere: a test on even attention would see little
    assert found[0].amax() > 5 / 57


def test_attention_of_a_continuation(network, frozen, text):
    attention, _, _ = whole(network, frozen.embed(text))
    expected = per_kv_head(attention[:, :, 45:, :45], 2)
    cache, (seen,) = frozen.read(text, [(45, 57)])
    torch.testing.assert_close(seen, expected, atol=1e-6, rtol=1e-5)
    prompt = PromptCache(cache.keys[:, :, :45], cache.values[:, :, :45])
    torch.testing.assert_close(
        frozen.attention_of(prompt, text[45:]), expected, atol=1e-6, rtol=1e-5
    )


def test_responses_are_the_models_own(network, frozen, text):
    prompts = [text[:50], text[:31]]
    caches = [frozen.prefill(ids) for ids in prompts]
    generators = [torch.Generator().manual_seed(n) for n in range(2)]
    tokens, seen = frozen.respond(caches, [int(ids[-1]) for ids in prompts], 7, 0.0, generators)
    for ids, own, attention in zip(prompts, tokens, seen, strict=True):
        both = torch.cat([ids, own])
        weights, _, logits = whole(network, frozen.embed(both))
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == own.tolist()
        expected = per_kv_head(weights[:, :, len(ids) :, : len(ids)], 2)
        torch.testing.assert_close(attention, expected, atol=1e-6, rtol=1e-5)


def test_a_response_does_not_depend_on_its_batch(frozen, text):
    caches = [frozen.prefill(text[:n]) for n in (50, 31)]
    last = [int(text[49]), int(text[30])]

    def draw(places):
        generators = [torch.Generator().manual_seed(place) for place in places]
        chosen = [caches[p] for p in places], [last[p] for p in places]
        return frozen.respond(*chosen, 9, 1.0, generators)[0]

    both = draw([0, 1])
    assert torch.equal(both[1], draw([1])[0])
    assert len(set(both.flatten().tolist())) > 4


def test_gradients_reach_the_soft_tokens_alone(network, frozen, text):
    soft = (frozen.embed(text[:4]) + 0.01).requires_grad_()
    (found,) = frozen.probe(soft[None], [frozen.prefill(text)])
    weights = torch.linspace(0, 1, 57)
    (found * weights).sum().backward()
    assert float(soft.grad.abs().sum()) > 0
    assert all(value.grad is None for value in network.parameters())

    def value(shift):
        moved = soft.detach() + shift
        return (frozen.probe(moved[None], [frozen.prefill(text)])[0] * weights).sum().double()

    direction = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    slope = (value(1e-3 * direction) - value(-1e-3 * direction)) / 2e-3
    torch.testing.assert_close(slope.float(), (soft.grad * direction).sum(), rtol=2e-2, atol=1e-3)


@pytest.mark.slow
def test_the_real_model(model_path):
    network = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    frozen = FrozenModel(network)
    ids = torch.arange(1000, 1090)
    soft = frozen.embed(ids[60:70]) * 1.1
    (found,) = frozen.probe(soft[None], [frozen.prefill(ids)])
    attention, _, _ = whole(network, torch.cat([frozen.embed(ids), soft]))
    part = attention[:, :, 90:, :90]
    expected = per_kv_head(part / part.sum(-1, keepdim=True), 3)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-3)
