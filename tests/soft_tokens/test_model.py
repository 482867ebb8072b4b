"""The modules themselves."""

from __future__ import annotations

import pytest
import torch

from vllm_kvcompress.soft_tokens.model import FINAL_TEMPERATURE, DynamicTokens, StaticTokens


@pytest.fixture
def dynamic():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        library = torch.nn.init.orthogonal_(torch.empty(12, 16))
        offset, echo = torch.randn(4, 16), torch.tensor([0.0, 0.5, 1.0, 2.0])
        made = DynamicTokens(library, offset, echo, 2.0, selection_width=6, hidden_width=8)
        torch.nn.init.normal_(made.selector[-1].weight, std=0.5)
    return made


@pytest.fixture
def prompts():
    return torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))


def test_static_tokens_ignore_the_prompt(prompts):
    tokens = StaticTokens(torch.arange(32.0).reshape(2, 16)).eval()
    assert tokens.kind == "static"
    assert (tokens.num_tokens, tokens.hidden_size) == (2, 16)
    assert torch.equal(tokens(prompts[0]), tokens(prompts[1]))


def test_dynamic_tokens_are_a_pure_function_of_the_prompt(dynamic, prompts):
    dynamic.eval()
    first = dynamic(prompts[0])
    assert torch.equal(first, dynamic(prompts[0]))
    assert not torch.allclose(first, dynamic(prompts[1]), atol=1e-3)
    assert first.shape == (4, 16)
    assert torch.equal(dynamic(prompts[0].bfloat16()), dynamic(prompts[0].bfloat16().float()))


def test_dynamic_tokens_are_mixes_of_the_library(dynamic, prompts):
    dynamic.eval()
    mean, last = prompts[0].mean(0), prompts[0][-1]
    features = torch.cat([x / x.square().mean().sqrt() for x in (mean, last)])
    queries = dynamic.selector(features).reshape(4, 6)
    logits = queries @ dynamic.row_keys(dynamic.library).T  # the rows have length 1
    weights = (logits / FINAL_TEMPERATURE).softmax(-1)
    last = torch.tensor([0.0, 0.5, 1.0, 2.0])[:, None] * prompts[0][-4:]
    expected = dynamic.offset + last + 2.0 * weights @ dynamic.library
    torch.testing.assert_close(dynamic(prompts[0]), expected, atol=1e-5, rtol=1e-4)


def test_a_prompt_shorter_than_the_soft_tokens(dynamic, prompts):
    dynamic.eval()
    dynamic.scale.data.zero_()
    short = prompts[0][:2]
    expected = dynamic.offset + dynamic.echo[:, None] * short[[0, 0, 0, 1]]
    torch.testing.assert_close(dynamic(short), expected)


def test_training_chooses_with_noise(dynamic, prompts):
    dynamic.train()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = dynamic(prompts[0]), dynamic(prompts[0])
        torch.manual_seed(3)
        again = dynamic(prompts[0])
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
