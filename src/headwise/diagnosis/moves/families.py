"""Families of named maps of rows (roles, fused rows, rotated rows, heads), and all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, permutations, product

import torch
from torch import Tensor

from headwise.diagnosis.catalogue import (
    ANOTHER_ROLE,
    FUSED_ROW_GROUPS,
    FUSED_ROW_NESTING,
    FUSED_ROW_ORDER,
    HEADS_INTERLEAVED,
    HEADS_PERMUTED,
    K_AND_V_EXCHANGED,
    KV_HEADS_TILED,
    OUTPUT_GROUP_ORDER,
    Q_AND_K_EXCHANGED,
    Q_AND_V_EXCHANGED,
    ROTARY_PERMUTATION_DOUBLED,
    ROTARY_PERMUTATION_HEADS,
    ROTARY_PERMUTATION_MISSING,
    ROTARY_PERMUTATION_WIDTH,
    SHARD_ORDER,
)
from headwise.diagnosis.moves.maps import (
    TENSORS,
    Draft,
    MapName,
    RowMap,
    lengths_of_pattern_names,
    make_distinct_maps,
    number_rows_by_role,
    order_rows_by_pattern,
    read_rows_by_pattern,
    sizes_with_all_roles,
)
from headwise.diagnosis.moves.rows import ROLES, RowSizes
from headwise.layouts.pattern import GROUPED, Splits, to_half_split, to_interleaved

USUAL = ("q", "k", "v")
ORDERS = tuple(permutations(USUAL))
RANKS = (2, 4, 8)
_BY_RANK: Splits = {"heads": ("ranks", "rank_heads"), "kv_heads": ("ranks", "rank_kv_heads")}
# order of a family among all: the smaller, the more usual
EXCHANGED, BLOCKS, NESTED, GROUPS, BY_RANK, COPIED = 0, 100, 200, 300, 400, 900


_EXCHANGES = {
    Q_AND_K_EXCHANGED: ("q", "k"),
    K_AND_V_EXCHANGED: ("k", "v"),
    Q_AND_V_EXCHANGED: ("q", "v"),
}


def draft_exchanged_roles(sizes: RowSizes) -> Iterator[Draft]:
    """Yield the exchanges of two roles, and one role in the place of another."""
    indices = {role: index.flatten() for role, index in number_rows_by_role(sizes).items()}
    for cause, (first, second) in _EXCHANGES.items():
        if len(indices[first]) != len(indices[second]):
            continue
        exchanged = {first: indices[second], second: indices[first]}
        yield MapName(cause, "", (), EXCHANGED), exchanged
        for role, source in ((first, second), (second, first)):
            text = f"{role} holds the rows of {source}"
            name = MapName(ANOTHER_ROLE, text, (), COPIED, (("source", source),))
            yield name, {role: indices[source]}


def draft_fused_orders(sizes: RowSizes) -> Iterator[Draft]:
    """Yield fused rows that are stored in one order and read in another."""
    nests = _fused_row_patterns(sizes)
    rows: dict[tuple[str, tuple[str, ...]], Tensor] = {
        (nest, order): order_rows_by_pattern(
            _write_fused_pattern(pattern, order), sizes, lengths, splits
        )
        for nest, (pattern, lengths, splits, _) in nests.items()
        for order in ORDERS
    }
    flat = next(iter(nests))
    for (nest, order), (other, reading) in product(rows, rows):
        if (nest, order) == (other, reading) or not _is_usual_pair(
            nest, order, other, reading, flat
        ):
            continue
        pattern, lengths, splits, family = nests[other]
        family = max(family, nests[nest][3])
        mixed = order != USUAL or reading != USUAL
        if nest == other:
            cause, place = FUSED_ROW_ORDER, family + (0 if nest == flat else 20)
        else:
            cause = _CAUSE_OF[family]
            place = family + 10 * mixed + 10 * (flat not in (nest, other))
        text = f"{_write_block_order(nest, order)} read as {_write_block_order(other, reading)}"
        parameters = (
            ("stored", _write_block_order(nest, order)),
            ("read", _write_block_order(other, reading)),
        )
        # A reader of several ranks needs the ranks of its own order alone.
        moved = read_rows_by_pattern(
            _write_fused_pattern(pattern, reading), rows[nest, order], lengths, splits
        )
        yield MapName(cause, text, (), place, parameters), moved


def draft_fused_kv_orders(sizes: RowSizes) -> Iterator[Draft]:
    """Yield keys and values that are fused without the queries."""
    if sizes.head_dim != sizes.value_dim:
        return
    lengths = lengths_of_pattern_names(sizes)
    nests = {
        "[k|v]": "([wk: kv_heads head_dim | wv: kv_heads head_dim]) embed_dim",
        "kv_heads [k|v] head_dim": "(kv_heads [wk: head_dim | wv: head_dim]) embed_dim",
        "kv_heads head_dim [k|v]": "(kv_heads head_dim [wk: | wv:]) embed_dim",
        "[k|v] head_dim kv_heads": "([wk: head_dim kv_heads | wv: head_dim kv_heads]) embed_dim",
    }
    rows = {nest: order_rows_by_pattern(pattern, sizes, lengths) for nest, pattern in nests.items()}
    for nest, other in permutations(nests, 2):
        moved = read_rows_by_pattern(nests[other], rows[nest], lengths)
        text = f"{nest} read as {other}"
        place = NESTED + 15 + 10 * ("[k|v]" not in (nest, other))
        name = MapName(FUSED_ROW_NESTING, text, (), place, (("stored", nest), ("read", other)))
        yield name, moved


_CAUSE_OF = {
    BLOCKS: FUSED_ROW_ORDER,
    NESTED: FUSED_ROW_NESTING,
    GROUPS: FUSED_ROW_GROUPS,
    BY_RANK: SHARD_ORDER,
}
_Nest = tuple[tuple[str, ...], dict[str, int], Splits, int]


def _fused_row_patterns(sizes: RowSizes) -> dict[str, _Nest]:
    """Return name -> (pattern in parts, lengths, splits, family); ``*`` stands for the blocks."""
    lengths = lengths_of_pattern_names(sizes)
    flat = ("(", "heads head_dim", "kv_heads head_dim", "kv_heads value_dim", ") embed_dim")
    nests: dict[str, _Nest] = {"*": (flat, lengths, GROUPED, BLOCKS)}
    is_equal = sizes.heads == sizes.kv_heads
    is_square = sizes.head_dim == sizes.value_dim
    if sizes.heads % sizes.kv_heads == 0 and sizes.kv_heads > 1:
        if is_equal:
            blocks = ("(heads ", "head_dim", "head_dim", "value_dim", ") embed_dim")
            nests["heads * head_dim"] = (blocks, lengths, GROUPED, NESTED)
        else:
            blocks = ("(kv_heads ", "group head_dim", "head_dim", "value_dim", ") embed_dim")
            nests["kv_heads * head_dim"] = (blocks, lengths, GROUPED, GROUPS)
    if is_square:
        blocks = ("(head_dim ", "heads", "kv_heads", "kv_heads", ") embed_dim")
        nests["head_dim * heads"] = (blocks, lengths, GROUPED, NESTED)
        blocks = ("(", "head_dim heads", "head_dim kv_heads", "head_dim kv_heads", ") embed_dim")
        nests["* head_dim heads"] = (blocks, lengths, GROUPED, NESTED)
    if is_equal and is_square:
        for around in ("heads head_dim", "head_dim heads"):
            nests[f"{around} *"] = (
                (f"({around} ", "", "", "", ") embed_dim"),
                lengths,
                GROUPED,
                NESTED,
            )
    for ranks in RANKS:
        if sizes.heads % ranks or sizes.kv_heads % ranks:
            continue
        cut = {
            "ranks": ranks,
            "rank_heads": sizes.heads // ranks,
            "rank_kv_heads": sizes.kv_heads // ranks,
        }
        inner = ("rank_heads head_dim", "rank_kv_heads head_dim", "rank_kv_heads value_dim")
        blocks = ("(ranks ", *inner, ") embed_dim")
        nests[f"{ranks} ranks *"] = (
            blocks,
            lengths_of_pattern_names(sizes, **cut),
            _BY_RANK,
            BY_RANK,
        )
    return nests


def _write_fused_pattern(parts: tuple[str, ...], order: tuple[str, ...]) -> str:
    opening, *names, closing = parts
    inner = dict(zip(USUAL, names, strict=True))
    blocks = " | ".join(f"{TENSORS[role]}: {inner[role]}" for role in order)
    return f"{opening}[{blocks}]{closing}"


def _write_block_order(nest: str, order: tuple[str, ...]) -> str:
    return nest.replace("*", f"[{'|'.join(order)}]")


def _is_usual_pair(
    nest: str, order: tuple[str, ...], other: str, reading: tuple[str, ...], flat: str
) -> bool:
    """True for pairs that occur: one change at a time, or two beside the plain order."""
    if nest == other:
        return True
    if flat in (nest, other):
        return order == reading or USUAL in (order, reading)
    return order == reading == USUAL


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
        name = MapName(HEADS_INTERLEAVED, text, (), INTERLEAVED + place // 6)
        yield name, {role: _store_by_channel(indices[role]) for role in scope}
        text = "heads head_dim read as head_dim heads"
        name = MapName(HEADS_INTERLEAVED, text, (), INTERLEAVED + 2 + place // 6)
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
            name = MapName(OUTPUT_GROUP_ORDER, text, (), OUTPUT_GROUPS + back, parameters)
            yield name, {"o": regroup(indices["o"])}
            name = MapName(KV_HEADS_TILED, text, (), TILED + back, parameters)
            yield name, {role: regroup(indices[role]) for role in "qo"}
            name = MapName(HEADS_PERMUTED, f"query {text}", (), QUERY_GROUPS + back, parameters)
            yield name, {"q": regroup(indices["q"])}
            if sizes.kv_heads == sizes.heads:  # of a file that holds each kv head several times
                text = f"{number} heads in {sizes.heads} places"
                name = MapName(KV_HEADS_TILED, text, (), TILED + back, parameters)
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
            name = MapName(SHARD_ORDER, text, (), FIRST_SHARD, (("shards", shards),))
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


ROTATED_SCOPES = (("q", "k"), ("q",), ("k",))
MISSING, DOUBLED, WRONG_HEADS, VALUES, WRONG_WIDTH = 50, 60, 70, 80, 650
Permutation = Callable[[Tensor, int], Tensor]  # of rows (heads, head_dim, 1), of that width


def draft_rotary_maps(sizes: RowSizes) -> Iterator[Draft]:
    """Yield permutations that are missing, doubled, or made for other heads or another width."""
    widths = _list_rotary_widths(sizes)
    missing, doubled = interleave_pairs, split_pairs_in_halves
    if sizes.is_interleaved or sizes.was_interleaved:
        missing, doubled = split_pairs_in_halves, interleave_pairs
    for place, width in enumerate(widths):
        text = "" if width == sizes.head_dim else f"the first {width} channels of each head"
        width_of = (("width", width),)
        for scope in ROTATED_SCOPES:
            apart = 5 * place + (scope != ("q", "k"))
            name = MapName(ROTARY_PERMUTATION_MISSING, text, (), MISSING + apart, width_of)
            yield name, _map_each_role(scope, sizes, lambda x, w=width: missing(x, w))
            name = MapName(ROTARY_PERMUTATION_DOUBLED, text, (), DOUBLED + apart, width_of)
            yield name, _map_each_role(scope, sizes, lambda x, w=width: doubled(x, w))
    for done in widths:
        for right in widths:
            text = f"the first {done} channels of each head for the first {right}"
            name = MapName(ROTARY_PERMUTATION_WIDTH, text, (), WRONG_WIDTH)
            for scope in ROTATED_SCOPES if done != right else ():
                yield (
                    name,
                    _map_each_role(
                        scope, sizes, lambda x, w=done, r=right: _permute_with_wrong_width(x, w, r)
                    ),
                )
    yield from _draft_wrong_head_counts(sizes)
    yield from _draft_permuted_values(sizes)


def _draft_permuted_values(sizes: RowSizes) -> Iterator[Draft]:
    """Yield values that were permuted like queries and keys, for their own heads or others."""
    rows = sizes.count_rows("v")
    for heads in (n for n in range(1, rows // 2 + 1) if rows % (2 * n) == 0):
        width, is_right = rows // heads, heads == sizes.kv_heads
        words = "" if is_right else f", for {describe_number_of_heads(heads)}"
        text = f"values, which do not rotate, were permuted too{words}"
        place = VALUES + (0 if is_right else 10 if heads in (1, sizes.heads) else 500)
        name = MapName(ROTARY_PERMUTATION_DOUBLED, text, (), place)
        for permute in (interleave_pairs, split_pairs_in_halves):
            yield (
                name,
                _map_each_role(
                    ("v",), sizes, lambda x, n=heads, w=width, f=permute: f(x.reshape(n, w, 1), w)
                ),
            )


def describe_number_of_heads(heads: int) -> str:
    """Return "1 head", or a number of heads."""
    return f"{heads} head{'s' * (heads != 1)}"


def _draft_wrong_head_counts(sizes: RowSizes) -> Iterator[Draft]:
    whole = sizes.rotary_width in (None, sizes.head_dim)
    to, back = (
        (interleave_pairs, split_pairs_in_halves)
        if sizes.is_interleaved
        else (split_pairs_in_halves, interleave_pairs)
    )
    pairs = "half-split" if sizes.is_interleaved else "interleaved"
    for scope in ROTATED_SCOPES if whole and sizes.head_dim % 2 == 0 else ():
        rows = [sizes.count_rows(role) for role in scope]
        counts = [n for n in range(1, max(rows) // 2 + 1) if all(r % (2 * n) == 0 for r in rows)]
        for heads in counts:
            if all(heads == sizes.count_heads(role) for role in scope):
                continue
            known = heads in (sizes.heads, sizes.kv_heads, sizes.heads // sizes.kv_heads)
            place = WRONG_HEADS + (0 if known else 500) + (scope == ("q", "k"))
            right = dict.fromkeys(str(sizes.count_heads(role)) for role in scope)
            text = f"made for {describe_number_of_heads(heads)} instead of {' and '.join(right)}"
            name = MapName(
                ROTARY_PERMUTATION_HEADS,
                text,
                (),
                place,
                (("heads", heads),),
            )
            yield (
                name,
                _map_each_role(
                    scope, sizes, lambda x, n=heads: _read_permuted_with_wrong_heads(x, n, to, back)
                ),
            )
            name = replace(name, text=f"{text}, to {pairs} pairs", order=place + 2)
            yield (
                name,
                _map_each_role(
                    scope,
                    sizes,
                    lambda x, n=heads: _store_permuted_with_wrong_heads(x, n, to, back),
                ),
            )


def interleave_pairs(rows: Tensor, width: int) -> Tensor:
    """Return rows (heads, head_dim, 1) whose pairs go from half-split to interleaved."""
    return to_interleaved({"wq": rows}, width=width)["wq"]


def split_pairs_in_halves(rows: Tensor, width: int) -> Tensor:
    """Return rows (heads, head_dim, 1) whose pairs go from interleaved to half-split."""
    return to_half_split({"wq": rows}, width=width)["wq"]


def _permute_with_wrong_width(rows: Tensor, done: int, right: int) -> Tensor:
    return split_pairs_in_halves(interleave_pairs(rows, right), done)


def _read_permuted_with_wrong_heads(
    rows: Tensor, heads: int, to: Permutation, back: Permutation
) -> Tensor:
    """Return rows that were stored for the other pairing, permuted with a wrong head count."""
    stored = back(rows, rows.shape[1]).reshape(heads, -1, 1)
    return to(stored, stored.shape[1]).reshape(rows.shape)


def _store_permuted_with_wrong_heads(
    rows: Tensor, heads: int, to: Permutation, back: Permutation
) -> Tensor:
    """Return rows that were stored for the other pairing with a wrong head count."""
    stored = rows.reshape(heads, -1, 1)
    return to(back(stored, stored.shape[1]).reshape(rows.shape), rows.shape[1])


def _list_rotary_widths(sizes: RowSizes) -> list[int]:
    """Return widths to try, the most likely first."""
    wanted = [sizes.rotary_width, sizes.head_dim, sizes.head_dim // 2, sizes.head_dim // 4]
    fitting = [w for w in wanted if w and w > 2 and w % 2 == 0 and w <= sizes.head_dim]
    return list(dict.fromkeys(fitting))


def _map_each_role(scope: tuple[str, ...], sizes: RowSizes, moved: object) -> dict[str, Tensor]:
    assert callable(moved)
    indices = number_rows_by_role(sizes)
    return {role: torch.as_tensor(moved(indices[role])).flatten() for role in scope}


FAMILIES = (
    draft_exchanged_roles,
    draft_fused_orders,
    draft_fused_kv_orders,
    draft_rotary_maps,
    draft_interleaved_heads,
    draft_head_group_orders,
    draft_repeated_first_shards,
)


@dataclass(frozen=True, eq=False)
class RowMapCatalogue:
    """The maps for some sizes.

    Attributes:
        maps: of distinct effect, the most usual first; none moves nothing.
        indices: (maps, rows).
        permutations: the maps that have an inverse.
        inverses: (permutations, rows).
    """

    maps: tuple[RowMap, ...]
    indices: Tensor
    permutations: tuple[RowMap, ...]
    inverses: Tensor


@lru_cache(maxsize=8)
def make_row_map_catalogue(sizes: RowSizes, columns: tuple[int, ...]) -> RowMapCatalogue:
    """Return the maps for these sizes.

    Args:
        sizes: of the rows.
        columns: of each role; rows of different widths are never exchanged.
    """
    drafts = chain.from_iterable(family(sizes) for family in FAMILIES)
    maps = make_distinct_maps(drafts, sizes, columns)
    permutations = tuple(row_map for row_map in maps if row_map.is_permutation)
    none = torch.empty(0, sizes.total_rows, dtype=torch.int64)
    return RowMapCatalogue(
        maps,
        torch.stack([x.index for x in maps]) if maps else none,
        permutations,
        torch.stack([x.inverse_index() for x in permutations]) if permutations else none,
    )
