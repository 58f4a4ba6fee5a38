"""Interface to attention implementations of other libraries, and the weights they share."""

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

    Head h has the rows from h * head_dim of ``q`` and ``k``, the rows from h * value_dim of ``v``,
    and the same columns of ``out``. An `Implementation` takes square matrices only.

    Attributes:
        biases: the biases of ``q``, ``k``, ``v`` and ``out``, or None.
    """

    q: Float[Tensor, "heads_head_dim embed_dim"]
    k: Float[Tensor, "heads_head_dim source_dim"]
    v: Float[Tensor, "heads_value_dim values_source_dim"]
    out: Float[Tensor, "out_dim heads_value_dim"]
    biases: tuple[Float[Tensor, " _"], ...] | None = None

    @classmethod
    def of_matrices(
        cls, matrices: Iterable[Tensor], biases: Iterable[Tensor] = ()
    ) -> SharedWeights:
        """Make the weights from four matrices, and four biases or none."""
        q, k, v, out = matrices
        return cls(q, k, v, out, tuple(biases) or None)

    @classmethod
    def of_linears(cls, *linears: Any) -> SharedWeights:
        """Make the weights from the parameters of four linear layers, without a copy."""
        return cls.of_matrices(
            (x.weight for x in linears), (x.bias for x in linears if x.bias is not None)
        )

    @classmethod
    def from_packed(
        cls, weight: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor
    ) -> SharedWeights:
        """Split packed weights as in `torch.nn.MultiheadAttention`: rows of q, of k, then of v."""
        return cls.of_matrices((*weight.chunk(3), out), (*bias.chunk(3), out_bias))

    @classmethod
    def random(cls, embed_dim: int, *, biased: bool = False) -> SharedWeights:
        """Draw normal weights that keep the variance of the input; biases have std 1/2."""
        matrices = [torch.randn(embed_dim, embed_dim) / math.sqrt(embed_dim) for _ in range(4)]
        return cls.of_matrices(
            matrices, (torch.randn(embed_dim) / 2 for _ in range(4 if biased else 0))
        )

    def double(self) -> SharedWeights:
        """Return the weights in float64."""
        return SharedWeights.of_matrices(
            (matrix.double() for matrix in self.matrices), (b.double() for b in self.biases or ())
        )

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """The matrices of queries, keys, values and output."""
        return self.q, self.k, self.v, self.out

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The matrices, then the biases if there are any."""
        return (*self.matrices, *(self.biases or ()))


class Implementation(nn.Module):
    """Multi-head self-attention as another library or paper implements it.

    Attributes:
        name: the name shown to people.
        biased: True if the projections have biases.
        projections: the names of the linear layers of q, k, v and the output.
        mask_values: the mask's value for a key that may be attended, and for a hidden key.
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
        """Make the library's layer; a rewritten implementation makes its parameters here."""
        raise NotImplementedError

    def as_shared_weights(self) -> SharedWeights:
        """Return the parameters as views: writing to them changes the layer."""
        return SharedWeights.of_linears(*map(self.get_submodule, self.projections))

    @torch.no_grad()
    def load_weights(self, weights: SharedWeights) -> Implementation:
        """Copy these weights into the layer; without biases, the layer's biases become 0.

        Raises:
            OptionError: ``weights`` has biases and the layer has none.
        """
        stored, zero = self.as_shared_weights(), torch.zeros(())
        if weights.biases is not None and stored.biases is None:
            raise OptionError(
                saw=f"biases for {self.name}",
                needed="weights without biases: its projections have none",
                do="pass SharedWeights(q, k, v, out)",
            )
        for parameter, value in zip(stored.tensors, (*weights.tensors, *[zero] * 4), strict=False):
            parameter.copy_(value)
        return self

    def initialize(self) -> None:
        """Draw the weights as the model around the layer does, if that model draws them again."""

    def forward(
        self, x: Float[Tensor, "batch length embed_dim"], mask: Any = None
    ) -> Float[Tensor, "batch length embed_dim"]:
        """Compute the attention alone, before any residual or norm.

        ``mask`` has the values of this implementation. A tensor has the axes (batch, queries,
        keys).
        """
        raise NotImplementedError

    def convert_mask(self, may_attend: Bool[Tensor, "batch queries keys"]) -> Any:
        """Convert a mask in which True may be attended to the values of this implementation."""
        return torch.where(may_attend, *self.mask_values)

    def compute_block(self, x: Float[Tensor, "batch length embed_dim"]) -> Any:
        """Compute the whole published class, with its residual and norm if it has any."""
        return self(x)

    def returned_attention_weights(self, x: Float[Tensor, "batch length embed_dim"]) -> Any:
        """Return the attention weights with the implementation's axes, or None if it has none."""
