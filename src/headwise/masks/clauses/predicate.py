"""A function of the caller's own, asked about each tile when it is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks import clause
from headwise.masks.clause import WHOLE, Clause, LoweredClause, MaskBlock, MatrixPart, MatrixSizes
from headwise.support import private_torch
from headwise.support.tracing import is_jit_tracing

WAY_ON = 'Mask.may_attend(allowed, axes="queries keys") with the tensor written down'

# (batch, head, query, key) indices that broadcast -> bool
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PredicateClause(Clause):
    """True where the function says so of (batch, head, query, key).

    ``first`` is the place of this matrix in the one that the function knows. Unbound, the first
    query has number 0, unless ``align`` is "bottom-right": then the last has that of the last key.
    """

    kind = "where"
    tensor_fields = ("carrier",)  # once lowered; see `lower_for_operator`

    function: Predicate
    heads: tuple[int, ...] | None = None  # chosen heads; None: all of them
    first: tuple[int, int, int] = (0, 0, 0)  # batch, query, key
    align: str | None = None  # None once bound

    def bind(self, sizes: MatrixSizes) -> PredicateClause:
        if torch.compiler.is_compiling() or is_jit_tracing() or torch.onnx.is_in_onnx_export():
            # A compiler does not show the error, but why it could not go on.
            private_torch.break_compiled_graph(
                f"a graph cannot call the function of Mask.where; {WAY_ON}"
            )
            raise MaskError(
                saw=f"{self} in a graph that is compiled or exported",
                needed="a mask that is data: a graph cannot call a function for each tile",
                do=WAY_ON,
            )
        batch, query, key = self.first
        shift = sizes.keys - sizes.queries if self.align == "bottom-right" else 0
        return replace(self, first=(batch, query + shift, key), align=None)

    def evaluate_block(self, block: MaskBlock, sizes: MatrixSizes) -> Tensor:
        indices = (
            self._head_numbers(block, sizes)
            if axis == 1
            else clause.positions_of_index(index, size, block.device)
            for axis, (index, size) in enumerate(zip(block[:4], sizes, strict=True))
        )
        shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
        return self._call_function(*(i.reshape(s) for i, s in zip(indices, shapes, strict=True)))

    def evaluate_pairs(self, rows: Tensor, columns: Tensor, sizes: MatrixSizes) -> Tensor:
        block = MaskBlock(WHOLE, WHOLE, rows, WHOLE, rows.device)
        batches = clause.positions_of_index(WHOLE, sizes.batch, rows.device)
        heads = self._head_numbers(block, sizes)
        return self._call_function(batches[:, None, None], heads[:, None], rows, columns)

    def _head_numbers(self, block: MaskBlock, sizes: MatrixSizes) -> Tensor:
        if self.heads is None:
            return clause.positions_of_index(block.heads, sizes.heads, block.device)
        return torch.tensor(self.heads[block.heads], device=block.device)

    def _call_function(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        first_batch, first_query, first_key = self.first
        allowed = self.function(batch + first_batch, head, query + first_query, key + first_key)
        shape = torch.broadcast_shapes(batch.shape, head.shape, query.shape, key.shape)
        if not _is_broadcastable_bool(allowed, shape):
            seen = type(allowed).__name__
            if isinstance(allowed, Tensor):
                seen = f"{allowed.dtype} tensor of shape {tuple(allowed.shape)}"
            raise MaskError(
                saw=f"{self} that returns a {seen} for indices that broadcast to {tuple(shape)}",
                needed="a bool tensor that broadcasts to the same shape, True = may attend",
                do="e.g. Mask.where(lambda batch, head, query, key: key <= query)",
            )
        return allowed.expand(shape)

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> PredicateClause:
        moved = (span.first for span in place)
        batch, query, key = (a + b for a, b in zip(self.first, moved, strict=True))
        return replace(self, first=(batch, query, key))

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        return sizes

    def of_heads(self, index: Tensor) -> PredicateClause:
        chosen = index.tolist()
        heads = chosen if self.heads is None else [self.heads[head] for head in chosen]
        return replace(self, heads=tuple(heads))

    def tensors(self) -> tuple[Tensor, ...]:
        """The function's own are its own affair."""
        return ()

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> PredicateClause:
        return self

    def lower_for_operator(self) -> LoweredClause:
        """A tensor that carries the clause: an operator hands the same object on."""
        carrier = torch.empty(0)
        carrier.clause = self  # type: ignore[attr-defined]
        return LoweredClause(self.kind, (carrier,), ())

    @classmethod
    def from_lowered(cls, tensors: tuple[Tensor, ...], integers: tuple[int, ...]) -> Clause:
        (carrier,) = tensors
        carried: Clause = carrier.clause  # type: ignore[attr-defined]
        return carried

    def __str__(self) -> str:
        return f"where({getattr(self.function, '__name__', type(self.function).__name__)})"


def is_carrier(tensor: Tensor) -> bool:
    """True for a tensor that carries a clause, which a copy of the tensor would lose."""
    return hasattr(tensor, "clause")


def _is_broadcastable_bool(allowed: object, shape: torch.Size) -> bool:
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
        return False
    sizes = zip(reversed(allowed.shape), reversed(shape), strict=False)
    return allowed.dim() <= len(shape) and all(n in (1, wanted) for n, wanted in sizes)
