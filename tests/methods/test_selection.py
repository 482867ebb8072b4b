"""From scores to kept tokens: the sets by hand, their sizes, and ties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.methods import selection


def tokens(kept: torch.Tensor) -> list:
    """Indices of the kept tokens, nested like the leading dimensions."""
    if kept.dim() == 1:
        return kept.nonzero().flatten().tolist()
    return [tokens(row) for row in kept]


def test_pool_averages_the_neighbours_that_exist():
    scores = torch.tensor([[[4.0, 0.0, 2.0, 6.0, 1.0]]])
    assert selection.pool(scores, 3)[0, 0].tolist() == pytest.approx([2, 2, 8 / 3, 3, 3.5])
    assert selection.pool(scores, 5)[0, 0].tolist() == pytest.approx([2, 3, 2.6, 9 / 4, 3])
    assert torch.equal(selection.pool(scores, 1), scores)


@settings(deadline=None)
@given(
    shape=st.sampled_from([(7,), (2, 9), (2, 3, 5)]),
    kernel=st.sampled_from([1, 3, 5, 7, 63]),
    seed=st.integers(0, 50),
)
def test_pool_is_the_mean_of_a_window(shape, kernel, seed):
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    pooled = selection.pool(scores, kernel)
    assert pooled.shape == scores.shape
    for at in range(shape[-1]):
        window = scores[..., max(at - kernel // 2, 0) : at + kernel // 2 + 1]
        torch.testing.assert_close(pooled[..., at], window.mean(-1))


def test_top_takes_the_lowest_of_equal_scores():
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 2.0])
    chosen = [tokens(selection.top(scores, count)) for count in range(7)]
    assert chosen == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 5], [0, 1, 2, 3, 5], [0, 1, 2, 3, 4, 5]]


def test_top_of_scores_that_are_no_numbers():
    scores = torch.tensor([math.nan, 1.0, -math.inf, math.inf, math.nan])
    assert tokens(selection.top(scores, 1)) == [3]
    assert tokens(selection.top(scores, 2)) == [1, 3]
    assert tokens(selection.top(scores, 4)) == [0, 1, 2, 3]
    assert tokens(selection.top(torch.full((4,), math.nan), 2)) == [0, 1]


@settings(deadline=None)
@given(
    rows=st.integers(1, 3),
    width=st.integers(1, 40),
    levels=st.integers(1, 50),
    data=st.data(),
)
def test_top_is_a_stable_sort(rows, width, levels, data):
    values = st.lists(st.integers(0, levels), min_size=width, max_size=width)
    scores = torch.tensor(data.draw(st.lists(values, min_size=rows, max_size=rows))).float()
    count = data.draw(st.integers(0, width))
    order = scores.sort(descending=True, stable=True).indices[:, :count]
    expected = torch.zeros(scores.shape, dtype=torch.bool).scatter(1, order, True)
    assert torch.equal(selection.top(scores, count), expected)


SCORES = torch.tensor(
    [
        # means:    5    4  0.5  4.5  3.5    1
        [0.0, 8.0, 1.0, 1.0, 7.0, 2.0],
        [10.0, 0.0, 0.0, 8.0, 0.0, 0.0],
    ]
)


def test_each_head_its_own():
    assert tokens(selection.select(SCORES, 2, 0, "each")) == [[1, 4], [0, 3]]


def test_union_is_trimmed_by_the_mean():
    # wanted are 0, 1, 3, 4; their means are 5, 4, 4.5, 3.5
    assert tokens(selection.select(SCORES, 2, 0, "union")) == [[0, 3], [0, 3]]
    assert tokens(selection.select(SCORES, 3, 0, "union")) == [[0, 1, 3], [0, 1, 3]]


def test_union_leaves_out_what_no_head_wants():
    # token 2 has the highest mean, but is the first choice of neither head
    scores = torch.tensor([[9.0, 0.0, 8.0], [0.0, 9.0, 8.0]])
    assert tokens(selection.select(scores, 1, 0, "union")) == [[0], [0]]


def test_adaptive_budgets_follow_the_scores():
    scores = torch.stack([torch.arange(10.0), torch.arange(10.0) + 100])
    # a fifth of 5 is the first head's by right, the rest goes to the other
    kept = selection.select(scores, 5, 0, "adaptive")
    assert tokens(kept) == [[9], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert tokens(selection.select(scores, 4, 0, "adaptive")) == [[], [2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("rule", ["union", "each", "adaptive"])
def test_first_tokens_are_always_kept(rule):
    scores = torch.arange(20.0).repeat(2, 3, 1)
    scores[..., 1] = math.nan
    kept = selection.select(scores, 6, 4, rule)
    assert kept[..., :4].all()
    assert tokens(selection.select(scores, 4, 4, rule)) == [[[0, 1, 2, 3]] * 3] * 2
    assert scores[0, 0, 0] == 0, "the scores of the caller stay what they are"


@settings(deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    width=st.integers(4, 60),
    levels=st.sampled_from([1, 3, 1000]),
    rule=st.sampled_from(["union", "each", "adaptive"]),
    data=st.data(),
)
def test_sizes_are_exact_and_layers_independent(layers, heads, width, levels, rule, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    scores = torch.randint(levels, (layers, heads, width), generator=generator).float()
    count = data.draw(st.integers(1, width))
    first = data.draw(st.integers(0, count))
    kept = selection.select(scores, count, first, rule)
    assert kept[..., :first].all()
    sizes = kept.sum(-1)
    assert torch.equal(sizes.sum(-1), torch.full((layers,), heads * count))
    if rule == "adaptive":
        assert sizes.min() >= int(0.2 * count)
    else:
        assert (sizes == count).all()
    if rule == "union":
        assert torch.equal(kept, kept[:, :1].expand_as(kept))
    for layer in range(layers):
        assert torch.equal(selection.select(scores[layer], count, first, rule), kept[layer])
