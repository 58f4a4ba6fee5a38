"""Orders of whole blocks of rows, heads or shards, that are read off the labels."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from headwise.diagnosis.moves.labels import hash_label_sequences, make_hash_multipliers, mix_bits
from headwise.diagnosis.moves.maps import MapName, RowMap
from headwise.diagnosis.moves.rows import RowSizes

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
            names.append(MapName("heads permuted", text, roles, ROLLED_ORDER, parameters))
        else:
            text = f"heads in the order {listed}"
            names.append(MapName("heads permuted", text, roles, HEADS_ORDER, parameters))
    if count in SHARDS:
        text = f"{count} shards in the order {listed}"
        cause = "shards joined in the wrong order"
        names.append(MapName(cause, text, roles, SHARDS_ORDER, parameters))
    return tuple(sorted(names, key=lambda name: name.order))
