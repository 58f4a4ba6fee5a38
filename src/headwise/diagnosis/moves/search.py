"""Search of named maps that make one sequence of labels of another.

Depth 2 meets in the middle: maps applied to b on one side, inverse maps applied to a on the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from headwise.diagnosis.moves.catalogue import RowMapCatalogue
from headwise.diagnosis.moves.heads import MatrixMap
from headwise.diagnosis.moves.labels import Labelled, hash_label_sequences, make_hash_multipliers
from headwise.diagnosis.moves.maps import MapName, RowMap
from headwise.diagnosis.moves.orders import find_block_maps, mark_possible_block_permutations
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
