"""A page that shows over a prompt's text which tokens share an entry; it needs no network."""

from __future__ import annotations

import base64

import numpy as np

from kvcompress_serving.plots.membership import Compressed, explained_methods


def html(compressed: Compressed, model: str) -> str:
    """The page.

    Tokens of one entry have one colour, the entry's own token is as large as the entry's weight
    says, dropped tokens are struck through, and the raw window at the end is framed. Layer and
    head are chosen in the page.

    Args:
        compressed: a prompt whose owners are known.
        model: its name.

    Raises:
        ValueError: the method does not say which tokens went where.
    """
    from jinja2 import Environment, PackageLoader

    if compressed.owners is None or compressed.weights is None:
        raise ValueError(
            f"the page shows what was merged with what, which '{compressed.method}' cannot say; "
            f"methods that can: {', '.join(explained_methods())}"
        )
    num_layers, num_heads, _ = compressed.owners.shape
    loader = PackageLoader("kvcompress_serving.plots", ".")
    template = Environment(loader=loader, autoescape=True).get_template("page.html.jinja")
    return template.render(
        title=f"{compressed.method} on {model}",
        settings=compressed.settings,
        data={
            "tokens": compressed.tokens,
            "gapEnd": compressed.gap_end,
            "numLayers": num_layers,
            "numHeads": num_heads,
            "owners": _base64(compressed.owners.astype("<i4")),
            "weights": _base64(compressed.weights.astype("<f4")),
        },
    )


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
