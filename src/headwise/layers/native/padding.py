"""How the tokens of one call are laid out, and how the output is put back.

* `Unpacked`: as they were given.
* `Packed`: the real tokens alone, one sequence after the other in a single row. Projections and
  attention then cost what the real tokens cost.
* `LeftPadded`: sequences of unequal lengths that end together, as a cache holds them.

A query that was given up, since its token is padding, has zero head outputs on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import MaskError
from headwise.kernels import varlen
from headwise.layers.hooks import is_watched
from headwise.layers.native.cache import Cache
from headwise.masks.clause import Clause, Rectangle, Span
from headwise.masks.clauses.lengths import KEYS, QUERIES, PaddingClause, Starts
from headwise.masks.clauses.segments import PackedRow
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.tracing import may_check_values, may_read_values


class CallInputs(NamedTuple):
    """What a layer was called with, and what it adds to every call."""

    x: Tensor
    source: Tensor  # x itself in self-attention
    mask: Mask
    score_bias: ScoreBias
    cache: Cache | None


@dataclass(eq=False)
class Unpacked:
    """Every token where it was given."""

    x: Tensor
    source: Tensor
    mask: Mask
    first: int = 0  # the position of the first token
    padding: Tensor | None = None  # for a cache: what each sequence was padded by in all, before
    lengths: Tensor | None = None  # for a cache: how many of the last tokens are real

    def positions(self) -> Tensor:
        """The position of each token in its sequence: (length,), or (batch, length)."""
        place = torch.arange(self.x.shape[1], device=self.x.device) + self.first
        return place if self.padding is None else place - self.padding[:, None]

    def gate(self, gate: Tensor) -> Tensor:
        """A gate, (heads,) or (batch, heads), as a factor of the head outputs."""
        return gate[..., None, None]

    def mask_over(self, starts: Tensor | None) -> Mask:
        """The mask over a cache's keys, of which those before a sequence's start are none."""
        return self.mask if starts is None else self.mask & Mask.starts(keys=starts)

    def project(self, merged: Tensor, projection: nn.Module) -> Tensor:
        """The output at every token that was given, by the output projection."""
        output: Tensor = projection(merged)
        return output

    @classmethod
    def of(cls, call: CallInputs) -> Unpacked:
        """The tokens of a call without a cache, as they were given."""
        return Unpacked(call.x, call.source, call.mask, padding=_first_places(call))


def choose_frame(call: CallInputs) -> Unpacked:
    """Aligned where a cache is told lengths; packed where that saves work; else as given."""
    if call.cache is not None:
        return align(call, call.cache)
    # Whoever watches is shown each token where it was given.
    packed = pack(call) if _may_be_packed(call) and not is_watched() else None
    return packed or Unpacked.of(call)


# ---- real tokens only --------------------------------------------------------------------------


@dataclass(eq=False)
class Packed(Unpacked):
    """Real tokens in one row; ``pieces`` say where each stretch of them came from."""

    pieces: tuple[Rectangle, ...] = ()
    batch: int = 0
    queries: int = 0

    def positions(self) -> Tensor:
        """The place of each token in the row it came from, (length,)."""
        device, padding = self.x.device, self.padding
        origins = [0] * self.batch if padding is None else padding.tolist()
        return torch.cat(
            [
                torch.arange(*piece.queries, device=device) - origins[piece.batch]
                for piece in self.pieces
            ]
        )

    def gate(self, gate: Tensor) -> Tensor:
        """The gate of each token's own sequence."""
        if gate.dim() == 1:
            return gate[:, None, None]
        row = _repeated([piece.batch for piece in self.pieces], self._lengths(), gate.device)
        return gate.index_select(0, row).mT[None, :, :, None]

    def project(self, merged: Tensor, projection: nn.Module) -> Tensor:
        """(batch, queries, out_dim): the output of a token of zeros wherever no token came from."""
        merged = torch.cat([merged, merged.new_zeros(1, 1, merged.shape[2])], dim=1)
        *tokens, blank = projection(merged)[0].split([*self._lengths(), 1])
        parts, at = [], 0
        for part, piece in zip(tokens, self.pieces, strict=True):
            first = piece.batch * self.queries + piece.queries.first
            parts += [blank.expand(first - at, -1), part]
            at = first + len(part)
        parts.append(blank.expand(self.batch * self.queries - at, -1))
        return torch.cat(parts).view(self.batch, self.queries, -1)

    def _lengths(self) -> list[int]:
        return [piece.queries.size for piece in self.pieces]


def pack(call: CallInputs) -> Packed | None:
    """The real tokens alone, where the mask gives queries up and that saves work; else None."""
    x, source, mask = call.x, call.source, call.mask
    batch, queries, width = x.shape
    least = varlen.call_cost(x.device)
    if batch * queries * width * width <= least:
        return None  # whatever the lengths are: reading them would wait for an accelerator
    bound = mask.bind(batch=batch, heads=1, queries=queries, keys=source.shape[1], device=x.device)
    division = bound.divided()
    if division is None or not all(clause.is_relative for clause in division.rest.clauses):
        return None
    found = division.rectangles
    real = sum(piece.queries.size for piece in found)
    saved = (batch * queries - real) * width * width
    if not found or saved <= least * len(found):
        return None
    if source is x and any(piece.queries != piece.keys for piece in found):
        return None  # the tokens that are queries are not those that are keys
    packed_x = _real(x, [(piece.batch, piece.queries) for piece in found])
    offsets = _offsets([piece.queries for piece in found], x.device)
    if source is x:
        source, key_offsets = packed_x, offsets
    else:
        source = _real(source, [(piece.batch, piece.keys) for piece in found])
        key_offsets = _offsets([piece.keys for piece in found], x.device)
    # Queries stand at their own keys: sides that name no alignment need none.
    mask = Mask((*division.rest.clauses, PackedRow(offsets, key_offsets)))
    place: dict[str, Any] = {
        "padding": bound.first_keys(),
        "pieces": found,
        "batch": batch,
        "queries": queries,
    }
    return Packed(packed_x, source, mask, **place)


def _may_be_packed(call: CallInputs) -> bool:
    if not call.mask.clauses or call.score_bias.tensors or not may_read_values(call.x):
        return False
    # Packed, queries and keys of two sequences would stand at other distances.
    by_distance = call.score_bias.by_distance or any(c.is_relative for c in call.mask.clauses)
    return call.source is call.x or not by_distance


def _real(x: Tensor, stretches: list[tuple[int, Span]]) -> Tensor:
    """(1, tokens, width): the stretches of each row, one after the other."""
    parts: list[Tensor] = []
    for index, row in enumerate(x.split(1)):
        parts += varlen.cut(row, [span for own, span in stretches if own == index], dim=1)
    return torch.cat(parts, dim=1)


def _offsets(spans: list[Span], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(span.size for span in spans)], device=device)


def _repeated(numbers: list[int], times: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device).repeat_interleave(
        torch.tensor(times, device=device), output_size=sum(times)
    )


# ---- for a cache -------------------------------------------------------------------------------


@dataclass(eq=False)
class LeftPadded(Unpacked):
    """Sequences that end together; tokens before their own first one are none.

    ``end_together``: whether they were given so.
    """

    end_together: bool = False

    def mask_over(self, starts: Tensor | None) -> Mask:
        """Real tokens see real keys; padding is neither."""
        _, gap = _places(self.x, self.lengths)
        return self.mask & Mask.starts(queries=gap[:, 0], keys=starts)

    def project(self, merged: Tensor, projection: nn.Module) -> Tensor:
        """Each sequence from its first place on; what was padding reads a place that still is."""
        output: Tensor = projection(merged)
        if self.end_together:
            return output
        place, gap = _places(output, self.lengths)
        return _taken(output, (place + gap).masked_fill(place >= place.shape[0] - gap, 0))


def align(call: CallInputs, cache: Cache) -> Unpacked:
    """The layout for a cache: sequences of unequal lengths end together.

    Raises:
        MaskError: lengths that are not those of the new tokens, or together with clauses that name
            places; a top-left alignment, which a step cannot have.
    """
    x, mask = call.x, call.mask
    _check_alignment(call, cache)
    if not mask.of_kind(PaddingClause):
        return Unpacked(x, x, mask, cache.seen, cache.padding)
    lengths, end_together = _told_lengths(call)
    place, gap = _places(x, lengths)
    if not end_together:
        x = _taken(x, (place - gap).clamp(min=0))
    padding = gap[:, 0] if cache.padding is None else gap[:, 0] + cache.padding
    return LeftPadded(x, x, mask.without(PaddingClause), cache.seen, padding, lengths, end_together)


def _check_alignment(call: CallInputs, cache: Cache) -> None:
    named = [clause.named_align for clause in call.mask.clauses]
    named += [part.align for part in call.score_bias.by_distance]
    if cache.seen and "top-left" in named:
        raise MaskError(
            saw=f'align="top-left" with a cache that has seen {cache.seen} tokens',
            needed="the last query at the last key: a step begins after the first key",
            do='align="bottom-right", or no alignment, with a cache',
        )
    new, by_place = call.x.shape[1], [c for c in call.mask.clauses if _names_places(c)]
    # In this order: a graph should compare sizes of the cache only where it must.
    if by_place and cache.keys_with(new) != cache.seen + new:
        raise MaskError(
            saw=f"{by_place[0]} with a cache that has dropped tokens its window needs no more",
            needed="a mask that names no places, or one bool for each key that is left",
            do="Mask.may_attend, or layer.cache of a layer without a window",
        )


def _names_places(clause: Clause) -> bool:
    """Whether a clause means other tokens once a cache has dropped some."""
    return not (clause.is_relative or clause.names_every_key or isinstance(clause, PaddingClause))


def _told_lengths(call: CallInputs) -> tuple[Tensor, bool]:
    """How many of the new tokens are real, and whether they are the last ones.

    With a cache nothing that names places may stand beside lengths, as they move the sequences.
    """
    mask, (batch, new, _) = call.mask, call.x.shape
    told = Mask(mask.of_kind(PaddingClause)).bind(
        batch=batch, heads=1, queries=new, keys=new, device=call.x.device
    )
    by_axis = {(c.kind, c.axis): c.numbers for c in told.clauses if isinstance(c, PaddingClause)}
    kind = told.clauses[0].kind
    queries, keys = by_axis.get((kind, QUERIES)), by_axis.get((kind, KEYS))
    if len(by_axis) > 2 or queries is None or keys is None or not _are_equal(queries, keys):
        raise MaskError(
            saw=f"a cache with {mask}",
            needed="one length for each sequence: how many of this call's tokens are real",
            do='Mask.lengths(queries=n, keys=n), with side="left" where padding stands before them',
        )
    others = mask.without(PaddingClause).clauses
    if call.score_bias.tensors or not all(clause.is_relative for clause in others):
        raise MaskError(
            saw=f"a cache with mask {mask} and score bias {call.score_bias}",
            needed="lengths alone, or clauses that name places alone: lengths move the sequences, "
            "so that all end together",
            do="leave out the lengths, and say by Mask.may_attend which keys may be attended",
        )
    is_left = kind == Starts.kind
    return (new - queries if is_left else queries), is_left


def _first_places(call: CallInputs) -> Tensor | None:
    """The place of each sequence's first token, where the mask says that padding stands before."""
    clauses, (batch, queries, _) = call.mask.of_kind(PaddingClause), call.x.shape
    if not clauses:
        return None
    keys = call.source.shape[1]
    sizes = {"batch": batch, "heads": 1, "queries": queries, "keys": keys}
    return Mask(clauses).bind(**sizes, device=call.x.device).first_keys()


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a is b or not may_check_values(a) or torch.equal(a, b)


def _places(x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """(length,) and (batch, 1): each place of a row, and how many of its tokens are padding."""
    assert lengths is not None
    length = x.shape[1]
    return torch.arange(length, device=x.device), (length - lengths)[:, None]


def _taken(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
