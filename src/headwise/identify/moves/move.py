"""Moves: named mistakes that make the rows of a from those of b; and changes that move nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from headwise.function.weights import State, bias_of
from headwise.identify import catalogue
from headwise.identify.catalogue import FACTOR, ROWS_ZERO, SIGN, WEIGHTS_ROUNDED, Cause
from headwise.identify.comparison import format_noun_with_numbers
from headwise.identify.moves.maps import (
    BOTH,
    TENSORS,
    WEIGHTS,
    MapName,
    MatrixMap,
    RowMap,
    RowSizes,
    is_of_projections,
    take_rows,
    view_kind,
)
from headwise.identify.moves.search import read_bits

Edit = Callable[[Tensor], Tensor]  # of rows (heads, channels, columns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """A change of rows."""

    parts: tuple[str, ...] = BOTH  # which of weights and biases change
    still: tuple[str, ...] = ()  # roles whose biases stay

    def apply(self, rows: State) -> State:
        """Return changed rows."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Taken(Change):
    """A map of rows or matrices as a change."""

    step: RowMap | MatrixMap

    def apply(self, rows: State) -> State:
        """Return the rows in their new places."""
        if isinstance(self.step, MatrixMap):
            return self.step.apply(rows)
        sizes = RowSizes.of(rows)
        moved = take_rows(rows, self.step.index_over_roles(sizes), sizes, self.parts)
        still = (f"b{role}" for role in self.still)
        return {**moved, **{name: rows[name] for name in still if name in rows}}


@dataclass(frozen=True, eq=False)
class Edited(Change):
    """Weights and biases of roles are changed in their places."""

    edits: Mapping[str, Edit]

    def apply(self, rows: State) -> State:
        """Return the edited rows; a bias is one column, and that of the output one row."""
        made = dict(rows)
        for role, edit in self.edits.items():
            if "weights" in self.parts:
                made[f"w{role}"] = edit(rows[f"w{role}"])
            name = f"b{role}"
            if name in rows and role not in self.still and "biases" in self.parts:
                bias = rows[name][None, None] if role == "o" else rows[name][..., None]
                edited = edit(bias)
                if edited.shape == bias.shape:  # the output's has no heads to edit
                    made[name] = edited.view_as(rows[name])
        return made


@dataclass(frozen=True, eq=False)
class Limited(Change):
    """Another change, in some heads of some roles alone."""

    change: Change
    roles: tuple[str, ...]
    heads: tuple[int, ...]

    def apply(self, rows: State) -> State:
        """Return the rows with these heads as the change makes them."""
        made, limited, places = self.change.apply(rows), dict(rows), list(self.heads)
        for part, role in product(self.parts, self.roles):
            name = f"{part[0]}{role}"
            if name in rows and name != "bo":
                limited[name] = rows[name].index_copy(0, torch.tensor(places), made[name][places])
        return limited


def cast_and_back(dtype: torch.dtype) -> Edit:
    """Return the edit that rounds to a dtype."""
    return lambda x: x.to(dtype).to(x.dtype)


def multiply(factors: Tensor) -> Edit:
    """Return the edit that multiplies by factors, (heads, channels) or broadcast, float64."""
    return lambda x: (x.to(torch.float64) * factors[..., None]).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Dropped(Change):
    """Weights or biases are no longer there."""

    roles: tuple[str, ...]

    def apply(self, rows: State) -> State:
        """Return the rows without these."""
        dropped = {f"{part[0]}{role}" for part in self.parts for role in self.roles}
        return {name: x for name, x in rows.items() if name not in dropped}


@dataclass(frozen=True)
class Move:
    """One named mistake."""

    name: MapName  # the simplest
    change: Change
    equals: tuple[MapName, ...] = ()  # other names of the same effect at these sizes
    kind: Mapping[str, str] = field(
        default_factory=TENSORS.copy, compare=False
    )  # the tensors that it changes

    @classmethod
    def of_step(cls, step: RowMap | MatrixMap, parts: tuple[str, ...] = BOTH) -> Move:
        """Return a map as a move with its simplest name; one of matrices moves weights alone."""
        parts = WEIGHTS if isinstance(step, MatrixMap) else parts
        return cls(step.names[0], Taken(step, parts=parts), step.names[1:])

    @property
    def cause(self) -> Cause:
        """The cause."""
        return self.name.cause

    @property
    def roles(self) -> tuple[str, ...]:
        """The projections that it concerns."""
        return self.name.roles

    def apply(self, weights: State) -> State:
        """Return canonical weights with this mistake."""
        change = self.change
        if isinstance(change, Taken) and isinstance(change.step, MatrixMap):  # not of activations
            change = replace(change, step=replace(change.step, given=None))
        rows = change.apply(view_kind(weights, self.kind))
        if self.kind == TENSORS:
            return rows
        names = {name: f"w{role}" for role, name in self.kind.items()}
        names |= {bias_of(name): f"b{role}" for role, name in self.kind.items()}
        return {
            name: rows[names[name]].reshape(x.shape) if name in names else x
            for name, x in weights.items()
            if name not in names or names[name] in rows
        }

    def of_kind(self, kind: Mapping[str, str]) -> Move:
        """Return the move of tensors of a kind."""
        if is_of_projections(kind):
            return replace(self, kind=kind)

        def rename(name: MapName) -> MapName:
            roles = tuple(kind[role] for role in name.roles)
            causes = _OF_NORMS if "norm" in roles[0] else _OF_BIAS if roles == ("bo",) else {}
            cause, text = causes.get(name.cause, name.cause), name_in_kind(kind, name.text)
            return replace(name, cause=cause, text=text, roles=roles)

        equals = (rename(name) for name in self.equals if name.cause not in _OF_FUSED_ROWS)
        return replace(self, name=rename(self.name), equals=tuple(equals), kind=kind)

    def __str__(self) -> str:
        parts = self.change.parts
        alone = "" if parts == BOTH else f", {' and '.join(parts)} alone"
        return f"{self.name} ({' and '.join(self.roles)}{alone})"


# Causes of moved projections -> those of tensors of another kind.
_OF_NORMS = {
    catalogue.Q_AND_K_EXCHANGED: catalogue.NORM_WEIGHTS_EXCHANGED,
    catalogue.BIAS_MISSING: catalogue.NORM_WEIGHTS_MISSING,
    catalogue.HEADS_PERMUTED: catalogue.NORM_WEIGHTS_ORDER,
    catalogue.HEADS_INTERLEAVED: catalogue.NORM_WEIGHTS_ORDER,
    catalogue.ROTARY_PERMUTATION_MISSING: catalogue.NORM_WEIGHTS_ORDER,
    catalogue.ROTARY_PERMUTATION_DOUBLED: catalogue.NORM_WEIGHTS_ORDER,
}
_OF_BIAS = {ROWS_ZERO: catalogue.BIAS_MISSING}
# Only rows of projections are fused.
_OF_FUSED_ROWS = (
    catalogue.FUSED_ROW_ORDER,
    catalogue.FUSED_ROW_NESTING,
    catalogue.FUSED_ROW_GROUPS,
)


def name_in_kind(kind: Mapping[str, str], text: str) -> str:
    """Return words on projections as words on the tensors of a kind."""
    names = {} if is_of_projections(kind) else kind
    return re.sub(r"\b[qkvo]\b", lambda role: names.get(role[0], role[0]), text)


def apply_moves(moves: Iterable[Move], rows: State) -> State:
    """Return the rows that all moves make of right ones."""
    for move in moves:
        rows = move.change.apply(rows)
    return rows


@dataclass(frozen=True)
class MoveReport:
    """Moves that make the rows of a from those of b.

    ``residual`` is the largest difference left in a role, relative to its root mean square; 0 where
    every bit is equal.
    """

    moves: tuple[Move, ...]  # in the order in which they are applied to b
    others: tuple[tuple[Move, ...], ...] = ()  # other sequences with the same effect
    explained: tuple[str, ...] = ()  # roles that the moves make equal, or that were equal
    unexplained: tuple[str, ...] = ()
    residual: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [str(move) for move in self.moves] or ["no move"]
        if self.unexplained:
            lines.append(f"not explained: {', '.join(self.unexplained)}")
        return "; ".join(lines)


CLOSE = 1e-5  # of float32 weights; forms of usual sizes are further apart


RATES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # of dropout, which divides what it keeps


@cache  # asked for each number that is tried
def list_formulas(head_dim: int, width: int) -> dict[str, float]:
    """Return numbers that code multiplies by, by their formulas; ``width`` is of the tokens."""
    forms: dict[str, float] = {}
    for name, size in (("head_dim", head_dim), ("width", width)):
        forms |= {
            f"1 / sqrt({name})": size**-0.5,
            f"1 / {name}": 1 / size,
            f"sqrt({name})": size**0.5,
            name: float(size),
        }
    forms |= {
        "sqrt(head_dim / width)": (head_dim / width) ** 0.5,
        "head_dim ** -0.25": head_dim**-0.25,
        "head_dim ** 0.25": head_dim**0.25,
        "1 / sqrt(2 * head_dim)": (2 * head_dim) ** -0.5,
        "1 / sqrt(2)": 2**-0.5,
        "sqrt(2)": 2**0.5,
        "log2(e)": math.log2(math.e),
        "ln(2)": math.log(2),
    }
    return forms | {f"1 / (1 - {rate})": 1 / (1 - rate) for rate in RATES}


def find_factor_formula(factor: float, *, head_dim: int, width: int) -> str:
    """Return the formula that gives a factor, such as "1 / sqrt(head_dim)"; "" for none."""
    forms = list_formulas(head_dim, width)
    plain = abs(factor)
    near = [name for name, form in forms.items() if abs(plain - form) <= CLOSE * form != CLOSE]
    return f"{'-' if factor < 0 else ''}{near[0]}" if near else ""


ROUNDED = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def have_same_bits(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have equal bits; -0 equals 0, and NaN itself."""
    if a.dtype != b.dtype:
        return False
    if a.dtype.itemsize > 1:  # torch cannot compare float8 numbers
        if torch.equal(a, b):
            return True
        if not bool(a.isnan().any()):
            return False
    return torch.equal(read_bits(a), read_bits(b))


def largest_residual(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the root mean square of b."""
    if have_same_bits(a, b):
        return 0.0
    pairs = list(zip(a, b, strict=True))  # float64 of one head at a time
    difference = max(float((x.double() - y.double()).abs().max()) for x, y in pairs)
    size = (sum(float(y.double().square().sum()) for _, y in pairs) / b.numel()) ** 0.5
    return difference / size if size else math.inf if difference else 0.0


def find_row_change(role: str, a: Tensor, b: Tensor, tolerance: float) -> tuple[Move | None, float]:
    """Return the change that makes a role of a from moved rows, and the residual after it.

    Both are (heads, channels, columns). A residual above the relative ``tolerance`` means that the
    role is not explained.
    """
    if have_same_bits(a, b):
        return None, 0.0
    # Most pairs differ in their first head already.
    for dtype in ROUNDED:
        if dtype != a.dtype and all(_is_rounding(x, y, dtype) for x, y in ((a[:1], b[:1]), (a, b))):
            return name_rounding(role, dtype), 0.0
    limit, columns = max(tolerance, 1e-9), a.shape[2]
    grouped = _group_factors(_fit_row_factors(a[:1], b[:1]), limit, columns)
    grouped = grouped and _group_factors(_fit_row_factors(a, b), limit, columns)
    if grouped is None:
        return None, largest_residual(a, b)
    name, factors = grouped
    edit = multiply(factors)
    move = Move(replace(name, roles=(role,)), Edited({role: edit}))
    plain, multiplied = largest_residual(a, b), largest_residual(a, edit(b))
    return (move, multiplied) if multiplied <= tolerance < plain else (None, min(plain, multiplied))


def name_rounding(role: str, dtype: torch.dtype, parts: tuple[str, ...] = BOTH) -> Move:
    """Return the move of a projection that was cast to a dtype and back."""
    name = MapName(WEIGHTS_ROUNDED, format_dtype(dtype), (role,), 0, (("dtype", str(dtype)),))
    return Move(name, Edited({role: cast_and_back(dtype)}, parts=parts))


def name_zeros(role: str, parts: tuple[str, ...]) -> Move:
    """Return the move of a projection without numbers."""
    return Move(MapName(ROWS_ZERO, "all", (role,)), Edited({role: torch.zeros_like}, parts=parts))


def _is_rounding(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    rounded_a, rounded_b = map(cast_and_back(dtype), (a, b))
    return have_same_bits(rounded_a, rounded_b) and (
        have_same_bits(a, rounded_a) or have_same_bits(b, rounded_b)
    )


def _fit_row_factors(a: Tensor, b: Tensor) -> Tensor:
    """Return the factor of each row by least squares, (heads, channels); 1 for rows of zeros."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    size = (b * b).sum(2)
    return torch.where(size > 0, (a * b).sum(2) / size.where(size > 0, 1.0), 1.0)


def _group_factors(
    factors: Tensor, tolerance: float, columns: int
) -> tuple[MapName, Tensor] | None:
    channels = factors.shape[1]
    if _are_factors_constant(factors, tolerance):
        factor = snap_to_power_of_two(float(factors.median()))
        form = find_factor_formula(factor, head_dim=channels, width=columns)
        return _name_factor(factor, form), torch.full((1, 1), factor, dtype=torch.float64)
    if channels % 2 == 0:
        halves = factors.unflatten(1, (2, -1)).unbind(1)
        pairs = factors.unflatten(1, (-1, 2)).unbind(2)
        for text, parts in (
            ("the second half of each head", halves),
            ("the odd channels of each head", pairs),
        ):
            if all(_are_factors_constant(part, tolerance) for part in parts):
                return _name_two_factors(text, [float(part.median()) for part in parts], channels)
    if all(_are_factors_constant(row, tolerance) for row in factors):
        by_head = [snap_to_power_of_two(float(row.median())) for row in factors]
        changed = [head for head, factor in enumerate(by_head) if factor != 1]
        if not changed or (0 in by_head and len({*by_head} - {1}) > 1):
            return None  # a head that is dropped while others are scaled is no factor
        text = format_noun_with_numbers("head", changed)
        is_sign = all(factor in (1, -1) for factor in by_head)
        factor = by_head[changed[0]]
        if not is_sign and factor and all(by_head[head] == factor for head in changed):
            text = f"{factor:.6g}, {text}"  # without the number nobody can undo it
        parameters = (("heads", tuple(changed)), ("factors", tuple(by_head)))
        name = MapName(SIGN if is_sign else FACTOR, text, (), 0, parameters)
        return name, torch.tensor(by_head, dtype=torch.float64)[:, None]
    return None


def _name_two_factors(text: str, medians: list[float], channels: int) -> tuple[MapName, Tensor]:
    first, second = map(snap_to_power_of_two, medians)
    both = torch.tensor([first, second], dtype=torch.float64)
    is_half = text.startswith("the second half")
    factor = both.repeat_interleave(channels // 2) if is_half else both.repeat(channels // 2)
    if first != 1:
        text = text.replace("second", "first").replace("odd", "even") if second == 1 else "channels"
    name = _name_factor(second if first == 1 else first, text)
    return replace(name, text=text, parameters=(("factors", (first, second)),)), factor[None]


def _are_factors_constant(factors: Tensor, tolerance: float) -> bool:
    middle = float(factors.median())
    return bool(((factors - middle).abs() <= tolerance * abs(middle)).all())


def snap_to_power_of_two(factor: float) -> float:
    """Return the power of two that is meant, or the factor itself."""
    if not factor or not math.isfinite(factor):
        return factor
    power = math.copysign(2.0 ** round(math.log2(abs(factor))), factor)
    return power if abs(factor / power - 1) < 1e-4 else factor


def _name_factor(factor: float, text: str) -> MapName:
    if factor == -1:
        return MapName(SIGN, text, (), 0, (("factor", -1.0),))
    words = f"{factor:.6g}" + (f", {text}" if text else "")
    return MapName(FACTOR, words, (), 0, (("factor", factor),))


def format_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")


def find_zeroed_rows(role: str, a: Tensor, b: Tensor, tolerance: float) -> Move | None:
    """Return the move that leaves some rows of b without numbers, or None.

    Both are (heads, channels, columns); ``tolerance`` is relative, for rows that are not zero.
    """
    zeros = ~a.any(2) & b.any(2)
    if not bool(zeros.any()):
        return None

    def edit(x: Tensor) -> Tensor:
        return torch.where(zeros[..., None], torch.zeros_like(x), x)

    if largest_residual(a, edit(b)) > tolerance:
        return None
    heads = tuple(zeros.all(1).nonzero().flatten().tolist())
    text = f"{int(zeros.sum())} of {zeros.numel()} rows"
    if bool(zeros.all()):
        text = "all"
    elif int(zeros.sum()) == len(heads) * zeros.shape[1]:
        text = format_noun_with_numbers("head", heads)
    rows = tuple(zeros.flatten().nonzero().flatten().tolist())
    name = MapName(ROWS_ZERO, text, (role,), 0, (("heads", heads), ("rows", rows)))
    return Move(name, Edited({role: edit}))
