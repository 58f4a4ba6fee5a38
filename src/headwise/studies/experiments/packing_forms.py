"""Where the matrices of the heads lie in memory: one for each, side by side, or all in one.

The small matrices of a layer are (matrices, embed_dim, head_dim), in the order of the paper's
formula x @ W: those of the queries of every head, then of the keys, then of the values. A form
says how many of them lie side by side in each matrix that is stored, and along which axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import linear

from headwise import reference
from headwise.matrix import AttentionMatrix
from headwise.studies.peers.peer import Weights

PARTS = 3  # queries, keys, values


@dataclass(frozen=True)
class Form:
    """One way to store the small matrices.

    Attributes:
        sizes: how many small matrices lie side by side in each stored one.
        by_rows: whether a stored matrix has a row for each output, as torch's Linear; it has a
            column for each, to be used as x @ W, otherwise.
    """

    sizes: tuple[int, ...]
    by_rows: bool

    def pack(self, small: Shaped[Tensor, "matrices embed_dim head_dim"]) -> list[Tensor]:
        """The stored matrices, made of the small ones."""
        wide = [torch.cat(list(group), dim=1) for group in small.split(self.sizes)]
        return [w.mT.contiguous() if self.by_rows else w for w in wide]

    def places(
        self, *, embed_dim: int, head_dim: int
    ) -> Int[Tensor, "matrices {embed_dim} {head_dim}"]:
        """The index map: where each number of a small matrix stands among all that are stored."""
        entry, channel = torch.meshgrid(
            torch.arange(embed_dim), torch.arange(head_dim), indexing="ij"
        )
        found, stored = [], 0
        for size in self.sizes:
            for place in range(size):
                output = place * head_dim + channel
                by_rows, by_columns = output * embed_dim + entry, entry * size * head_dim + output
                found.append(stored + (by_rows if self.by_rows else by_columns))
            stored += size * head_dim * embed_dim
        return torch.stack(found)

    def split(self, bias: Float[Tensor, " outputs"]) -> tuple[Tensor, ...]:
        """The bias of each stored matrix, of the biases of all small ones in their order."""
        head_dim = len(bias) // sum(self.sizes)
        parts: tuple[Tensor, ...] = bias.split([size * head_dim for size in self.sizes])
        return parts

    def products(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys embed_dim"],
        matrices: list[Tensor],
        biases: tuple[Tensor, ...],
    ) -> list[Tensor]:
        """The products with each stored matrix: that of the queries takes ``x``."""
        done, outputs = 0, []
        for size, matrix, bias in zip(self.sizes, matrices, biases, strict=True):
            tokens = x if done * PARTS < sum(self.sizes) else source
            outputs.append(linear(tokens, matrix if self.by_rows else matrix.mT, bias))
            done += size
        return outputs

    def heads(self, outputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (batch, heads, length, head_dim), of these products."""
        single = [
            one
            for size, output in zip(self.sizes, outputs, strict=True)
            for one in output.unflatten(-1, (size, -1)).unbind(-2)
        ]
        count = len(single) // PARTS
        q, k, v = (torch.stack(single[n : n + count], dim=1) for n in range(0, len(single), count))
        return q, k, v


def forms(heads: int) -> dict[str, Form]:
    """The forms that are in use, by the names of the study."""
    return {
        "per_head": Form((1,) * (PARTS * heads), by_rows=False),
        "separate": Form((heads, heads, heads), by_rows=True),
        "q_kv": Form((heads, 2 * heads), by_rows=True),
        "packed": Form((PARTS * heads,), by_rows=True),
        "transposed": Form((PARTS * heads,), by_rows=False),
    }


def attend(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch heads keys head_dim"],
    v: Float[Tensor, "batch heads keys head_dim"],
    weights: Weights,
) -> Float[Tensor, "batch queries embed_dim"]:
    """The output for queries, keys and values of heads, by the output projection."""
    outputs = reference.merge_heads(AttentionMatrix(q, k) @ v)
    return linear(outputs, weights.out, weights.biases[3] if weights.biases else None)
