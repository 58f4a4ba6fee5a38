"""Rows of the four projections of an attention, and the space of their indices.

A row is a channel of a head: its weights, with a bias apart, or its activations over all tokens.

    q (heads, head_dim, columns)      k (kv_heads, head_dim, columns)
    v (kv_heads, value_dim, columns)  o (heads, value_dim, columns)

The rows of o are the columns of the output projection, one for each channel of the head outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.errors import ShapeError

ROLES = ("q", "k", "v", "o")


@dataclass(frozen=True)
class RowSizes:
    """Sizes of the projections that two sets of rows share.

    Attributes:
        roles: the projections that are there, in the order of `ROLES`.
        rotary_width: rotated channels of a head; None where nothing says it.
        is_interleaved: True if right rows pair channels 2i and 2i + 1.
        was_interleaved: True if the rows to explain were stored for such pairs, and read into
            half-split ones.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rotary_width: int | None = None
    roles: tuple[str, ...] = ROLES
    is_interleaved: bool = False
    was_interleaved: bool = False

    def count_heads(self, role: str) -> int:
        """Return the number of heads of a role."""
        return self.heads if role in "qo" else self.kv_heads

    def count_channels(self, role: str) -> int:
        """Return the channels of each head of a role."""
        return self.head_dim if role in "qk" else self.value_dim

    def count_rows(self, role: str) -> int:
        """Return the number of rows of a role."""
        return self.count_heads(role) * self.count_channels(role)

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


@dataclass(frozen=True)
class Rows:
    """Projections by role.

    Attributes:
        matrices: role -> (heads, channels, columns).
        biases: role -> (heads, channels); a role without a bias is absent.
    """

    matrices: Mapping[str, Tensor]
    biases: Mapping[str, Tensor] = field(default_factory=dict)

    def head_counts_and_dims(self, rotary_width: int | None = None) -> RowSizes:
        """Return the sizes of these projections; an absent role has those of its partner.

        Raises:
            ShapeError: two projections contradict each other.
        """
        shapes = {role: tuple(self.matrices[role].shape) for role in self.roles}
        heads = {shapes[role][0] for role in "qo" if role in shapes}
        kv_heads = {shapes[role][0] for role in "kv" if role in shapes}
        head_dim = {shapes[role][1] for role in "qk" if role in shapes}
        value_dim = {shapes[role][1] for role in "vo" if role in shapes}
        if max(map(len, (heads, kv_heads, head_dim, value_dim))) > 1 or not shapes:
            raise ShapeError(
                saw=f"projections of the shapes {shapes}",
                needed="q and o with the same heads, k and v likewise; q and k with the same "
                "channels, v and o likewise",
                do="pass rows in canonical form: (heads, channels, columns)",
            )
        [heads_, kv_heads_] = [
            next(iter(x or y)) for x, y in ((heads, kv_heads), (kv_heads, heads))
        ]
        wide = next(iter(head_dim or value_dim))
        tall = next(iter(value_dim or head_dim))
        return RowSizes(heads_, kv_heads_, wide, tall, rotary_width, self.roles)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that are there, in the order of `ROLES`."""
        return tuple(role for role in ROLES if role in self.matrices)

    def matrix_of_role(self, role: str) -> Tensor:
        """Return the rows of a role as a matrix.

        Returns:
            (heads * channels, columns).
        """
        return self.matrices[role].flatten(0, 1)

    def column_counts(self) -> tuple[int, ...]:
        """Return the number of columns of each role."""
        return tuple(self.matrices[role].shape[2] for role in self.roles)


def take_rows(rows: Rows, index: Tensor, sizes: RowSizes, parts: tuple[str, ...]) -> Rows:
    """Return rows whose row i of all roles is row ``index[i]`` of ``rows``.

    Args:
        rows: the projections.
        index: (rows of all roles), in the order of `RowSizes.spans`.
        sizes: of the rows.
        parts: ``"weights"``, ``"biases"``: which of the two move.
    """
    matrices, biases = dict(rows.matrices), dict(rows.biases)
    spans = sizes.spans()
    for role, span in spans.items():
        taken = index[span]
        if torch.equal(taken, torch.arange(span.start, span.stop)):
            continue
        if "weights" in parts:
            taken_rows = _take_rows_at(taken, {r: rows.matrix_of_role(r) for r in spans}, spans)
            matrices[role] = taken_rows.view_as(rows.matrices[role])
        present = {r: rows.biases[r].flatten()[:, None] for r in spans if r in rows.biases}
        sources = {r for r, s in spans.items() if _index_reads_span(taken, s)}
        if "biases" in parts and role in rows.biases and sources <= set(present):
            biases[role] = _take_rows_at(taken, present, spans).view_as(rows.biases[role])
    return Rows(matrices, biases)


def _index_reads_span(index: Tensor, span: slice) -> bool:
    return bool(((index >= span.start) & (index < span.stop)).any())


def _take_rows_at(index: Tensor, flat: Mapping[str, Tensor], spans: Mapping[str, slice]) -> Tensor:
    """Return the rows at ``index``, of as many columns as their source has."""
    taken = None
    for role, span in spans.items():
        inside = (index >= span.start) & (index < span.stop)
        if not bool(inside.any()):
            continue
        if taken is None:
            taken = flat[role].new_empty(len(index), flat[role].shape[1])
        taken[inside] = flat[role][index[inside] - span.start].to(taken.dtype)
    assert taken is not None
    return taken
