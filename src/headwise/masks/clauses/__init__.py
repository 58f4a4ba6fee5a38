"""The kinds of clauses, and the registry by which an operator makes a lowered one again."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from headwise.masks.clause import Clause
from headwise.masks.clauses.band import Band, Prefix
from headwise.masks.clauses.chosen import Chosen
from headwise.masks.clauses.dense import Dense
from headwise.masks.clauses.lengths import Lengths, Starts
from headwise.masks.clauses.predicate import PredicateClause
from headwise.masks.clauses.segments import PackedRow, Segments

# A new kind is added here.
KINDS: dict[str, type[Clause]] = {
    c.kind: c
    for c in (Band, Lengths, Starts, Segments, PackedRow, Dense, Chosen, Prefix, PredicateClause)
}


def lower_clauses(clauses: Iterable[Clause]) -> tuple[str, list[Tensor], list[int]]:
    """The kinds of bound clauses, in one string, with all their tensors and integers."""
    parts = [clause.lower_for_operator() for clause in clauses]
    integers = [number for part in parts for number in part.integers]
    return (
        " ".join(part.kind for part in parts),
        [tensor for part in parts for tensor in part.tensors],
        # While torch.jit.trace records, sizes are tensors, of which an operator takes no list.
        [int(number) if isinstance(number, Tensor) else number for number in integers],
    )


def rebuild_clauses(
    kinds: str, tensors: Sequence[Tensor], integers: Sequence[int]
) -> tuple[Clause, ...]:
    """The inverse of `lower_clauses`."""
    rest, numbers = iter(tensors), iter(integers)
    return tuple(
        kind.from_lowered(
            tuple(next(rest) for _ in kind.tensor_fields),
            tuple(next(numbers) for _ in kind.integer_fields),
        )
        for kind in map(KINDS.__getitem__, kinds.split())
    )
