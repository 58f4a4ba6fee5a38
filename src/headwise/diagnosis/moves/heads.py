"""Maps of heads, of their rotated rows, and of whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis.moves.fused import RANKS
from headwise.diagnosis.moves.maps import Draft, MapName, number_rows_by_role, sizes_with_all_roles
from headwise.diagnosis.moves.rows import ROLES, Rows, RowSizes
from headwise.layouts.pattern import to_half_split, to_interleaved

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
            name = MapName("rotary permutation missing", text, (), MISSING + apart, width_of)
            yield name, _map_each_role(scope, sizes, lambda x, w=width: missing(x, w))
            name = MapName("rotary permutation doubled", text, (), DOUBLED + apart, width_of)
            yield name, _map_each_role(scope, sizes, lambda x, w=width: doubled(x, w))
    for done in widths:
        for right in widths:
            text = f"the first {done} channels of each head for the first {right}"
            name = MapName("rotary permutation of another width", text, (), WRONG_WIDTH)
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


TRANSPOSED_ORDER, RESHAPED_ORDER = 80, 700


@dataclass(frozen=True, eq=False)
class MatrixMap:
    """A matrix of (rows, columns) is stored transposed, and read without a transposition.

    A square matrix comes out transposed. Any other is cut into rows of another length.

    Attributes:
        roles: the projections whose matrices are read so.
        is_reversed: True if the stored matrix is cut first and transposed afterwards.
        given: the rows with every such matrix transposed, where they cannot be computed:
            activations. Such a map cannot be undone.
    """

    roles: tuple[str, ...]
    is_square: bool
    is_reversed: bool = False
    given: Rows | None = None

    @property
    def names(self) -> tuple[MapName, ...]:
        """The name of the mistake, as for a map of rows."""
        if self.is_square:
            order = TRANSPOSED_ORDER + (0 if len(self.roles) == 1 else 5 - len(self.roles))
            return (MapName("square matrix transposed", "", self.roles, order),)
        text = "cut, then transposed" if self.is_reversed else "transposed, then cut"
        cause = "output projection reshaped with exchanged axes"
        if self.roles != ("o",):
            cause = "projection reshaped with exchanged axes"
        return (MapName(cause, text, self.roles, RESHAPED_ORDER),)

    def apply(self, rows: Rows) -> Rows:
        """Return rows with these matrices read so; biases stay."""
        if self.given is not None:
            taken = {role: self.given.matrices[role] for role in self.roles}
            return Rows({**rows.matrices, **taken}, rows.biases)
        return self._reread_rows(rows, is_reversed=self.is_reversed)

    def undo(self, rows: Rows) -> Rows:
        """Return the rows that `apply` makes these of."""
        return self._reread_rows(rows, is_reversed=not self.is_reversed)

    def _reread_rows(self, rows: Rows, *, is_reversed: bool) -> Rows:
        matrices = dict(rows.matrices)
        for role in self.roles:
            matrices[role] = transpose_into_same_shape(
                rows.matrix_of_role(role), is_reversed=is_reversed
            ).view_as(rows.matrices[role])
        return Rows(matrices, rows.biases)


def transpose_into_same_shape(matrix: Tensor, *, is_reversed: bool) -> Tensor:
    """Return a matrix of the same shape whose entries were stored or read with exchanged axes.

    Args:
        matrix: (rows, columns).
        is_reversed: True to cut first and transpose afterwards.
    """
    rows, columns = matrix.shape
    if is_reversed:
        return matrix.reshape(columns, rows).T.contiguous()
    return matrix.T.reshape(rows, columns)
