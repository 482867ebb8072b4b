"""Random codecs and codes for the tests of coded pages."""

from __future__ import annotations

import torch

from kvcompress_kernels.code_format import (
    SCALE_DTYPE,
    WIDTHS,
    Codes,
    Counts,
    GroupCodec,
    RowLayout,
    SideCodec,
)


def random_codec(
    group_size: int,
    head_size: int,
    key_counts: Counts,
    value_counts: Counts,
    has_bias: bool = False,
    seed: int = 0,
) -> GroupCodec:
    """A codec whose decoding matrices undo its encoding matrices on the channels that it keeps."""
    generator = torch.Generator().manual_seed(seed)
    size = group_size * head_size

    def side(counts: Counts) -> SideCodec:
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
        basis = basis[:, : sum(counts)]
        spread = 0.5 + torch.rand(sum(counts), generator=generator)
        mean = torch.randn(size, generator=generator)
        return SideCodec(counts, mean, basis / spread, (basis * spread).T.contiguous())

    return GroupCodec(side(key_counts), side(value_counts), has_bias)


def random_codes(num_rows: int, layout: RowLayout, generator: torch.Generator) -> Codes:
    """Every code and scales around 1, biases around 0."""

    def table(counts: Counts) -> torch.Tensor:
        parts = [
            torch.randint(0, 2**width, (num_rows, count), generator=generator)
            for count, width in zip(counts, WIDTHS, strict=True)
        ]
        return torch.cat(parts, 1).to(torch.uint8)

    scales = []
    for name in layout.scales():
        draw = torch.randn(num_rows, generator=generator)
        if name.endswith("max"):
            draw = (draw.abs() + 0.5) / 100
        elif name.endswith("rms"):
            draw = draw.abs() + 0.5
        scales.append(draw)
    return Codes(
        table(layout.key_counts),
        table(layout.value_counts),
        torch.stack(scales).to(SCALE_DTYPE),
    )
