"""Moves of biases: with their weights, alone, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.diagnosis.moves.catalogue import make_row_map_catalogue
from headwise.diagnosis.moves.changes import (
    Multiplied,
    Rounded,
    Zeroed,
    find_row_change,
    have_same_bits,
    largest_residual,
)
from headwise.diagnosis.moves.heads import MatrixMap
from headwise.diagnosis.moves.labels import Labelled, hash_rows
from headwise.diagnosis.moves.maps import MapName
from headwise.diagnosis.moves.move import Move, Taken
from headwise.diagnosis.moves.rows import Rows, RowSizes
from headwise.diagnosis.moves.search import search_steps


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
    cleared = [_make_cleared_bias_move(role, a.biases.get(role)) for role in wrong]
    moves += _unite_cleared_bias_moves([move for move in cleared if move is not None])
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


def _make_cleared_bias_move(role: str, bias: Tensor | None) -> Move | None:
    if bias is not None and bool(bias.any()):
        return None
    cause = "bias missing" if bias is None else "bias zero"
    return Move(MapName(cause, "", (role,)), BiasCleared((role,), bias is None), parts=("biases",))


def _unite_cleared_bias_moves(moves: list[Move]) -> tuple[Move, ...]:
    """Return one move for each cause."""
    united = []
    for cause in dict.fromkeys(move.cause for move in moves):
        roles = tuple(role for move in moves if move.cause == cause for role in move.roles)
        change = BiasCleared(roles, cause == "bias missing")
        united.append(Move(MapName(cause, "", roles), change, parts=("biases",)))
    return tuple(united)


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
