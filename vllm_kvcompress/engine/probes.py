"""Runs a method's probes through the model, after prompts that are about to be compressed.

The probes of all plans of a step are one batch, in which every prompt is a request whose next
``k`` tokens are the probes. Their keys and values go to the first blocks of the plan's slab, which
is empty until the method writes it:

    prompt             [ b0 b1 b2 b3' ]         b3' is partly filled, and may hold later tokens too
    as the probes see  [ b0 b1 b2 s0 s1 ]       s0: a copy of b3', then probes

Nothing of the prompt is written. The blocks are cleared right after the pass, whatever became of
it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvcompress.engine.protocol import Observation, Plan
from vllm_kvcompress.engine.state import DeviceState, QueryWindows
from vllm_kvcompress.soft_tokens.model import SoftTokens


@dataclass
class Probed:
    """What a step's probes found.

    Args:
        queries: by request id ``[L, num_heads, k, D]``, after RoPE.
        seconds: that the pass took for each plan, on average.
    """

    queries: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0


class Prober:
    """The probes of one method on one rank.

    Args:
        runner: the model runner, V1 or V2, whose KV cache is initialised.
        group: index of the compressed KV-cache group.
        probes: of the method.
        state: of the group.

    Raises:
        ValueError: the model cannot read them.
    """

    def __init__(self, runner: Any, group: int, probes: SoftTokens, state: DeviceState) -> None:
        self._runner = runner
        self._group = group
        self._state = state
        self._config: VllmConfig = runner.vllm_config
        self._probes = probes.to(state.kv_cache.device)
        if reasons := list(self._unreadable()):
            raise ValueError(
                f"--kv-compression: {' and '.join(reasons)}, so the model cannot read the soft "
                "tokens of the method. Choose another method."
            )
        budget = self._config.scheduler_config.max_num_batched_tokens
        self._max_batch = max(budget // probes.num_tokens, 1)

    def _unreadable(self) -> Iterator[str]:
        model = self._runner.get_model()
        if "inputs_embeds" not in inspect.signature(model.forward).parameters:
            yield f"{type(model).__name__} takes no embeddings in place of tokens"
        num_groups = len(self._runner.kv_cache_config.kv_cache_groups)
        if num_groups > 1:
            yield f"the model has {num_groups} KV-cache groups instead of one"
        size = self._config.model_config.get_inputs_embeds_size()
        if self._probes.hidden_size != size:
            yield f"its embeddings have {size} numbers, not {self._probes.hidden_size}"

    @torch.inference_mode()
    def run(self, plans: Sequence[Plan]) -> Probed:
        """Queries of the probes after the prompt of each plan."""
        started = time.perf_counter()
        found = Probed()
        for start in range(0, len(plans), self._max_batch):
            self._run_batch(plans[start : start + self._max_batch], found)
        found.seconds = (time.perf_counter() - started) / max(len(plans), 1)
        return found

    def _run_batch(self, plans: Sequence[Plan], found: Probed) -> None:
        rows = {plan.request_id: row for row, plan in enumerate(plans)}
        scratch = [self._scratch(plan) for plan in plans]
        queries = QueryWindows(self._state.geometry.num_layers, rows.__getitem__)
        queries.begin_step([self._observation(plan) for plan in plans])
        try:
            tables = [self._table(plan, own) for plan, own in zip(plans, scratch, strict=True)]
            embeddings = torch.cat([self._embeddings(plan) for plan in plans])
            with self._state.observing(queries):
                self._forward(self._metadata(plans, tables), embeddings)
        finally:
            self._state.clear([block for own in scratch for block in own])
        for request_id in rows:
            taken = queries.take(request_id)
            assert taken is not None, "every compressed layer attends"
            found.queries[request_id] = taken

    def _scratch(self, plan: Plan) -> list[int]:
        """Slab blocks that the pass writes to."""
        geometry = self._state.geometry
        needed = geometry.cells(plan.num_tokens % geometry.block_size + self._probes.num_tokens)
        assert needed <= len(plan.slab), "the method's budget counts them in"
        return plan.slab[:needed]

    def _observation(self, plan: Plan) -> Observation:
        first, end = plan.num_tokens, plan.num_tokens + self._probes.num_tokens
        return Observation(plan.request_id, 0, first, end, first, end)

    def _table(self, plan: Plan, scratch: list[int]) -> list[int]:
        """Blocks of the prompt followed by its probes; the last one of the prompt is copied if it
        is partly filled."""
        blocks = plan.source + plan.tail
        num_full, rest = divmod(plan.num_tokens, self._state.geometry.block_size)
        if rest:
            self._state.copy(blocks[num_full], scratch[0])
        return blocks[:num_full] + scratch

    def _embeddings(self, plan: Plan) -> torch.Tensor:
        """``[k, d]`` in the model's data type."""
        device, dtype = self._state.kv_cache.device, self._config.model_config.dtype
        if plan.token_ids is None:
            prompt = torch.empty((0, self._probes.hidden_size), device=device)
        else:
            ids = torch.from_numpy(plan.token_ids).to(device)
            prompt = self._runner.get_model().embed_input_ids(ids)
        return self._probes(prompt).to(dtype)

    def _metadata(self, plans: Sequence[Plan], tables: list[list[int]]) -> CommonAttentionMetadata:
        """A batch with one row for each plan."""
        device, block_size = self._state.kv_cache.device, self._state.geometry.block_size
        num_probes = self._probes.num_tokens
        # vLLM's Triton kernels are compiled anew for strides that 16 does not divide
        width = -(-max(map(len, tables)) // 16) * 16
        table = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
        first = torch.tensor([plan.num_tokens for plan in plans])
        positions = first[:, None] + torch.arange(num_probes)
        slots = table.gather(1, positions // block_size).long() * block_size
        slots += positions % block_size
        starts = torch.arange(len(plans) + 1, dtype=torch.int32) * num_probes
        seq_lens = (first + num_probes).int()
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(plans),
            num_actual_tokens=positions.numel(),
            max_query_len=num_probes,
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=table.to(device),
            slot_mapping=slots.flatten().to(device),
            positions=positions.flatten().to(device),
            is_prefilling=torch.ones(len(plans), dtype=torch.bool),
        )

    def _forward(self, common: CommonAttentionMetadata, embeddings: torch.Tensor) -> None:
        """One pass of the model, not compiled and without a graph: with embeddings in place of
        tokens it is a form of the model that vLLM has compiled nothing for."""
        metadata, slots = {}, {}
        for group in self._runner.attn_groups[self._group]:
            built = group.build_metadata(common)
            metadata.update(dict.fromkeys(group.layer_names, built))
            slots.update(dict.fromkeys(group.layer_names, common.slot_mapping))
        with set_forward_context(
            metadata,
            self._config,
            num_tokens=common.num_actual_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=slots,
            skip_compiled=True,
        ):
            self._runner.get_model()(
                input_ids=None, positions=common.positions, inputs_embeds=embeddings
            )
