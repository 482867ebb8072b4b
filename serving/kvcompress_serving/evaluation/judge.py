"""``python -m kvcompress_serving.evaluation.judge``: what learned probes are worth as selectors.

For held-out prompts of several kinds, the share of the tokens that the true continuation attends
to which each selector finds, and how far the next tokens move when only the chosen ones are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from kvcompress_serving.evaluation import provenance, tasks, texts
from kvcompress_serving.evaluation.fidelity import kl_divergence
from kvcompress_serving.evaluation.offline import FullRun, Offline
from kvcompress_serving.evaluation.prompts import BORDER_TOKENS, Case, make_case
from kvcompress_serving.evaluation.retrieval import forced_scores
from kvcompress_serving.evaluation.rows import Row
from kvcompress_serving.evaluation.selectors import LAST, ORACLE, Chosen, judge
from kvcompress_serving.evaluation.statistics import bootstrap, paired
from vllm_kvcompress.artifacts import load_artifact
from vllm_kvcompress.config import parse_config
from vllm_kvcompress.core import RequestOptions
from vllm_kvcompress.soft_tokens.artifact import (
    ARTIFACT_FILE,
    ARTIFACT_KIND,
    ARTIFACT_VERSION,
    read_soft_tokens,
)
from vllm_kvcompress.soft_tokens.model import SoftTokens, StaticTokens

_NEEDLES = "niah_multikey_1"
RESULTS_FILE = "judge.json"
TABLES_FILE = "judge.md"
_NUM_RESAMPLES = 10_000
_KEEP = [0.5, 0.25, 0.1]
_FORCED = [ORACLE, LAST, "last queries, pooled, times value norm", "static", "dynamic"]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what is fed after it.

    Args:
        kind: of text.
        name: within its kind.
        ids: of the prompt, which is compressed.
        continuation: of which the attention is the oracle's.
        case: of a retrieval task.
    """

    kind: str
    name: str
    ids: list[int]
    continuation: list[int]
    case: Case | None = None


@dataclass(frozen=True)
class Finding:
    """One selector on one prompt at one size.

    Args:
        kind: of text.
        prompt: its name.
        selector: its name.
        keep: share of the compressed tokens.
        scores: ``hits``; and ``kl``, ``top1`` and, for needles, ``nll`` of the answer where the
            continuation was computed.
    """

    kind: str
    prompt: str
    selector: str
    keep: float
    scores: dict[str, float]


def text_prompts(
    engine: Offline,
    sources: Sequence[texts.Document],
    prompt_tokens: int,
    continuation_tokens: int,
    per_kind: int,
) -> Iterator[Prompt]:
    """Stretches of texts with their own continuation."""
    start = engine.start()
    length = prompt_tokens + continuation_tokens - len(start)
    for document, ids in texts.cut(sources, engine.encode, length, per_kind):
        ids = [*start, *ids]
        yield Prompt(document.kind, document.name, ids[:prompt_tokens], ids[prompt_tokens:])


def needle_prompts(
    engine: Offline, text: str, prompt_tokens: int, count: int, seed: int
) -> Iterator[Prompt]:
    """Needles whose question is part of the compressed prompt, or follows it."""
    source = tasks.Source.of(text)
    samples = tasks.samples(
        _NEEDLES,
        prompt_tokens - BORDER_TOKENS,
        count,
        source,
        lambda text: len(engine.encode(text)),
        seed=seed,
    )
    for sample in samples:
        for order in ("known", "after"):
            case = make_case(sample, order, engine.encode, engine.start())
            kind = f"needle, question {'known' if order == 'known' else 'not known'}"
            yield Prompt(kind, f"{sample.index}", case.prompt, case.continuation, case)


def examine(
    engine: Offline,
    prompt: Prompt,
    probes: dict[str, SoftTokens],
    keeps: Sequence[float],
    forced: Collection[tuple[str, float]],
    heads: str,
) -> list[Finding]:
    """All selectors on one prompt.

    Args:
        engine: the model.
        prompt: the prompt.
        probes: soft tokens by name.
        keeps: shares of the compressed tokens.
        forced: selectors and shares for which the continuation is computed.
        heads: see `CompressionConfig.heads`.
    """
    config = parse_config({"method": "none", "heads": heads})
    run = engine.full(prompt.ids, prompt.continuation)
    block_size = engine.shape.block_size
    num_compressed = (len(prompt.ids) - config.window) // block_size * block_size
    judged = judge(run, probes, num_compressed, config.num_sink_tokens)
    findings = []
    for keep in keeps:
        for name in judged.scores:
            scores = {"hits": judged.hit_rate(name, keep)}
            if (name, keep) in forced:
                method = Chosen(config, judged.scores[name], keep)
                scores |= _forced(engine, prompt, run, Row(name, method, RequestOptions("chosen")))
            findings.append(Finding(prompt.kind, prompt.name, name, keep, scores))
    return findings


def _forced(engine: Offline, prompt: Prompt, run: FullRun, row: Row) -> dict[str, float]:
    """Scores of the continuation over what a selector keeps."""
    packed = engine.compress(row, run)
    ours = packed.feed(prompt.continuation[:-1])
    full = run.logits[: len(ours)]
    scores = {
        "kl": float(kl_divergence(full, ours).mean()),
        "top1": float((full.argmax(-1) == ours.argmax(-1)).double().mean()),
    }
    if prompt.case is not None:
        (found,) = forced_scores(prompt.case, ours, run.prompt_logits)
        scores["nll"] = found["nll"]
    return scores


def gap_closed(
    last: Sequence[float], own: Sequence[float], oracle: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """Share of the way from the last queries to the oracle: ``(last - own) / (last - oracle)`` of
    the means, with a 95 % percentile interval over resampled prompts."""
    table = np.array([last, own, oracle])
    index = np.random.default_rng(seed).integers(
        0, table.shape[1], (_NUM_RESAMPLES, table.shape[1])
    )

    def share(means: np.ndarray) -> np.ndarray:
        return (means[0] - means[1]) / (means[0] - means[2])

    low, high = np.quantile(share(table[:, index].mean(-1)), (0.025, 0.975))
    return float(share(table.mean(-1))), float(low), float(high)


_TITLES = {"hits": "hit rate", "kl": "KL, nats", "top1": "top-1", "nll": "answer NLL"}


def tables(findings: Sequence[Finding]) -> list[tuple[str, list[str], list[list[str]]]]:
    """One table for each kind of text and size: means with 95 % bootstrap intervals, differences
    to the last queries on the same prompts, and how much of the way to the oracle's divergence is
    gone."""
    made = []
    for kind, keep in dict.fromkeys((f.kind, f.keep) for f in findings):
        own = [f for f in findings if (f.kind, f.keep) == (kind, keep)]
        by_selector: dict[str, list[dict[str, float]]] = {}
        for finding in own:
            by_selector.setdefault(finding.selector, []).append(finding.scores)
        names = [n for n in _TITLES if any(n in f.scores for f in own)]
        rows = []
        for selector, scores in by_selector.items():
            cells = [selector, str(len(scores))]
            for name in names:
                cells += _cells(by_selector, selector, name)
            rows.append([*cells, _gap(by_selector, selector)])
        columns = ["selector", "prompts"]
        for name in names:
            columns += [_TITLES[name], "against last queries"]
        made.append((f"{kind}, {keep:.0%} kept", [*columns, "gap closed (KL)"], rows))
    return made


def _column(scores: Sequence[dict[str, float]], name: str) -> list[float]:
    return [s[name] for s in scores if name in s]


def _cells(by_selector: dict[str, list[dict[str, float]]], selector: str, name: str) -> list[str]:
    """A score, and its difference to that of the last queries."""
    own, base = (_column(by_selector[key], name) for key in (selector, LAST))
    if not own:
        return ["", ""]
    mean = bootstrap(own)
    shown = f"{mean.mean:.3f} [{mean.low:.3f}, {mean.high:.3f}]"
    if selector == LAST:
        return [shown, ""]
    moved = paired(own, base)
    return [shown, f"{moved.mean:+.3f} [{moved.low:+.3f}, {moved.high:+.3f}]"]


def _gap(by_selector: dict[str, list[dict[str, float]]], selector: str) -> str:
    last, own, oracle = (
        _column(by_selector.get(key, []), "kl") for key in (LAST, selector, ORACLE)
    )
    if selector in (LAST, ORACLE) or not own or not len(last) == len(own) == len(oracle):
        return ""
    share, low, high = gap_closed(last, own, oracle)
    return f"{share:.0%} [{low:.0%}, {high:.0%}]"


def markdown(findings: Sequence[Finding]) -> str:
    """`tables` as Markdown."""
    lines = []
    for title, columns, rows in tables(findings):
        lines += [f"### {title}", "", f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(lines)


def read_probes(path: Path) -> dict[str, SoftTokens]:
    """Every kind of soft tokens in an artifact, and others that were never trained.

    Args:
        path: file, or folder with it.

    Raises:
        ValueError: it is no such artifact.
    """
    file = path / ARTIFACT_FILE if path.is_dir() else path
    found = read_soft_tokens(load_artifact(file, ARTIFACT_KIND, ARTIFACT_VERSION))
    return {str(kind): tokens for kind, tokens in found.items()}


def untrained(engine: Offline, num_tokens: int, seed: int) -> SoftTokens:
    """Rows of the embedding table, drawn at random."""
    table = engine.model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    return StaticTokens(table[torch.randint(len(table), (num_tokens,), generator=generator)]).eval()


app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[Path, typer.Option(envvar="KVC_MODEL", help="Model folder.")],
    artifact: Annotated[Path, typer.Option(help="Soft tokens: file, or folder with it.")],
    out: Annotated[Path, typer.Option(help="Folder for judge.json and judge.md.")],
    text: Annotated[
        list[str],
        typer.Option(help="PATH or KIND=PATH of held-out texts; prose and code by default."),
    ] = [],  # noqa: B006 - typer reads it, nobody changes it
    documents: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 20,
    forced_documents: Annotated[
        int, typer.Option(min=0, help="Of these, prompts whose continuation is computed.")
    ] = 20,
    needles: Annotated[int, typer.Option(min=0, help="Needle samples.")] = 20,
    prompt_tokens: Annotated[int, typer.Option(min=256)] = 768,
    continuation_tokens: Annotated[int, typer.Option(min=2)] = 64,
    keep: Annotated[list[float], typer.Option(help="Shares of the compressed tokens.")] = _KEEP,
    forced: Annotated[
        list[str], typer.Option(help="Selectors whose continuation is computed.")
    ] = _FORCED,
    forced_keep: Annotated[
        list[float], typer.Option(help="Shares at which the continuation is computed.")
    ] = _KEEP,
    heads: Annotated[str, typer.Option(help="union or each.")] = "union",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Judge soft tokens as selectors, beside the last queries and the oracle."""
    console = Console()
    engine = Offline(model)
    probes = read_probes(artifact)
    first = next(iter(probes.values()))
    probes["untrained"] = untrained(engine, first.num_tokens, seed)
    sources = texts.read_sources(text) if text else texts.default_sources()
    prompts = list(text_prompts(engine, sources, prompt_tokens, continuation_tokens, documents))
    prose = next((s.text for s in sources if s.kind == "prose"), texts.default_text())
    if needles:
        prompts += needle_prompts(engine, prose, prompt_tokens, needles, seed)
    prompts = _in_turns(prompts)
    findings: list[Finding] = []
    taken: dict[str, int] = {}
    save = _saver(out, provenance.collect(model.expanduser(), seed, {"artifact": artifact.name}))
    for prompt in track(prompts, "prompts", console=console):
        taken[prompt.kind] = taken.get(prompt.kind, 0) + 1
        own = forced if taken[prompt.kind] <= forced_documents else []
        wanted = {(name, share) for name in own for share in forced_keep}
        findings += examine(engine, prompt, probes, keep, wanted, heads)
        save(findings)
    (out / TABLES_FILE).write_text(markdown(findings), encoding="utf-8")
    console.print(f"written: {out / RESULTS_FILE}, {out / TABLES_FILE}", markup=False)


def _in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first of every kind, then the second of every kind, and so on: what is there after an
    interruption is of all kinds."""
    places: dict[str, int] = {}
    ranked = []
    for prompt in prompts:
        places[prompt.kind] = places.get(prompt.kind, 0) + 1
        ranked.append((places[prompt.kind], prompt))
    return [prompt for _, prompt in sorted(ranked, key=lambda pair: pair[0])]


def _saver(out: Path, origin: dict[str, Any]) -> Callable[[Sequence[Finding]], None]:
    """Writes what was found so far."""
    out.mkdir(parents=True, exist_ok=True)

    def save(findings: Sequence[Finding]) -> None:
        body = {"provenance": origin, "findings": [asdict(f) for f in findings]}
        (out / RESULTS_FILE).write_text(json.dumps(body), encoding="utf-8")

    return save


if __name__ == "__main__":
    app()
