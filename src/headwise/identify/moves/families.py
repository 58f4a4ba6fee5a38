"""Families of named maps of rows (roles, fused rows, rotated rows, heads), and all of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, permutations, product

import torch
from torch import Tensor

from headwise.identify import catalogue
from headwise.identify.moves import maps
from headwise.identify.moves.maps import ROLES, TENSORS, Draft, MapName, RowMap, RowSizes
from headwise.layouts.pattern import GROUPED, Splits, to_half_split, to_interleaved

USUAL = ("q", "k", "v")
ORDERS = tuple(permutations(USUAL))
RANKS = (2, 4, 8)
_BY_RANK: Splits = {"heads": ("ranks", "rank_heads"), "kv_heads": ("ranks", "rank_kv_heads")}
# order of a family among all: the smaller, the more usual
EXCHANGED, BLOCKS, NESTED, GROUPS, BY_RANK, COPIED = 0, 100, 200, 300, 400, 900


_EXCHANGES = (
    (catalogue.Q_AND_K_EXCHANGED, "", ("q", "k")),
    (catalogue.K_AND_V_EXCHANGED, "", ("k", "v")),
    (catalogue.Q_AND_V_EXCHANGED, "", ("q", "v")),
    (catalogue.FUSED_ROW_ORDER, "heads [q|gate] read as heads [gate|q]", ("q", "g")),
    *(
        (catalogue.ANOTHER_ROLE, f"the gate and {role} are exchanged", (role, "g"))
        for role in USUAL
    ),
)


def _draft_exchanged_roles(sizes: RowSizes) -> Iterator[Draft]:
    indices = sizes.number_rows()
    for cause, words, (first, second) in _EXCHANGES:
        if indices[first].numel() != indices[second].numel():
            continue
        exchanged = {first: indices[second], second: indices[first]}
        yield MapName(cause, words, (), EXCHANGED), exchanged
        for role, source in ((first, second), (second, first)):
            text = f"{role} holds the rows of {source}".replace("g ", "the gate ")
            name = MapName(catalogue.ANOTHER_ROLE, text, (), COPIED, (("source", source),))
            yield name, {role: indices[source]}


def _draft_fused_orders(sizes: RowSizes) -> Iterator[Draft]:
    nests = _fused_row_patterns(sizes)
    written = {(nest, order): nest.write(order) for nest, order in product(nests, ORDERS)}
    rows = {
        (nest, order): maps.order_rows_by_pattern(pattern, sizes, nest.lengths, nest.splits)
        for (nest, order), pattern in written.items()
    }
    flat = nests[0]
    for (nest, order), (other, reading) in product(rows, rows):
        is_same_nest, is_flat = nest is other, flat in (nest, other)
        if is_same_nest and order == reading:
            continue
        # Pairs that occur: one change at a time, or two beside the plain order.
        is_usual = order == reading == USUAL
        if is_flat:
            is_usual = order == reading or USUAL in (order, reading)
        if not (is_same_nest or is_usual):
            continue
        family = max(other.family, nest.family)
        if is_same_nest:
            cause, place = catalogue.FUSED_ROW_ORDER, family + (0 if nest is flat else 20)
        else:
            mixed = order != USUAL or reading != USUAL
            cause, place = _CAUSE_OF[family], family + 10 * mixed + 10 * (not is_flat)
        stored, read = nest.describe(order), other.describe(reading)
        # A reader of several ranks needs the ranks of its own order alone.
        moved = maps.read_rows_by_pattern(
            written[other, reading], rows[nest, order], other.lengths, other.splits
        )
        parameters = (("stored", stored), ("read", read))
        yield MapName(cause, f"{stored} read as {read}", (), place, parameters), moved


def _draft_fused_pair_orders(sizes: RowSizes) -> Iterator[Draft]:
    if sizes.head_dim == sizes.value_dim:
        yield from _draft_orders_of_pair("k", "v", "kv_heads", sizes)
    if sizes.head_dim == sizes.gate_width:
        yield from _draft_orders_of_pair("q", "g", "heads", sizes)
        yield from _draft_orders_of_pair("g", "q", "heads", sizes)


def _draft_orders_of_pair(first: str, second: str, heads: str, sizes: RowSizes) -> Iterator[Draft]:
    lengths, pair = sizes.lengths(), f"[{first}|{second}]".replace("g", "gate")
    blocks = (
        (pair, "", f"{heads} head_dim"),
        (f"{heads} {pair} head_dim", f"{heads} ", "head_dim"),
        (f"{heads} head_dim {pair}", f"{heads} head_dim ", ""),
        (f"{pair} head_dim {heads}", "", f"head_dim {heads}"),
    )
    nests = {
        name: f"({before}[w{first}: {inner} | w{second}: {inner}]) embed_dim"
        for name, before, inner in blocks
    }
    rows = {
        nest: maps.order_rows_by_pattern(pattern, sizes, lengths) for nest, pattern in nests.items()
    }
    for nest, other in permutations(nests, 2):
        place = NESTED + 15 + 10 * (pair not in (nest, other))
        text, parameters = f"{nest} read as {other}", (("stored", nest), ("read", other))
        name = MapName(catalogue.FUSED_ROW_NESTING, text, (), place, parameters)
        yield name, maps.read_rows_by_pattern(nests[other], rows[nest], lengths)


_CAUSE_OF = {
    BLOCKS: catalogue.FUSED_ROW_ORDER,
    NESTED: catalogue.FUSED_ROW_NESTING,
    GROUPS: catalogue.FUSED_ROW_GROUPS,
    BY_RANK: catalogue.SHARD_ORDER,
}


@dataclass(frozen=True, eq=False)
class _Nest:
    """A nesting of fused rows: its name, in which ``*`` stands for the blocks, and its pattern."""

    name: str
    before: str  # the axes around the blocks in the axis of rows
    blocks: tuple[str, str, str]  # the axes within the blocks of q, k and v
    family: int  # the order of the maps that read it
    lengths: dict[str, int]
    splits: Splits

    def write(self, order: tuple[str, ...]) -> str:
        inner = dict(zip(USUAL, self.blocks, strict=True))
        blocks = " | ".join(f"{TENSORS[role]}: {inner[role]}" for role in order)
        return f"({self.before}[{blocks}]) embed_dim"

    def describe(self, order: tuple[str, ...]) -> str:
        return self.name.replace("*", f"[{'|'.join(order)}]")


def _fused_row_patterns(sizes: RowSizes) -> list[_Nest]:
    whole = ("heads head_dim", "kv_heads head_dim", "kv_heads value_dim")
    shapes = [("*", "", whole, BLOCKS)]
    is_equal = sizes.heads == sizes.kv_heads
    is_square = sizes.head_dim == sizes.value_dim
    if sizes.heads % sizes.kv_heads == 0 and sizes.kv_heads > 1:
        if is_equal:
            inner = ("head_dim", "head_dim", "value_dim")
            shapes.append(("heads * head_dim", "heads ", inner, NESTED))
        else:
            inner = ("group head_dim", "head_dim", "value_dim")
            shapes.append(("kv_heads * head_dim", "kv_heads ", inner, GROUPS))
    if is_square:
        inner = ("heads", "kv_heads", "kv_heads")
        shapes.append(("head_dim * heads", "head_dim ", inner, NESTED))
        inner = ("head_dim heads", "head_dim kv_heads", "head_dim kv_heads")
        shapes.append(("* head_dim heads", "", inner, NESTED))
    if is_equal and is_square:
        for around in ("heads head_dim", "head_dim heads"):
            shapes.append((f"{around} *", f"{around} ", ("", "", ""), NESTED))
    nests = [
        _Nest(name, before, inner, family, sizes.lengths(), GROUPED)
        for name, before, inner, family in shapes
    ]
    for ranks in RANKS:
        if sizes.heads % ranks or sizes.kv_heads % ranks:
            continue
        heads, kv_heads = sizes.heads // ranks, sizes.kv_heads // ranks
        lengths = sizes.lengths(ranks=ranks, rank_heads=heads, rank_kv_heads=kv_heads)
        inner = ("rank_heads head_dim", "rank_kv_heads head_dim", "rank_kv_heads value_dim")
        nests.append(_Nest(f"{ranks} ranks *", "ranks ", inner, BY_RANK, lengths, _BY_RANK))
    return nests


SCOPES = (
    (*USUAL, "o"),
    USUAL,
    *((role,) for role in (*USUAL, "o")),
    *map(tuple, ("qk", "kv", "qo", "vo", "g", "qkvg")),
)
INTERLEAVED, OUTPUT_GROUPS, TILED, QUERY_GROUPS, FIRST_SHARD = 110, 120, 130, 140, 800
REVERSED = 810


def _draft_interleaved_heads(sizes: RowSizes) -> Iterator[Draft]:
    """Yield rows stored channel by channel and read head by head, and the reverse."""
    indices = sizes.number_rows()
    changes: tuple[tuple[str, Callable[[Tensor], Tensor], int], ...] = (
        ("head_dim heads read as heads head_dim", lambda x: x.transpose(0, 1), 0),
        ("heads head_dim read as head_dim heads", lambda x: x.reshape(*x.shape[1::-1]).T, 2),
    )
    for (place, scope), (text, change, back) in product(enumerate(SCOPES), changes):
        name = MapName(catalogue.HEADS_INTERLEAVED, text, (), INTERLEAVED + back + place // 6)
        yield name, {role: change(indices[role]) for role in scope}


def _draft_reversed_rows(sizes: RowSizes) -> Iterator[Draft]:
    indices = sizes.number_rows()
    for scope in (*((role,) for role in ROLES), ROLES):
        name = MapName(catalogue.HEADS_PERMUTED, "all rows in the reverse order", (), REVERSED)
        yield name, {role: indices[role].flip(0, 1) for role in scope}


def _draft_head_group_orders(sizes: RowSizes) -> Iterator[Draft]:
    indices = sizes.number_rows()
    for number in (n for n in range(2, sizes.heads) if sizes.heads % n == 0):
        group = sizes.heads // number
        known = number == sizes.kv_heads or sizes.kv_heads == sizes.heads
        far = 0 if number == sizes.kv_heads else 20 if known else 600
        by_kv_head, across = "by kv head, (kv_heads group)", "across kv heads, (group kv_heads)"
        for groups, first in ((number, by_kv_head), (group, across)):
            second = across if groups == number else by_kv_head
            text = f"heads stored {first}, and read {second}"
            back = far + (groups != number)
            kinds = [
                (catalogue.OUTPUT_GROUP_ORDER, text, OUTPUT_GROUPS, "o"),
                (catalogue.KV_HEADS_TILED, text, TILED, "qo"),
                (catalogue.HEADS_PERMUTED, f"query {text}", QUERY_GROUPS, "q"),
            ]
            if sizes.kv_heads == sizes.heads:  # of a file that holds each kv head several times
                words = f"{number} heads in {sizes.heads} places"
                kinds.append((catalogue.KV_HEADS_TILED, words, TILED, "kv"))
            for cause, words, place, roles in kinds:
                name = MapName(cause, words, (), place + back, (("kv_heads", number),))
                # The heads of all groups, in the order of their place in the group.
                grouped = {role: indices[role].unflatten(0, (groups, -1)) for role in roles}
                yield name, {role: rows.transpose(0, 1) for role, rows in grouped.items()}


def _draft_repeated_first_shards(sizes: RowSizes) -> Iterator[Draft]:
    for role, index in sizes.number_rows().items():
        rows = index.flatten()
        for shards in sorted({*RANKS, sizes.count_heads(role)}):
            if len(rows) % shards == 0:
                text, parameters = f"every of {shards} shards is the first", (("shards", shards),)
                name = MapName(catalogue.SHARD_ORDER, text, (), FIRST_SHARD, parameters)
                yield name, {role: rows[: len(rows) // shards].repeat(shards)}


ROTATED_SCOPES = (("q", "k"), ("q",), ("k",))
MISSING, DOUBLED, WRONG_HEADS, VALUES, WRONG_WIDTH = 50, 60, 70, 80, 650
Permutation = Callable[[Tensor, int], Tensor]  # of rows (heads, head_dim, 1), of that width


def _draft_rotary_maps(sizes: RowSizes) -> Iterator[Draft]:
    wanted = [sizes.rotary_width, sizes.head_dim, sizes.head_dim // 2, sizes.head_dim // 4]
    fitting = (w for w in wanted if w and w > 2 and w % 2 == 0 and w <= sizes.head_dim)
    widths = list(dict.fromkeys(fitting))
    missing, doubled = interleave_pairs, split_pairs
    if sizes.is_interleaved or sizes.was_interleaved:
        missing, doubled = split_pairs, interleave_pairs
    indices = sizes.number_rows()
    for (place, width), scope in product(enumerate(widths), ROTATED_SCOPES):
        text = "" if width == sizes.head_dim else f"the first {width} channels of each head"
        apart = 5 * place + (scope != ("q", "k"))
        for cause, order, permute in (
            (catalogue.ROTARY_PERMUTATION_MISSING, MISSING, missing),
            (catalogue.ROTARY_PERMUTATION_DOUBLED, DOUBLED, doubled),
        ):
            name = MapName(cause, text, (), order + apart, (("width", width),))
            yield name, {role: permute(indices[role], width) for role in scope}
    for done, right in product(widths, widths):
        text = f"the first {done} channels of each head for the first {right}"
        name = MapName(catalogue.ROTARY_PERMUTATION_WIDTH, text, (), WRONG_WIDTH)
        for scope in ROTATED_SCOPES if done != right else ():
            moved = {role: interleave_pairs(indices[role], right) for role in scope}
            yield name, {role: split_pairs(rows, done) for role, rows in moved.items()}
    yield from _draft_wrong_head_counts(sizes)
    yield from _draft_permuted_values(sizes)
    width = sizes.rotary_width or 0
    if 0 < width < sizes.head_dim and "k" not in sizes.roles:  # whose key is shared, in part
        yield from _draft_rotated_channels_place(indices["q"], width)


def _draft_rotated_channels_place(rows: Tensor, width: int) -> Iterator[Draft]:
    """Yield queries whose channels that turn are at the other end of each head."""
    for by, text in ((width, "behind"), (-width, "before")):
        words = f"the {width} channels that turn are {text} the others"
        name = MapName(catalogue.ROTATED_CHANNELS_PLACE, words, (), MISSING)
        yield name, {"q": rows.roll(by, 1)}
        # as read in the order of the canonical form, of rows that pair channels 2i and 2i + 1
        yield name, {"q": split_pairs(interleave_pairs(rows, width).roll(by, 1), width)}


def _draft_permuted_values(sizes: RowSizes) -> Iterator[Draft]:
    """Yield values that were permuted like queries and keys, for their own heads or others."""
    rows, values = sizes.count_rows("v"), sizes.number_rows()["v"]
    for heads in (n for n in range(1, rows // 2 + 1) if rows % (2 * n) == 0):
        is_right = heads == sizes.kv_heads
        words = "" if is_right else f", for {_describe_number_of_heads(heads)}"
        text = f"values, which do not rotate, were permuted too{words}"
        place = VALUES + (0 if is_right else 10 if heads in (1, sizes.heads) else 500)
        name = MapName(catalogue.ROTARY_PERMUTATION_DOUBLED, text, (), place)
        for permute in (interleave_pairs, split_pairs):
            yield name, {"v": _permute_in_heads(values, heads, permute)}


def _describe_number_of_heads(heads: int) -> str:
    return f"{heads} head{'s' * (heads != 1)}"


def _draft_wrong_head_counts(sizes: RowSizes) -> Iterator[Draft]:
    """Yield rows for the other pairing whose permutation was made for other heads."""
    head_dim, indices = sizes.head_dim, sizes.number_rows()
    if sizes.rotary_width not in (None, head_dim) or head_dim % 2:
        return
    to, back, pairs = split_pairs, interleave_pairs, "interleaved"
    if sizes.is_interleaved:
        to, back, pairs = interleave_pairs, split_pairs, "half-split"
    for scope in ROTATED_SCOPES:
        rows = [sizes.count_rows(role) for role in scope]
        right = dict.fromkeys(sizes.count_heads(role) for role in scope)
        for heads in range(1, max(rows) // 2 + 1):
            if [*right] == [heads] or any(count % (2 * heads) for count in rows):
                continue
            known = heads in (sizes.heads, sizes.kv_heads, sizes.heads // sizes.kv_heads)
            place = WRONG_HEADS + (0 if known else 500) + (scope == ("q", "k"))
            number = _describe_number_of_heads(heads)
            text = f"made for {number} instead of {' and '.join(map(str, right))}"
            cause, parameters = catalogue.ROTARY_PERMUTATION_HEADS, (("heads", heads),)
            name = MapName(cause, text, (), place, parameters)
            stored = {role: back(indices[role], head_dim) for role in scope}
            yield name, {role: _permute_in_heads(x, heads, to) for role, x in stored.items()}
            name = replace(name, text=f"{text}, to {pairs} pairs", order=place + 2)
            read = {role: _permute_in_heads(indices[role], heads, back) for role in scope}
            yield name, {role: to(x, head_dim) for role, x in read.items()}


def interleave_pairs(rows: Tensor, width: int) -> Tensor:
    """Return rows (heads, head_dim, 1) whose pairs go from half-split to interleaved."""
    return to_interleaved({"wq": rows}, width=width)["wq"]


def split_pairs(rows: Tensor, width: int) -> Tensor:
    """Return rows (heads, head_dim, 1) whose pairs go from interleaved to half-split."""
    return to_half_split({"wq": rows}, width=width)["wq"]


def _permute_in_heads(rows: Tensor, heads: int, permute: Permutation) -> Tensor:
    stored = rows.reshape(heads, -1, 1)
    return permute(stored, stored.shape[1]).reshape(rows.shape)


FAMILIES = (
    _draft_exchanged_roles,
    _draft_fused_orders,
    _draft_fused_pair_orders,
    _draft_rotary_maps,
    _draft_interleaved_heads,
    _draft_head_group_orders,
    _draft_repeated_first_shards,
    _draft_reversed_rows,
)


@dataclass(frozen=True, eq=False)
class RowMapCatalogue:
    """The maps for some sizes."""

    maps: tuple[RowMap, ...]  # of distinct effect, the most usual first; none moves nothing
    indices: Tensor  # (maps, rows)
    permutations: tuple[RowMap, ...]  # the maps that have an inverse
    inverses: Tensor  # (permutations, rows)


@lru_cache(maxsize=8)
def make_row_map_catalogue(sizes: RowSizes, columns: tuple[int, ...]) -> RowMapCatalogue:
    """Return the maps for these sizes; rows of different ``columns`` are never exchanged."""
    drafts = chain.from_iterable(family(sizes) for family in FAMILIES)
    distinct = maps.make_distinct_maps(drafts, sizes, columns)
    permuted = tuple(each for each in distinct if each.is_permutation)
    none = torch.empty(0, sizes.total_rows, dtype=torch.int64)
    indices = torch.cat([none, *(each.index[None] for each in distinct)])
    inverses = torch.cat([none, *(each.index.argsort()[None] for each in permuted)])
    return RowMapCatalogue(distinct, indices, permuted, inverses)
