"""`find_moves`: the moves that make one set of projections of another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.diagnosis.moves.labelled_rows import Labelled, exact_labels, matrix_maps
from headwise.diagnosis.moves.map_catalogue import map_catalogue
from headwise.diagnosis.moves.matrix_map import MatrixMap
from headwise.diagnosis.moves.move import Move, MoveReport, Taken
from headwise.diagnosis.moves.projection_rows import Rows, RowSizes
from headwise.diagnosis.moves.row_labels import bits_of
from headwise.diagnosis.moves.search_moves import Steps, search_steps
from headwise.errors import ShapeError

MOST_LISTED = 8  # other sequences of moves that are kept


def find_moves(a: Rows, b: Rows, *, rotary_width: int | None = None) -> MoveReport:
    """Return the moves that make the rows of a from those of b.

    Every entry is compared after the moves. Where several sequences have the same effect on
    these rows, the shortest and most usual is first.

    Args:
        a: the rows to explain.
        b: the rows that are right.
        rotary_width: rotated channels of a head, if they are known.

    Raises:
        ShapeError: the two have other roles or shapes.
    """
    sizes = _common_sizes(a, b, rotary_width)
    equal = tuple(role for role in sizes.roles if same_bits(a.matrices[role], b.matrices[role]))
    if equal == sizes.roles:
        return MoveReport((), explained=equal, residual=dict.fromkeys(equal, 0.0))
    sequences = _exact_steps(a, b, sizes, sizes.roles)
    verified = [steps for steps in sequences if _makes(steps, a, b, sizes.roles)]
    if not verified:
        rest = tuple(role for role in sizes.roles if role not in equal)
        return MoveReport((), explained=equal, unexplained=rest)
    best, *others = [as_moves(steps) for steps in verified[: MOST_LISTED + 1]]
    return MoveReport(best, tuple(others), sizes.roles, residual=dict.fromkeys(sizes.roles, 0.0))


def _common_sizes(a: Rows, b: Rows, rotary_width: int | None) -> RowSizes:
    shapes = [{role: tuple(x.shape) for role, x in rows.matrices.items()} for rows in (a, b)]
    if shapes[0] != shapes[1]:
        raise ShapeError(
            saw=f"rows of the shapes {shapes[0]} and {shapes[1]}",
            needed="the same roles and shapes on both sides",
            do="compare the roles that both have, with heads and channels of the same sizes",
        )
    return b.sizes(rotary_width)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have equal bits; -0 equals 0, and NaN itself."""
    return a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def _exact_steps(a: Rows, b: Rows, sizes: RowSizes, roles: tuple[str, ...]) -> list[Steps]:
    """Return sequences of steps by labels of bits, without matrices where rows alone do."""
    catalogue = map_catalogue(sizes, b.columns())
    ours, theirs = (exact_labels(x, sizes, matrices=False) for x in (a, b))
    if _same_multiset(ours, theirs, roles):
        rows_alone = search_steps(ours, theirs, catalogue, (), roles)
        if rows_alone:
            return rows_alone
    maps = matrix_maps(b, sizes)
    ours, theirs = (exact_labels(x, sizes, matrices=True) for x in (a, b))
    return search_steps(ours, theirs, catalogue, maps, roles)


def _same_multiset(a: Labelled, b: Labelled, roles: tuple[str, ...]) -> bool:
    """True if every row of these roles of a is a row of b."""
    spans = a.sizes.spans()
    ours = torch.cat([a.plain[spans[role]] for role in roles])
    return bool(torch.isin(ours, b.plain).all())


def _makes(steps: Steps, a: Rows, b: Rows, roles: Sequence[str]) -> bool:
    """True if the steps make every entry of these roles of a."""
    made = b
    for step in steps:
        made = Taken(step).apply(made)
    return all(same_bits(a.matrices[role], made.matrices[role]) for role in roles)


def as_moves(steps: Steps) -> tuple[Move, ...]:
    """Return the steps as moves, each with its simplest name."""
    return tuple(
        Move(
            step.names[0],
            Taken(step),
            step.names[1:],
            ("weights",) if isinstance(step, MatrixMap) else ("weights", "biases"),
        )
        for step in steps
    )
