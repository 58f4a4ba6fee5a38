"""Moves between two sets of canonical weights of one attention, and weights as initialised.

The largest distance of the distribution function from that of an initialisation
(Kolmogorov-Smirnov) is compared with 1.95 / sqrt(n), which chance passes once in 1,000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import BIAS_MISSING, INITIAL_WEIGHTS
from headwise.diagnosis.moves.find import find_moves
from headwise.diagnosis.moves.maps import ROLES, WEIGHTS, MapName, Rows
from headwise.diagnosis.moves.move import BiasDropped, Edited, Move, MoveReport, largest_residual
from headwise.function.rounding import default_tolerance
from headwise.function.weights import State

OUTPUT_BIAS = "output bias"
# Two independent draws in bfloat16 agree in less than this share of their entries.
MOST_EQUAL = 0.05


def extract_rows(state: State) -> Rows:
    """Return the rows of canonical weights; the output bias is left out."""
    return Rows(
        {role: state[f"w{role}"] for role in ROLES if f"w{role}" in state},
        {role: state[f"b{role}"] for role in "qkv" if f"b{role}" in state},
    )


def replace_rows(state: State, rows: Rows) -> State:
    """Return canonical weights whose projections and biases are these rows."""
    others = {name: x for name, x in state.items() if name == "bo" or name[1:] not in ROLES}
    projections = {f"w{role}": x for role, x in rows.matrices.items()}
    return {**others, **projections, **{f"b{role}": x for role, x in rows.biases.items()}}


def find_state_moves(
    a: State, b: State, *, tolerance: float | None = None, **options: Any
) -> MoveReport:
    """Return the moves that make canonical weights a from b, the right ones.

    Fewer kv heads are repeated where the other side has more. Options are those of `find_moves`.

    Raises:
        ShapeError: the two have other sizes.
    """
    ours, theirs = _equalise_kv_heads(extract_rows(a), extract_rows(b))
    report = find_moves(ours, theirs, tolerance=tolerance, **options)
    moves = [*report.moves, *_find_initial_values(report.unexplained, ours, theirs)]
    named = {role for move in moves[len(report.moves) :] for role in move.roles}
    unexplained = [role for role in report.unexplained if role not in named]
    output_bias = _find_output_bias_move(a.get("bo"), b.get("bo"), tolerance)
    if isinstance(output_bias, Move):
        moves.append(output_bias)
    elif not output_bias:
        unexplained.append(OUTPUT_BIAS)
    explained = tuple(role for role in ours.roles if role not in unexplained)
    rest = tuple(unexplained)
    return replace(report, moves=tuple(moves), explained=explained, unexplained=rest)


def _find_initial_values(unexplained: Sequence[str], ours: Rows, theirs: Rows) -> list[Move]:
    """Return the moves of roles that were initialised anew."""
    fresh: dict[str, list[str]] = {}
    for role in unexplained:
        if role not in ours.roles or not _has_few_equal_entries(role, ours, theirs):
            continue
        if initialisation := recognise_initialisation(role, ours):
            fresh.setdefault(initialisation.text, []).append(role)
    return [
        Move(
            MapName(INITIAL_WEIGHTS, text, tuple(roles)),
            Edited({role: partial(_replace, ours.matrices[role]) for role in roles}, parts=WEIGHTS),
        )
        for text, roles in fresh.items()
    ]


def _replace(new: Tensor, _old: Tensor) -> Tensor:
    return new


def _has_few_equal_entries(role: str, a: Rows, b: Rows) -> bool:
    """True if so few entries agree that the matrix may be another draw."""
    if role not in b.roles or a.matrices[role].shape != b.matrices[role].shape:
        return True
    equal = a.matrices[role] == b.matrices[role]
    return float(equal.double().mean()) < MOST_EQUAL


def _equalise_kv_heads(a: Rows, b: Rows) -> tuple[Rows, Rows]:
    """Return rows with the kv heads of the side with fewer of them repeated."""
    counts = [x.matrices["k"].shape[0] if "k" in x.matrices else 0 for x in (a, b)]
    most = max(counts)
    if min(counts) == most or not min(counts) or most % min(counts):
        return a, b
    return a.repeat_kv_heads(most // counts[0]), b.repeat_kv_heads(most // counts[1])


def _find_output_bias_move(
    a: Tensor | None, b: Tensor | None, tolerance: float | None
) -> Move | bool:
    """Return the move of the output bias; True where it is equal, False where it is another."""
    if a is None or not bool(a.any()):
        if b is None or not bool(b.any()):
            return True
        text = OUTPUT_BIAS if a is None else f"{OUTPUT_BIAS}, zero"
        return Move(MapName(BIAS_MISSING, text, ("o",)), BiasDropped(("o",)))
    if b is None or a.shape != b.shape:
        return False
    limit = default_tolerance(a.dtype, b.dtype) if tolerance is None else tolerance
    return largest_residual(a, b) <= limit


CRITICAL = 1.95
MOST_ENTRIES = 100_000
LEAST_ENTRIES = 64


@dataclass(frozen=True)
class Initialisation:
    """A distribution around 0."""

    text: str  # its name and parameters
    width: float  # the bound of a uniform one, or the standard deviation of a normal one
    is_uniform: bool

    @property
    def standard_deviation(self) -> float:
        """The standard deviation."""
        return self.width / math.sqrt(3) if self.is_uniform else self.width

    def cumulative_share(self, x: Tensor) -> Tensor:
        """Return the share of values below each x."""
        if self.is_uniform:
            return (x / self.width).clamp(-1, 1) / 2 + 0.5
        normal: Tensor = torch.special.ndtr(x / self.width)
        return normal


def list_initialisations(role: str, rows: Rows) -> list[Initialisation]:
    """Return usual initialisations of the matrix of a role; that of o has its inputs as rows."""
    shapes = {each: rows.matrix_of_role(each).shape for each in rows.roles}
    count, columns = shapes[role]
    inputs = count if role == "o" else columns
    fused = sum(shapes[r][0] for r in "qkv" if r in shapes and shapes[r][1] == columns)
    spread = {"one matrix": count + columns}
    if role != "o" and fused > count:
        spread["q, k and v fused"] = fused + columns
    deviation, near = 1 / math.sqrt(inputs), "normal with standard deviation"
    return [
        Initialisation("uniform within 1/sqrt(inputs)", deviation, True),
        *(
            Initialisation(f"Xavier uniform of {name}", math.sqrt(6 / size), True)
            for name, size in spread.items()
        ),
        Initialisation(f"{near} 0.02", 0.02, False),
        Initialisation(f"{near} 1/sqrt(inputs)", deviation, False),
        *(
            Initialisation(f"Xavier normal of {name}", math.sqrt(2 / size), False)
            for name, size in spread.items()
        ),
    ]


def recognise_initialisation(role: str, rows: Rows) -> Initialisation | None:
    """Return the initialisation whose statistics the weights of a role have, or None."""
    values = rows.matrix_of_role(role).flatten().to(torch.float64)
    if values.numel() < LEAST_ENTRIES:
        return None
    kinds = list_initialisations(role, rows)
    apart = [kolmogorov_smirnov_statistic(values, each) for each in kinds]
    nearest = min(range(len(kinds)), key=apart.__getitem__)
    return kinds[nearest] if apart[nearest] < CRITICAL else None


def kolmogorov_smirnov_statistic(values: Tensor, kind: Initialisation) -> float:
    """Return the largest distance of the distribution functions, times the root of the count."""
    values = values[:: math.ceil(values.numel() / MOST_ENTRIES)].sort().values
    count = len(values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    share = kind.cumulative_share(values)
    apart = max(float((share - steps[:-1]).max()), float((steps[1:] - share).max()))
    return apart * math.sqrt(count)
