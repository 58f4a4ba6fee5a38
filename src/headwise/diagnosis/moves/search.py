"""Search of named maps that make one sequence of labels of another.

Depth 2 meets in the middle: maps applied to b on one side, inverse maps applied to a on the other.
Orders of whole blocks of rows, heads or shards, are read off the labels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import HEADS_PERMUTED, SHARD_ORDER
from headwise.diagnosis.moves.families import RowMapCatalogue
from headwise.diagnosis.moves.labels import (
    Labelled,
    hash_label_sequences,
    make_hash_multipliers,
    mix_bits,
)
from headwise.diagnosis.moves.maps import MapName, MatrixMap, RowMap
from headwise.diagnosis.moves.rows import RowSizes

Step: TypeAlias = RowMap | MatrixMap
Steps: TypeAlias = tuple[Step, ...]  # applied to b in this order


@dataclass(frozen=True)
class LabelsAfterSteps:
    """Sequences of labels, each after a step; the first is after none.

    Attributes:
        steps: None for no step.
        labels: (steps, rows of all roles).
    """

    steps: Sequence[Step | None]
    labels: Tensor


def search_steps(
    a: Labelled,
    b: Labelled,
    catalogue: RowMapCatalogue,
    matrix_maps: Sequence[MatrixMap],
    roles: tuple[str, ...],
) -> list[Steps]:
    """Return the shortest sequences of steps that make a's labels of b's, the most usual first.

    Args:
        a: labels to explain.
        b: labels of the right rows.
        catalogue: the maps of rows.
        matrix_maps: those that both sides have labels of.
        roles: the roles of a that must come out right.

    Returns:
        Sequences of equal effect on these labels; empty where none was found.
    """
    forward = LabelsAfterSteps(
        [None, *catalogue.maps, *matrix_maps],
        torch.stack(
            [b.plain, *b.plain[catalogue.indices], *(b.labels_after_map(m) for m in matrix_maps)]
        ),
    )
    weights = _zero_hash_multipliers_outside_roles(a.sizes, roles)
    wanted = int(hash_label_sequences(a.plain, weights))
    hashes = hash_label_sequences(forward.labels, weights).tolist()
    if hashes[0] == wanted:
        return [()]
    single: list[Steps] = [
        (step,)
        for step, value in zip(forward.steps, hashes, strict=True)
        if value == wanted and step is not None
    ]
    blocks = find_block_maps(a.plain, b.plain, a.sizes, roles)
    if blocks is not None and len(blocks) == 1:
        single.append(tuple(blocks))
    if single:
        return _select_shortest_sequences(single, roles)
    backward = _backward_labels(a, catalogue, matrix_maps, roles)
    double = list(_yield_meeting_steps(forward, hashes, backward, weights))
    double += _yield_steps_with_block_order(forward, backward, a.plain, b.plain, a.sizes, roles)
    if blocks is not None:
        double.append(tuple(blocks))
    return _select_shortest_sequences(double, roles)


def _zero_hash_multipliers_outside_roles(sizes: RowSizes, roles: tuple[str, ...]) -> Tensor:
    """Return random numbers for the rows of these roles, and 0 for the others."""
    weights = make_hash_multipliers(sizes.total_rows, seed=2)
    for role, span in sizes.spans().items():
        if role not in roles:
            weights[span] = 0
    return weights


def _backward_labels(
    a: Labelled,
    catalogue: RowMapCatalogue,
    matrix_maps: Sequence[MatrixMap],
    roles: tuple[str, ...],
) -> LabelsAfterSteps:
    """Return a's labels before each step that takes nothing from other roles."""
    counted = torch.zeros(a.sizes.total_rows, dtype=torch.bool)
    for role, span in a.sizes.spans().items():
        counted[span] = role in roles
    closed = (counted[catalogue.inverses] == counted).all(1)
    maps = [m for m, kept in zip(catalogue.permutations, closed.tolist(), strict=True) if kept]
    whole = [m for m in matrix_maps if m.given is None and set(m.roles) <= set(roles)]
    labels = [
        *a.plain[catalogue.inverses[closed]],
        *(a.labels_after_map(m, undone=True) for m in whole),
    ]
    return LabelsAfterSteps([None, *maps, *whole], torch.stack([a.plain, *labels]))


def _yield_meeting_steps(
    forward: LabelsAfterSteps, hashes: Sequence[int], backward: LabelsAfterSteps, weights: Tensor
) -> Iterator[Steps]:
    before: dict[int, list[Step]] = defaultdict(list)
    for step, value in zip(forward.steps, hashes, strict=True):
        if step is not None:
            before[value].append(step)
    values = hash_label_sequences(backward.labels, weights).tolist()
    for second, value in zip(backward.steps, values, strict=True):
        if second is not None:
            yield from ((first, second) for first in before.get(value, ()))


def _yield_steps_with_block_order(
    forward: LabelsAfterSteps,
    backward: LabelsAfterSteps,
    a: Tensor,
    b: Tensor,
    sizes: RowSizes,
    roles: tuple[str, ...],
) -> Iterator[Steps]:
    """Yield a step and an order of blocks, in either order."""
    for place in (
        mark_possible_block_permutations(forward.labels[1:], a, sizes, roles)
        .nonzero()
        .flatten()
        .tolist()
    ):
        blocks = find_block_maps(a, forward.labels[place + 1], sizes, roles)
        step = forward.steps[place + 1]
        if blocks is not None and step is not None:
            yield (step, *blocks)
    for place in (
        mark_possible_block_permutations(backward.labels[1:], b, sizes, roles)
        .nonzero()
        .flatten()
        .tolist()
    ):
        blocks = find_block_maps(backward.labels[place + 1], b, sizes, roles)
        step = backward.steps[place + 1]
        if blocks is not None and step is not None:
            yield (*blocks, step)


def _select_shortest_sequences(sequences: Sequence[Steps], roles: tuple[str, ...]) -> list[Steps]:
    """Return the sequences of the fewest steps, those that move these roles alone first."""
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
    """Sequences of steps that have the same effect on the labels of some roles.

    Attributes:
        sequences: the simplest first.
        roles: the roles that come out right.
    """

    sequences: tuple[Steps, ...]
    roles: tuple[str, ...]


def explain_roles(
    a: Labelled, b: Labelled, catalogue: RowMapCatalogue, matrix_maps: Sequence[MatrixMap]
) -> RoleSteps:
    """Return the steps that make a's labels of b's, for all roles whose labels b has."""
    spans, known = a.sizes.spans(), _has_known_labels_by_role(a, b)
    roles = tuple(role for role in a.sizes.roles if known[role])
    moved = tuple(r for r in roles if not torch.equal(a.plain[spans[r]], b.plain[spans[r]]))
    still = tuple(role for role in roles if role not in moved)
    if not moved:
        return RoleSteps(((),), roles)
    for together in dict.fromkeys((roles, moved)):
        sequences = search_steps(a, b, catalogue, matrix_maps, together)
        if sequences:
            kept = tuple(_restrict_steps_to_roles(steps, together, a.sizes) for steps in sequences)
            return RoleSteps(kept, roles)
    steps: list[Step] = []
    explained = list(still)
    for group in _group_roles_exchanging_rows(a, b, moved):
        sequences = search_steps(a, b, catalogue, matrix_maps, group)
        if sequences:
            explained += group
            steps = _merge_steps(
                steps, _restrict_steps_to_roles(sequences[0], group, a.sizes), group, a.sizes
            )
    return RoleSteps((tuple(steps),), tuple(r for r in a.sizes.roles if r in explained))


def _has_known_labels_by_role(a: Labelled, b: Labelled) -> dict[str, bool]:
    """Return whether each label of a role of a is one of b's."""
    every = torch.cat([b.plain, *b.by_map.values()])
    spans = a.sizes.spans()
    known = {role: bool(torch.isin(a.plain[span], every).all()) for role, span in spans.items()}
    for (role, _), labels in a.by_map.items():
        known[role] |= bool(torch.isin(labels, b.plain).all())
    return known


def _group_roles_exchanging_rows(
    a: Labelled, b: Labelled, roles: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """Return the roles in groups that exchange no rows."""
    spans = a.sizes.spans()
    groups: list[set[str]] = []
    for role in roles:
        labels = a.plain[spans[role]]
        sources = {role}
        if not _have_same_sorted_labels(labels, b.plain[spans[role]]):
            sources |= {r for r in roles if bool(torch.isin(labels, b.plain[spans[r]]).any())}
        touched = [group for group in groups if group & sources]
        groups = [group for group in groups if not group & sources]
        groups.append(sources.union(*touched))
    return [tuple(role for role in roles if role in group) for group in groups]


def _have_same_sorted_labels(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.sort().values, b.sort().values)


def _restrict_steps_to_roles(steps: Steps, roles: tuple[str, ...], sizes: RowSizes) -> Steps:
    """Return steps that leave all other roles where they are."""
    return tuple(_restrict_step_to_roles(step, roles, sizes) for step in steps)


def _restrict_step_to_roles(step: Step, roles: tuple[str, ...], sizes: RowSizes) -> Step:
    if isinstance(step, MatrixMap):
        return replace(step, roles=tuple(r for r in step.roles if r in roles))
    if all(set(name.roles) <= set(roles) for name in step.names):
        return step
    index = torch.arange(sizes.total_rows)
    for role, span in sizes.spans().items():
        if role in roles:
            index[span] = step.index[span]
    names = tuple(
        replace(name, roles=tuple(r for r in name.roles if r in roles)) for name in step.names
    )
    return replace(step, names=names, index=index)


def _merge_steps(
    steps: list[Step], more: Steps, roles: tuple[str, ...], sizes: RowSizes
) -> list[Step]:
    """Return steps of separate groups of roles, those of the same name as one."""
    merged = list(steps)
    for step in more:
        for place, other in enumerate(merged):
            both = _join_two_steps(other, step, roles, sizes)
            if both is not None:
                merged[place] = both
                break
        else:
            merged.append(step)
    return merged


def _join_two_steps(
    first: Step, second: Step, roles: tuple[str, ...], sizes: RowSizes
) -> Step | None:
    """Return one step of two of the same name, or None."""
    if isinstance(first, RowMap) and isinstance(second, RowMap):
        shared = tuple(
            replace(name, roles=tuple(r for r in sizes.roles if r in (*name.roles, *other.roles)))
            for name in first.names
            for other in second.names
            if _name_key_without_roles(name) == _name_key_without_roles(other)
        )
        index = first.index.clone()
        for role in roles:
            index[sizes.spans()[role]] = second.index[sizes.spans()[role]]
        both_fit = first.is_permutation and second.is_permutation
        both = replace(first, names=shared, index=index, is_permutation=both_fit)
        return both if shared else None
    if isinstance(first, RowMap) or isinstance(second, RowMap):
        return None
    united = {*first.roles, *second.roles}
    is_square = first.is_square and second.is_square
    return replace(first, roles=tuple(r for r in sizes.roles if r in united)) if is_square else None


def _name_key_without_roles(name: MapName) -> tuple[object, ...]:
    return (name.cause, name.text, name.parameters)


SHARDS = (2, 4, 8)
HEADS_ORDER, ROLLED_ORDER, SHARDS_ORDER = 1000, 990, 1010


def hash_blocks(labels: Tensor, blocks: int) -> Tensor:
    """Return a hash for each block of rows.

    Args:
        labels: (sequences, rows).
        blocks: a number that divides the rows.

    Returns:
        (sequences, blocks), int64.
    """
    rows = labels.unflatten(-1, (blocks, -1))
    return mix_bits(hash_label_sequences(rows, make_hash_multipliers(rows.shape[-1], seed=1)))


def mark_possible_block_permutations(
    sequences: Tensor, labels: Tensor, sizes: RowSizes, roles: tuple[str, ...]
) -> Tensor:
    """Return which sequences may be the labels with whole blocks in another order.

    Args:
        sequences: (sequences, rows of all roles).
        labels: (rows of all roles).
        sizes: of the rows.
        roles: that have to fit.

    Returns:
        (sequences), bool.
    """
    fitting = torch.ones(len(sequences), dtype=torch.bool)
    for role, span in sizes.spans().items():
        if role not in roles:
            continue
        some = (sequences[:, span] == labels[span]).all(1)
        for blocks in list_block_counts(role, sizes):
            ours = hash_blocks(sequences[:, span], blocks).sort(dim=1).values
            theirs = hash_blocks(labels[None, span], blocks).sort(dim=1).values
            some |= (ours == theirs).all(1)
        fitting &= some
    return fitting


def list_block_counts(role: str, sizes: RowSizes) -> list[int]:
    """Return the numbers of blocks to try, the fewest first."""
    counts = {*SHARDS, sizes.count_heads(role)} - {1}
    return sorted(n for n in counts if sizes.count_rows(role) % n == 0)


def find_block_order(a: Tensor, b: Tensor, blocks: int) -> list[int] | None:
    """Return the order of b's blocks that makes a, or None.

    Args:
        a: (rows), labels.
        b: (rows), likewise.
        blocks: a number that divides the rows.
    """
    ours, theirs = hash_blocks(a[None], blocks)[0], hash_blocks(b[None], blocks)[0]
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
    """Return maps of whole blocks that make a's labels of b's, or None.

    Roles whose blocks have the same order make one map.

    Args:
        a: (rows of all roles), labels.
        b: (rows of all roles), likewise.
        sizes: of the rows.
        roles: that have to come out right.
    """
    orders: dict[tuple[int, ...], list[str]] = {}
    spans = sizes.spans()
    for role in roles:
        span = spans[role]
        if torch.equal(a[span], b[span]):
            continue
        for blocks in list_block_counts(role, sizes):
            order = find_block_order(a[span], b[span], blocks)
            if order is not None:
                orders.setdefault(tuple(order), []).append(role)
                break
        else:
            return None
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
        if order == tuple((i + step) % count for i in range(count)) and step in (1, count - 1):
            text = f"rows rolled by {'one head' if step == count - 1 else 'one head backwards'}"
            names.append(MapName(HEADS_PERMUTED, text, roles, ROLLED_ORDER, parameters))
        else:
            text = f"heads in the order {listed}"
            names.append(MapName(HEADS_PERMUTED, text, roles, HEADS_ORDER, parameters))
    if count in SHARDS:
        text = f"{count} shards in the order {listed}"
        names.append(MapName(SHARD_ORDER, text, roles, SHARDS_ORDER, parameters))
    return tuple(sorted(names, key=lambda name: name.order))
