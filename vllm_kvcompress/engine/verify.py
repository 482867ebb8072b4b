"""What ``vllm-kvcompress verify`` runs: one long prompt through the real engine, stepped by hand.

The checks do not trust the plugin's own log: blocks and usage are vLLM's numbers, and the outputs
are compared with those of the same engine without compression.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import prometheus_client

from vllm_kvcompress.engine.metrics import PREFIX

NEEDLE = "One of the special magic numbers for lighthouse is: 7421953."
QUESTION = (
    "What is the special magic number for lighthouse mentioned in the provided text? "
    "The special magic number for lighthouse mentioned in the provided text is"
)
ANSWER = "7421953"
SETTINGS: dict[str, dict[str, Any]] = {"semanticache": {"threshold": 0.9, "max_keep": 0.9}}
"""Settings per method. SemantiCache merges by similarity, so the finest threshold of its paper is
the one at which a number in the text must survive."""
_NUM_SENTENCES = 130
_MAX_TOKENS = 48
_BLOCK_SIZE = 32


def _prompt() -> str:
    """About 2,800 tokens of varied sentences, with the needle in the middle."""
    subjects = ("ship", "harbour", "captain", "storm", "island", "market", "letter", "garden")
    verbs = ("crossed", "described", "reached", "avoided", "remembered", "measured", "painted")
    objects = ("the northern coast", "a quiet village", "the old map", "seven small boats")
    sentences = [
        f"On day {i}, the {subjects[i % 8]} {verbs[i % 7]} {objects[i % 4]}, and nobody in room "
        f"{(i * 37) % 101} asked why."
        for i in range(_NUM_SENTENCES)
    ]
    sentences.insert(_NUM_SENTENCES // 2, NEEDLE)
    return f"{' '.join(sentences)}\n\n{QUESTION}"


def _gauge(name: str) -> float:
    """Sum over all label sets of a metric on this process's registry."""
    return sum(
        sample.value
        for family in prometheus_client.REGISTRY.collect()
        for sample in family.samples
        if sample.name == name
    )


def run(model: Path, method: str) -> dict[str, Any]:
    """Verify one method on one model.

    Args:
        model: Hugging Face folder.
        method: a registered name.

    Returns:
        ``method``, ``blocks_before``, ``blocks_after``, ``blocks_freed``, ``entries_kept``,
        ``prompt_tokens``, ``usage_before``, ``usage_after``, ``ok``, ``failures``.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    config = {"method": method, **SETTINGS.get(method, {})}
    llm = LLM(
        model=str(model),
        additional_config={"kv_compression": config},
        kv_cache_memory_bytes=1 << 29,
        max_model_len=4096,
        max_num_seqs=4,
        block_size=_BLOCK_SIZE,
        enforce_eager=True,
        disable_log_stats=False,
    )
    engine = llm.llm_engine
    pool = engine.vllm_config.cache_config.num_gpu_blocks

    def generate(name: str, prompt: str, **options: Any) -> tuple[Any, list[float]]:
        params = SamplingParams(
            temperature=0, max_tokens=_MAX_TOKENS, ignore_eos=True, extra_args=options
        )
        # every run has the prefix cache to itself, so that each one prefills its prompt
        engine.reset_prefix_cache()
        engine.add_request(name, {"prompt": prompt, "cache_salt": name}, params)
        usage, final = [], None
        while engine.has_unfinished_requests():
            for output in engine.step():
                final = output
            usage.append(_gauge("vllm:kv_cache_usage_perc"))
        return final, usage

    prompt = _prompt()
    short = "The capital of France is"
    stock, stock_usage = generate("stock", prompt, kv_compression="none")
    packed, usage = generate("packed", prompt)
    untouched, _ = generate("untouched", short)
    untouched_stock, _ = generate("untouched-stock", short, kv_compression="none")

    # vLLM says goodbye on the standard output, so before the result is printed
    engine.engine_core.shutdown()

    # the request holds the most right after its prompt; usage is sampled once a step
    before, after = max(usage), usage[len(usage) // 2]
    entries = _gauge(f"{PREFIX}entries_kept_total")
    freed = int(_gauge(f"{PREFIX}blocks_freed_total"))
    num_tokens = len(packed.prompt_token_ids)
    blocks_before = -(-num_tokens // _BLOCK_SIZE)
    texts = {name: out.outputs[0].text for name, out in (("stock", stock), ("packed", packed))}

    failures = []
    if method == "none":
        if freed or entries:
            failures.append("method 'none' compressed something")
    elif not entries:
        failures.append("nothing was compressed")
    if method == "relocate" or method == "none":
        if packed.outputs[0].token_ids != stock.outputs[0].token_ids:
            failures.append(f"the output differs from stock: {texts}")
    else:
        if freed <= 0:
            failures.append("no block was freed")
        if not after < max(stock_usage):
            failures.append(
                f"usage did not fall: {after:.4f} compressed, {max(stock_usage):.4f} stock"
            )
    if not all(0 <= value <= 1 for value in (*usage, *stock_usage)):
        failures.append("usage left [0, 1]")
    if ANSWER in texts["stock"] and ANSWER not in texts["packed"]:
        failures.append(
            f"the needle was lost: stock {texts['stock']!r}, packed {texts['packed']!r}"
        )
    if untouched.outputs[0].token_ids != untouched_stock.outputs[0].token_ids:
        failures.append("a request that is not compressed differs from stock")
    return {
        "method": method,
        "prompt_tokens": num_tokens,
        "entries_kept": round(entries),
        "blocks_before": blocks_before,
        "blocks_after": blocks_before - freed,
        "blocks_freed": freed,
        "pool_blocks": pool,
        "usage_before": round(before, 4),
        "usage_after": round(after, 4),
        "needle_found_stock": ANSWER in texts["stock"],
        "needle_found": ANSWER in texts["packed"],
        "ok": not failures,
        "failures": failures,
    }
