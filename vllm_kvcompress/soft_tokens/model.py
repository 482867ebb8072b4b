"""Soft tokens: vectors in place of embeddings that a frozen model reads after a prompt.

Shape letters: ``k`` soft tokens, ``M`` rows of the library, ``d`` hidden size of the model, ``T``
tokens of the prompt, ``r`` width in which rows are chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional as F

Kind = Literal["static", "dynamic"]
KINDS: tuple[Kind, ...] = ("static", "dynamic")

SELECTION_WIDTH = 32
HIDDEN_WIDTH = 256
FINAL_TEMPERATURE = 0.1
"""Temperature of the choice at inference, the last one of training."""


class SoftTokens(nn.Module, ABC):
    """Makes the soft tokens of a prompt.

    In training mode the choice of a dynamic kind is noisy; ``eval()`` gives the inference form,
    which is a pure function of the prompt.

    Attributes:
        num_tokens: ``k``.
        hidden_size: ``d``.
        kind: "static" or "dynamic".
    """

    kind: ClassVar[Kind]

    def __init__(self, num_tokens: int, hidden_size: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.hidden_size = hidden_size

    @abstractmethod
    def forward(self, prompt_embeddings: torch.Tensor) -> torch.Tensor:
        """Soft tokens of one prompt.

        Args:
            prompt_embeddings: ``[T, d]``, rows of the model's embedding table; any float type.

        Returns:
            float32 ``[k, d]``, to be used in place of embeddings, on the device of the parameters.
        """


class StaticTokens(SoftTokens):
    """The same ``k`` learned vectors for every prompt, as in Judge Q.

    Args:
        tokens: ``[k, d]`` to start from.
    """

    kind = "static"

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__(tokens.shape[0], tokens.shape[1])
        self.tokens = nn.Parameter(tokens.detach().float().clone())

    def forward(self, prompt_embeddings: torch.Tensor) -> torch.Tensor:
        return self.tokens


class DynamicTokens(SoftTokens):
    """Mixes of the rows of a learned library, chosen from the prompt (Meta-Soft,
    arXiv 2605.22337).

    The mean and the last of the prompt's embeddings, each scaled to a root mean square of 1, go
    through a small network that gives each soft token a query of width ``r``; its products with the
    library's rows, projected to the same width, are the logits of the choice.

    Two things are added to the mix that the paper does not have; zeros give the published form: an
    offset that all prompts share, and an echo of the prompt's last ``k`` embeddings, soft token
    ``i`` that of the token ``T - k + i``. Words that are read a second time, after the whole
    prompt, look for what follows them.

    Args:
        library: ``[M, d]`` to start from.
        offset: ``[k, d]`` to start from.
        echo: ``[k]`` to start from, factors of the last embeddings.
        scale: of the mix, to start from.
        selection_width: ``r``.
        hidden_width: of the network.

    Attributes:
        temperature: of the choice in training mode; the trainer lowers it.
    """

    kind = "dynamic"

    def __init__(
        self,
        library: torch.Tensor,
        offset: torch.Tensor,
        echo: torch.Tensor,
        scale: float,
        selection_width: int = SELECTION_WIDTH,
        hidden_width: int = HIDDEN_WIDTH,
    ) -> None:
        num_tokens, hidden_size = offset.shape
        assert library.shape[1] == hidden_size, "library and offset are of one model"
        super().__init__(num_tokens, hidden_size)
        self.library = nn.Parameter(library.detach().float().clone())
        self.offset = nn.Parameter(offset.detach().float().clone())
        self.echo = nn.Parameter(echo.detach().float().clone())
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.selector = nn.Sequential(
            nn.Linear(2 * hidden_size, hidden_width),
            nn.SiLU(),
            nn.Linear(hidden_width, num_tokens * selection_width),
        )
        self.row_keys = nn.Linear(hidden_size, selection_width, bias=False)
        self.temperature = 1.0

    def logits(self, prompt_embeddings: torch.Tensor) -> torch.Tensor:
        """Logits of the choice, float32 ``[k, M]``."""
        found = prompt_embeddings.to(self.library)
        features = F.rms_norm(torch.stack([found.mean(0), found[-1]]), found.shape[-1:])
        queries = self.selector(features.flatten()).unflatten(-1, (self.num_tokens, -1))
        keys = self.row_keys(F.normalize(self.library, dim=-1))
        return queries @ keys.T

    def forward(self, prompt_embeddings: torch.Tensor) -> torch.Tensor:
        logits = self.logits(prompt_embeddings)
        if self.training:
            weights = F.gumbel_softmax(logits, tau=self.temperature)
        else:
            weights = (logits / FINAL_TEMPERATURE).softmax(-1)
        mix = self.scale * (weights @ self.library)
        return self.offset + self.echo[:, None] * self._last(prompt_embeddings) + mix

    def _last(self, prompt_embeddings: torch.Tensor) -> torch.Tensor:
        """The last ``k`` embeddings, ``[k, d]``; a shorter prompt's first one stands for those
        before it."""
        num_tokens = prompt_embeddings.shape[0]
        places = torch.arange(num_tokens - self.num_tokens, num_tokens).clamp_min(0)
        return prompt_embeddings[places.to(prompt_embeddings.device)].to(self.library)


def diversity_loss(library: torch.Tensor) -> torch.Tensor:
    """``||N N^T - I||_F^2 / M`` of the rows scaled to length 1; 0 where they are orthogonal.

    Args:
        library: ``[M, d]``.
    """
    rows = F.normalize(library, dim=-1)
    gram = rows @ rows.T
    identity = torch.eye(len(rows), device=rows.device)
    return (gram - identity).square().sum() / len(rows)
