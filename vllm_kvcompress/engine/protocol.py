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

from vllm_kvcompress.core import RequestOptions, TokenLayout

ATTRIBUTE = "kv_compression"


@dataclass(frozen=True)
class Plan:
    """Compress the tokens ``[0, gap_end)`` of one request at the start of this step.

    Args:
        sequence: number of the plan, never used twice in an engine.
        request_id: vLLM's internal request id.
        source: block ids that hold the tokens, in token order, ``gap_end / block_size`` of them.
        slab: fresh private block ids, in order.
        gap_end: number of tokens that are compressed, a multiple of the block size.
        options: method and settings for this request.
        layout: token layout, if the method needs one.
    """

    sequence: int
    request_id: str
    source: list[int]
    slab: list[int]
    gap_end: int
    options: RequestOptions
    layout: TokenLayout | None = None


@dataclass(frozen=True)
class CompressionStep:
    """Orders of one step, executed in the order release, compress, forward pass.

    Args:
        observe: requests whose last prompt chunk runs in this step; the attention layers keep
            their last queries, if the method needs `Signal.QUERY_WINDOW`.
        compress: plans, in the order in which their blocks were taken.
        release: requests that ended or lost their blocks; their state is forgotten.
    """

    observe: tuple[str, ...] = ()
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
