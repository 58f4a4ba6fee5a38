"""`find_moves`: the moves that make one set of projections of another, and their biases.

The rows of the output projection cannot be read off its outputs. Each map of them is tried, and
orders and factors of whole heads follow from the contributions of all pairs of a head and a part
of the projection, by least squares.

`find_state_moves` does so for canonical weights, and recognises weights as initialised: the
largest distance of the distribution function from that of an initialisation (Kolmogorov-Smirnov)
is compared with 1.95 / sqrt(n), which chance passes once in 1,000.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.function.rounding import default_tolerance
from headwise.function.weights import State, bias_of, kinds_of
from headwise.identify.catalogue import BIAS_MISSING, FACTOR, INITIAL_WEIGHTS, ROWS_ZERO, SIGN
from headwise.identify.comparison import format_noun_with_numbers
from headwise.identify.moves import families, search
from headwise.identify.moves import move as changes
from headwise.identify.moves.maps import (
    BIASES,
    ROLES,
    WEIGHTS,
    MapName,
    RowSizes,
    count_columns,
    is_of_projections,
    join_rows,
    list_roles,
    view_kind,
)
from headwise.identify.moves.move import Dropped, Edited, Move, MoveReport, name_in_kind

NONE = MoveReport(())
MOST_LISTED = 8  # other sequences of moves that are kept


def find_moves(
    a: State,
    b: State,
    *,
    transposed: State | None = None,
    tolerance: float | None = None,
    **rotary: Any,
) -> MoveReport:
    """Return the moves that make the rows of a from those of b, which are right.

    Every entry is compared after the moves. Where several sequences have the same effect on
    these rows, the shortest and most usual is first. The ``tolerance`` of an entry is relative to
    the root mean square of its role; by default that of the coarser dtype. ``rotary`` are fields of
    `RowSizes`: rotary_width, is_interleaved, was_interleaved. ``transposed`` are b's rows with each
    square matrix transposed, where rows are activations; weights are transposed here.

    Raises:
        ShapeError: the two have other roles or shapes.
    """
    shapes = [{r: tuple(rows[f"w{r}"].shape) for r in list_roles(rows)} for rows in (a, b)]
    if shapes[0] != shapes[1]:
        raise ShapeError(
            saw=f"rows of the shapes {shapes[0]} and {shapes[1]}",
            needed="the same roles and shapes on both sides",
            do="compare the roles that both have, with heads and channels of the same sizes",
        )
    sizes = replace(RowSizes.of(b), **rotary)
    dtypes = [rows[f"w{role}"].dtype for rows in (a, b) for role in sizes.roles]
    tolerance = default_tolerance(*dtypes) if tolerance is None else tolerance
    common = torch.float64 if torch.float64 in dtypes else torch.float32
    common = dtypes[0] if len(set(dtypes)) == 1 else common
    a, b, given = (
        {name: x.to(common) for name, x in rows.items()} for rows in (a, b, transposed or {})
    )
    best = MoveReport((), unexplained=sizes.roles)
    for explanation in _yield_explanations(a, b, sizes, given or None):
        report = _make_move_report(explanation, a, b, sizes, tolerance)
        if len(report.explained) > len(best.explained):
            best = report
        if not [role for role in report.unexplained if role in sizes.roles]:
            break
    return best


def _yield_explanations(
    a: State, b: State, sizes: RowSizes, given: State | None
) -> Iterator[search.RoleSteps]:
    yield search.RoleSteps(((),), sizes.roles)
    catalogue = families.make_row_map_catalogue(sizes, count_columns(b))
    matrix_maps = search.list_matrix_maps(b, sizes, given)
    for dtype in (None, *_list_rounding_dtypes(a, b)):
        by_bits = partial(search.label_bits, dtype=dtype)
        for maps in ([], matrix_maps):
            labelled = search.label_rows(a, b, sizes, maps, by_bits)
            yield search.explain_roles(*labelled, catalogue, maps)
    labelled = search.label_rows(a, b, sizes, matrix_maps, search.label_directions)
    yield search.explain_roles(*labelled, catalogue, matrix_maps)


def _list_rounding_dtypes(a: State, b: State) -> list[torch.dtype]:
    return [
        dtype
        for dtype in changes.ROUNDED
        if any(
            x.dtype != dtype and x.any() and changes.have_same_bits(x, x.to(dtype).to(x.dtype))
            for rows in (a, b)
            for x in (join_rows(rows, role)[:64] for role in list_roles(rows))
        )
    ]


def _make_move_report(
    explanation: search.RoleSteps, a: State, b: State, sizes: RowSizes, tolerance: float
) -> MoveReport:
    sequences = [
        tuple(map(Move.of_step, steps)) for steps in explanation.sequences[: MOST_LISTED + 1]
    ]
    # Names that are equal for the weights may differ for the biases.
    sequences.sort(key=lambda moves: len(_list_wrong_biases(moves, a, b, tolerance)))
    moves = sequences[0] if sequences else ()
    made = changes.apply_moves(moves, b)
    changed, residual, unexplained = [], {}, []
    for role in sizes.roles:
        ours, theirs = a[f"w{role}"], made[f"w{role}"]
        change, left = changes.find_zeroed_rows(role, ours, theirs, tolerance), 0.0
        if ours.shape[2] == 1:  # all numbers count as a row
            ours, theirs = (x.reshape(1, 1, -1) for x in (ours, theirs))
        if change is None:
            change, left = changes.find_row_change(role, ours, theirs, tolerance)
        if left > tolerance:
            unexplained.append(role)
        residual[role] = left
        changed += [] if change is None else [change]
    moves = tuple(move for move in moves if not set(move.roles) <= set(unexplained))
    moves, biases = _explain_biases(moves + _unite_changes_over_roles(changed), a, b, tolerance)
    explained = tuple(role for role in sizes.roles if role not in unexplained)
    rest = (*unexplained, *(f"bias of {role}" for role in biases))
    return MoveReport(moves, tuple(sequences[1:]), explained, rest, residual)


def _unite_changes_over_roles(changed: list[Move]) -> tuple[Move, ...]:
    united: dict[object, Move] = {}
    for move in changed:
        key = (move.cause, move.name.text, move.roles if move.cause == ROWS_ZERO else ())
        if (other := united.get(key)) is not None:
            edits = [each.change.edits for each in (other, move) if isinstance(each.change, Edited)]
            name = replace(other.name, roles=(*other.roles, *move.roles))
            move = Move(name, Edited({**edits[0], **edits[1]}))
        united[key] = move
    return tuple(united.values())


def _list_wrong_biases(
    moves: Sequence[Move], a: State, b: State, tolerance: float
) -> tuple[str, ...]:
    made = changes.apply_moves(moves, b)
    roles = (role for role in list_roles(a) if role != "o")
    return tuple(r for r in roles if not _biases_equal(r, a, made, tolerance))


def _explain_biases(
    moves: tuple[Move, ...], a: State, b: State, tolerance: float
) -> tuple[tuple[Move, ...], tuple[str, ...]]:
    """Return moves that explain the biases too, and the roles whose biases stay unexplained."""
    list_wrong = partial(_list_wrong_biases, a=a, b=b, tolerance=tolerance)
    if not (wrong := list_wrong(moves)):
        return moves, ()
    moves = _keep_bias_in_place(moves, wrong, a, b, tolerance)
    moves += _find_cleared_biases(list_wrong(moves), a)
    if wrong := list_wrong(moves):
        moves += _find_moves_of_biases_alone(wrong, a, changes.apply_moves(moves, b))
    for role in list_wrong(moves):
        made = changes.apply_moves(moves, b)
        if f"b{role}" in a.keys() & made.keys():  # all heads of a bias count as a row
            ours, theirs = (rows[f"b{role}"].flatten()[None, None] for rows in (a, made))
            if (move := changes.find_row_change(role, ours, theirs, tolerance)[0]) is not None:
                moves += (replace(move, change=replace(move.change, parts=BIASES)),)
    return moves, list_wrong(moves)


def _biases_equal(role: str, a: State, b: State, tolerance: float) -> bool:
    """True if two biases are equal; an absent bias equals zeros."""
    ours, theirs = (rows.get(f"b{role}") for rows in (a, b))
    if ours is None or theirs is None:
        return all(x is None or not bool(x.any()) for x in (ours, theirs))
    is_same = changes.have_same_bits(ours, theirs)
    return is_same or changes.largest_residual(ours, theirs) <= tolerance


def _keep_bias_in_place(
    moves: tuple[Move, ...], wrong: tuple[str, ...], a: State, b: State, tolerance: float
) -> tuple[Move, ...]:
    unmoved = {r for r in wrong if f"b{r}" in b and _biases_equal(r, a, b, tolerance)}
    kept = []
    for move in moves:
        still = tuple(role for role in move.roles if role in unmoved)
        if still:
            biased = {role for role in move.roles if f"b{role}" in b}
            parts = WEIGHTS if biased <= unmoved else move.change.parts
            move = replace(move, change=replace(move.change, parts=parts, still=still))
        kept.append(move)
    return tuple(kept)


def _find_cleared_biases(wrong: Sequence[str], a: State) -> tuple[Move, ...]:
    dropped = tuple(role for role in wrong if f"b{role}" not in a)
    zero = tuple(role for role in wrong if f"b{role}" in a and not bool(a[f"b{role}"].any()))
    cleared = Edited(dict.fromkeys(zero, torch.zeros_like), parts=BIASES)
    moves = (
        Move(MapName(BIAS_MISSING, "", dropped), Dropped(dropped, parts=BIASES)),
        Move(MapName(BIAS_MISSING, "zero", zero), cleared),
    )
    return tuple(move for move in moves if move.roles)


def _find_moves_of_biases_alone(wrong: tuple[str, ...], a: State, b: State) -> tuple[Move, ...]:
    roles = tuple(
        role for role in list_roles(a) if role != "o" and f"b{role}" in a.keys() & b.keys()
    )
    if not set(wrong) <= set(roles):
        return ()
    sizes = replace(RowSizes.of(b), roles=roles)
    ours, theirs = (
        search.Labelled(
            sizes, search.hash_rows(torch.cat([rows[f"b{r}"].flatten() for r in roles])[:, None])
        )
        for rows in (a, b)
    )
    maps = families.make_row_map_catalogue(sizes, (1,) * len(roles))
    sequences = search.search_steps(ours, theirs, maps, (), roles)
    return tuple(Move.of_step(step, BIASES) for step in (sequences[0] if sequences else ()))


FIRST_TOKENS = 4  # a map that fails on them is not tried on all
MOST_BLOCKS = 64
EQUATIONS = 6  # times the number of unknown coefficients


@dataclass(frozen=True)
class HeadsAndOutput:
    """Head outputs and outputs of a layer, and the projections that should connect them."""

    heads: Tensor  # (tokens, heads, value_dim), float64
    output: Tensor  # (tokens, out_dim), without the bias
    rows: State  # the right projections
    tolerance: float  # of rounding, relative to the root mean square of the output

    def find_moves(self) -> Iterator[Move]:
        """Yield the moves of the output projection that make the outputs."""
        sizes = RowSizes.of(self.rows)
        maps = families.make_row_map_catalogue(sizes, count_columns(self.rows)).maps
        steps: list[search.Step] = [*maps, *search.list_matrix_maps(self.rows, sizes)]
        for move in (
            *(Move.of_step(step, WEIGHTS) for step in steps if step.names[0].roles == ("o",)),
            *(changes.name_rounding("o", dtype, WEIGHTS) for dtype in changes.ROUNDED),
            changes.name_zeros("o", WEIGHTS),
            *self._yield_block_moves(sizes),
        ):
            projection = move.change.apply(self.rows)["wo"]
            if all(self._makes_outputs(projection, count) for count in (FIRST_TOKENS, None)):
                yield move

    def _makes_outputs(self, projection: Tensor, count: int | None) -> bool:
        """True if a projection (heads, value_dim, out_dim) makes the outputs of some tokens."""
        ours = self.output[:count]
        apart = self.heads[:count].flatten(1) @ projection.flatten(0, 1) - ours
        return float(apart.abs().max()) <= self.tolerance * float(ours.square().mean().sqrt())

    def _yield_block_moves(self, sizes: RowSizes) -> Iterator[Move]:
        for blocks in search.list_block_counts("o", sizes):
            if blocks > MOST_BLOCKS:
                continue
            shares = self._solve_block_coefficients(blocks)
            taken = shares.abs().argmax(1).tolist()
            if taken == list(range(blocks)):
                if blocks == sizes.heads:
                    yield from _yield_head_factor_moves(shares.diagonal())
            elif sorted(taken) == list(range(blocks)):
                yield Move.of_step(search.make_block_map(tuple(taken), ("o",), sizes), WEIGHTS)

    def _solve_block_coefficients(self, blocks: int) -> Tensor:
        """Return the share of each block of head outputs (rows) in each block of the projection."""
        tokens, width = self.output.shape
        wanted = min(tokens, max(FIRST_TOKENS, -(-EQUATIONS * blocks * blocks // width)))
        heads = self.heads[:wanted].flatten(1).unflatten(1, (blocks, -1))
        projection = join_rows(self.rows, "o").unflatten(0, (blocks, -1))
        products = torch.einsum("tbv,cvo->tobc", heads, projection.double())
        wanted_output = self.output[:wanted].reshape(-1, 1)
        equations = products.flatten(0, 1).flatten(1)
        solution: Tensor = torch.linalg.lstsq(equations, wanted_output, driver="gelsd").solution
        return solution.view(blocks, blocks)

    def find_moves_with_bias(self, output: Tensor, bias: Tensor) -> Iterator[Move]:
        """Yield a factor of the projection and of its bias; ``output`` is with the bias."""
        right = self.heads.flatten(1) @ join_rows(self.rows, "o") + bias
        shared = float((right * output).sum() / right.square().sum())
        factor = changes.snap_to_power_of_two(shared)
        apart = float((factor * right - output).abs().max())
        if factor != 1 and apart <= self.tolerance * float(output.square().mean().sqrt()):
            cause = SIGN if factor == -1 else FACTOR
            name = MapName(cause, f"{factor:.6g}", ("o",), 0, (("factor", factor),))
            yield Move(
                name, Edited({"o": changes.multiply(torch.tensor([[factor]], dtype=torch.float64))})
            )


def _yield_head_factor_moves(shares: Tensor) -> Iterator[Move]:
    snapped = torch.where((shares - shares.round()).abs() < 1e-6, shares.round(), shares)
    changed = tuple((snapped != 1).nonzero().flatten().tolist())
    if not changed:
        return
    factors = tuple(snapped.tolist())
    parameters: tuple[tuple[str, Any], ...] = (("heads", changed), ("factors", factors))
    text = format_noun_with_numbers("head", changed)
    if float((shares - shares.mean()).abs().max()) < 1e-6 * float(shares.abs().max()):
        snapped = snapped.mean().expand_as(snapped)
        parameters, text = (("factor", float(snapped[0])),), f"{float(snapped[0]):.6g}"
    kinds = {float(snapped[head]) for head in changed}
    cause = SIGN if kinds == {-1.0} else ROWS_ZERO if kinds == {0.0} else FACTOR
    change = Edited({"o": changes.multiply(snapped[:, None])}, parts=WEIGHTS)
    yield Move(MapName(cause, text, ("o",), 0, parameters), change)


# Two independent draws in bfloat16 agree in less than this share of their entries.
MOST_EQUAL = 0.05


def find_state_moves(
    a: State, b: State, *, tolerance: float | None = None, **options: Any
) -> MoveReport:
    """Return the moves that make canonical weights a from b, the right ones.

    Fewer kv heads are repeated where the other side has more. Options are those of `find_moves`.

    Raises:
        ShapeError: the two have other sizes.
    """
    if "wr" in b:  # a key that all heads share tells how many channels turn
        options["rotary_width"] = len(b["wr"])
    report, *others = (_find_moves_of_kind(kind, a, b, tolerance, options) for kind in kinds_of(b))
    moves = [move for each in (report, *others) for move in each.moves]
    unexplained = [role for each in (report, *others) for role in each.unexplained]
    return replace(report, moves=tuple(moves), unexplained=tuple(unexplained))


def _find_moves_of_kind(
    kind: dict[str, str], a: State, b: State, tolerance: float | None, options: dict[str, Any]
) -> MoveReport:
    names = [name for tensor in kind.values() for name in (tensor, bias_of(tensor))]
    if all(a.get(name) is b.get(name) for name in names):
        return NONE
    ours, theirs = view_kind(a, kind), view_kind(b, kind)
    few, most = sorted(len(rows.get("wk", ())) for rows in (ours, theirs))
    if 0 < few < most and most % few == 0:
        ours, theirs = (
            {
                name: x.repeat_interleave(most // len(rows["wk"]), 0) if name[1:] in "kv" else x
                for name, x in rows.items()
            }
            for rows in (ours, theirs)
        )
    apart = {*list_roles(ours)} ^ {*list_roles(theirs)}
    lost, added = (
        [role for role in apart if f"w{role}" in rows and bool(rows[f"w{role}"].any())]
        for rows in (theirs, ours)
    )
    kept = {f"{letter}{role}" for role in ROLES if role not in apart for letter in "wb"} - {"bo"}
    ours, theirs = ({n: x for n, x in rows.items() if n in kept} for rows in (ours, theirs))
    report = find_moves(ours, theirs, tolerance=tolerance, **options) if ours else NONE
    more = _find_initial_values(report.unexplained, ours, theirs) if is_of_projections(kind) else []
    if lost == ["o"]:
        more.append(Move(MapName(ROWS_ZERO, "", ("o",)), Dropped(("o",))))
    named = {role for move in more for role in move.roles}
    rest = [role for role in (*report.unexplained, *lost, *added) if role not in named]
    moves = tuple(move.of_kind(kind) for move in (*report.moves, *more))
    left = tuple(name_in_kind(kind, role) for role in rest)
    explained = tuple(role for role in list_roles(ours) if role not in rest)
    return replace(report, moves=moves, explained=explained, unexplained=left)


def _find_initial_values(unexplained: Sequence[str], ours: State, theirs: State) -> list[Move]:
    fresh: dict[str, list[str]] = {}
    for role in (each for each in unexplained if f"w{each}" in ours):
        equal = ours[f"w{role}"] == theirs[f"w{role}"]
        if float(equal.double().mean()) >= MOST_EQUAL:
            continue
        if initialisation := recognise_initialisation(role, ours):
            fresh.setdefault(initialisation.text, []).append(role)
    return [
        Move(
            MapName(INITIAL_WEIGHTS, text, tuple(roles)),
            Edited({role: ours[f"w{role}"].view_as for role in roles}, parts=WEIGHTS),
        )
        for text, roles in fresh.items()
    ]


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


def list_initialisations(role: str, rows: State) -> list[Initialisation]:
    """Return usual initialisations of the matrix of a role; that of o has its inputs as rows."""
    shapes = {each: join_rows(rows, each).shape for each in list_roles(rows)}
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


def recognise_initialisation(role: str, rows: State) -> Initialisation | None:
    """Return the initialisation whose statistics the weights of a role have, or None."""
    values = rows[f"w{role}"].flatten().to(torch.float64)
    if values.numel() < LEAST_ENTRIES:
        return None
    kinds = list_initialisations(role, rows)
    apart, place = min((kolmogorov_smirnov_statistic(values, x), n) for n, x in enumerate(kinds))
    return kinds[place] if apart < CRITICAL else None


def kolmogorov_smirnov_statistic(values: Tensor, kind: Initialisation) -> float:
    """Return the largest distance of the distribution functions, times the root of the count."""
    values = values[:: math.ceil(values.numel() / MOST_ENTRIES)].sort().values
    count = len(values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    share = kind.cumulative_share(values)
    apart = max(float((share - steps[:-1]).max()), float((steps[1:] - share).max()))
    return apart * math.sqrt(count)
