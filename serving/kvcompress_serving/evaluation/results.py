"""What was measured, prompt by prompt, and the tables that are made from it."""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress_serving.evaluation.statistics import Estimate, bootstrap, paired
from kvcompress_serving.evaluation.texts import Document

if TYPE_CHECKING:  # reading results imports neither torch nor transformers
    from kvcompress_serving.evaluation.offline import CompressedRun
    from kvcompress_serving.evaluation.rows import Row


FORMAT = "vllm-kvcompress-eval/1"


class EndpointError(RuntimeError):
    """A server refused a request or cannot be reached."""


def token_digest(token_ids: Sequence[int]) -> str:
    """Short hash of token ids."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:12]


def common_prefix(reference: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens in which the two agree."""
    for index, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return index
    return min(len(reference), len(other))


@dataclass(frozen=True)
class Measurement:
    """One row on one prompt.

    Args:
        task: ``fidelity``, or the name of a retrieval task with its setting.
        group: kind of text.
        prompt: name and digest of the prompt; rows are compared on equal prompts.
        row: name of the row.
        scores: by name.
        num_tokens: tokens of the compressed prompt.
        bytes_ratio: bytes kept per byte of the raw cache.
        blocks_ratio: blocks held per block of the raw cache.
        kept: entries and raw tokens per prompt token.
        bypassed: why the prompt was left alone; empty if it was compressed.
    """

    task: str
    group: str
    prompt: str
    row: str
    scores: dict[str, float]
    num_tokens: int
    bytes_ratio: float
    blocks_ratio: float
    kept: float
    bypassed: str = ""

    @staticmethod
    def of(
        task: str, document: Document, row: Row, packed: CompressedRun, scores: dict[str, float]
    ) -> Measurement:
        """Measurement of the offline back end."""
        return Measurement(
            task=task,
            group=document.kind,
            prompt=f"{document.name}#{packed.digest}",
            row=row.name,
            scores=scores,
            num_tokens=packed.bytes.num_tokens,
            bytes_ratio=packed.bytes.ratio,
            blocks_ratio=packed.bytes.blocks_ratio,
            kept=packed.kept,
            bypassed=packed.bypassed,
        )


@dataclass(frozen=True)
class Line:
    """One row of one table: means over the prompts.

    Args:
        task: see `Measurement`.
        group: see `Measurement`.
        row: name of the row.
        count: prompts.
        bypassed: prompts that were left alone.
        bytes_ratio: mean over the prompts.
        blocks_ratio: mean over the prompts.
        kept: mean over the prompts.
        scores: estimate of each score.
        against: estimate of each score's difference to the reference row on the same prompts;
            empty for that row itself.
    """

    task: str
    group: str
    row: str
    count: int
    bypassed: int
    bytes_ratio: float
    blocks_ratio: float
    kept: float
    scores: dict[str, Estimate]
    against: dict[str, Estimate]


class Direction(enum.Enum):
    """Whether a larger score is better."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True)
class Score:
    """How a score is shown.

    Args:
        title: heading of its column.
        direction: which way is better.
        digits: after the decimal point.
        relative: it says by itself how a row differs from the full cache.
    """

    title: str
    direction: Direction
    digits: int
    relative: bool = False


SCORES = {
    "kl": Score("mean KL, nats", Direction.LOWER, 4, relative=True),
    "top1": Score("top-1", Direction.HIGHER, 3),
    "nll": Score("NLL, nats/token", Direction.LOWER, 3),
    "ppl_ratio": Score("perplexity / full", Direction.LOWER, 3, relative=True),
    "greedy_prefix": Score("greedy tokens equal", Direction.HIGHER, 1, relative=True),
    "exact": Score("exact answer", Direction.HIGHER, 2),
    "match": Score("string match", Direction.HIGHER, 2),
    "same_prefix": Score("answer equal up to", Direction.HIGHER, 2, relative=True),
}
"""Every score that a back end reports, in the order of the columns."""
HEADLINES = ("kl", "match", "nll")
"""The score that a table is plotted by: the first of these that it has."""


@dataclass(frozen=True)
class Run:
    """A file of results.

    Args:
        provenance: see `provenance.collect`.
        rows: settings of each row by name.
        measurements: everything that was measured.
    """

    provenance: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    measurements: list[Measurement]

    def save(self, path: Path) -> None:
        """Write JSON, with the tables beside the measurements for readers without this code."""
        lines = summarize(self.measurements, seed=self.provenance.get("seed", 0))
        body = {
            "format": FORMAT,
            "provenance": self.provenance,
            "rows": self.rows,
            "tables": [asdict(line) for line in lines],
            "measurements": [asdict(m) for m in self.measurements],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Run:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is no such file, or of another format.
        """
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            if body["format"] != FORMAT:
                raise ValueError(f"format {body['format']!r}, expected {FORMAT!r}")
            items = [Measurement(**item) for item in body["measurements"]]
            return Run(body["provenance"], body["rows"], items)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a results file of this tool ({error})") from None


def summarize(
    measurements: Sequence[Measurement], reference: str | None = None, *, seed: int = 0
) -> list[Line]:
    """Tables of all tasks and groups, rows in the order in which they were measured.

    Args:
        measurements: of one run.
        reference: row that the others are compared with; the first row by default.
        seed: of the bootstrap.

    Raises:
        ValueError: a row was measured on other prompts than the reference.
    """
    lines = []
    for task, group in dict.fromkeys((m.task, m.group) for m in measurements):
        table = [m for m in measurements if (m.task, m.group) == (task, group)]
        by_row: dict[str, dict[str, Measurement]] = {}
        for measurement in table:
            by_row.setdefault(measurement.row, {})[measurement.prompt] = measurement
        base = by_row[reference or next(iter(by_row))]
        for row, prompts in by_row.items():
            if prompts.keys() != base.keys():
                raise ValueError(f"{task}, {group}: row '{row}' was measured on other prompts")
            own = list(prompts.values())
            names = own[0].scores
            scores = {n: bootstrap([m.scores[n] for m in own], seed=seed) for n in names}
            against = {}
            if prompts is not base:
                for n in names:
                    pairs = [(m.scores[n], base[key].scores[n]) for key, m in prompts.items()]
                    against[n] = paired(*zip(*pairs, strict=True), seed=seed)
            lines.append(
                Line(
                    task=task,
                    group=group,
                    row=row,
                    count=len(own),
                    bypassed=sum(bool(m.bypassed) for m in own),
                    bytes_ratio=_mean(m.bytes_ratio for m in own),
                    blocks_ratio=_mean(m.blocks_ratio for m in own),
                    kept=_mean(m.kept for m in own),
                    scores=scores,
                    against=against,
                )
            )
    return lines


def _mean(values: Iterable[float]) -> float:
    items = list(values)
    return math.fsum(items) / len(items)
