"""Kinds of prompts that are not compressed: they give what stock vLLM gives, and are counted."""

from __future__ import annotations

from copy import copy

import pytest
import torch
from harness import check_idle, check_invariants
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

RELOCATE = {"method": "relocate", "min_prompt_tokens": 64, "window": 32}


@pytest.fixture
def embed(tiny_model):
    """The model's own embeddings of token ids, so that the answer is known."""
    weights = load_file(tiny_model() / "model.safetensors")["model.embed_tokens.weight"]
    return lambda token_ids: weights[torch.tensor(token_ids)]


@pytest.fixture
def engines(make_engine, tiny_model):
    """Ours and stock, both taking embeddings for prompts."""
    return [
        make_engine(tiny_model(), compression, enable_prompt_embeds=True)
        for compression in (RELOCATE, None)
    ]


def generate(engine, prompt):
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    engine.engine.add_request("embeds", prompt, params)
    return list(engine.drain()["embeds"].outputs[0].token_ids)


def test_prompt_embeddings(engines, embed, token_ids, changes):
    ours, stock = engines
    prompt = {"prompt_embeds": embed(token_ids[:300])}
    answer = generate(ours, prompt)
    assert answer == generate(stock, prompt)
    assert answer == stock.generate([token_ids[:300]])[0][0]
    assert changes() == {"prompt_embeds": 1}
    check_idle(ours)


def test_embeddings_between_tokens(engines, embed, token_ids, changes):
    """Some positions are token ids, others embeddings whose ids are placeholders."""
    ours, stock = engines
    mask = [not 100 <= position < 200 for position in range(300)]
    ids = [token if is_token else 0 for token, is_token in zip(token_ids, mask, strict=False)]
    prompt = {
        "prompt_token_ids": ids,
        "prompt_embeds": embed(token_ids[:300]),
        "prompt_is_token_ids": mask,
    }
    answer = generate(ours, prompt)
    assert answer == generate(stock, prompt)
    assert answer == stock.generate([token_ids[:300]])[0][0]
    assert changes() == {"prompt_embeds": 1}
    check_idle(ours)


class Session:
    """A request whose prompt arrives in pieces, as `AsyncLLM` makes one of an async generator."""

    def __init__(self, engine, name):
        self._engine, self._name = engine, name
        self.answers = []

    def send(self, token_ids, *, last=False):
        """Send a piece and generate its answer; the last sends only that no more comes."""
        core, processor = self._engine.engine.engine_core, self._engine.engine.input_processor
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        request = processor.process_inputs(
            self._name,
            {"prompt_token_ids": token_ids},
            params,
            core.get_supported_tasks(),
            resumable=not last,
        )
        core.add_request(request)
        answer = []
        while not last and len(answer) < 24:
            for output in core.get_output().outputs:
                answer += output.new_token_ids
            if hasattr(self._engine.scheduler, "planner"):
                check_invariants(self._engine)
        self.answers.append(answer)


def test_streaming_input(make_engine, tiny_model, token_ids, changes):
    answers = []
    for compression in (RELOCATE, None):
        engine = make_engine(tiny_model(), compression)
        session = Session(engine, "session")
        for start in (0, 300, 500):
            session.send(token_ids[start : start + 200])
        session.send([0], last=True)
        answers.append(session.answers)
        engine.drain()
        assert not engine.scheduler.requests
    assert answers[0] == answers[1]
    assert changes() == {"streaming_input": 1}
    check_idle(make_engine(tiny_model(), RELOCATE))


def test_multimodal_input(make_engine, tiny_model, token_ids, changes):
    """A request with the features of an image, as far as the scheduler of a model without an
    encoder takes one: it is the planner that is asked."""
    engine = make_engine(tiny_model(), RELOCATE)
    name = engine.add(token_ids[:300])
    request = copy(engine.scheduler.requests[engine.live_id(name)])
    request.request_id = "image"
    request.mm_features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier="image",
            mm_position=PlaceholderRange(offset=10, length=100),
        )
    ]
    engine.planner.add(request)
    assert changes() == {"multimodal": 1}
    assert len(engine.drain()) == 1
    assert changes() == {"multimodal": 1, "compressed": 1}
    check_idle(engine)
