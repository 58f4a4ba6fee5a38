"""Rows of the projections of an attention, and named maps of them.

A row is a channel of a head: its weights, with a bias apart, or its activations over all tokens.

    q (heads, head_dim, columns)      k (kv_heads, head_dim, columns)
    v (kv_heads, value_dim, columns)  o (heads, value_dim, columns)
    g (heads, gate_width, columns)

The rows of o are the columns of the output projection, one for each channel of the head outputs. A
map says for each row of a which row of b it is. Most maps are a pair of patterns of the layout
language: b's rows are stored in the first order, and a is read in the second. Tensors of another
kind, such as the norms of q and k, have rows of one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.function.weights import AXES, KINDS, State, bias_of
from headwise.identify import catalogue
from headwise.identify.catalogue import Cause
from headwise.layouts.pattern import GROUPED, Splits, pack_tensors, parse_pattern, unpack_tensor

TENSORS = KINDS[0]
ROLES = tuple(TENSORS)
WEIGHTS, BIASES, BOTH = ("weights",), ("biases",), ("weights", "biases")


@dataclass(frozen=True)
class RowSizes:
    """Sizes of the projections that two sets of rows share."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rotary_width: int | None = None  # rotated channels of a head; None where nothing says it
    roles: tuple[str, ...] = ROLES[:4]  # the projections that are there, in this order
    is_interleaved: bool = False  # right rows pair channels 2i and 2i + 1
    was_interleaved: bool = False  # rows were stored for such pairs, and read into half-split ones
    gate_width: int = 0

    @classmethod
    def of(cls, rows: State) -> RowSizes:
        """Return the sizes of projections; an absent role has those of its partner.

        Raises:
            ShapeError: two projections contradict each other.
        """
        shapes = {role: tuple(rows[f"w{role}"].shape) for role in list_roles(rows)}
        counts = [
            {shapes[role][axis] for role in roles if role in shapes}
            for axis, roles in ((0, "qog"), (0, "kv"), (1, "qk"), (1, "vo"), (1, "g"))
        ]
        gate_width = next(iter(counts.pop()), 0)
        if max(map(len, counts)) > 1 or not shapes:
            raise ShapeError(
                saw=f"projections of the shapes {shapes}",
                needed="q and o with the same heads, k and v likewise; q and k with the same "
                "channels, v and o likewise",
                do="pass rows in canonical form: (heads, channels, columns)",
            )
        heads, kv_heads, head_dim, value_dim = (
            next(iter(counts[place] or counts[partner]))
            for place, partner in enumerate((1, 0, 3, 2))
        )
        roles = tuple(shapes)
        return cls(heads, kv_heads, head_dim, value_dim, roles=roles, gate_width=gate_width)

    def count_heads(self, role: str) -> int:
        """Return the number of heads of a role."""
        return self.heads if role in "qog" else self.kv_heads

    def count_rows(self, role: str) -> int:
        """Return the number of rows of a role."""
        return self.count_heads(role) * self._count_channels(role)

    def _count_channels(self, role: str) -> int:
        other = self.gate_width if role == "g" else self.value_dim
        return self.head_dim if role in "qk" else other

    def spans(self) -> dict[str, slice]:
        """Return the rows of each role among the rows of all roles."""
        spans, start = {}, 0
        for role in self.roles:
            spans[role] = slice(start, start + self.count_rows(role))
            start += self.count_rows(role)
        return spans

    @property
    def total_rows(self) -> int:
        """The number of rows of all roles."""
        return sum(self.count_rows(role) for role in self.roles)

    def lengths(self, **more: int) -> dict[str, int]:
        """Return a length for each name of a pattern; the columns of a row count as one."""
        group = self.heads // self.kv_heads if self.heads % self.kv_heads == 0 else 1
        names = ("heads", "kv_heads", "head_dim", "value_dim")
        known = {name: getattr(self, name) for name in names}
        return {**known, "group": group, "embed_dim": 1, "out_dim": 1, **more}

    def number_rows(self) -> dict[str, Tensor]:
        """Return the index of each row of each of all roles, (heads, channels, 1)."""
        return {
            role: torch.arange(span.start, span.stop).view(
                self.count_heads(role), self._count_channels(role), 1
            )
            for role, span in replace(self, roles=ROLES).spans().items()
        }


def list_roles(rows: State) -> tuple[str, ...]:
    """Return the roles whose projections are there, in the order of `ROLES`."""
    return tuple(role for role in ROLES if f"w{role}" in rows)


def join_rows(rows: State, role: str) -> Tensor:
    """Return the rows of a role as a matrix, (heads * channels, columns)."""
    return rows[f"w{role}"].flatten(0, 1)


def count_columns(rows: State) -> tuple[int, ...]:
    """Return the number of columns of each role."""
    return tuple(rows[f"w{role}"].shape[2] for role in list_roles(rows))


def list_square_roles(rows: State) -> list[str]:
    """Return the roles whose matrices have as many rows as columns."""
    return [role for role in list_roles(rows) if len({*join_rows(rows, role).shape}) == 1]


def is_of_projections(kind: Mapping[str, str]) -> bool:
    """True if the tensors of a kind are projections of tokens or of latents, by their roles."""
    return kind.items() <= TENSORS.items()


def view_kind(state: State, kind: Mapping[str, str]) -> State:
    """Return the tensors of a kind by the names of projections; vectors are rows of one column."""
    if kind == TENSORS:
        return state
    if is_of_projections(kind):
        names = {name for tensor in kind.values() for name in (tensor, bias_of(tensor))}
        return {name: x for name, x in state.items() if name in names}
    rows = {}
    for role, name in kind.items():
        for letter, tensor in (("w", name), ("b", bias_of(name))):
            if tensor in state:
                x = state[tensor] if AXES[tensor][0].endswith("heads") else state[tensor][None]
                x = x[:, None] if x.dim() == 1 else x
                rows[f"{letter}{role}"] = x if x.dim() == 3 or letter == "b" else x[..., None]
    return rows


def take_rows(rows: State, index: Tensor, sizes: RowSizes, parts: tuple[str, ...]) -> State:
    """Return rows whose row i of all roles is row ``index[i]`` of ``rows``.

    ``parts`` says which of weights and biases move. A bias stays where its source is absent.
    """
    spans, taken = sizes.spans(), dict(rows)
    for part, role in product(parts, sizes.roles):
        held = {each: f"{part[0]}{each}" for each in sizes.roles}
        held = {each: name for each, name in held.items() if name in rows and name != "bo"}
        places = index[spans[role]]
        inside = {source: _is_in_span(places, span) for source, span in spans.items()}
        sources = [source for source, is_there in inside.items() if bool(is_there.any())]
        is_still = torch.equal(places, torch.arange(len(index))[spans[role]])
        if is_still or not held.keys() >= {role, *sources}:
            continue
        x, flat = rows[held[role]], {source: rows[held[source]].flatten(0, 1) for source in sources}
        moved = flat[sources[0]].new_empty(len(places), *x.shape[2:])
        for source in sources:
            rows_of_source = places[inside[source]] - spans[source].start
            moved[inside[source]] = flat[source][rows_of_source].to(moved.dtype)
        taken[held[role]] = moved.view_as(x)
    return taken


def _is_in_span(index: Tensor, span: slice) -> Tensor:
    inside: Tensor = (index >= span.start) & (index < span.stop)
    return inside


@dataclass(frozen=True)
class MapName:
    """Name of a map: the mistake that makes it."""

    cause: Cause
    text: str  # the mistake in words, with its parameters
    roles: tuple[str, ...] = ()  # the projections whose rows move, or tensors of another kind
    order: int = 0  # 0 for the most usual mistakes
    parameters: tuple[tuple[str, Any], ...] = ()  # such as the number of heads that was used

    def __str__(self) -> str:
        return f"{self.cause.name}: {self.text}" if self.text else self.cause.name

    @property
    def repair(self) -> str:
        """The repair in words."""
        weights = [TENSORS.get(role, role) for role in self.roles]
        biases = [name if name == "bo" else bias_of(name) for name in weights]
        listed = {"weights": ", ".join(weights), "biases": ", ".join(biases)}
        return self.cause.remedy.format(**listed, text=self.text, move=self)


@dataclass(frozen=True, eq=False)
class RowMap:
    """A map of rows: row i of all roles becomes row ``index[i]``."""

    names: tuple[MapName, ...]  # the simplest first; the others make the same map at these sizes
    index: Tensor  # (rows of all roles), int64
    is_permutation: bool  # each row is taken once
    space: tuple[str, ...] = ROLES  # the roles whose rows the index counts

    def index_over_roles(self, sizes: RowSizes) -> Tensor:
        """Return the index among the rows of more roles, where the others stay."""
        if self.space == sizes.roles:
            return self.index
        whole = torch.arange(sizes.total_rows)
        places = torch.cat([whole[sizes.spans()[role]] for role in self.space])
        whole[places] = places[self.index]
        return whole


Draft = tuple[MapName, dict[str, Tensor]]  # the rows that each moved role takes, of all four roles


def order_rows_by_pattern(
    pattern: str, sizes: RowSizes, lengths: Mapping[str, int], splits: Splits = GROUPED
) -> Tensor:
    """Return the indices of rows in the order of a pattern; (rows)."""
    indices = {TENSORS[role]: index for role, index in sizes.number_rows().items()}
    return pack_tensors(parse_pattern(pattern), indices, lengths, splits).flatten()


def read_rows_by_pattern(
    pattern: str, rows: Tensor, lengths: Mapping[str, int], splits: Splits = GROUPED
) -> dict[str, Tensor]:
    """Return, for each role of a pattern, the rows that it takes where they are read so."""
    parsed = parse_pattern(pattern)
    canonical = unpack_tensor(parsed, rows.view(parsed.shape(lengths)), lengths, splits)
    return {tensor[1:]: x for tensor, x in canonical.items()}


def make_distinct_maps(
    drafts: Iterable[Draft], sizes: RowSizes, columns: tuple[int, ...]
) -> tuple[RowMap, ...]:
    """Return one map for each distinct draft, the simplest names first.

    Drafts that move nothing at these sizes, or that need a role that is absent or has other
    columns, are left out.
    """
    whole = replace(sizes, roles=ROLES)
    spans, kept = whole.spans(), torch.full((whole.total_rows,), -1)
    for role, span in sizes.spans().items():  # the index of each row among those that are there
        kept[spans[role]] = torch.arange(span.start, span.stop)
    width = dict(zip(sizes.roles, columns, strict=True))
    still = torch.arange(sizes.total_rows)
    distinct: dict[bytes, tuple[Tensor, list[MapName]]] = {}
    for name, moved in drafts:
        moved = {role: index for role, index in moved.items() if role in sizes.roles}
        if not _fits_present_rows(moved, spans, width):
            continue
        index = torch.arange(whole.total_rows)
        for role, taken in moved.items():
            index[spans[role]] = taken.flatten()
        index = kept[index[kept >= 0]]
        if torch.equal(index, still):
            continue
        roles = tuple(r for r, s in sizes.spans().items() if not torch.equal(index[s], still[s]))
        _, names = distinct.setdefault(index.numpy().tobytes(), (index, []))
        names.append(replace(name, roles=roles))
    maps = [
        RowMap(
            tuple(sorted(names, key=lambda name: name.order)),
            index,
            bool((torch.bincount(index, minlength=sizes.total_rows) == 1).all()),
            sizes.roles,
        )
        for index, names in distinct.values()
    ]
    return tuple(sorted(maps, key=lambda row_map: row_map.names[0].order))


def _fits_present_rows(
    moved: Mapping[str, Tensor], spans: Mapping[str, slice], width: Mapping[str, int]
) -> bool:
    if len(width) == len(spans) and len(set(width.values())) == 1:
        return bool(moved)
    return bool(moved) and all(
        width.get(source) == width[role]
        for role, index in moved.items()
        for source, span in spans.items()
        if bool(_is_in_span(index, span).any())
    )


TRANSPOSED_ORDER, RESHAPED_ORDER = 80, 700


@dataclass(frozen=True, eq=False)
class MatrixMap:
    """A matrix of (rows, columns) is stored transposed, and read without a transposition.

    A square matrix comes out transposed. Any other is cut into rows of another length. ``given``
    are the rows with every such matrix transposed, where they cannot be computed: activations. Such
    a map cannot be undone.
    """

    roles: tuple[str, ...]  # the projections whose matrices are read so
    is_square: bool
    is_reversed: bool = False  # the stored matrix is cut first and transposed afterwards
    given: State | None = None

    @property
    def names(self) -> tuple[MapName, ...]:
        """The name of the mistake, as for a map of rows."""
        if self.is_square:
            order = TRANSPOSED_ORDER + (0 if len(self.roles) == 1 else 5 - len(self.roles))
            return (MapName(catalogue.MATRIX_TRANSPOSED, "", self.roles, order),)
        text = "cut, then transposed" if self.is_reversed else "transposed, then cut"
        is_output = self.roles == ("o",)
        cause = catalogue.OUTPUT_RESHAPED if is_output else catalogue.PROJECTION_RESHAPED
        return (MapName(cause, text, self.roles, RESHAPED_ORDER),)

    def apply(self, rows: State, *, undone: bool = False) -> State:
        """Return rows with these matrices read so, or the rows before that; biases stay."""
        if self.given is not None:
            return {**rows, **{f"w{role}": self.given[f"w{role}"] for role in self.roles}}
        made = dict(rows)
        for role in self.roles:
            matrix = join_rows(rows, role)
            if self.is_reversed != undone:
                turned = matrix.reshape(matrix.T.shape).T.contiguous()
            else:
                turned = matrix.T.reshape(matrix.shape)
            made[f"w{role}"] = turned.view_as(rows[f"w{role}"])
        return made
