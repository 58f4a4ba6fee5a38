"""Search of named maps that make one sequence of labels of rows of another.

Labels are equal for equal numbers, or for numbers that are equal up to rounding. Depth 2 meets in
the middle: maps applied to b on one side, inverse maps applied to a on the other. Orders of whole
blocks of rows, heads or shards, are read off the labels.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations
from typing import TypeAlias

import torch
from torch import Tensor

from headwise.function.weights import State
from headwise.identify.catalogue import FUSED_ROW_CUT, HEADS_PERMUTED, SHARD_ORDER
from headwise.identify.moves.families import RowMapCatalogue
from headwise.identify.moves.maps import (
    MapName,
    MatrixMap,
    RowMap,
    RowSizes,
    join_rows,
    list_roles,
    list_square_roles,
)
from headwise.support.tensors import view_as_bits

_BLOCK = 1 << 20  # entries that are widened to int64 at a time
_SEED = 16
_MULTIPLIER = -7046029254386353131


def make_multipliers(count: int, seed: int = 0) -> Tensor:
    """Return (count) random odd numbers, int64; the first ones are equal for every count."""
    generator = torch.Generator().manual_seed(_SEED + seed)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def mix_bits(labels: Tensor) -> Tensor:
    """Return labels whose bits depend on all bits of the given ones."""
    labels = (labels ^ (labels >> 29)) * _MULTIPLIER
    return (labels ^ (labels >> 32)) * _MULTIPLIER


def read_bits(x: Tensor) -> Tensor:
    """Return the bits of each entry as integers; -0 counts as 0, float8 excepted."""
    return view_as_bits(x + 0.0 if x.dtype.itemsize > 1 else x)


def hash_rows(rows: Tensor) -> Tensor:
    """Return one hash for each row (rows, columns); (rows), int64."""
    multipliers = make_multipliers(rows.shape[1])
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    blocks = (read_bits(block).to(torch.int64) for block in rows.split(step))
    return mix_bits(torch.cat([(bits * multipliers).sum(1) for bits in blocks]))


@dataclass
class Labelled:
    """Labels of the rows of each role, and of the rows of its matrix read with exchanged axes."""

    sizes: RowSizes
    plain: Tensor  # (rows of all roles), int64
    # Role, and whether the map is reversed -> the labels of the role after it.
    by_map: Mapping[tuple[str, bool], Tensor] = field(default_factory=dict)

    def labels_after_map(self, matrix_map: MatrixMap, *, undone: bool = False) -> Tensor:
        """Return the labels of all rows after a map of matrices, or before it."""
        labels, spans = self.plain.clone(), self.sizes.spans()
        for role in matrix_map.roles:
            labels[spans[role]] = self.by_map[role, matrix_map.is_reversed != undone]
        return labels


_Parts = dict[tuple[str, bool | None], Tensor]  # of a role as it is, or after a map of its matrix


def label_rows(
    a: State,
    b: State,
    sizes: RowSizes,
    matrix_maps: Sequence[MatrixMap],
    label: Callable[[_Parts, _Parts], tuple[_Parts, _Parts]],
) -> tuple[Labelled, Labelled]:
    """Return labels of a's and of b's rows, as they are and with matrices read otherwise."""
    ours, theirs = (
        _Parts({(role, None): join_rows(rows, role) for role in sizes.roles}) for rows in (a, b)
    )
    for each in matrix_maps:
        if len(each.roles) == 1:
            [role] = each.roles
            theirs[role, each.is_reversed] = join_rows(each.apply(b), role)
            if each.given is None:
                turned = each.apply(a, undone=True)
                ours[role, not each.is_reversed] = join_rows(turned, role)
    labels_a, labels_b = (
        Labelled(
            sizes,
            torch.cat([labels[role, None] for role in sizes.roles]),
            {(role, way): x for (role, way), x in labels.items() if way is not None},
        )
        for labels in label(ours, theirs)
    )
    return labels_a, labels_b


def label_bits(
    ours: _Parts, theirs: _Parts, *, dtype: torch.dtype | None = None
) -> tuple[_Parts, _Parts]:
    """Return labels of the bits of each part, after a rounding to ``dtype``."""
    a, b = (
        _Parts({key: hash_rows(x if dtype is None else x.to(dtype)) for key, x in parts.items()})
        for parts in (ours, theirs)
    )
    return a, b


def list_matrix_maps(rows: State, sizes: RowSizes, given: State | None = None) -> list[MatrixMap]:
    """Return the maps of matrices for these rows, those of the fewest roles first.

    ``given`` are the rows with matrices transposed, if they cannot be computed.
    """
    square = list_square_roles(rows) if given is None else list_roles(given)
    maps = [
        MatrixMap(roles, is_square=True, given=given)
        for count in range(1, len(square) + 1)
        for roles in combinations(square, count)
    ]
    for role in sizes.roles if given is None else ():
        if role not in square and min(join_rows(rows, role).shape) > 1:
            maps += [MatrixMap((role,), is_square=False, is_reversed=x) for x in (False, True)]
    return maps


DIMENSIONS = 64
LEAST_COSINE = 0.95
_ROWS_AT_ONCE = 1024
_ZERO = -1  # label of a row of zeros
_UNKNOWN = -2  # the first label of rows that are near to none
_SAME = 1e-13  # 1 - cosine of rows that are parallel in float64
_WIDEST = 1e-2  # the largest distance at which right rows can count as parallel


def label_directions(ours: _Parts, theirs: _Parts) -> tuple[_Parts, _Parts]:
    """Return labels of the directions of rows; parts of other widths share none."""
    labels: tuple[_Parts, _Parts] = ({}, {})
    start = 0
    for width in dict.fromkeys(part.shape[1] for part in (*ours.values(), *theirs.values())):
        sides = [
            {key: part for key, part in parts.items() if part.shape[1] == width}
            for parts in (ours, theirs)
        ]
        directions = [_project_and_normalise_rows([*parts.values()], width) for parts in sides]
        nearest = _label_nearest_directions(*directions, start=start)
        start += sum(map(len, directions))
        for side, (parts, near) in enumerate(zip(sides, nearest, strict=True)):
            lengths = [len(part) for part in parts.values()]
            labels[side].update(zip(parts, near.split(lengths), strict=True))
    return labels


def _project_and_normalise_rows(parts: list[Tensor], columns: int) -> Tensor:
    """Return rows of length 1 in at most 64 dimensions; rows of zeros stay zero."""
    projection = None
    if columns > DIMENSIONS:
        generator = torch.Generator().manual_seed(columns)
        projection = torch.randn(columns, DIMENSIONS, generator=generator, dtype=torch.float64)
    projected = []
    for part in parts or [torch.zeros(0, columns)]:
        for block in part.split(_ROWS_AT_ONCE):
            rows = block.to(torch.float64)
            largest = rows.abs().amax(1, keepdim=True)
            rows = rows / largest.where(largest > 0, 1.0)
            projected.append(rows if projection is None else rows @ projection)
    return torch.nn.functional.normalize(torch.cat(projected), dim=1)


def _label_nearest_directions(ours: Tensor, theirs: Tensor, *, start: int) -> tuple[Tensor, Tensor]:
    """Return labels from ``start`` on for directions; equal labels for those that are parallel."""
    unknown = _UNKNOWN - start - torch.arange(len(ours))
    unknown[~ours.any(1)] = _ZERO
    if not len(theirs):
        return unknown, torch.arange(0)
    best = [(block @ theirs.T).abs().max(1) for block in ours.split(_ROWS_AT_ONCE)]
    nearest, apart = torch.cat([x.indices for x in best]), 1 - torch.cat([x.values for x in best])
    known = apart < 1 - LEAST_COSINE
    noise = float(apart[known].quantile(0.9)) if bool(known.any()) else 0.0
    parallel = min(_WIDEST, max(_SAME, 4 * noise))
    # The first of all parallel rows stands for them.
    same = (1 - (block @ theirs.T).abs() <= parallel for block in theirs.split(_ROWS_AT_ONCE))
    right = start + torch.cat([x.to(torch.uint8).argmax(1) for x in same])
    right[~theirs.any(1)] = _ZERO
    return right[nearest].where(known, unknown), right


Step: TypeAlias = RowMap | MatrixMap
Steps: TypeAlias = tuple[Step, ...]  # applied to b in this order


@dataclass(frozen=True)
class LabelsAfterSteps:
    """Sequences of labels, each after at most one step; the first is after none."""

    steps: Sequence[Steps]
    labels: Tensor  # (sequences of steps, rows of all roles)


def search_steps(
    a: Labelled,
    b: Labelled,
    catalogue: RowMapCatalogue,
    matrix_maps: Sequence[MatrixMap],
    roles: tuple[str, ...],
) -> list[Steps]:
    """Return the shortest sequences of steps that make a's labels of b's, the most usual first.

    Both sides have labels of the ``matrix_maps``. The ``roles`` of a must come out right; the
    sequences have equal effect on them.
    """
    steps: list[Step] = [*catalogue.maps, *matrix_maps]
    whole = [b.plain, *b.plain[catalogue.indices], *(b.labels_after_map(m) for m in matrix_maps)]
    forward = LabelsAfterSteps([(), *((step,) for step in steps)], torch.stack(whole))
    weights = make_multipliers(a.sizes.total_rows, seed=2)
    for role, span in a.sizes.spans().items():
        if role not in roles:
            weights[span] = 0
    wanted = int((a.plain * weights).sum(-1))
    hashes = (forward.labels * weights).sum(-1).tolist()
    if hashes[0] == wanted:
        return [()]
    single = [s for s, value in zip(forward.steps, hashes, strict=True) if value == wanted]
    blocks = find_block_maps(a.plain, b.plain, a.sizes, roles)
    if blocks is not None and len(blocks) == 1:
        single.append(tuple(blocks))
    if not single and (cut := find_cut_map(a.plain, b.plain, a.sizes, roles)) is not None:
        single.append((cut,))
    if single:
        return _select_shortest_sequences(single, roles)
    backward = _backward_labels(a, catalogue, matrix_maps, roles)
    double = list(_yield_meeting_steps(forward, hashes, backward, weights))
    double += _yield_steps_with_block_order(forward, backward, a.plain, b.plain, a.sizes, roles)
    if blocks is not None:
        double.append(tuple(blocks))
    return _select_shortest_sequences(double, roles)


def _backward_labels(
    a: Labelled,
    catalogue: RowMapCatalogue,
    matrix_maps: Sequence[MatrixMap],
    roles: tuple[str, ...],
) -> LabelsAfterSteps:
    counted = torch.zeros(a.sizes.total_rows, dtype=torch.bool)
    for role, span in a.sizes.spans().items():
        counted[span] = role in roles
    closed = (counted[catalogue.inverses] == counted).all(1)
    maps = [m for m, kept in zip(catalogue.permutations, closed.tolist(), strict=True) if kept]
    whole = [m for m in matrix_maps if m.given is None and set(m.roles) <= set(roles)]
    steps: list[Step] = [*maps, *whole]
    undone = (a.labels_after_map(m, undone=True) for m in whole)
    labels = [a.plain, *a.plain[catalogue.inverses[closed]], *undone]
    return LabelsAfterSteps([(), *((step,) for step in steps)], torch.stack(labels))


def _yield_meeting_steps(
    forward: LabelsAfterSteps, hashes: Sequence[int], backward: LabelsAfterSteps, weights: Tensor
) -> Iterator[Steps]:
    before: dict[int, list[Steps]] = defaultdict(list)
    for steps, value in zip(forward.steps, hashes, strict=True):
        before[value].append(steps)
    values = (backward.labels * weights).sum(-1).tolist()
    for second, value in zip(backward.steps, values, strict=True):
        yield from (first + second for first in before.get(value, ()) if first and second)


def _yield_steps_with_block_order(
    forward: LabelsAfterSteps,
    backward: LabelsAfterSteps,
    a: Tensor,
    b: Tensor,
    sizes: RowSizes,
    roles: tuple[str, ...],
) -> Iterator[Steps]:
    for side, other in ((forward, a), (backward, b)):
        possible = _mark_block_permutations(side.labels[1:], other, sizes, roles)
        for place in (possible.nonzero().flatten() + 1).tolist():
            labels, steps = side.labels[place], side.steps[place]
            pair = (a, labels) if side is forward else (labels, b)
            if (blocks := find_block_maps(*pair, sizes, roles)) is not None:
                yield (*steps, *blocks) if side is forward else (*blocks, *steps)


def _select_shortest_sequences(sequences: Sequence[Steps], roles: tuple[str, ...]) -> list[Steps]:
    if not sequences:
        return []
    fewest = min(map(len, sequences))
    shortest = [steps for steps in sequences if len(steps) == fewest]

    def place(steps: Steps) -> tuple[bool, int]:
        moved = {role for step in steps for role in step.names[0].roles}
        return not moved <= set(roles), sum(step.names[0].order for step in steps)

    return sorted(shortest, key=place)


@dataclass(frozen=True)
class RoleSteps:
    """Sequences of steps that have the same effect on the labels of some roles."""

    sequences: tuple[Steps, ...]  # the simplest first
    roles: tuple[str, ...]  # that come out right


def explain_roles(
    a: Labelled, b: Labelled, catalogue: RowMapCatalogue, matrix_maps: Sequence[MatrixMap]
) -> RoleSteps:
    """Return the steps that make a's labels of b's, for all roles whose labels b has."""
    spans, every = a.sizes.spans(), torch.cat([b.plain, *b.by_map.values()])
    known = {role for role, span in spans.items() if torch.isin(a.plain[span], every).all()}
    known |= {role for (role, _), x in a.by_map.items() if torch.isin(x, b.plain).all()}
    roles = tuple(role for role in a.sizes.roles if role in known)
    moved = tuple(r for r in roles if not torch.equal(a.plain[spans[r]], b.plain[spans[r]]))
    if not moved:
        return RoleSteps(((),), roles)
    for together in dict.fromkeys((roles, moved)):
        sequences = search_steps(a, b, catalogue, matrix_maps, together)
        if sequences:
            kept = (
                tuple(_restrict_step(step, together, a.sizes) for step in steps)
                for steps in sequences
            )
            return RoleSteps(tuple(kept), roles)
    steps: list[Step] = []
    explained = [role for role in roles if role not in moved]
    for group in _group_roles_exchanging_rows(a, b, moved):
        sequences = search_steps(a, b, catalogue, matrix_maps, group)
        if sequences:
            explained += group
            more = (_restrict_step(step, group, a.sizes) for step in sequences[0])
            steps = _merge_steps(steps, more, group, a.sizes)
    return RoleSteps((tuple(steps),), tuple(r for r in a.sizes.roles if r in explained))


def _group_roles_exchanging_rows(
    a: Labelled, b: Labelled, roles: tuple[str, ...]
) -> list[tuple[str, ...]]:
    spans = a.sizes.spans()
    groups: list[set[str]] = []
    for role in roles:
        labels = a.plain[spans[role]]
        sources = {role}
        if not torch.equal(labels.sort().values, b.plain[spans[role]].sort().values):
            sources |= {r for r in roles if bool(torch.isin(labels, b.plain[spans[r]]).any())}
        touched = [group for group in groups if group & sources]
        groups = [group for group in groups if not group & sources]
        groups.append(sources.union(*touched))
    return [tuple(role for role in roles if role in group) for group in groups]


def _restrict_step(step: Step, roles: tuple[str, ...], sizes: RowSizes) -> Step:
    if isinstance(step, MatrixMap):
        return replace(step, roles=tuple(r for r in step.roles if r in roles))
    if all(set(name.roles) <= set(roles) for name in step.names):
        return step
    names = (replace(n, roles=tuple(r for r in n.roles if r in roles)) for n in step.names)
    index = _take_from(step.index, torch.arange(sizes.total_rows), roles, sizes)
    return replace(step, names=tuple(names), index=index)


def _take_from(source: Tensor, index: Tensor, roles: tuple[str, ...], sizes: RowSizes) -> Tensor:
    index, spans = index.clone(), sizes.spans()
    for role in roles:
        index[spans[role]] = source[spans[role]]
    return index


def _merge_steps(
    steps: list[Step], more: Iterable[Step], roles: tuple[str, ...], sizes: RowSizes
) -> list[Step]:
    merged = list(steps)
    for step in more:
        joined = ((n, _join_two_steps(other, step, roles, sizes)) for n, other in enumerate(merged))
        place, both = next((pair for pair in joined if pair[1] is not None), (len(merged), step))
        merged[place : place + 1] = [step if both is None else both]
    return merged


def _join_two_steps(
    first: Step, second: Step, roles: tuple[str, ...], sizes: RowSizes
) -> Step | None:
    if isinstance(first, RowMap) and isinstance(second, RowMap):
        shared = tuple(
            replace(name, roles=tuple(r for r in sizes.roles if r in (*name.roles, *other.roles)))
            for name in first.names
            for other in second.names
            if replace(name, roles=(), order=0) == replace(other, roles=(), order=0)
        )
        index = _take_from(second.index, first.index, roles, sizes)
        both_fit = first.is_permutation and second.is_permutation
        both = replace(first, names=shared, index=index, is_permutation=both_fit)
        return both if shared else None
    if isinstance(first, RowMap) or isinstance(second, RowMap):
        return None
    united = {*first.roles, *second.roles}
    is_square = first.is_square and second.is_square
    return replace(first, roles=tuple(r for r in sizes.roles if r in united)) if is_square else None


SHARDS = (2, 4, 8)
HEADS_ORDER, ROLLED_ORDER, SHARDS_ORDER, CUT_ORDER = 1000, 990, 1010, 1020
FUSED = ("q", "k", "v")


def _hash_blocks(labels: Tensor, blocks: int) -> Tensor:
    """Return a hash for each of some blocks of rows of labels (sequences, rows)."""
    rows = labels.unflatten(-1, (blocks, -1))
    return mix_bits((rows * make_multipliers(rows.shape[-1], seed=1)).sum(-1))


def _mark_block_permutations(
    sequences: Tensor, labels: Tensor, sizes: RowSizes, roles: tuple[str, ...]
) -> Tensor:
    fitting = torch.ones(len(sequences), dtype=torch.bool)
    for role, span in sizes.spans().items():
        if role not in roles:
            continue
        some = (sequences[:, span] == labels[span]).all(1)
        for blocks in list_block_counts(role, sizes):
            ours = _hash_blocks(sequences[:, span], blocks).sort(dim=1).values
            theirs = _hash_blocks(labels[None, span], blocks).sort(dim=1).values
            some |= (ours == theirs).all(1)
        fitting &= some
    return fitting


def list_block_counts(role: str, sizes: RowSizes) -> list[int]:
    """Return the numbers of blocks to try, the fewest first."""
    counts = {*SHARDS, sizes.count_heads(role)} - {1}
    return sorted(n for n in counts if sizes.count_rows(role) % n == 0)


def _find_block_order(a: Tensor, b: Tensor, blocks: int) -> list[int] | None:
    ours, theirs = _hash_blocks(a[None], blocks)[0], _hash_blocks(b[None], blocks)[0]
    places: dict[int, list[int]] = defaultdict(list)
    for place, label in reversed(list(enumerate(theirs.tolist()))):
        places[label].append(place)
    order = []
    for place, label in enumerate(ours.tolist()):
        left = places.get(label)
        if not left:
            return None
        # Equal blocks stay at their place where they can.
        order.append(place if place in left else left[-1])
        left.remove(order[-1])
    return order


def find_block_maps(
    a: Tensor, b: Tensor, sizes: RowSizes, roles: tuple[str, ...]
) -> list[RowMap] | None:
    """Return maps of whole blocks that make a's labels of b's in some roles, or None.

    Roles whose blocks have the same order make one map.
    """
    orders: dict[tuple[int, ...], list[str]] = {}
    spans = sizes.spans()
    for role in roles:
        span = spans[role]
        if torch.equal(a[span], b[span]):
            continue
        tried = (_find_block_order(a[span], b[span], n) for n in list_block_counts(role, sizes))
        order = next((order for order in tried if order is not None), None)
        if order is None:
            return None
        orders.setdefault(tuple(order), []).append(role)
    return [make_block_map(order, tuple(moved), sizes) for order, moved in orders.items()]


def make_block_map(order: tuple[int, ...], roles: tuple[str, ...], sizes: RowSizes) -> RowMap:
    """Return the map that puts the blocks of some roles into an order."""
    index, spans = torch.arange(sizes.total_rows), sizes.spans()
    for role in roles:
        rows = index[spans[role]].view(len(order), -1)
        index[spans[role]] = rows[list(order)].flatten()
    names = _name_block_order(order, roles, sizes)
    return RowMap(names, index, is_permutation=True, space=sizes.roles)


def _name_block_order(
    order: tuple[int, ...], roles: tuple[str, ...], sizes: RowSizes
) -> tuple[MapName, ...]:
    count, names = len(order), []
    parameters = (("order", order),)
    listed = " ".join(map(str, order))
    if all(count == sizes.count_heads(role) for role in roles):
        step = order[0]
        text, place = f"heads in the order {listed}", HEADS_ORDER
        if order == tuple((i + step) % count for i in range(count)) and step in (1, count - 1):
            back = "" if step == count - 1 else " backwards"
            text, place = f"rows rolled by one head{back}", ROLLED_ORDER
        names.append(MapName(HEADS_PERMUTED, text, roles, place, parameters))
    if count in SHARDS:
        text = f"{count} shards in the order {listed}"
        names.append(MapName(SHARD_ORDER, text, roles, SHARDS_ORDER, parameters))
    return tuple(sorted(names, key=lambda name: name.order))


def find_cut_map(a: Tensor, b: Tensor, sizes: RowSizes, roles: tuple[str, ...]) -> RowMap | None:
    """Return the map that cuts roles of a out of b's fused rows [q|k|v] at other places, or None.

    A role that is cut so has rows of its own too: rows of another role alone are another mistake.
    """
    spans = sizes.spans()
    if not {*FUSED} <= spans.keys():
        return None
    places = torch.cat([torch.arange(spans[role].start, spans[role].stop) for role in FUSED])
    fused, index, words, moved = b[places], torch.arange(sizes.total_rows), [], []
    starts = dict(zip(FUSED, accumulate(map(sizes.count_rows, FUSED), initial=0), strict=False))
    for role in roles:
        span = spans[role]
        if torch.equal(a[span], b[span]):
            continue
        start = None if role not in starts else _find_run(a[span], fused)
        shift = 0 if start is None else start - starts[role]
        if start is None or not 0 < abs(shift) < sizes.count_rows(role):
            return None
        index[span] = places[start : start + sizes.count_rows(role)]
        words.append(f"{role} from row {start} in place of {starts[role]}")
        moved.append(role)
    name = MapName(
        FUSED_ROW_CUT, ", ".join(words), tuple(moved), CUT_ORDER, (("cut", ", ".join(words)),)
    )
    return RowMap((name,), index, is_permutation=False, space=sizes.roles) if moved else None


def _find_run(labels: Tensor, fused: Tensor) -> int | None:
    near = (fused[: len(fused) - len(labels) + 1] == labels[0]).nonzero().flatten().tolist()
    runs = (n for n in near if torch.equal(fused[n : n + len(labels)], labels))
    return next(runs, None)
