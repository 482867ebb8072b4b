"""The engine against the plain torch simulation of the same method on the same prompt."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_kvcompress.config import parse_config, request_options
from vllm_kvcompress.methods.registry import create_method
from vllm_kvcompress.simulation import Simulation

NUM_FORCED = 64
RECORDED: list[torch.Tensor] = []


class _Forced:
    """Keeps the logits of every step and makes the engine take the given token."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        RECORDED.append(logits.detach().clone().float())
        forced = torch.full_like(logits, float("-inf"))
        forced[self._tokens[len(output_ids)]] = 0.0
        return forced


class ForceTokens(AdapterLogitsProcessor):
    """Teacher forcing for requests that carry ``forced`` in their extra arguments."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> _Forced | None:
        forced = (params.extra_args or {}).get("forced")
        return _Forced(forced) if forced else None


@pytest.mark.parametrize(
    ("config", "start", "num_tokens"),
    [
        ({"method": "semanticache"}, 0, 1500),
        pytest.param(
            {"method": "semanticache", "threshold": 0.9, "max_keep": 0.4},
            4000,
            1200,
            marks=pytest.mark.slow,
        ),
        pytest.param({"method": "relocate"}, 9000, 900, marks=pytest.mark.slow),
        pytest.param({"method": "selkv"}, 2000, 1210, marks=pytest.mark.slow),
        pytest.param(
            {"method": "selkv", "keep": 0.5, "heads": "each", "merge": False},
            6000,
            800,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"method": "metasoft", "probes": "dynamic", "flow": "mass"},
            2000,
            1210,
            marks=pytest.mark.slow,
        ),
        ({"method": "aatc"}, 1000, 1300),
        ({"method": "selkv+aatc", "keep": 0.5}, 500, 1100),
        pytest.param(
            {"method": "semanticache+aatc", "bits": 3.0}, 3000, 1000, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value["method"] if isinstance(value, dict) else "",
)
def test_same_entries_and_next_tokens(
    make_engine, model_path, token_ids, record_property, config, start, num_tokens
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = token_ids[start : start + num_tokens]
    forced = token_ids[start + num_tokens : start + num_tokens + NUM_FORCED]
    RECORDED.clear()
    engine = make_engine(model_path, config, logits_processors=[ForceTokens])
    engine.add(prompt, max_tokens=NUM_FORCED, extra_args={"forced": forced})
    entries = None
    while engine.engine.has_unfinished_requests():
        engine.step()
        if engine.compressor.state.num_requests and entries is None:
            state = engine.compressor.state
            entries = state.num_entries[1].long()
            if state.codecs:
                per_group = entries.shape[1] // state.num_rows.shape[2]
                entries = entries + state.num_rows[1].repeat_interleave(per_group, dim=1)
            entries = entries.clone()
    # the first of them comes from the prefill, the others from the compressed cache
    ours = torch.stack(RECORDED)[1:]

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    parsed = parse_config(config)
    method = create_method(parsed)
    method.bind_tokenizer(AutoTokenizer.from_pretrained(model_path))
    simulation = Simulation(model, method, block_size=32)
    packed = simulation.prefill(prompt, request_options({}, parsed))
    theirs = simulation.feed(packed, forced[: NUM_FORCED - 1])

    # keys differ in their last bits between vLLM and transformers, so a pair of tokens whose
    # similarity is the threshold to six digits may fall to either side
    difference = (packed.num_entries() - entries).abs()
    assert difference.sum() <= 2, difference
    assert difference.max() <= 1
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    divergence = torch.nn.functional.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    record_property("differing entries", int(difference.sum()))
    record_property("top-1 agreement", float(agreement))
    record_property("mean KL", float(divergence.mean()))
    assert agreement >= 0.99
    assert divergence.mean() <= 1e-3
