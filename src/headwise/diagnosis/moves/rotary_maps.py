"""Maps of rotated rows: the permutation between interleaved and half-split pairs, done wrongly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.diagnosis.moves.projection_rows import RowSizes
from headwise.diagnosis.moves.row_map import Draft, MapName, role_indices
from headwise.layouts.pattern import to_half_split, to_interleaved

SCOPES = (("q", "k"), ("q",), ("k",))
MISSING, DOUBLED, WRONG_HEADS, WRONG_WIDTH = 50, 60, 70, 650


def rotary_maps(sizes: RowSizes) -> Iterator[Draft]:
    """Yield permutations that are missing, doubled, or made for other heads or another width."""
    widths = _widths(sizes)
    missing, doubled = interleaved, half_split
    if sizes.is_interleaved:
        missing, doubled = half_split, interleaved
    for place, width in enumerate(widths):
        text = "" if width == sizes.head_dim else f"the first {width} channels of each head"
        width_of = (("width", width),)
        for scope in SCOPES:
            apart = 5 * place + (scope != ("q", "k"))
            name = MapName("rotary permutation missing", text, (), MISSING + apart, width_of)
            yield name, _each(scope, sizes, lambda x, w=width: missing(x, w))
            name = MapName("rotary permutation doubled", text, (), DOUBLED + apart, width_of)
            yield name, _each(scope, sizes, lambda x, w=width: doubled(x, w))
    for done in widths:
        for right in widths:
            text = f"the first {done} channels of each head for the first {right}"
            name = MapName("rotary permutation of another width", text, (), WRONG_WIDTH)
            for scope in SCOPES if done != right else ():
                yield name, _each(scope, sizes, lambda x, w=done, r=right: _rewidth(x, w, r))
    yield from _wrong_heads(sizes)


def _wrong_heads(sizes: RowSizes) -> Iterator[Draft]:
    whole = sizes.rotary_width in (None, sizes.head_dim)
    for scope in SCOPES if whole and sizes.head_dim % 2 == 0 else ():
        rows = [sizes.count(role) for role in scope]
        counts = [n for n in range(1, max(rows) // 2 + 1) if all(r % (2 * n) == 0 for r in rows)]
        for heads in counts:
            if all(heads == sizes.heads_of(role) for role in scope):
                continue
            known = heads in (sizes.heads, sizes.kv_heads, sizes.heads // sizes.kv_heads)
            place = WRONG_HEADS + (0 if known else 500) + (scope == ("q", "k"))
            text = f"made for {heads} heads"
            name = MapName(
                "rotary permutation with a wrong number of heads",
                text,
                (),
                place,
                (("heads", heads),),
            )
            yield name, _each(scope, sizes, lambda x, n=heads: _to_half(x, n))
            back = MapName(
                name.cause, f"{text}, to interleaved pairs", (), place + 2, name.parameters
            )
            yield back, _each(scope, sizes, lambda x, n=heads: _to_pairs(x, n))


def interleaved(rows: Tensor, width: int) -> Tensor:
    """Return rows (heads, head_dim, 1) whose pairs go from half-split to interleaved."""
    return to_interleaved({"wq": rows}, width=width)["wq"]


def half_split(rows: Tensor, width: int) -> Tensor:
    """Return rows (heads, head_dim, 1) whose pairs go from interleaved to half-split."""
    return to_half_split({"wq": rows}, width=width)["wq"]


def _rewidth(rows: Tensor, done: int, right: int) -> Tensor:
    return half_split(interleaved(rows, right), done)


def _to_half(rows: Tensor, heads: int) -> Tensor:
    """Return interleaved rows after a permutation to half-split pairs with a wrong head count."""
    stored = interleaved(rows, rows.shape[1]).reshape(heads, -1, 1)
    return half_split(stored, stored.shape[1]).reshape(rows.shape)


def _to_pairs(rows: Tensor, heads: int) -> Tensor:
    """Return rows after a permutation to interleaved pairs with a wrong head count."""
    stored = rows.reshape(heads, -1, 1)
    return half_split(interleaved(stored, stored.shape[1]).reshape(rows.shape), rows.shape[1])


def _widths(sizes: RowSizes) -> list[int]:
    """Return widths to try, the most likely first."""
    wanted = [sizes.rotary_width, sizes.head_dim, sizes.head_dim // 2, sizes.head_dim // 4]
    fitting = [w for w in wanted if w and w > 2 and w % 2 == 0 and w <= sizes.head_dim]
    return list(dict.fromkeys(fitting))


def _each(scope: tuple[str, ...], sizes: RowSizes, moved: object) -> dict[str, Tensor]:
    assert callable(moved)
    indices = role_indices(sizes)
    return {role: torch.as_tensor(moved(indices[role])).flatten() for role in scope}
