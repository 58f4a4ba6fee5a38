"""Maps of rotated rows: the permutation between interleaved and half-split pairs, done wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headwise.diagnosis.moves.row_map import Draft, MapName, number_rows_by_role
from headwise.diagnosis.moves.rows_of_all_projections import RowSizes
from headwise.layouts.pattern import to_half_split, to_interleaved

SCOPES = (("q", "k"), ("q",), ("k",))
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
        for scope in SCOPES:
            apart = 5 * place + (scope != ("q", "k"))
            name = MapName("rotary permutation missing", text, (), MISSING + apart, width_of)
            yield name, _map_each_role(scope, sizes, lambda x, w=width: missing(x, w))
            name = MapName("rotary permutation doubled", text, (), DOUBLED + apart, width_of)
            yield name, _map_each_role(scope, sizes, lambda x, w=width: doubled(x, w))
    for done in widths:
        for right in widths:
            text = f"the first {done} channels of each head for the first {right}"
            name = MapName("rotary permutation of another width", text, (), WRONG_WIDTH)
            for scope in SCOPES if done != right else ():
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
        name = MapName("rotary permutation doubled", text, (), place)
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
    for scope in SCOPES if whole and sizes.head_dim % 2 == 0 else ():
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
                "rotary permutation with a wrong number of heads",
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
