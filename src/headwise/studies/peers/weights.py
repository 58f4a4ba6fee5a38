"""The weights that every implementation is filled with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Weights:
    """Separate projections, each used as in `torch.nn.Linear`: ``x @ matrix.mT + bias``.

    Head h has the rows from h * head_dim of ``q`` and ``k``, those from h * value_dim of ``v``, and
    those columns of ``out``. An implementation of `Peer` takes square ones only.

    Attributes:
        biases: those of ``q``, ``k``, ``v`` and ``out``; None where there are none.
    """

    q: Float[Tensor, "heads_head_dim embed_dim"]
    k: Float[Tensor, "heads_head_dim source_dim"]
    v: Float[Tensor, "heads_value_dim values_source_dim"]
    out: Float[Tensor, "out_dim heads_value_dim"]
    biases: tuple[Float[Tensor, " _"], ...] | None = None

    @classmethod
    def of(cls, matrices: Iterable[Tensor], biases: Iterable[Tensor] = ()) -> Weights:
        """From the four matrices, and four biases or none."""
        q, k, v, out = matrices
        return cls(q, k, v, out, tuple(biases) or None)

    @classmethod
    def of_linears(cls, *linears: nn.Linear) -> Weights:
        """The parameters of four linear layers themselves."""
        biases: list[Tensor | None] = [linear.bias for linear in linears]
        return cls.of((x.weight for x in linears), (x for x in biases if x is not None))

    @classmethod
    def packed(cls, weight: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor) -> Weights:
        """As `torch.nn.MultiheadAttention` holds them: the rows of q, of k, then of v."""
        return cls.of((*weight.chunk(3), out), (*bias.chunk(3), out_bias))

    @classmethod
    def random(cls, embed_dim: int, *, biased: bool = False) -> Weights:
        """Normal, so that projections are as wide as their input, with biases half as wide."""
        matrices = [torch.randn(embed_dim, embed_dim) / math.sqrt(embed_dim) for _ in range(4)]
        return cls.of(matrices, (torch.randn(embed_dim) / 2 for _ in range(4 if biased else 0)))

    def double(self) -> Weights:
        """The same in float64."""
        biases = (bias.double() for bias in self.biases or ())
        return Weights.of((matrix.double() for matrix in self.matrices), biases)

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Those of the queries, the keys, the values and the output."""
        return self.q, self.k, self.v, self.out

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The matrices, then the biases where there are any."""
        return (*self.matrices, *(self.biases or ()))
