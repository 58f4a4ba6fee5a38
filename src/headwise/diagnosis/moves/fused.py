"""Maps of fused rows: roles exchanged, orders of blocks, nestings, groups and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from torch import Tensor

from headwise.diagnosis.moves.maps import (
    TENSORS,
    Draft,
    MapName,
    lengths_of_pattern_names,
    number_rows_by_role,
    order_rows_by_pattern,
    read_rows_by_pattern,
)
from headwise.diagnosis.moves.rows import RowSizes
from headwise.layouts.pattern import GROUPED, Splits

USUAL = ("q", "k", "v")
ORDERS = tuple(permutations(USUAL))
RANKS = (2, 4, 8)
_BY_RANK: Splits = {"heads": ("ranks", "rank_heads"), "kv_heads": ("ranks", "rank_kv_heads")}
# order of a family among all: the smaller, the more usual
EXCHANGED, BLOCKS, NESTED, GROUPS, BY_RANK, COPIED = 0, 100, 200, 300, 400, 900


def draft_exchanged_roles(sizes: RowSizes) -> Iterator[Draft]:
    """Yield the exchanges of two roles, and one role in the place of another."""
    indices = {role: index.flatten() for role, index in number_rows_by_role(sizes).items()}
    for first, second in (("q", "k"), ("k", "v"), ("q", "v")):
        if len(indices[first]) != len(indices[second]):
            continue
        exchanged = {first: indices[second], second: indices[first]}
        yield MapName(f"{first} and {second} exchanged", "", (), EXCHANGED), exchanged
        for role, source in ((first, second), (second, first)):
            text = f"{role} holds the rows of {source}"
            name = MapName("rows of another role", text, (), COPIED)
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
            cause, place = "order of fused rows", family + (0 if nest == flat else 20)
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
        name = MapName(
            "nesting of fused rows", text, (), place, (("stored", nest), ("read", other))
        )
        yield name, moved


_CAUSE_OF = {
    BLOCKS: "order of fused rows",
    NESTED: "nesting of fused rows",
    GROUPS: "kv groups of fused rows",
    BY_RANK: "shards joined in the wrong order",
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
