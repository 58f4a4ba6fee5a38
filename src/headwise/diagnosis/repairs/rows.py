"""Lines of code that make the weights of projections right again, read off wrong and right ones.

A line is only returned where it gives the right numbers from the wrong ones. Matrices are (rows,
columns), as `torch.nn.Linear` stores them: ``wq`` has a row for each channel of each head, and
``wo`` a column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations

import torch
from torch import Tensor

from headwise.function.lines import write_number
from headwise.function.weights import State
from headwise.identify.moves.maps import TENSORS, join_rows, list_roles
from headwise.identify.moves.move import find_factor_formula

MOST_RUNS = 12  # of an index that a line lists
CLOSE = 1e-9  # of a factor
NEAR = 3e-7  # of a fitted number, which may be one of 6 digits
ROLES = "qkv"


def write_weight_lines(wrong: State, right: State) -> tuple[str, ...]:
    """Return the lines that make right weights from wrong ones; () where none do.

    Numbers that are lost, or that the wrong weights never had, cannot come back by a line.
    """
    names = [n for n, x in right.items() if n not in wrong or not torch.equal(wrong[n], x)]
    if any(name not in wrong or wrong[name].shape != right[name].shape for name in names):
        return ()
    parted = [role for role in list_roles(right) if {f"w{role}", f"b{role}"} & {*names}]
    others = [name for name in names if name[1:] not in TENSORS]
    if others:
        vectors = [_write_vector(name, 1, wrong[name], right[name]) for name in others]
        return tuple(vectors) if all(vectors) and not parted else ()
    if lines := _write_exchange(parted, wrong, right):
        return lines
    each = [_write_role(role, wrong, right) for role in parted]
    if all(each):
        return tuple(line for lines in each for line in lines)
    return _write_fused(parted, wrong, right)


def _write_exchange(parted: Sequence[str], ours: State, theirs: State) -> tuple[str, ...]:
    for order in permutations(parted):
        if len(parted) < 2 or "o" in parted:
            return ()
        lines = []
        for kind in "wb":
            a, b = (
                {role: x[f"{kind}{role}"] for role in parted if f"{kind}{role}" in x}
                for x in (ours, theirs)
            )
            there = [role for role in parted if role in b]
            taken = dict(zip(parted, order, strict=True))
            if not there or all(torch.equal(a[role], b[role]) for role in there):
                continue
            if not all(taken[r] in a and torch.equal(a[taken[r]], b[r]) for r in there):
                break
            names = [", ".join(f"{kind}{role}" for role in which) for which in (parted, order)]
            lines.append(" = ".join(names))
        else:
            return tuple(lines)
    return ()


def _write_role(role: str, ours: State, theirs: State) -> tuple[str, ...]:
    heads, bias = theirs[f"w{role}"].shape[0], f"b{role}"
    a, b = (join_rows(x, role) for x in (ours, theirs))
    lines = []
    if not torch.equal(a, b):
        name, shape = (f"w{role}", f"w{role}.shape") if role != "o" else ("wo.T", "wo.T.shape")
        expression = next(_list_expressions(name, shape, heads, a, b), "")
        if not expression:
            return ()
        lines.append(f"w{role} = {_transpose_back(expression) if role == 'o' else expression}")
    if bias in theirs and not torch.equal(ours[bias], theirs[bias]):
        heads = 1 if role == "o" else heads
        line = _write_vector(bias, heads, ours[bias], theirs[bias])
        if not line:
            return ()
        lines.append(line)
    return tuple(lines)


def _write_vector(name: str, heads: int, wrong: Tensor, right: Tensor) -> str:
    a, b = (x.flatten()[:, None] for x in (wrong, right))
    expression = next(_list_expressions(name, f"{name}.shape", heads, a, b), "")
    return f"{name} = {expression}" if expression else ""


def _transpose_back(expression: str) -> str:
    """Return an expression of ``wo.T`` as one of ``wo``."""
    plain = {"-wo.T": "-wo", "wo.T.T": "wo.T"}
    if expression in plain:
        return plain[expression]
    if " / " in expression and "reshape" not in expression:
        return expression.replace(".T", "")
    return f"{expression}.T" if expression.endswith(")") else f"({expression}).T"


def _list_expressions(name: str, shape: str, heads: int, a: Tensor, b: Tensor) -> Iterator[str]:
    """Yield expressions that make (rows, columns) ``b`` from ``a``; the simplest first."""
    rows, columns = a.shape
    if columns > 1:
        if rows == columns and torch.equal(a.T, b):
            yield f"{name}.T"
        elif torch.equal(a.T.reshape(a.shape), b):
            yield f"{name}.T.reshape({shape})"
        elif torch.equal(a.reshape(columns, rows).T, b):
            yield f"{name}.reshape({columns}, {rows}).T"
    if (index := find_rows(b, a)) is not None:
        yield from _list_index_expressions(name, shape, heads, index)
    else:
        yield from _list_factors(name, shape, heads, a, b)


def find_rows(wanted: Tensor, among: Tensor) -> list[int] | None:
    """Return the place of each wanted row among others; None if one is missing or there twice."""
    places: dict[bytes, int] = {}
    for place, row in enumerate(among.contiguous().numpy()):
        places[row.tobytes()] = place if row.tobytes() not in places else -1
    index = [places.get(row.tobytes(), -1) for row in wanted.contiguous().numpy()]
    return None if -1 in index else index


def _list_index_expressions(
    name: str, shape: str, heads: int, index: Sequence[int]
) -> Iterator[str]:
    if (order := _as_order_of_axes(index)) is not None:
        sizes, axes = order
        moved = f"permute({', '.join(map(str, (*axes, len(axes))))})"
        swapped = [axis for n, axis in enumerate(axes) if axis != n]
        if len(swapped) == 2:
            moved = f"transpose({swapped[1]}, {swapped[0]})"
        yield f"{name}.reshape({', '.join(map(str, sizes))}, -1).{moved}.reshape({shape})"
    rows = len(index)
    channels = rows // heads
    blocks = f"{name}.reshape({heads}, {channels}, -1)"
    within = [place - channels * (place // channels) for place in index]
    is_in_heads = index == [x + channels * (n // channels) for n, x in enumerate(within)]
    is_alike = heads > 1 and is_in_heads and within == within[:channels] * heads
    if is_alike and (runs := write_index(within[:channels])):
        yield f"{blocks}[:, {runs}].reshape({shape})"
    if within == [*range(channels)] * heads:
        order_of_heads = [place // channels for place in index[::channels]]
        if runs := write_index(order_of_heads):
            yield f"{blocks}[{runs}].reshape({shape})"
    if runs := write_index(index):
        yield f"{name}[{runs}]"


def write_index(index: Sequence[int]) -> str:
    """Return a list of places in code, long runs as ranges; "" for one of too many parts."""
    runs: list[tuple[int, int, int]] = []  # first, step, count
    place = 0
    while place < len(index):
        step = index[place + 1] - index[place] if place + 1 < len(index) else 1
        count = 1
        while step and place + count < len(index):
            if index[place + count] - index[place + count - 1] != step:
                break
            count += 1
        count = 1 if count < 3 else count
        runs.append((index[place], step, count))
        place += count
    if len(runs) > MOST_RUNS:
        return ""
    return f"[{', '.join(_write_run(*run) for run in runs)}]"


def _write_run(first: int, step: int, count: int) -> str:
    if count == 1:
        return str(first)
    end = first + step * (count - 1) + (1 if step > 0 else -1)
    stop = f"{end}" if end >= 0 else "-1"
    return f"*range({first}, {stop}{'' if step == 1 else f', {step}'})"


def _as_order_of_axes(index: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Return sizes and an order of axes by which a reshaped range becomes the index, or None."""
    if len(index) < 4 or index[0]:
        return None
    extents, strides, rest = [], [], list(index)
    while len(rest) > 1:  # the innermost axis of the index first
        step, count = rest[1] - rest[0], 1
        while count < len(rest) and rest[count] - rest[count - 1] == step:
            count += 1
        if step <= 0 or len(rest) % count:
            return None
        extents.append(count)
        strides.append(step)
        rest = rest[::count]
    stored = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    sizes = [extents[axis] for axis in stored]
    axes = [stored.index(axis) for axis in reversed(range(len(extents)))]
    if len(sizes) < 2 or axes == sorted(axes):
        return None
    made = torch.arange(len(index)).reshape(sizes).permute(axes).flatten().tolist()
    return (sizes, axes) if made == list(index) else None


def _list_factors(name: str, shape: str, heads: int, a: Tensor, b: Tensor) -> Iterator[str]:
    """Yield quotients: rows of ``b`` times a factor of the role, of heads or of channels."""
    size = b.square().sum(1)
    factors = (a * b).sum(1) / size.where(size > 0, 1.0)
    if not bool(factors.all()):
        return
    if float((a / factors[:, None] - b).abs().max()) > CLOSE * float(b.abs().max()):
        return
    by_head = factors.reshape(heads, -1)
    middle = float(factors.median())
    if bool(((factors - middle).abs() <= CLOSE * abs(middle)).all()):
        number = write_form(middle, head_dim=len(a) // heads, width=a.shape[1])
        yield f"-{name}" if math.isclose(middle, -1.0) else f"{name} / {number}"
    for by, axes in ((by_head[:, :1], "(-1, 1, 1)"), (by_head[:1], "(1, -1, 1)")):
        if bool(((by_head - by).abs() <= CLOSE * by_head.abs()).all()) and by.numel() <= MOST_RUNS:
            numbers = ", ".join(write_number(float(each)) for each in by.flatten())
            blocks = f"{name}.reshape({heads}, {by_head.shape[1]}, -1)"
            yield f"({blocks} / torch.tensor([{numbers}]).reshape{axes}).reshape({shape})"


def write_form(number: float, *, head_dim: int, width: int) -> str:
    """Return a number in code, by its formula where that is shorter than its digits."""
    short = float(f"{number:.6g}")
    number = short if math.isclose(short, number, rel_tol=NEAR) else number
    form = find_factor_formula(number, head_dim=head_dim, width=width)
    if not form or form[0] == "l" or math.isclose(number, round(number, 3)):
        return write_number(number)
    form = re.sub(r"sqrt\(([^)]*)\)", r"(\1)**0.5", form).replace("head_dim", str(head_dim))
    form = re.sub(r"\((\w+)\)", r"\1", form.replace("width", str(width)))
    return f"({form})" if " " in form else form


def _write_fused(parted: Sequence[str], ours: State, theirs: State) -> tuple[str, ...]:
    roles = [role for role in ROLES if f"w{role}" in theirs]
    widths = {ours[f"w{role}"].shape[2] for role in roles}
    if not {*parted} <= {*roles} or len(widths) > 1:
        return ()
    lines: list[str] = []
    for kind in "wb":
        held = [f"{kind}{role}" for role in roles]
        if not {*held} <= theirs.keys():
            continue
        sizes = [theirs[f"w{role}"].shape[:2].numel() for role in roles]
        a, b = (
            torch.cat([x[n].reshape(size, -1) for n, size in zip(held, sizes, strict=True)])
            for x in (ours, theirs)
        )
        if torch.equal(a, b):
            continue
        index = find_rows(b, a)
        name = {"w": "rows", "b": "biases"}[kind]
        made = (
            ""
            if index is None
            else next(_list_index_expressions(name, f"{name}.shape", 1, index), "")
        )
        if not made:
            return ()
        names = ", ".join(f"{kind}{role}" for role in roles)
        lines += [f"{name} = torch.cat(({names}))", f"{name} = {made}"]
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        cuts = [f"{name}[{i or ''}:{j}]" for i, j in pairwise(ends)]
        lines.append(f"{names} = {', '.join(cuts)}")
    return tuple(lines)
