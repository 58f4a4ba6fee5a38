"""The weights that every implementation is filled with, and how one is filled, called and asked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise.errors import OptionError


@dataclass(frozen=True, eq=False)
class SharedWeights:
    """Separate projections, each used as in `torch.nn.Linear`: ``x @ matrix.mT + bias``.

    Head h has the rows from h * head_dim of ``q`` and ``k``, those from h * value_dim of ``v``, and
    those columns of ``out``. A `Implementation` takes square ones only.

    Attributes:
        biases: those of ``q``, ``k``, ``v`` and ``out``; None where there are none.
    """

    q: Float[Tensor, "heads_head_dim embed_dim"]
    k: Float[Tensor, "heads_head_dim source_dim"]
    v: Float[Tensor, "heads_value_dim values_source_dim"]
    out: Float[Tensor, "out_dim heads_value_dim"]
    biases: tuple[Float[Tensor, " _"], ...] | None = None

    @classmethod
    def of(cls, matrices: Iterable[Tensor], biases: Iterable[Tensor] = ()) -> SharedWeights:
        """From the four matrices, and four biases or none."""
        q, k, v, out = matrices
        return cls(q, k, v, out, tuple(biases) or None)

    @classmethod
    def of_linears(cls, *linears: Any) -> SharedWeights:
        """The parameters of four linear layers themselves."""
        return cls.of((x.weight for x in linears), (x.bias for x in linears if x.bias is not None))

    @classmethod
    def packed(cls, weight: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor) -> SharedWeights:
        """As `torch.nn.MultiheadAttention` holds them: the rows of q, of k, then of v."""
        return cls.of((*weight.chunk(3), out), (*bias.chunk(3), out_bias))

    @classmethod
    def random(cls, embed_dim: int, *, biased: bool = False) -> SharedWeights:
        """Normal, so that projections are as wide as their input, with biases half as wide."""
        matrices = [torch.randn(embed_dim, embed_dim) / math.sqrt(embed_dim) for _ in range(4)]
        return cls.of(matrices, (torch.randn(embed_dim) / 2 for _ in range(4 if biased else 0)))

    def double(self) -> SharedWeights:
        """The same in float64."""
        return SharedWeights.of(
            (matrix.double() for matrix in self.matrices), (b.double() for b in self.biases or ())
        )

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Those of the queries, the keys, the values and the output."""
        return self.q, self.k, self.v, self.out

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The matrices, then the biases where there are any."""
        return (*self.matrices, *(self.biases or ()))


class Implementation(nn.Module):
    """Multi-head self-attention as others wrote it.

    Attributes:
        name: how it is called.
        biased: whether its projections have biases.
        projections: the linear layers of q, k, v and the output, by their names.
        mask_values: what a mask holds where a key may be attended, and where it may not.
    """

    name: ClassVar[str]
    biased: ClassVar[bool] = True
    projections: ClassVar[tuple[str, ...]] = ()
    mask_values: ClassVar[tuple[Any, Any]] = (True, False)

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.p = embed_dim, num_heads, dropout
        self.head_dim = embed_dim // num_heads
        self.inner: Any = self.build()

    def build(self) -> Any:
        """The layer that computes; one that is written anew makes its own parameters."""
        raise NotImplementedError

    def held(self) -> SharedWeights:
        """Its own parameters, in no other memory: what is written there is used."""
        return SharedWeights.of_linears(*map(self.get_submodule, self.projections))

    @torch.no_grad()
    def fill(self, given: SharedWeights) -> Implementation:
        """Take these weights; a bias that is not given becomes 0.

        Raises:
            OptionError: biases are given and it has none.
        """
        own, zero = self.held(), torch.zeros(())
        if given.biases is not None and own.biases is None:
            raise OptionError(
                saw=f"biases for {self.name}",
                needed="weights without biases: its projections have none",
                do="give Weights(q, k, v, out)",
            )
        for mine, theirs in zip(own.tensors, (*given.tensors, *[zero] * 4), strict=False):
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
        return torch.where(may_attend, *self.mask_values)

    def block(self, x: Float[Tensor, "batch length embed_dim"]) -> Any:
        """All that the published class computes, with its residual and norm if it has any."""
        return self(x)

    def attention_weights(self, x: Float[Tensor, "batch length embed_dim"]) -> Any:
        """The weights, with the axes in which they are given out; None where they are not."""
