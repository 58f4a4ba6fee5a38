"""Moves: named mistakes that make the rows of a from those of b; and changes that move nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import FACTOR, ROWS_ZERO, SIGN, WEIGHTS_ROUNDED, Cause
from headwise.diagnosis.moves.labels import read_bits
from headwise.diagnosis.moves.maps import MapName, MatrixMap, RowMap
from headwise.diagnosis.moves.rows import Rows, take_rows

BOTH = ("weights", "biases")


class Change(Protocol):
    """A change of rows."""

    def apply(self, rows: Rows) -> Rows:
        """Return changed rows."""


@dataclass(frozen=True)
class Taken:
    """A map of rows or matrices as a change.

    Attributes:
        parts: which of weights and biases move.
        still: roles whose biases stay.
    """

    step: RowMap | MatrixMap
    parts: tuple[str, ...] = BOTH
    still: tuple[str, ...] = ()

    def apply(self, rows: Rows) -> Rows:
        """Return the rows in their new places."""
        if isinstance(self.step, MatrixMap):
            return self.step.apply(rows)
        sizes = rows.head_counts_and_dims()
        moved = take_rows(rows, self.step.index_over_roles(sizes), sizes, self.parts)
        kept = {role: rows.biases[role] for role in self.still if role in rows.biases}
        return Rows(moved.matrices, {**moved.biases, **kept})


@dataclass(frozen=True)
class Move:
    """One named mistake.

    Attributes:
        name: the simplest name.
        equals: other names of the same effect at these sizes.
        change: the mistake as a change of rows.
        parts: which of weights and biases it concerns.
    """

    name: MapName
    change: Change
    equals: tuple[MapName, ...] = ()
    parts: tuple[str, ...] = BOTH

    @property
    def cause(self) -> Cause:
        """The cause."""
        return self.name.cause

    @property
    def roles(self) -> tuple[str, ...]:
        """The projections that it concerns."""
        return self.name.roles

    def apply(self, rows: Rows) -> Rows:
        """Return the rows that the mistake makes of right ones."""
        return self.change.apply(rows)

    def __str__(self) -> str:
        where = " and ".join(self.roles)
        parts = "" if self.parts == BOTH else f", {' and '.join(self.parts)} alone"
        return f"{self.name} ({where}{parts})"


@dataclass(frozen=True)
class MoveReport:
    """Moves that make the rows of a from those of b.

    Attributes:
        moves: in the order in which they are applied to b.
        others: other sequences of moves with the same effect.
        explained: roles that the moves make equal, or that were equal.
        unexplained: the other roles.
        residual: role -> the largest difference left, relative to the root mean square of the
            role; 0 where every bit is equal.
    """

    moves: tuple[Move, ...]
    others: tuple[tuple[Move, ...], ...] = ()
    explained: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()
    residual: dict[str, float] = field(default_factory=dict)

    def apply(self, rows: Rows) -> Rows:
        """Return the rows that the moves make of b's: a prediction of a."""
        for move in self.moves:
            rows = move.apply(rows)
        return rows

    def __str__(self) -> str:
        lines = [str(move) for move in self.moves] or ["no move"]
        if self.unexplained:
            lines.append(f"not explained: {', '.join(self.unexplained)}")
        return "; ".join(lines)


CLOSE = 1e-5  # of float32 weights; forms of usual sizes are further apart


def find_factor_formula(factor: float, *, head_dim: int, width: int) -> str:
    """Return the formula that gives a factor, such as "1 / sqrt(head_dim)"; "" for none.

    Args:
        factor: of weights or of scores.
        head_dim: channels of a head.
        width: of the tokens.
    """
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
    plain = abs(factor)
    near = [name for name, form in forms.items() if abs(plain - form) <= CLOSE * form != CLOSE]
    return f"{'-' if factor < 0 else ''}{near[0]}" if near else ""


ROUNDED = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
WIDEST = 0.05  # the largest tolerance that a dtype has


@dataclass(frozen=True)
class Rounded:
    """Weights and biases are cast to another dtype and back."""

    roles: tuple[str, ...]
    dtype: torch.dtype
    parts: tuple[str, ...] = BOTH
    still: tuple[str, ...] = ()

    def apply(self, rows: Rows) -> Rows:
        """Return rows after both casts."""
        matrices, biases = dict(rows.matrices), dict(rows.biases)
        for role in self.roles:
            if "weights" in self.parts:
                matrices[role] = matrices[role].to(self.dtype).to(matrices[role].dtype)
            if role in biases and role not in self.still and "biases" in self.parts:
                biases[role] = biases[role].to(self.dtype).to(biases[role].dtype)
        return Rows(matrices, biases)


@dataclass(frozen=True)
class Multiplied:
    """Weights and biases are multiplied.

    Attributes:
        factors: role -> (heads, channels) or broadcastable; float64.
        parts: which of weights and biases are multiplied.
        still: roles whose biases are not.
    """

    factors: Mapping[str, Tensor] = field(default_factory=dict)
    parts: tuple[str, ...] = BOTH
    still: tuple[str, ...] = ()

    def apply(self, rows: Rows) -> Rows:
        """Return the products, in the dtype of the rows."""
        matrices, biases = dict(rows.matrices), dict(rows.biases)
        for role, factor in self.factors.items():
            if "weights" in self.parts:
                x = matrices[role]
                matrices[role] = (x.to(torch.float64) * factor[..., None]).to(x.dtype)
            if role in biases and role not in self.still and "biases" in self.parts:
                x = biases[role]
                biases[role] = (x.to(torch.float64) * factor).to(x.dtype)
        return Rows(matrices, biases)


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


def default_tolerance(*dtypes: torch.dtype) -> float:
    """Return the relative error that sums in these dtypes may have."""
    eps = (torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return min(WIDEST, 4096 * max(eps, default=WIDEST))


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

    Args:
        role: the projection.
        a: (heads, channels, columns).
        b: likewise, after the moves.
        tolerance: relative; a residual above it means that the role is not explained.
    """
    if have_same_bits(a, b):
        return None, 0.0
    rounding = find_rounding_dtype(a, b)
    if rounding is not None:
        text, parameters = format_dtype(rounding), (("dtype", rounding),)
        name = MapName(WEIGHTS_ROUNDED, text, (role,), 0, parameters)
        return Move(name, Rounded((role,), rounding)), 0.0
    grouped = _fit_grouped_factors(a, b, max(tolerance, 1e-9))
    if grouped is None:
        return None, largest_residual(a, b)
    name, factor = grouped
    move = Move(
        MapName(name.cause, name.text, (role,), 0, name.parameters), Multiplied({role: factor})
    )
    made = move.apply(Rows({role: b})).matrices[role]
    plain, multiplied = largest_residual(a, b), largest_residual(a, made)
    return (move, multiplied) if multiplied <= tolerance < plain else (None, min(plain, multiplied))


def find_rounding_dtype(a: Tensor, b: Tensor) -> torch.dtype | None:
    """Return the dtype to which one of the two is the other's rounding, or None."""
    for dtype in ROUNDED:
        # Most pairs differ in their first head already.
        if dtype != a.dtype and all(_is_rounding(x, y, dtype) for x, y in ((a[:1], b[:1]), (a, b))):
            return dtype
    return None


def _is_rounding(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    rounded_a, rounded_b = (x.to(dtype).to(x.dtype) for x in (a, b))
    return have_same_bits(rounded_a, rounded_b) and (
        have_same_bits(a, rounded_a) or have_same_bits(b, rounded_b)
    )


def fit_row_factors(a: Tensor, b: Tensor) -> Tensor:
    """Return the factor of each row by least squares; 1 for rows of zeros.

    Args:
        a: (heads, channels, columns).
        b: likewise.

    Returns:
        (heads, channels), float64.
    """
    a, b = a.to(torch.float64), b.to(torch.float64)
    size = (b * b).sum(2)
    return torch.where(size > 0, (a * b).sum(2) / size.where(size > 0, 1.0), 1.0)


def _fit_grouped_factors(a: Tensor, b: Tensor, tolerance: float) -> tuple[MapName, Tensor] | None:
    """Return the factors of all rows by group; None as soon as the first head has no groups."""
    if _group_factors(fit_row_factors(a[:1], b[:1]), tolerance, a.shape[2]) is None:
        return None
    return _group_factors(fit_row_factors(a, b), tolerance, a.shape[2])


def _group_factors(
    factors: Tensor, tolerance: float, columns: int
) -> tuple[MapName, Tensor] | None:
    """Return one factor for the role, for heads, for halves or for every second channel."""
    channels = factors.shape[1]
    half = channels // 2
    middle = factors.median()
    if _are_factors_constant(factors, tolerance):
        factor = snap_to_power_of_two(float(middle))
        form = find_factor_formula(factor, head_dim=channels, width=columns)
        return _name_factor(factor, form), torch.full((1, 1), factor, dtype=torch.float64)
    if channels % 2 == 0:
        for text, parts in (
            ("the second half of each head", (factors[:, :half], factors[:, half:])),
            ("the odd channels of each head", (factors[:, ::2], factors[:, 1::2])),
        ):
            if all(_are_factors_constant(part, tolerance) for part in parts):
                return _expand_two_factors_to_channels(text, parts, channels)
    if all(_are_factors_constant(row, tolerance) for row in factors):
        by_head = [snap_to_power_of_two(float(row.median())) for row in factors]
        changed = [head for head, factor in enumerate(by_head) if factor != 1]
        text = f"heads {', '.join(map(str, changed))}"
        is_sign = all(factor in (1, -1) for factor in by_head)
        parameters = (("heads", tuple(changed)), ("factors", tuple(by_head)))
        name = MapName(SIGN if is_sign else FACTOR, text, (), 0, parameters)
        return name, torch.tensor(by_head, dtype=torch.float64)[:, None]
    return None


def _expand_two_factors_to_channels(
    text: str, parts: tuple[Tensor, Tensor], channels: int
) -> tuple[MapName, Tensor]:
    first, second = (snap_to_power_of_two(float(part.median())) for part in parts)
    factor = torch.empty(1, channels, dtype=torch.float64)
    is_half = text.startswith("the second half")
    factor[:, slice(0, channels // 2) if is_half else slice(0, None, 2)] = first
    factor[:, slice(channels // 2, None) if is_half else slice(1, None, 2)] = second
    if first != 1:
        text = text.replace("second", "first").replace("odd", "even") if second == 1 else "channels"
    name = _name_factor(second if first == 1 else first, text)
    return MapName(name.cause, text, (), 0, (("factors", (first, second)),)), factor


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


@dataclass(frozen=True, eq=False)
class Zeroed:
    """Some rows are zero.

    Attributes:
        role: the projection.
        rows: (heads, channels), bool: True for a row of zeros.
        parts: which of weights and biases are zero.
        still: roles whose biases are not.
    """

    role: str
    rows: Tensor
    parts: tuple[str, ...] = BOTH
    still: tuple[str, ...] = ()

    def apply(self, rows: Rows) -> Rows:
        """Return rows with zeros at these places."""
        weights = rows.matrices[self.role]
        zeroed = torch.where(self.rows[..., None], torch.zeros_like(weights), weights)
        biases = dict(rows.biases)
        if self.role in biases and self.role not in self.still and "biases" in self.parts:
            biases[self.role] = biases[self.role].masked_fill(self.rows, 0.0)
        return Rows({**rows.matrices, self.role: zeroed}, biases)


def find_zeroed_rows(role: str, a: Tensor, b: Tensor, tolerance: float) -> Move | None:
    """Return the move that leaves some rows of b without numbers, or None.

    Args:
        role: the projection.
        a: (heads, channels, columns).
        b: likewise.
        tolerance: relative, for the rows that are not zero.
    """
    zeros = ~a.any(2) & b.any(2)
    if not bool(zeros.any()):
        return None
    change = Zeroed(role, zeros)
    if largest_residual(a, change.apply(Rows({role: b})).matrices[role]) > tolerance:
        return None
    heads = tuple(zeros.all(1).nonzero().flatten().tolist())
    if bool(zeros.all()):
        text = "all"
    elif int(zeros.sum()) == len(heads) * zeros.shape[1]:
        text = f"heads {', '.join(map(str, heads))}"
    else:
        text = f"{int(zeros.sum())} of {zeros.numel()} rows"
    rows = tuple(zeros.flatten().nonzero().flatten().tolist())
    parameters = (("heads", heads), ("rows", rows))
    return Move(MapName(ROWS_ZERO, text, (role,), 0, parameters), change)
