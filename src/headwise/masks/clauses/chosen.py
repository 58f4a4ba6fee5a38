"""Keys that each query chose by their numbers, one by one or in blocks of equal size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Integer
from torch import Tensor

from headwise.masks import clause
from headwise.masks.clause import Clause, Index, MaskBlock, MatrixPart, MatrixSizes
from headwise.masks.clauses.dense import require_broadcastable_to_matrix


@dataclass(frozen=True, eq=False)
class Chosen(Clause):
    """True = the query chose this block of keys, (batch, groups of heads, queries, blocks).

    A key that no query chose is a token, and no padding; therefore `real_tokens` is unknown.
    """

    kind = "chosen"
    tensor_fields = ("allowed",)
    integer_fields = ("share", "size", "first")
    names_every_key = True

    allowed: Tensor
    share: int = 1  # heads of a group
    size: int = 1  # keys of a block
    first: int = 0  # place of key 0 in its block

    @classmethod
    def from_indices(
        cls, indices: Integer[Tensor, "batch groups queries K"], *, heads: int, keys: int, size: int
    ) -> Chosen:
        """Return the clause of the blocks with these numbers; a negative number chooses none."""
        blocks = -(-keys // size)
        numbers = indices.long().masked_fill(indices < 0, blocks)
        allowed = indices.new_zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool)
        allowed = allowed.scatter(-1, numbers, value=True)[..., :blocks]
        return cls(allowed, heads // indices.shape[1], size)

    def bind(self, sizes: MatrixSizes) -> Chosen:
        blocks = -(-(sizes.keys + self.first) // self.size)
        wanted = sizes._replace(heads=sizes.heads // self.share, keys=blocks)
        require_broadcastable_to_matrix(self.allowed, wanted, "chosen keys")
        return self

    def evaluate_block(self, block: MaskBlock, sizes: MatrixSizes) -> Tensor:
        groups = self._divide(block.heads, sizes.heads, self.share)
        blocks = self._divide(block.columns, sizes.keys, self.size, self.first)
        return clause.index_axes(self.allowed, block.batches, groups, block.rows, blocks)

    def evaluate_pairs(self, rows: Tensor, columns: Tensor, sizes: MatrixSizes) -> Tensor:
        groups = self._divide(clause.WHOLE, sizes.heads, self.share)
        allowed = clause.index_axes(self.allowed, clause.WHOLE, groups)
        return clause.read_pairs(allowed, rows, (columns + self.first) // self.size)

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> Chosen:
        batches, queries, _ = (slice(*span) for span in place)
        start, stop = (key + self.first for key in place.keys)
        blocks = slice(start // self.size, -(-stop // self.size))
        part = clause.index_axes(self.allowed, batches, clause.WHOLE, queries, blocks)
        return replace(self, allowed=part, first=start % self.size)

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        batch, groups, queries, _ = self.allowed.shape
        return MatrixSizes(batch, groups * self.share if groups > 1 else 1, queries, sizes.keys)

    def of_heads(self, index: Tensor) -> Chosen:
        if self.allowed.shape[1] == 1:
            return replace(self, share=1)
        return replace(self, allowed=self.allowed.index_select(1, index // self.share), share=1)

    def known_sizes(self) -> MatrixSizes:
        batch, groups, queries, blocks = self.allowed.shape
        return MatrixSizes(batch, groups * self.share, queries, blocks * self.size - self.first)

    def _divide(self, index: Index, length: int, size: int, first: int = 0) -> Index:
        positions = clause.positions_of_index(index, length, self.allowed.device)
        return index if size == 1 else (positions + first) // size

    def __str__(self) -> str:
        blocks = "" if self.size == 1 else f" in blocks of {self.size}"
        return f"chosen{tuple(self.allowed.shape)}{blocks}"
