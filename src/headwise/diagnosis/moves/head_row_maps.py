"""Maps of heads: interleaved, in another group order, tiled, or copied from one shard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from headwise.diagnosis.moves.fused_maps import RANKS
from headwise.diagnosis.moves.row_map import (
    Draft,
    MapName,
    number_rows_by_role,
    sizes_with_all_roles,
)
from headwise.diagnosis.moves.rows_of_all_projections import ROLES, RowSizes

SCOPES = (
    ("q", "k", "v", "o"),
    ("q", "k", "v"),
    ("q",),
    ("k",),
    ("v",),
    ("o",),
    ("q", "k"),
    ("k", "v"),
    ("q", "o"),
    ("v", "o"),
)
INTERLEAVED, OUTPUT_GROUPS, TILED, QUERY_GROUPS, FIRST_SHARD = 110, 120, 130, 140, 800


def draft_interleaved_heads(sizes: RowSizes) -> Iterator[Draft]:
    """Yield rows stored channel by channel and read head by head, and the reverse."""
    indices = number_rows_by_role(sizes)
    for place, scope in enumerate(SCOPES):
        text = "head_dim heads read as heads head_dim"
        name = MapName("heads interleaved", text, (), INTERLEAVED + place // 6)
        yield name, {role: _store_by_channel(indices[role]) for role in scope}
        text = "heads head_dim read as head_dim heads"
        name = MapName("heads interleaved", text, (), INTERLEAVED + 2 + place // 6)
        yield name, {role: _reread_by_channel(indices[role]) for role in scope}


def draft_head_group_orders(sizes: RowSizes) -> Iterator[Draft]:
    """Yield heads in another order of groups."""
    indices = number_rows_by_role(sizes)
    for number in _list_nontrivial_divisors(sizes.heads):
        group = sizes.heads // number
        known = number == sizes.kv_heads or sizes.kv_heads == sizes.heads
        far = 0 if number == sizes.kv_heads else 20 if known else 600
        by_kv_head, across = "by kv head, (kv_heads group)", "across kv heads, (group kv_heads)"
        for groups, first in ((number, by_kv_head), (group, across)):
            second = across if groups == number else by_kv_head
            regroup = partial(_regroup_heads, groups=groups)
            text = f"heads stored {first}, and read {second}"
            parameters = (("kv_heads", number),)
            back = far + (groups != number)
            name = MapName(
                "output heads in another group order", text, (), OUTPUT_GROUPS + back, parameters
            )
            yield name, {"o": regroup(indices["o"])}
            tiled = "kv heads tiled instead of repeated"
            name = MapName(tiled, text, (), TILED + back, parameters)
            yield name, {role: regroup(indices[role]) for role in "qo"}
            name = MapName("heads permuted", f"query {text}", (), QUERY_GROUPS + back, parameters)
            yield name, {"q": regroup(indices["q"])}
            if sizes.kv_heads == sizes.heads:  # of a file that holds each kv head several times
                text = f"{number} heads in {sizes.heads} places"
                name = MapName(tiled, text, (), TILED + back, parameters)
                yield name, {role: regroup(indices[role]) for role in "kv"}


def draft_repeated_first_shards(sizes: RowSizes) -> Iterator[Draft]:
    """Yield roles that hold the first shard or the first head at every place."""
    indices = number_rows_by_role(sizes)
    for role in ROLES:
        rows = indices[role].flatten()
        for shards in sorted({*RANKS, sizes_with_all_roles(sizes).count_heads(role)}):
            if len(rows) % shards:
                continue
            text = f"every of {shards} shards is the first"
            name = MapName(
                "shards joined in the wrong order", text, (), FIRST_SHARD, (("shards", shards),)
            )
            yield name, {role: rows[: len(rows) // shards].repeat(shards)}


def _store_by_channel(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).flatten()


def _reread_by_channel(rows: Tensor) -> Tensor:
    heads, channels, _ = rows.shape
    return rows.reshape(channels, heads).T.flatten()


def _regroup_heads(rows: Tensor, groups: int) -> Tensor:
    """Return heads of ``groups`` groups in the order of their place in the group."""
    heads, channels, _ = rows.shape
    return rows.reshape(groups, heads // groups, channels).transpose(0, 1).flatten()


def _list_nontrivial_divisors(count: int) -> list[int]:
    return [n for n in range(2, count) if count % n == 0]
