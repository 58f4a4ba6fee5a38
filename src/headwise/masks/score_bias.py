"""Score biases: a float added to the scores before the softmax, as a lazy value.

Two forms are enough. What depends on the distance ``key - query`` alone (ALiBi, relative
positions) is a table with one entry per distance: queries + keys - 1 numbers for each head, never
queries x keys. Everything else is a dense tensor with named axes. An entry of -inf masks;
``finfo.min`` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from headwise.errors import DeviceError, MaskError
from headwise.masks import clause
from headwise.masks.clause import WHOLE, Align, MatrixPart, MatrixSizes
from headwise.masks.clauses.dense import require_broadcastable_to_matrix, with_matrix_axes
from headwise.masks.mask import Mask
from headwise.support import arguments, text, tracing
from headwise.support.tensors import convert_to_int64


def _alibi_rows(slopes: Tensor, distances: Tensor, dtype: torch.dtype) -> Tensor:
    """``-slope * |distance|``, for the slope of each head."""
    # In bfloat16 a slope times a distance is off by one part in 256: whole points of the score.
    exact = torch.promote_types(torch.promote_types(slopes.dtype, dtype), torch.float32)
    limits = torch.finfo(exact)  # a penalty beyond them hides no key
    return (-slopes.to(exact)[:, None] * distances.abs()).clamp(limits.min, limits.max)


def _relative_rows(table: Tensor, distances: Tensor, _: torch.dtype) -> Tensor:
    """One number for each distance from -reach to reach, of (heads, 2 * reach + 1)."""
    reach = table.shape[1] // 2
    return table[:, distances.clamp(-reach, reach) + reach]


# (heads, distances), with no rounding that the dtype would not make as well.
_ROWS = {"alibi": _alibi_rows, "relative": _relative_rows}


@dataclass(frozen=True, eq=False)
class ByDistance:
    """The bias of each head as a function of ``key - query``.

    A value, not a function: a copy holds its own tensors, and a pickle holds them at all.
    """

    name: str  # its formula, one of `_ROWS`
    given: Tensor  # the caller's tensor, with a row for each head, or one for all
    align: Align | None  # the key from which distances count
    heads: Tensor | None = None  # the numbers of chosen heads; None for all
    shift: int = 0  # added to distances, for a part of a matrix

    def __post_init__(self) -> None:
        clause.require_align(self.align)

    @property
    def num_heads(self) -> int:
        """The number of heads; 1 where one row serves all of them."""
        return len(self.given if self.heads is None or len(self.given) == 1 else self.heads)

    def offset(self, queries: int, keys: int) -> int:
        """Return the key position that is aligned with query 0."""
        what = f"a {self.name} bias"
        return clause.resolve_align(self.align, queries, keys, what=what)

    def rows(self, distances: Int[Tensor, " n"], dtype: torch.dtype) -> Tensor:
        """Return the bias of each head at these distances, (heads, n)."""
        rows = _ROWS[self.name](self.given, distances + self.shift, dtype)
        return rows if self.heads is None or len(rows) == 1 else rows.index_select(0, self.heads)

    def of_heads(self, index: Tensor) -> ByDistance:
        """Return the bias of chosen heads."""
        return replace(self, heads=index if self.heads is None else self.heads[index])


@dataclass(frozen=True, eq=False)
class ScoreBias:
    """A lazy sum of biases. Build one with a classmethod, add with ``+``."""

    by_distance: tuple[ByDistance, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def dense(cls, bias: Float[Tensor, "..."], *, axes: str) -> ScoreBias:
        """A float tensor whose axes are named, e.g. ``axes="heads queries keys"``.

        Raises:
            MaskError: ``bias`` is a tensor of no float dtype, or ``axes`` does not name its axes.
        """
        arguments.require_tensors(bias=bias)
        if not bias.is_floating_point():
            raise MaskError(
                saw=f"ScoreBias.dense with a tensor of dtype {bias.dtype}",
                needed="a float that is added to the scores",
                do="a bool mask is a Mask: Mask.may_attend(t, axes=...)",
            )
        return cls(tensors=(with_matrix_axes(bias, axes),))

    @classmethod
    def alibi(cls, slopes: Float[Tensor, " heads"], *, align: Align | None = None) -> ScoreBias:
        """``-slope * |key - query|`` for each head (Press et al. 2022, arXiv:2108.12409).

        The product is made in float32 or wider, whatever the dtype of the slopes.

        Raises:
            MaskError: slopes that are no floats, or not one for each head.
        """
        _require_float_tensor(slopes, "slopes", ("heads",))
        return cls(by_distance=(ByDistance("alibi", slopes, align),))

    @classmethod
    def relative(
        cls, table: Float[Tensor, "heads distances"], *, align: Align | None = None
    ) -> ScoreBias:
        """One learned number for each head and distance from -reach to +reach.

        ``table`` has 2 * reach + 1 columns; farther keys take the outermost entry (the clipping
        of Shaw et al. 2018, arXiv:1803.02155).
        """
        _require_float_tensor(table, "table", ("heads", "distances"))
        if table.shape[1] % 2 == 0:
            raise MaskError(
                saw=f"a relative table with {table.shape[1]} distances",
                needed="an odd number: 2 * reach + 1, for distances -reach to +reach",
                do=f"e.g. {table.shape[1] + 1} columns for reach {table.shape[1] // 2}",
            )
        return cls(by_distance=(ByDistance("relative", table, align),))

    def of_heads(self, index: Integer[Tensor, " chosen"]) -> ScoreBias:
        """The bias of chosen heads alone."""
        index = convert_to_int64(index, "heads")
        parts = tuple(part.of_heads(index) for part in self.by_distance)
        tensors = tuple(t if t.shape[1] == 1 else t.index_select(1, index) for t in self.tensors)
        return ScoreBias(parts, tensors)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> ScoreBias:
        """The bias with ``function`` of each of its tensors, in the order of `all_tensors`."""
        tensors = tuple(map(function, self.tensors))
        parts = tuple(replace(part, given=function(part.given)) for part in self.by_distance)
        return ScoreBias(parts, tensors)

    def __add__(self, other: ScoreBias) -> ScoreBias:
        require_score_bias_type(other, "ScoreBias + ")
        return ScoreBias(self.by_distance + other.by_distance, self.tensors + other.tensors)

    def aligned(self, align: Align) -> ScoreBias:
        """The same bias, with this alignment for the parts that name none."""
        clause.require_align(align)
        parts = tuple(replace(part, align=part.align or align) for part in self.by_distance)
        return replace(self, by_distance=parts)

    @property
    def requires_grad(self) -> bool:
        """True if a gradient flows into one of its tensors."""
        return any(tensor.requires_grad for tensor in self.all_tensors())

    def all_tensors(self) -> list[Tensor]:
        """Every tensor that the bias was made of."""
        return [*self.tensors, *(part.given for part in self.by_distance)]

    def bind(
        self,
        *,
        batch: int,
        heads: int,
        queries: int,
        keys: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> BoundBias:
        """Check the bias at these sizes, and fix them: `check`, then `bind_unchecked`."""
        self.check(batch=batch, heads=heads, queries=queries, keys=keys, device=device)
        return self.bind_unchecked(queries=queries, keys=keys, device=device, dtype=dtype)

    def check(
        self, *, batch: int, heads: int, queries: int, keys: int, device: torch.device
    ) -> None:
        """Check the bias at these sizes.

        Raises:
            MaskError: made for other sizes, NaN or +inf, slopes that are not finite, or an
                alignment missing.
            DeviceError: a tensor on another device.
        """
        for part in self.by_distance:
            part.offset(queries, keys)
            if not text.axis_broadcasts_to(part.num_heads, heads):
                raise MaskError(
                    saw=f"a {part.name} bias for {part.num_heads} heads",
                    needed=f"{heads} heads, or one row for all",
                    do="give one row for each head",
                )
            # A slope of infinity would be NaN at distance 0.
            given = part.given.abs() if part.name == "alibi" else part.given
            _check_device_and_values(given, device)
        sizes = MatrixSizes(batch, heads, queries, keys)
        for bias in self.tensors:
            require_broadcastable_to_matrix(bias, sizes, "a score bias")
            _check_device_and_values(bias, device)

    def bind_unchecked(
        self, *, queries: int, keys: int, device: torch.device, dtype: torch.dtype
    ) -> BoundBias:
        """Fix the sizes: one table over all distances, and the dense tensors.

        The table is part of the autograd graph in which it is made: make one for each reading. It
        is rounded no more than ``dtype``, that of the scores.
        """
        rows = []
        for part in self.by_distance:
            every = torch.arange(max(0, queries + keys - 1), device=device)
            rows.append(part.rows(every + (1 - queries - part.offset(queries, keys)), dtype))
        table = rows[0] if rows else None
        if len(rows) > 1:
            exact = reduce(torch.promote_types, (row.dtype for row in rows), dtype)
            table = reduce(torch.add, cast_biases_for_sum(rows, exact))
        return BoundBias(queries=queries, keys=keys, table=table, tensors=self.tensors)

    def __str__(self) -> str:
        parts = [part.name for part in self.by_distance]
        return " + ".join(parts + [f"dense{tuple(t.shape)}" for t in self.tensors]) or "zero"

    def __repr__(self) -> str:
        return f"ScoreBias({self})"


NO_BIAS = ScoreBias()  # the default of calls, recognised by identity


@dataclass(frozen=True, eq=False)
class BoundBias:
    """A score bias at known sizes; ``table[h, key - query + queries - 1]``."""

    queries: int
    keys: int
    table: Tensor | None
    tensors: tuple[Tensor, ...]

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for t in self.all_tensors())

    @property
    def is_empty(self) -> bool:
        return not self.all_tensors()

    @property
    def may_hide(self) -> bool:
        """False if no entry is known to be -inf.

        A table is read where that waits for no accelerator; a dense tensor never is.
        """
        if self.table is None or self.tensors:
            return bool(self.tensors)
        return not (tracing.may_check_values(self.table) and bool((self.table > -torch.inf).all()))

    def all_tensors(self) -> list[Tensor]:
        """The dense tensors, and the table where there is one."""
        return [*self.tensors, *([] if self.table is None else [self.table])]

    def parts_of_block(
        self, batches: slice, heads: slice, rows: slice | Tensor, columns: slice
    ) -> list[Tensor]:
        """Return the parts for one block; each broadcasts to (batches, heads, rows, columns)."""
        parts = [clause.index_axes(x, batches, heads, rows, columns) for x in self.tensors]
        if self.table is not None:
            table = self.table if self.table.shape[0] == 1 else self.table[heads]
            parts.append(self._read_distance_table(table, rows, columns)[None])
        return parts

    def _read_distance_table(self, table: Tensor, rows: slice | Tensor, columns: slice) -> Tensor:
        keys = self.keys
        if isinstance(rows, Tensor):
            distance = torch.arange(keys, device=table.device)[columns] - rows[:, None]
            return table[:, distance + self.queries - 1]
        first, stop, _ = rows.indices(self.queries)
        start, end, _ = columns.indices(keys)
        # Row i of the block is a run of the table that starts one place later for each earlier i.
        runs = table[:, start - stop + self.queries : end - first + self.queries - 1]
        return runs.unfold(-1, end - start, 1).flip(1)

    def cut_to_part(self, place: MatrixPart) -> BoundBias:
        queries, keys = place.queries.size, place.keys.size
        table = self.table
        if table is not None:
            first = place.keys.first - place.queries.stop + self.queries
            table = table[:, first : first + queries + keys - 1]
        tensors = cut_tensors_to_part(self.tensors, place)
        return BoundBias(queries=queries, keys=keys, table=table, tensors=tensors)

    def parts_at_pairs(
        self, rows: Int[Tensor, " pairs"], columns: Int[Tensor, " pairs"]
    ) -> list[Tensor]:
        """Return the parts at (query, key) pairs; they broadcast to (batch, heads, pairs)."""
        parts = [clause.read_pairs(bias, rows, columns) for bias in self.tensors]
        if self.table is not None:
            parts.append(self.table[None, :, columns - rows + self.queries - 1])
        return parts

    def parts_at_rows(self, rows: Int[Tensor, " rows"]) -> list[Tensor]:
        """The whole bias at chosen queries; parts broadcast to (batch, heads, rows, keys)."""
        return self.parts_of_block(WHOLE, WHOLE, rows, WHOLE)


def cut_score_bias_to_part(bias: ScoreBias, place: MatrixPart, sizes: MatrixSizes) -> ScoreBias:
    """Return the bias of one part of a matrix of these sizes, as a bias of that size."""
    first = place.keys.first - place.queries.first
    parts = []
    for part in bias.by_distance:
        shift = part.shift + first - part.offset(sizes.queries, sizes.keys)
        parts.append(replace(part, align="top-left", shift=shift))
    return ScoreBias(tuple(parts), cut_tensors_to_part(bias.tensors, place))


def cut_tensors_to_part(tensors: tuple[Tensor, ...], place: MatrixPart) -> tuple[Tensor, ...]:
    """Return one part of tensors that broadcast to (batch, heads, queries, keys)."""
    batches, queries, keys = (slice(*span) for span in place)
    return tuple(clause.index_axes(tensor, batches, WHOLE, queries, keys) for tensor in tensors)


def require_score_bias_type(value: object, call: str) -> ScoreBias:
    if isinstance(value, ScoreBias):
        return value
    raise MaskError(
        saw=f"{call}{text.describe_value(value)}",
        needed="a ScoreBias",
        do='ScoreBias.dense(t, axes="queries keys"), or ScoreBias.alibi(slopes)',
    )


def _require_float_tensor(tensor: Tensor, name: str, axes: tuple[str, ...]) -> None:
    arguments.require_tensors(**{name: tensor})
    if not tensor.is_floating_point() or tensor.dim() != len(axes):
        raise MaskError(
            saw=f"{name}={text.describe_value(tensor)}",
            needed=f"floats of shape ({', '.join(axes)})",
            do=f"e.g. {name}.float(), with one row for each head",
        )


def _check_device_and_values(bias: Tensor, device: torch.device) -> None:
    if bias.device != device:
        raise DeviceError(
            saw=f"a score bias on {bias.device} for queries and keys on {device}",
            needed="one device",
            do=f'bias.to("{device}")',
        )
    if not tracing.may_check_values(bias) or bias.numel() == 0:
        return
    highest = float(bias.detach().max())  # NaN wins over every number
    if highest != highest or highest == torch.inf:
        raise MaskError(
            saw=f"a score bias of shape {tuple(bias.shape)} that holds {highest}",
            needed="finite numbers, or -inf where a key is hidden",
            do="replace NaN and +inf; a boolean mask is a Mask",
        )


def split_additive_mask(added: Float[Tensor, "..."], *, axes: str) -> tuple[Mask, ScoreBias]:
    """Return the keys that a float mask hides, and the bias that it adds to the others.

    Hidden are entries at or below half of the lowest number of the mask's dtype. A query without a
    visible key gets zeros; with a plain addition it would get the mean of all values. Such queries
    are padding.

    Raises:
        MaskError: a tensor that is no float, or axes that do not fit.
    """
    score_bias = ScoreBias.dense(added, axes=axes)
    # `<=` keeps NaN out of the hidden entries, so the checks of values raise for it.
    hidden = added <= torch.finfo(added.dtype).min / 2
    if torch.compiler.is_compiling():
        # One tensor, which the fused kernel takes at any size.
        return Mask(), ScoreBias.dense(added.masked_fill(hidden, -torch.inf), axes=axes)
    mask = Mask.may_attend(~hidden, axes=axes)
    if tracing.may_check_values(added):  # return an empty mask or bias where one suffices
        if not bool(hidden.any()):
            return Mask(), score_bias
        if not added.requires_grad and not bool(added.masked_fill(hidden, 0).any()):
            return mask, ScoreBias()
    return mask, score_bias


# ---- casts to the dtype of the scores, by which finite numbers stay finite ---------------------


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias in ``dtype``; a number stays finite, and keeps its sign.

    Rounding alone would make -inf, which hides a key, of float32's ``finfo.min`` in bfloat16, and
    +inf, which makes NaN, of 7e4 in float16. Such numbers become the lowest or the largest one.
    """
    cast = bias.to(dtype)
    limits = torch.finfo(dtype)
    if torch.finfo(bias.dtype).max <= limits.max:
        return cast
    return torch.where(bias.isinf(), cast, bias.clamp(limits.min, limits.max).to(dtype))


def cast_biases_for_sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield biases in ``dtype``, to be added up: of finite numbers, the sum is finite too."""
    if len(parts) < 2:
        yield from (cast_bias(part, dtype) for part in parts)
        return
    limit = torch.finfo(dtype).max / len(parts)
    for part in parts:
        if torch.finfo(part.dtype).max <= limit:
            yield part.to(dtype)
        else:
            yield torch.where(part.isinf(), part, part.clamp(-limit, limit)).to(dtype)
