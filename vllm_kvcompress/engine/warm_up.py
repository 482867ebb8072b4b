"""Compiles the GPU kernels before the first request comes.

Triton compiles a kernel when it is launched for the first time, seconds in which every request
waits. vLLM counts on that being over once a worker has warmed up: it reports later compilations,
and with ``--jit-monitor-mode=error`` they are errors.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_kvcompress.core import KEPT, IncompressibleError, RequestOptions, Signal, TokenLayout
from vllm_kvcompress.engine.backend_triton import CompressedRows, attend, num_processors
from vllm_kvcompress.engine.protocol import Plan
from vllm_kvcompress.engine.state import LayerState
from vllm_kvcompress.engine.worker import Compressor

logger = init_logger("vllm.kvcompress.warm_up")

_REQUEST = "kv-compression-warm-up"


@torch.inference_mode()
def warm_up(runner: Any, compressor: Compressor) -> None:
    """Compress a prompt of no request and attend to it, in blocks that no request has yet.

    Args:
        runner: a V2 model runner whose KV cache is initialised.
        compressor: of the runner.
    """
    started = time.perf_counter()
    plan = _plan(runner, compressor)
    if plan is None:
        return
    state = compressor.state
    blocks = [*plan.source, *plan.tail, *plan.slab]
    state.fill_with_noise(blocks)
    try:
        usage = compressor.method.warm_up(compressor.prompt(plan, _queries(compressor, plan)))
        state.add(_REQUEST, plan.slab, plan.gap_end, usage)
        _attend(runner, compressor, plan)
    finally:
        state.release(_REQUEST)
        state.clear(blocks)
    logger.info("GPU kernels ready after %.1f s", time.perf_counter() - started)


def _plan(runner: Any, compressor: Compressor) -> Plan | None:
    """For the shortest prompt that the method takes, if it takes any and the pool has room."""
    config, method, geometry = compressor.config, compressor.method, compressor.state.geometry
    block_size = geometry.block_size
    num_probes = method.probes.num_tokens if method.probes is not None else 0
    longest = runner.vllm_config.model_config.max_model_len - config.window - 1 - num_probes
    num_tokens = max(config.min_prompt_tokens - config.window, block_size)
    while num_tokens <= longest:
        num_source = num_tokens // block_size
        gap_end = num_source * block_size
        layout = None
        if Signal.TOKEN_IDS in method.needs:
            layout = _layout(gap_end, config.num_sink_tokens, config.max_chunk)
        try:
            num_slab = method.budget(gap_end, layout, None, geometry).num_blocks
        except IncompressibleError:
            num_tokens *= 2
            continue
        num_tail = geometry.cells(config.window + 1)
        ids = iter(range(1, compressor.state.bias.shape[0]))  # all but the null block
        source, tail, slab = (
            list(islice(ids, count)) for count in (num_source, num_tail, num_slab)
        )
        if len(slab) < num_slab:
            logger.warning("no room to warm up: first requests will wait for kernels to compile")
            return None
        total = gap_end + config.window + 1
        return Plan(
            sequence=0,
            request_id=_REQUEST,
            source=source,
            tail=tail,
            slab=slab,
            gap_end=gap_end,
            num_tokens=total,
            options=RequestOptions(config.method),
            layout=layout,
            token_ids=np.zeros(total, dtype=np.int64),
        )
    return None


def _layout(num_tokens: int, num_sinks: int, max_chunk: int) -> TokenLayout:
    """Sinks, then chunks of the greatest length."""
    index = np.arange(num_tokens) - num_sinks
    chunk_ids = np.where(index < 0, KEPT, index // max_chunk).astype(np.int32)
    return TokenLayout(chunk_ids=chunk_ids, loose_chunk_ids=chunk_ids)


def _queries(compressor: Compressor, plan: Plan) -> torch.Tensor | None:
    if compressor.prober is not None:
        return compressor.prober.run([plan]).queries[plan.request_id]
    if Signal.QUERY_WINDOW not in compressor.method.needs:
        return None
    shape, pool = compressor.shape, compressor.state.kv_cache
    num_queries = min(compressor.config.observed_queries, plan.num_tokens)
    return torch.randn(
        (len(shape.layers), shape.num_heads, num_queries, shape.head_size), device=pool.device
    ).to(pool.dtype)


def _attend(runner: Any, compressor: Compressor, plan: Plan) -> None:
    """One query a row, with the keys in every number of parts that a batch may have."""
    from kvcompress_kernels.segment_attention.triton import allocate_workspace, choose_num_splits

    state, shape = compressor.state, compressor.shape
    device, dtype = state.kv_cache.device, state.kv_cache.dtype
    max_rows = runner.vllm_config.scheduler_config.max_num_seqs
    table = runner.block_tables.get_dummy_block_tables(max_rows)[compressor.group]
    table[:, : len(plan.slab)] = torch.tensor(plan.slab, dtype=table.dtype, device=device)

    def ints(values: range | list[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    def run(num_rows: int, num_splits: int) -> None:
        size = num_rows, shape.num_heads, shape.head_size
        query = torch.zeros(size, dtype=dtype, device=device)
        workspace = allocate_workspace(*size, num_splits, device) if num_splits > 1 else None
        rows = CompressedRows(
            rows=ints(range(num_rows)),
            block_table=table[:num_rows],
            seq_lens=ints([plan.gap_end] * num_rows),
            query_start_loc=ints(range(num_rows + 1)),
            num_tokens=num_rows,
            max_query_len=1,
            workspace=workspace,
            has_other_rows=False,
        )
        scale = shape.head_size**-0.5
        attend(query, torch.empty_like(query), rows, LayerState(0, state), scale)

    num_splits = choose_num_splits(1, shape.num_kv_heads, num_processors(device))
    while num_splits >= 1:
        run(1, num_splits)
        num_splits //= 2
    # attention to codes chooses its number of parts by the number of rows
    num_rows = 2
    while state.codecs and num_rows < 2 * max_rows:
        run(min(num_rows, max_rows), 1)
        num_rows *= 2
    table.zero_()
