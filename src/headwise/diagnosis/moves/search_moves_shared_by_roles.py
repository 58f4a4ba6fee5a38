"""Steps for as many roles as possible, together where that is possible, else in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.diagnosis.moves.matrix_map import MatrixMap
from headwise.diagnosis.moves.row_labels_by_content import Labelled
from headwise.diagnosis.moves.row_map import MapName, RowMap
from headwise.diagnosis.moves.row_map_catalogue import RowMapCatalogue
from headwise.diagnosis.moves.rows_of_all_projections import RowSizes
from headwise.diagnosis.moves.search_moves import Step, Steps, search_steps


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
