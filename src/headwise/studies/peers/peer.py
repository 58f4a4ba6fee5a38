"""What the implementations of this room have in common: how they are filled, called and asked."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.studies.peers.weights import Weights

PURPOSE = "whose attention is compared with"  # of a package, where it is missing


class Peer(nn.Module):
    """Multi-head self-attention as others wrote it.

    Attributes:
        name: how it is called.
        real: whether the package's own class computes; the others are written after their source.
        biased: whether its projections have biases.
    """

    name: ClassVar[str]
    real: ClassVar[bool]
    biased: ClassVar[bool]

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.p = embed_dim, num_heads, dropout
        self.head_dim = embed_dim // num_heads

    def held(self) -> Weights:
        """Its own parameters, in no other memory: what is written there is used."""
        raise NotImplementedError

    @torch.no_grad()
    def fill(self, given: Weights) -> Peer:
        """Take these weights; a bias that is not given becomes 0.

        Raises:
            OptionError: biases are given and it has none.
        """
        own = self.held()
        if given.biases is not None and own.biases is None:
            raise OptionError(
                saw=f"biases for {self.name}",
                needed="weights without biases: its projections have none",
                do="give Weights(q, k, v, out)",
            )
        for mine, theirs in zip(own.matrices, given.matrices, strict=True):
            mine.copy_(theirs)
        zeros = [torch.zeros_like(bias) for bias in own.biases or ()]
        for mine, theirs in zip(own.biases or (), given.biases or zeros, strict=True):
            mine.copy_(theirs)
        return self

    def start(self) -> None:
        """Draw the weights as the model around it does, where that draws them again."""

    def forward(
        self, x: Float[Tensor, "batch length embed_dim"], mask: Any = None
    ) -> Float[Tensor, "batch length embed_dim"]:
        """The attention alone, before any residual or norm.

        ``mask`` is in the values of the implementation; where it is a tensor, its axes are
        (batch, queries, keys).
        """
        raise NotImplementedError

    def spell(self, may_attend: Bool[Tensor, "batch queries keys"]) -> Any:
        """A mask in which True may be attended, in the values of this implementation."""
        raise NotImplementedError

    def block(
        self, x: Float[Tensor, "batch length embed_dim"]
    ) -> Float[Tensor, "batch length embed_dim"]:
        """All that the published class computes, with its residual and norm if it has any."""
        out: Tensor = self(x)
        return out

    def attention_weights(self, x: Float[Tensor, "batch length embed_dim"]) -> Tensor | None:
        """The weights, with the axes in which they are given out; None where they are not."""
