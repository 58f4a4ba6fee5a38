"""Search of named maps that make one sequence of labels of another.

Depth 2 meets in the middle: maps applied to b on one side, inverse maps applied to a on the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from headwise.diagnosis.moves.find_head_and_shard_orders import (
    find_block_maps,
    mark_possible_block_permutations,
)
from headwise.diagnosis.moves.matrix_map import MatrixMap
from headwise.diagnosis.moves.row_hashes import hash_label_sequences, make_hash_multipliers
from headwise.diagnosis.moves.row_labels_by_content import Labelled
from headwise.diagnosis.moves.row_map import RowMap
from headwise.diagnosis.moves.row_map_catalogue import RowMapCatalogue
from headwise.diagnosis.moves.rows_of_all_projections import RowSizes

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
