"""`find_moves`: the moves that make one set of projections of another, and their biases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import BIAS_MISSING
from headwise.diagnosis.moves.families import make_row_map_catalogue
from headwise.diagnosis.moves.labels import (
    Labelled,
    hash_rows,
    label_near_rows,
    label_rows_by_bits,
    list_matrix_maps,
)
from headwise.diagnosis.moves.maps import MapName, MatrixMap
from headwise.diagnosis.moves.move import (
    ROUNDED,
    Move,
    MoveReport,
    Multiplied,
    Rounded,
    Taken,
    Zeroed,
    default_tolerance,
    find_row_change,
    find_zeroed_rows,
    have_same_bits,
    largest_residual,
)
from headwise.diagnosis.moves.rows import Rows, RowSizes
from headwise.diagnosis.moves.search import RoleSteps, Steps, explain_roles, search_steps
from headwise.errors import ShapeError

MOST_LISTED = 8  # other sequences of moves that are kept


def find_moves(
    a: Rows,
    b: Rows,
    *,
    rotary_width: int | None = None,
    is_interleaved: bool = False,
    was_interleaved: bool = False,
    transposed: Rows | None = None,
    tolerance: float | None = None,
) -> MoveReport:
    """Return the moves that make the rows of a from those of b.

    Every entry is compared after the moves. Where several sequences have the same effect on
    these rows, the shortest and most usual is first.

    Args:
        a: the rows to explain.
        b: the rows that are right.
        rotary_width: rotated channels of a head, if they are known.
        is_interleaved: True if b's rotary pairs are channels 2i and 2i + 1.
        was_interleaved: True if a was stored for such pairs, and read into half-split ones.
        transposed: b's rows with each square matrix transposed, where rows are activations.
            Weights are transposed here.
        tolerance: the largest difference of an entry, relative to the root mean square of its
            role, that counts as rounding. By default that of the coarser dtype.

    Raises:
        ShapeError: the two have other roles or shapes.
    """
    sizes = replace(
        _common_sizes(a, b, rotary_width),
        is_interleaved=is_interleaved,
        was_interleaved=was_interleaved,
    )
    dtypes = [x.dtype for rows in (a, b) for x in rows.matrices.values()]
    tolerance = default_tolerance(*dtypes) if tolerance is None else tolerance
    a, b = _cast_to_common_dtype(a, dtypes), _cast_to_common_dtype(b, dtypes)
    transposed = None if transposed is None else _cast_to_common_dtype(transposed, dtypes)
    best = MoveReport((), unexplained=sizes.roles)
    for explanation in _yield_explanations(a, b, sizes, transposed):
        report = _make_move_report(explanation, a, b, sizes, tolerance)
        if len(report.explained) > len(best.explained):
            best = report
        if not [role for role in report.unexplained if role in sizes.roles]:
            break
    return best


def _common_sizes(a: Rows, b: Rows, rotary_width: int | None) -> RowSizes:
    shapes = [{role: tuple(x.shape) for role, x in rows.matrices.items()} for rows in (a, b)]
    if shapes[0] != shapes[1]:
        raise ShapeError(
            saw=f"rows of the shapes {shapes[0]} and {shapes[1]}",
            needed="the same roles and shapes on both sides",
            do="compare the roles that both have, with heads and channels of the same sizes",
        )
    return b.head_counts_and_dims(rotary_width)


def _cast_to_common_dtype(rows: Rows, dtypes: list[torch.dtype]) -> Rows:
    """Return rows in the dtype that holds the numbers of all."""
    common = torch.float64 if torch.float64 in dtypes else torch.float32
    common = dtypes[0] if len(set(dtypes)) == 1 else common
    return Rows(
        {role: x.to(common) for role, x in rows.matrices.items()},
        {role: x.to(common) for role, x in rows.biases.items()},
    )


def _yield_explanations(
    a: Rows, b: Rows, sizes: RowSizes, given: Rows | None
) -> Iterator[RoleSteps]:
    """Yield explanations: nothing moved, by bits, by bits after a rounding, by directions."""
    yield RoleSteps(((),), sizes.roles)
    catalogue = make_row_map_catalogue(sizes, b.column_counts())
    maps: list[MatrixMap] = []
    for dtype in (None, *_list_rounding_dtypes(a, b)):
        ours, theirs = (_cast_rows(rows, dtype) for rows in (a, b))
        for maps in ([], list_matrix_maps(b, sizes, given)):
            asked = bool(maps)
            turned = _cast_rows(given, dtype) if asked and given is not None else None
            labels_a = label_rows_by_bits(ours, sizes, matrices=asked and given is None)
            labels_b = label_rows_by_bits(theirs, sizes, matrices=asked, given=turned)
            yield explain_roles(labels_a, labels_b, catalogue, maps)
    yield explain_roles(*label_near_rows(a, b, sizes, maps), catalogue, maps)


def _cast_rows(rows: Rows, dtype: torch.dtype | None) -> Rows:
    if dtype is None:
        return rows
    return Rows({role: x.to(dtype) for role, x in rows.matrices.items()}, rows.biases)


def _list_rounding_dtypes(a: Rows, b: Rows) -> list[torch.dtype]:
    """Return the dtypes in which a role of one side is stored, but for the dtype that it has."""
    return [
        dtype
        for dtype in ROUNDED
        if any(
            x.dtype != dtype and x.any() and have_same_bits(x, x.to(dtype).to(x.dtype))
            for rows in (a, b)
            for x in (rows.matrix_of_role(role)[:64] for role in rows.roles)
        )
    ]


def _make_move_report(
    explanation: RoleSteps, a: Rows, b: Rows, sizes: RowSizes, tolerance: float
) -> MoveReport:
    """Return what is explained after the steps and changes that move nothing, on every entry."""
    sequences = [steps_to_moves(steps) for steps in explanation.sequences[: MOST_LISTED + 1]]
    # Names that are equal for the weights may differ for the biases.
    sequences.sort(key=lambda moves: len(list_wrong_biases(moves, a, b, tolerance)))
    moves = sequences[0] if sequences else ()
    others = tuple(moves for moves in sequences[1:])
    made = apply_moves(moves, b)
    changes, residual, unexplained = [], {}, []
    for role in sizes.roles:
        ours, theirs = a.matrices[role], made.matrices[role]
        change, left = find_zeroed_rows(role, ours, theirs, tolerance), 0.0
        if change is None:
            change, left = find_row_change(role, ours, theirs, tolerance)
        if left > tolerance:
            unexplained.append(role)
        residual[role] = left
        changes += [] if change is None else [change]
    moves = _drop_moves_explaining_nothing(moves, unexplained) + unite_changes_over_roles(changes)
    moves, biases = explain_biases(moves, a, b, tolerance)
    explained = tuple(role for role in sizes.roles if role not in unexplained)
    rest = (*unexplained, *(f"bias of {role}" for role in biases))
    return MoveReport(moves, others, explained, rest, residual)


def _drop_moves_explaining_nothing(
    moves: tuple[Move, ...], unexplained: list[str]
) -> tuple[Move, ...]:
    """Return the moves that explain a role."""
    return tuple(move for move in moves if not set(move.roles) <= set(unexplained))


def unite_changes_over_roles(changes: list[Move]) -> tuple[Move, ...]:
    """Return changes of several roles as one where they have the same cause and parameters."""
    united: list[Move] = []
    for move in changes:
        for place, other in enumerate(united):
            same = (move.name.cause, move.name.text) == (other.name.cause, other.name.text)
            both = _unite_two_changes(other, move) if same else None
            if both is not None:
                united[place] = both
                break
        else:
            united.append(move)
    return tuple(united)


def _unite_two_changes(first: Move, second: Move) -> Move | None:
    roles = (*first.roles, *second.roles)
    name = replace(first.name, roles=roles)
    match first.change, second.change:
        case Multiplied(factors=mine), Multiplied(factors=theirs):
            factors = {**mine, **theirs}
            return replace(first, name=name, change=replace(first.change, factors=factors))
        case Rounded(), Rounded():
            return replace(first, name=name, change=replace(first.change, roles=roles))
    return None


def steps_to_moves(steps: Steps) -> tuple[Move, ...]:
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


@dataclass(frozen=True)
class BiasCleared:
    """Biases are dropped, or set to zero."""

    roles: tuple[str, ...]
    is_dropped: bool

    def apply(self, rows: Rows) -> Rows:
        """Return rows without these biases, or with zeros for them."""
        biases = dict(rows.biases)
        for role in self.roles:
            if self.is_dropped:
                biases.pop(role, None)
            elif role in biases:
                biases[role] = torch.zeros_like(biases[role])
        return Rows(rows.matrices, biases)


def apply_moves(moves: Sequence[Move], rows: Rows) -> Rows:
    """Return rows after all moves."""
    for move in moves:
        rows = move.apply(rows)
    return rows


def list_wrong_biases(moves: Sequence[Move], a: Rows, b: Rows, tolerance: float) -> tuple[str, ...]:
    """Return the roles whose biases differ after the moves."""
    made = apply_moves(moves, b)
    return tuple(
        role
        for role in a.roles
        if not _biases_equal(a.biases.get(role), made.biases.get(role), tolerance)
    )


def explain_biases(
    moves: tuple[Move, ...], a: Rows, b: Rows, tolerance: float
) -> tuple[tuple[Move, ...], tuple[str, ...]]:
    """Return moves that explain the biases too, and the roles whose biases stay unexplained.

    Args:
        moves: those that make the weights of a.
        a: the rows to explain.
        b: the right rows.
        tolerance: relative, for biases that are rounded.
    """
    wrong = list_wrong_biases(moves, a, b, tolerance)
    if not wrong:
        return moves, ()
    moves = _keep_bias_in_place(moves, wrong, a, b, tolerance)
    wrong = list_wrong_biases(moves, a, b, tolerance)
    moves += _find_cleared_biases(wrong, a)
    wrong = list_wrong_biases(moves, a, b, tolerance)
    if wrong:
        moves += _find_moves_of_biases_alone(wrong, a, apply_moves(moves, b))
        wrong = list_wrong_biases(moves, a, b, tolerance)
    for role in wrong:
        moves += _find_bias_factor_or_rounding(role, a, apply_moves(moves, b), tolerance)
    return moves, list_wrong_biases(moves, a, b, tolerance)


def _biases_equal(a: Tensor | None, b: Tensor | None, tolerance: float) -> bool:
    """True if two biases are equal; an absent bias equals zeros."""
    if a is None or b is None:
        return all(x is None or not bool(x.any()) for x in (a, b))
    return have_same_bits(a, b) or largest_residual(a, b) <= tolerance


def _keep_bias_in_place(
    moves: tuple[Move, ...], wrong: tuple[str, ...], a: Rows, b: Rows, tolerance: float
) -> tuple[Move, ...]:
    """Return moves that leave a bias where it is, if that makes a's."""
    unmoved = tuple(
        r for r in wrong if r in b.biases and _biases_equal(a.biases.get(r), b.biases[r], tolerance)
    )
    kept = []
    for move in moves:
        change = move.change
        if isinstance(change, Taken | Multiplied | Rounded | Zeroed) and set(unmoved) & set(
            move.roles
        ):
            biased = {role for role in move.roles if role in b.biases}
            parts = ("weights",) if biased <= set(unmoved) else move.parts
            still = tuple(role for role in move.roles if role in unmoved)
            move = replace(move, change=replace(change, parts=parts, still=still), parts=parts)
        kept.append(move)
    return tuple(kept)


def _find_cleared_biases(wrong: Sequence[str], a: Rows) -> tuple[Move, ...]:
    """Return the moves of wrong biases that are missing, and of those that are zero."""
    moves = []
    for is_dropped in (True, False):
        roles = tuple(
            role
            for role in wrong
            if (role not in a.biases) == is_dropped
            and (is_dropped or not bool(a.biases[role].any()))
        )
        if roles:
            name = MapName(BIAS_MISSING, "" if is_dropped else "zero", roles)
            moves.append(Move(name, BiasCleared(roles, is_dropped), parts=("biases",)))
    return tuple(moves)


def _find_moves_of_biases_alone(wrong: tuple[str, ...], a: Rows, b: Rows) -> tuple[Move, ...]:
    """Return moves of biases that are not those of their weights."""
    roles = tuple(role for role in a.roles if role in a.biases and role in b.biases)
    if not set(wrong) <= set(roles):
        return ()
    sizes = replace(b.head_counts_and_dims(), roles=roles)
    ours, theirs = (_label_biases(rows, sizes) for rows in (a, b))
    sequences = search_steps(
        ours, theirs, make_row_map_catalogue(sizes, (1,) * len(roles)), (), roles
    )
    if not sequences or not sequences[0]:
        return ()
    moves = []
    for step in sequences[0]:
        assert not isinstance(step, MatrixMap)
        moves.append(Move(step.names[0], Taken(step, ("biases",)), step.names[1:], ("biases",)))
    return tuple(moves)


def _label_biases(rows: Rows, sizes: RowSizes) -> Labelled:
    biases = torch.cat([rows.biases[role].flatten() for role in sizes.roles])
    return Labelled(sizes, hash_rows(biases[:, None]))


def _find_bias_factor_or_rounding(
    role: str, a: Rows, b: Rows, tolerance: float
) -> tuple[Move, ...]:
    """Return a factor or a rounding of a bias; each head's bias counts as a row."""
    if role not in a.biases or role not in b.biases:
        return ()
    ours, theirs = (rows.biases[role].flatten()[None, None] for rows in (a, b))
    move, _ = find_row_change(role, ours, theirs, tolerance)
    if move is None or not isinstance(move.change, Multiplied | Rounded):
        return ()
    return (replace(move, change=replace(move.change, parts=("biases",)), parts=("biases",)),)
