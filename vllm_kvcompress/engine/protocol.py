"""What scheduler and worker tell each other, on top of vLLM's own messages.

A `CompressionStep` rides on every SchedulerOutput and a list of `Report` on the ModelRunnerOutput
that answers it, both under the attribute `ATTRIBUTE` (vLLM pickles these objects whole; code that
makes its own, as warm-ups do, has no such attribute, so read it with a default).

    scheduler                                         worker
    schedule k      last prompt chunk of r scheduled
    schedule k + 1  first decode step of r: Plan ---> start of step k + 1: read the old blocks,
                    block list already rewritten,     write the slab, rewrite the row, then the
                    old blocks held back              forward pass
    update k + 1    <-------------------------------- Report: cells used, or why not
                    old blocks and the unused end of the slab go back to the pool
                    (or the old block list is put back)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvcompress.core import RequestOptions, TokenLayout

ATTRIBUTE = "kv_compression"


@dataclass(frozen=True)
class Observation:
    """Keep the queries of tokens ``[start, stop)`` of one request, all computed in this step.

    Args:
        request_id: vLLM's internal request id.
        offset: of token ``start`` among the request's tokens of this step.
        start: position of the first token.
        stop: position after the last token.
        first: position of the first token that is to be kept of this request, over all steps.
        end: number of tokens of the prompt; the last one to be kept comes before it.
    """

    request_id: str
    offset: int
    start: int
    stop: int
    first: int
    end: int


@dataclass(frozen=True)
class Plan:
    """Compress the tokens ``[0, gap_end)`` of one request at the start of this step.

    Args:
        sequence: number of the plan, never used twice in an engine.
        request_id: vLLM's internal request id.
        source: block ids that hold the tokens, in token order, ``gap_end / block_size`` of them.
        tail: block ids of the tokens ``[gap_end, num_tokens)``.
        slab: fresh private block ids, in order.
        gap_end: number of tokens that are compressed, a multiple of the block size.
        num_tokens: tokens of the prompt, ``n``; those from ``gap_end`` on stay as they are.
        options: method and settings for this request.
        layout: token layout, if the method needs one.
        token_ids: int64 ``[n]``, if the method's probes depend on the prompt.
    """

    sequence: int
    request_id: str
    source: list[int]
    tail: list[int]
    slab: list[int]
    gap_end: int
    num_tokens: int
    options: RequestOptions
    layout: TokenLayout | None = None
    token_ids: np.ndarray | None = None


@dataclass(frozen=True)
class CompressionStep:
    """Orders of one step, executed in the order release, compress, forward pass.

    Args:
        observe: queries to keep, if the method needs `Signal.QUERY_WINDOW`.
        compress: plans, in the order in which their blocks were taken.
        release: requests that ended or lost their blocks, or whose queries are not needed any
            more; their state is forgotten.
    """

    observe: tuple[Observation, ...] = ()
    compress: tuple[Plan, ...] = ()
    release: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What became of one plan.

    Args:
        sequence: of the plan.
        request_id: of the plan.
        num_cells: cells of the slab in use (largest over the ranks), 0 when it failed.
        num_entries: entries kept, summed over layers and KV heads of this rank.
        num_segments: layers times KV heads of this rank.
        seconds: time the worker spent on it.
        error: None, or why nothing was compressed.
        details: what the method wants in the log.
    """

    sequence: int
    request_id: str
    num_cells: int
    num_entries: int
    num_segments: int
    seconds: float
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
