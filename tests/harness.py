"""A real vLLM engine inside the test process, so that tests see scheduler, pool and worker."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_kvcompress.engine.manager import CompressedManager
from vllm_kvcompress.engine.scheduler import Planner
from vllm_kvcompress.engine.worker import Compressor

BLOCK_SIZE = 32


class Engine:
    """vLLM with or without compression, stepped by hand.

    Args:
        model: model folder.
        compression: value for ``additional_config["kv_compression"]``; None is stock vLLM.
        **settings: further engine arguments.
    """

    def __init__(self, model: Path, compression: Any = None, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            # whatever the model, and small: a module keeps its engines, dozens of them
            "num_gpu_blocks_override": 512,
            "kv_cache_memory_bytes": 1 << 28,
            "disable_log_stats": False,
        }
        if compression is not None:
            defaults["additional_config"] = {"kv_compression": compression}
        self.llm = LLM(model=str(model), **{**defaults, **settings})
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.runner = core.model_executor.driver_worker.worker.model_runner
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        compressed = [m for m in managers if isinstance(m, CompressedManager)]
        self.manager = (compressed or managers)[0]
        self._counter = 0

    @property
    def compressed_manager(self) -> CompressedManager:
        assert isinstance(self.manager, CompressedManager)
        return self.manager

    @property
    def planner(self) -> Planner:
        return self.scheduler.planner

    @property
    def compressor(self) -> Compressor:
        return self.runner._compressor

    def add(self, prompt: list[int], *, salt: str | None = None, **params: Any) -> str:
        """Add a request of token ids; greedy and without early end unless told otherwise."""
        self._counter += 1
        name = f"r{self._counter}"
        request: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            request["cache_salt"] = salt
        settings = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, **params}
        self.engine.add_request(name, request, SamplingParams(**settings))
        return name

    def step(self) -> list[Any]:
        return self.engine.step()

    def drain(self) -> dict[str, Any]:
        """Step until nothing is left; final outputs by request name."""
        final = {}
        while self.engine.has_unfinished_requests():
            for output in self.step():
                if output.finished:
                    final[output.request_id] = output
        self.flush()
        return final

    def flush(self) -> None:
        """One more step, which carries the last release to the worker."""
        scheduler_output = self.scheduler.schedule()
        answer = self.runner.execute_model(scheduler_output)
        self.scheduler.update_from_output(scheduler_output, answer)

    def generate(self, prompts: list[list[int]], **params: Any) -> list[list[list[int]]]:
        """All prompts at once; token ids of every completion."""
        names = [self.add(prompt, **params) for prompt in prompts]
        final = self.drain()
        return [[list(c.token_ids) for c in final[name].outputs] for name in names]

    def live_id(self, name: str) -> str:
        """The scheduler's id of a live request (vLLM appends a random part)."""
        (found,) = [r for r in self.scheduler.requests if r == name or r.startswith(f"{name}-")]
        return str(found)

    def close(self) -> None:
        """Shut down and let go; the caller collects garbage when it has closed all it wants to."""
        self.engine.engine_core.shutdown()
        for name in ("llm", "engine", "scheduler", "pool", "runner", "manager"):
            delattr(self, name)


def check_invariants(engine: Engine) -> None:
    """What must hold after every step of a compressing engine."""
    manager, pool = engine.compressed_manager, engine.pool
    owners: Counter[int] = Counter()
    for blocks in manager.req_to_blocks.values():
        owners.update(block.block_id for block in blocks if not block.is_null)
    for _, old in engine.planner._held.values():
        owners.update(block.block_id for block in old)
    for block in pool.blocks:
        if not block.is_null:
            assert block.ref_cnt == owners[block.block_id], block
    free = sum(block.ref_cnt == 0 and not block.is_null for block in pool.blocks)
    assert pool.get_num_free_blocks() == free
    assert 0.0 <= engine.scheduler.get_kv_cache_usage() <= 1.0
    slabs: set[int] = set()
    for request_id, state in manager.compressed.items():
        blocks = manager.req_to_blocks[request_id]
        slab = blocks[: state.num_slab_blocks]
        assert all(block.block_hash is None and block.ref_cnt == 1 for block in slab)
        assert all(block.is_null for block in blocks[state.num_slab_blocks : state.num_gap_blocks])
        ids = {block.block_id for block in slab}
        assert not ids & slabs
        slabs |= ids
    assert set(manager.compressed) <= set(engine.scheduler.requests)


def check_idle(engine: Engine) -> None:
    """What must hold when all requests have ended."""
    check_invariants(engine)
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert not engine.compressed_manager.compressed
    assert not engine.planner._held
    assert not engine.planner._candidates
    assert not engine.planner._compressed
    assert engine.compressor.state.num_requests == 0
    assert not engine.compressor.state.slot_of_block.any()
    assert engine.compressor.state.queries.num_requests == 0
