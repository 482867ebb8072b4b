"""AATC: keys and values as transform codes of few bits (arXiv 2608.14191)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from kvcompress_kernels import formats
from kvcompress_kernels.code_format import GroupCodec
from kvcompress_kernels.code_rows import api as code_rows
from kvcompress_kernels.code_rows import reference
from kvcompress_kernels.formats import SlabGeometry
from vllm_kvcompress.artifacts import Artifact, find_artifact, model_folder
from vllm_kvcompress.calibration.codec import (
    ARTIFACT_FILE,
    ARTIFACT_KIND,
    ARTIFACT_VERSION,
    SHIPPED,
    Calibration,
)
from vllm_kvcompress.calibration.published import published_groups
from vllm_kvcompress.calibration.rope import Rotation
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.core import (
    Budget,
    CodedRows,
    IncompressibleError,
    LayerView,
    ModelShape,
    PagedPrompt,
    PromptView,
    Segment,
    Signal,
    SlabUsage,
    TokenLayout,
)
from vllm_kvcompress.methods.base import Method, SegmentWriter


class AATC(Method):
    """Codes every token of the prompt with a few bits per number; nothing is dropped or merged.

    The key and the value of a token, over a group of KV heads, are turned into channels by a linear
    transform that was calibrated on the model, and each channel is quantized with the bits that it
    is worth: 0, 1, 2, 4 or 8. The first tokens and the recent window stay as they are. Every token
    takes the same number of bytes, so the size is fixed in advance: about ``bits`` per number plus
    64 bits of scales per token and group, where the cache has 16 per number.

    Reads from the configuration: ``bits``, ``artifact``, ``num_sink_tokens``, ``window``. The
    artifact is a file that ``vllm-kvcompress calibrate`` makes from the model; ``bits`` may differ
    from those that it was made for. ``keep`` of a request has no meaning and is ignored.

    Based on AATC (arXiv 2608.14191), with these differences: keys are coded after RoPE, so that
    attention needs no decoded key; the transform whitens the covariance in a metric that says what
    an error does to the model's output (`calibration.transform`); losses are measured instead of
    modelled (`calibration.distortion`); widths come from a set that packs into bytes; up to 4 bits
    the levels are Lloyd-Max levels. The published recipe and keys before RoPE are there to compare
    with, as ``--preset paper`` and ``--key-space pre_rope`` of ``calibrate``, in the simulation
    only.

    Args:
        config: see above.
        with_bias: rows carry a bias, and every KV head is a group of its own: for entries that
            another method has made.

    **Limits**: it needs calibration, on text like that which is served: on a language that
    calibration never saw the loss is several times as large, and 3 bits are advisable. Codes are
    made once, from the prompt; what is generated stays raw.
    """

    name = "aatc"
    needs = frozenset({Signal.CALIBRATION})
    settings = ("bits", "artifact", "num_sink_tokens")
    size = "bits and scales in place of 16 bits a number"

    _bound: _Bound | None = None

    def __init__(self, config: CompressionConfig, *, with_bias: bool = False) -> None:
        super().__init__(config)
        self._with_bias = with_bias

    def bind_model(self, shape: ModelShape) -> None:
        if self._bound is None or self._bound.shape != shape:
            self._bound = _bind(shape, self.config.bits, self.config.artifact, self._with_bias)

    @property
    def _model(self) -> _Bound:
        assert self._bound is not None, "bind_model() must be called first"
        return self._bound

    def codecs(self) -> Sequence[Sequence[GroupCodec]]:
        """See `Method.codecs`.

        Raises:
            ValueError: the artifact can be evaluated only.
        """
        return self._model.codecs()

    def budget(
        self,
        num_tokens: int,
        layout: TokenLayout | None,
        keep: float | None,
        geometry: SlabGeometry,
    ) -> Budget:
        """Exactly the blocks that the raw first tokens and the coded rest take; on the rank that
        needs most, so that all ranks agree."""
        num_sinks = self._num_sinks(num_tokens)
        num_rows = num_tokens - num_sinks
        coded = max(
            sum(-(-num_rows // rows) for rows in per_group)
            for per_group in self._model.rows_per_cell
        )
        raw = geometry.cells_per_block * geometry.cells(num_sinks)
        num_blocks = geometry.blocks(raw + coded)
        if num_blocks >= geometry.cells(num_tokens):
            raise IncompressibleError(
                "no_room",
                f"{self.name}: {num_tokens} tokens at {self.config.bits:g} bits take {num_blocks} "
                f"blocks, no fewer than the {geometry.cells(num_tokens)} of the prompt",
            )
        return Budget(num_blocks)

    def _num_sinks(self, num_tokens: int) -> int:
        return min(self.config.num_sink_tokens, num_tokens)

    def compress_prompt(self, prompt: PromptView) -> Iterator[Segment]:
        for index, layer in enumerate(prompt.layers):
            yield self.compress(layer, prompt, index)

    def compress(self, layer: LayerView, prompt: PromptView, settings: int) -> Segment:
        """Compress one layer; ``settings`` is its index among the compressed ones."""
        num_sinks = self._num_sinks(layer.keys.shape[1])
        keys, values = layer.keys[:, num_sinks:], layer.values[:, num_sinks:]
        sinks = (list(layer.keys[:, :num_sinks]), list(layer.values[:, :num_sinks]))
        bias = [torch.zeros(num_sinks)] * len(layer.keys)
        if self._model.recoders is not None:
            parts, rotation = self._model.recoders[settings], self._model.rotation
            if rotation is not None:
                keys = rotation.undo(keys, num_sinks)
            keys, values = _recode(keys, values, parts)
            if rotation is not None:
                keys = rotation.apply(keys, num_sinks)
            return _recoded(Segment(*sinks, bias), keys, values, parts)
        codecs = self._model.codecs()[settings]
        size = len(keys) // len(codecs)
        rows = [
            CodedRows(codec, reference.encode(keys[first:stop], values[first:stop], codec))
            for codec, first, stop in zip(
                codecs, range(0, len(keys), size), range(size, len(keys) + 1, size), strict=True
            )
        ]
        return Segment(*sinks, bias, rows)

    def compress_into(self, prompt: PagedPrompt) -> SlabUsage:
        geometry = prompt.geometry
        num_tokens = len(prompt.source) * geometry.block_size
        num_sinks = self._num_sinks(num_tokens)
        blocks = prompt.source[: geometry.cells(num_sinks)]
        bias = torch.zeros(num_sinks)
        writer = SegmentWriter(prompt, self.name)
        for layer, codecs in enumerate(self.codecs()):
            keys, values = formats.gather_prompt(prompt.kv_cache, layer, blocks)
            for head in range(geometry.num_kv_heads):
                writer.write_raw(
                    layer, head, keys[head, :num_sinks], values[head, :num_sinks], bias
                )
            size = geometry.num_kv_heads // len(codecs)
            for group, codec in enumerate(codecs):
                first = writer.take_rows(layer, group, num_tokens - num_sinks, codec.layout)
                code_rows.encode_prompt(
                    prompt.kv_cache,
                    layer,
                    prompt.source,
                    group * size,
                    codec,
                    prompt.slab,
                    first,
                    start=num_sinks,
                )
        return writer.usage()


@dataclass(frozen=True)
class _Bound:
    """An artifact as it serves one rank of a model.

    Args:
        shape: of the model.
        coded: codecs of each layer and group; None for what can be evaluated only.
        recoders: in their place, for what can be evaluated only, else None.
        rotation: RoPE, where keys are coded before it.
        rows_per_cell: for each rank the rows per cell of all its groups.
        source: file that it comes from.
    """

    shape: ModelShape
    coded: list[list[GroupCodec]] | None
    recoders: Sequence[Sequence[_Recoder]] | None
    rotation: Rotation | None
    rows_per_cell: list[list[int]]
    source: Path

    def codecs(self) -> list[list[GroupCodec]]:
        if self.coded is None:
            raise ValueError(
                f"aatc: {self.source} was made with the preset 'paper', whose codes of any width "
                "have no byte format, or with keys before RoPE, which attention cannot read coded: "
                "it can be evaluated, not served; make one to serve with: "
                f"{_command(self.shape.model)}"
            )
        return self.coded


class _Recoder(Protocol):
    """Codes and decodes the entries of a group at once."""

    def recode(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rows_per_cell(self, cell_bytes: int) -> int: ...


@dataclass(frozen=True)
class _CodecRecoder:
    """What a codec leaves of entries."""

    codec: GroupCodec

    def recode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = reference.encode(keys, values, self.codec)
        decoded = reference.decode(codes, self.codec, keys.shape[-1])
        return decoded[0].to(keys.dtype), decoded[1].to(values.dtype)

    def rows_per_cell(self, cell_bytes: int) -> int:
        return self.codec.layout.rows_per_cell(cell_bytes)


@dataclass(frozen=True)
class _Recoded(Segment):
    """Raw entries that stand for codes without a byte format.

    Args:
        recoded_by: what coded them, one for each group.
        num_rows: rows that were coded.
    """

    recoded_by: Sequence[_Recoder] = ()
    num_rows: int = 0

    def num_cells(self, geometry: SlabGeometry, cell_bytes: int) -> int:
        coded = sum(-(-self.num_rows // part.rows_per_cell(cell_bytes)) for part in self.recoded_by)
        return sum(geometry.cells(m - self.num_rows) for m in self.num_entries) + coded


def _recode(
    keys: torch.Tensor, values: torch.Tensor, parts: Sequence[_Recoder]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of ``[H, m, D]`` when each group of heads is coded and decoded."""
    size = len(keys) // len(parts)
    recoded = [
        part.recode(k, v)
        for part, k, v in zip(parts, keys.split(size), values.split(size), strict=True)
    ]
    return torch.cat([pair[0] for pair in recoded]), torch.cat([pair[1] for pair in recoded])


def _recoded(
    sinks: Segment, keys: torch.Tensor, values: torch.Tensor, parts: Sequence[_Recoder]
) -> Segment:
    """Raw entries ``[H, m, D]`` in place of the rows that they were recoded through."""
    num_rows = keys.shape[1]
    bias = torch.zeros(num_rows)
    return _Recoded(
        [torch.cat(pair) for pair in zip(keys, sinks.keys, strict=True)],
        [torch.cat(pair) for pair in zip(values, sinks.values, strict=True)],
        [torch.cat([bias, own]) for own in sinks.bias],
        recoded_by=parts,
        num_rows=num_rows,
    )


def _bind(shape: ModelShape, bits: float, artifact: str | None, with_bias: bool) -> _Bound:
    """Find, check and prepare the artifact of a model.

    Raises:
        ValueError: there is none, it is damaged, or made from another model; all reasons, and the
            command that makes the right one.
    """
    try:
        file, calibration = _load(shape, artifact)
        group_size = 1 if with_bias else _group_size(calibration, shape)
        if group_size not in calibration.transforms:
            raise ValueError(f"{file} has no transform of single KV heads")
    except ValueError as error:
        raise ValueError(
            f"aatc: {error}; make an artifact with: {_command(shape.model)}, and name it as "
            "'artifact' in the configuration"
        ) from error
    transforms = calibration.transforms[group_size]
    per_rank = shape.num_kv_heads // group_size
    # where there are more ranks than heads, heads are repeated
    first_groups = [
        rank * calibration.num_kv_heads // shape.num_ranks // group_size
        for rank in range(shape.num_ranks)
    ]
    own = first_groups[shape.rank]
    rotation = None
    if calibration.key_space == "pre_rope":
        rotation = Rotation.of_model(model_folder(shape.model))
    if calibration.preset == "paper":
        by_first = {
            first: published_groups(transforms, shape.layers, range(first, first + per_rank), bits)
            for first in sorted(set(first_groups))
        }
        rows = [
            [group.rows_per_cell(shape.cell_bytes) for layer in groups for group in layer]
            for groups in by_first.values()
        ]
        return _Bound(shape, None, by_first[own], rotation, rows, file)
    widths = {
        first: transforms.widths(
            shape.layers, range(first, first + per_rank), bits, shape.cell_bytes, with_bias
        )
        for first in sorted(set(first_groups))
    }
    codecs = [
        [
            transforms.codec(layer, own + index, found, with_bias)
            for index, found in enumerate(groups)
        ]
        for layer, groups in zip(shape.layers, widths[own], strict=True)
    ]
    rows = [[group.rows for layer in groups for group in layer] for groups in widths.values()]
    if rotation is not None:
        recoders = [[_CodecRecoder(codec) for codec in layer] for layer in codecs]
        return _Bound(shape, None, recoders, rotation, rows, file)
    return _Bound(shape, codecs, None, None, rows, file)


def _load(shape: ModelShape, artifact: str | None) -> tuple[Path, Calibration]:
    """The artifact that is named, or the shipped one for the model.

    Raises:
        ValueError: all reasons why there is none to be used.
    """
    file, found = find_artifact(
        shape.model,
        artifact,
        SHIPPED,
        ARTIFACT_FILE,
        ARTIFACT_KIND,
        ARTIFACT_VERSION,
        "artifact is",
    )
    try:
        return file, _checked(found, shape)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _checked(artifact: Artifact, shape: ModelShape) -> Calibration:
    """What is in an artifact, if it suits the shape of the model."""
    calibration = Calibration.read(artifact)
    num_kv_heads = shape.num_kv_heads * shape.num_ranks
    wrong = []
    if calibration.num_layers <= max(shape.layers):
        wrong.append(f"{calibration.num_layers} layers, the model has layer {max(shape.layers)}")
    repeated = shape.num_kv_heads == 1 and shape.num_ranks > calibration.num_kv_heads
    if num_kv_heads != calibration.num_kv_heads and not repeated:
        wrong.append(f"{calibration.num_kv_heads} KV heads, the model has {num_kv_heads}")
    if calibration.head_size != shape.head_size:
        wrong.append(f"heads of {calibration.head_size}, those of the model are {shape.head_size}")
    if wrong:
        raise ValueError("it has " + "; ".join(wrong))
    return calibration


def _group_size(calibration: Calibration, shape: ModelShape) -> int:
    """Largest group of the artifact that lies within a rank, up to its own choice.

    Raises:
        ValueError: no group does.
    """
    fitting = [
        size
        for size in calibration.transforms
        if size <= calibration.group_size and shape.num_kv_heads % size == 0
    ]
    if not fitting:
        raise ValueError(
            f"its groups of {sorted(calibration.transforms)} KV heads do not fit the "
            f"{shape.num_kv_heads} of a rank"
        )
    return max(fitting)


def _command(model: str) -> str:
    return f"vllm-kvcompress calibrate --model {model} --out FOLDER"
