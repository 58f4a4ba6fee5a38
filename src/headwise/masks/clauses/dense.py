"""A boolean tensor, for every pattern that has no shorter form."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.errors import MaskError
from headwise.masks import clause
from headwise.masks.clause import WHOLE, Clause, MatrixPart, MatrixSizes, index_axes
from headwise.masks.clauses.lengths import KEYS, QUERIES
from headwise.support.text import MATRIX_AXES, axis_broadcasts_to, describe_sizes, describe_value


@dataclass(frozen=True, eq=False)
class Dense(Clause):
    """True = may attend; broadcastable to (batch, heads, queries, keys)."""

    kind = "dense"
    tensor_fields = ("allowed",)
    names_every_key = True
    is_written = True

    allowed: Tensor

    def bind(self, sizes: MatrixSizes) -> Dense:
        require_broadcastable_to_matrix(self.allowed, sizes, "a mask")
        return self

    def evaluate_block(self, block: clause.MaskBlock, sizes: MatrixSizes) -> Tensor:
        return index_axes(self.allowed, block.batches, block.heads, block.rows, block.columns)

    def evaluate_pairs(self, rows: Tensor, columns: Tensor, sizes: MatrixSizes) -> Tensor:
        return clause.read_pairs(self.allowed, rows, columns)

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> Dense:
        batches, queries, keys = (slice(*span) for span in place)
        return Dense(index_axes(self.allowed, batches, WHOLE, queries, keys))

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        return MatrixSizes(*self.allowed.shape)

    def real_tokens(self, axis: int, sizes: MatrixSizes) -> Tensor:
        return self.allowed.amax((1, KEYS if axis == QUERIES else QUERIES)).expand(-1, sizes[axis])

    def of_heads(self, index: Tensor) -> Dense:
        shared = self.allowed.shape[1] == 1
        return self if shared else Dense(self.allowed.index_select(1, index))

    def known_sizes(self) -> MatrixSizes:
        return MatrixSizes(*self.allowed.shape)

    def __str__(self) -> str:
        return f"may_attend{tuple(self.allowed.shape)}"


def with_matrix_axes(tensor: Tensor, axes: str) -> Tensor:
    """View a tensor whose axes are named as one broadcastable to (batch, heads, queries, keys)."""
    names = axes.split()
    if not names or [a for a in MATRIX_AXES if a in names] != names:
        raise MaskError(
            saw=f"axes={describe_value(axes)}",
            needed=f"names among {MATRIX_AXES}, in this order, each once",
            do='e.g. axes="batch keys" for a padding mask; transpose the tensor where needed',
        )
    if tensor.dim() != len(names):
        raise MaskError(
            saw=f"a tensor of shape {tuple(tensor.shape)} with axes={describe_value(axes)}",
            needed=f"{len(names)} axes, one for each name",
            do="name every axis of the tensor",
        )
    shape = dict(zip(names, tensor.shape, strict=True))
    return tensor.reshape([shape.get(a, 1) for a in MATRIX_AXES])


def require_broadcastable_to_matrix(tensor: Tensor, wanted: MatrixSizes, what: str) -> None:
    """Raise MaskError unless ``tensor`` broadcasts to (batch, heads, queries, keys)."""
    if not all(axis_broadcasts_to(n, want) for n, want in zip(tensor.shape, wanted, strict=True)):
        raise MaskError(
            saw=f"{what} for {describe_sizes(tensor, MATRIX_AXES)}",
            needed=f"sizes that broadcast to (batch {wanted.batch}, heads {wanted.heads}, "
            f"queries {wanted.queries}, keys {wanted.keys})",
            do="build it for these sizes, or leave out the axes it does not depend on",
        )
