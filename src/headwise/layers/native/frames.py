"""How the tokens of one call are laid out, and how the output is put back.

* `Whole`: as they were given.
* `Packed`: the real tokens alone, one sequence after the other in a single row. Projections and
  attention then cost what the real tokens cost.
* `Aligned`: sequences of unequal lengths that end together, as a cache holds them.

A query that was given up, since its token is padding, has zero head outputs on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import MaskError
from headwise.kernels import pieces
from headwise.kernels.pieces import Piece, Span
from headwise.layers.hooks import is_watched
from headwise.layers.native.cache import Cache
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.eager import may_check_values, may_read_values


class Call(NamedTuple):
    """What a layer was called with, and what it adds to every call."""

    x: Tensor
    source: Tensor  # x itself in self-attention
    mask: Mask
    score_bias: ScoreBias
    cache: Cache | None


@dataclass(eq=False)
class Whole:
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

    def mask_over(self, starts: Tensor | None, *, keys: int) -> Mask:
        """The mask over a cache's keys, of which those before a sequence's start are none."""
        if starts is None:
            return self.mask
        return self.mask & Mask.may_attend(_is_real(starts, keys), axes="batch keys")

    def project(self, merged: Tensor, projection: nn.Module) -> Tensor:
        """The output at every token that was given, by the output projection."""
        output: Tensor = projection(merged)
        return output

    @classmethod
    def of(cls, call: Call) -> Whole:
        """The tokens of a call without a cache, as they were given."""
        return Whole(call.x, call.source, call.mask)


def choose_frame(call: Call) -> Whole:
    """Aligned where a cache is told lengths; packed where that saves work; else as given."""
    if call.cache is not None:
        return align(call, call.cache)
    # Whoever watches is shown each token where it was given.
    packed = pack(call) if _may_be_packed(call) and not is_watched() else None
    return packed or Whole.of(call)


# ---- real tokens only --------------------------------------------------------------------------


@dataclass(eq=False)
class Packed(Whole):
    """Real tokens in one row; ``pieces`` say where each stretch of them came from."""

    pieces: tuple[Piece, ...] = ()
    batch: int = 0
    queries: int = 0

    def positions(self) -> Tensor:
        """The place of each token in the row it came from, (length,)."""
        device = self.x.device
        spans = [piece.queries for piece in self.pieces]
        return torch.cat([torch.arange(first, stop, device=device) for first, stop in spans])

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


def pack(call: Call) -> Packed | None:
    """The real tokens alone, where the mask gives queries up and that saves work; else None."""
    x, source, mask = call.x, call.source, call.mask
    batch, queries, width = x.shape
    least = pieces.call_cost(x.device)
    if batch * queries * width * width <= least:
        return None  # whatever the lengths are: reading them would wait for an accelerator
    bound = mask.bind(batch=batch, heads=1, queries=queries, keys=source.shape[1], device=x.device)
    found = pieces.of_mask(bound, batch)
    real = sum(piece.queries.size for piece in found)
    saved = (batch * queries - real) * width * width
    if not found or saved <= least * len(found):
        return None
    if source is x and any(piece.queries != piece.keys for piece in found):
        return None  # the tokens that are queries are not those that are keys
    packed_x = _real(x, [(piece.batch, piece.queries) for piece in found])
    query_ids = _ids([piece.queries for piece in found], x.device)
    if source is x:
        source, key_ids = packed_x, query_ids
    else:
        source = _real(source, [(piece.batch, piece.keys) for piece in found])
        key_ids = _ids([piece.keys for piece in found], x.device)
    mask = Mask(bands=mask.bands) & Mask.segments(query_ids, key_ids)
    return Packed(packed_x, source, mask, pieces=found, batch=batch, queries=queries)


def _may_be_packed(call: Call) -> bool:
    mask = call.mask
    told = mask.query_lengths is not None or len(mask.segment_ids) == 1
    if not told:
        return False
    lengths = [n for n in (mask.query_lengths, mask.key_lengths) if n is not None]
    if mask.dense or call.score_bias.tensors or len(mask.segment_ids) > 1:
        return False
    if not all(map(may_read_values, [call.x, *lengths, *sum(mask.segment_ids, ())])):
        return False
    # Packed, queries and keys of two sequences would stand at other distances.
    by_distance = mask.bands or call.score_bias.by_distance
    return call.source is call.x or not by_distance


def _real(x: Tensor, stretches: list[tuple[int, Span]]) -> Tensor:
    """(1, tokens, width): the stretches of each row, one after the other."""
    parts: list[Tensor] = []
    for index, row in enumerate(x.split(1)):
        parts += pieces.cut(row, [span for own, span in stretches if own == index], dim=1)
    return torch.cat(parts, dim=1)


def _ids(spans: list[Span], device: torch.device) -> Tensor:
    return _repeated(list(range(len(spans))), [span.size for span in spans], device)[None]


def _repeated(numbers: list[int], times: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device).repeat_interleave(
        torch.tensor(times, device=device), output_size=sum(times)
    )


# ---- for a cache -------------------------------------------------------------------------------


@dataclass(eq=False)
class Aligned(Whole):
    """Sequences that end together; tokens before their own first one are none."""

    def mask_over(self, starts: Tensor | None, *, keys: int) -> Mask:
        """Real tokens see real keys; padding is neither."""
        assert starts is not None
        place, gap = _places(self.x, self.lengths)
        query_ids, key_ids = ((real.long() - 1) for real in (place >= gap, _is_real(starts, keys)))
        return self.mask & Mask.segments(query_ids, key_ids)

    def project(self, merged: Tensor, projection: nn.Module) -> Tensor:
        """Each sequence from its first place on; what was padding reads a place that still is."""
        output: Tensor = projection(merged)
        place, gap = _places(output, self.lengths)
        return _taken(output, (place + gap).masked_fill(place >= place.shape[0] - gap, 0))


def align(call: Call, cache: Cache) -> Whole:
    """The layout for a cache: sequences of unequal lengths end together.

    Raises:
        MaskError: lengths that are not those of the new tokens, or together with clauses that name
            places; a top-left alignment, which a step cannot have.
    """
    x, mask = call.x, call.mask
    _check_alignment(call, cache)
    lengths = mask.query_lengths
    if lengths is None and mask.key_lengths is None:
        return Whole(x, x, mask, cache.seen, cache.padding)
    _check_lengths(call)
    place, gap = _places(x, lengths)
    x = _taken(x, (place - gap).clamp(min=0))
    padding = gap[:, 0] if cache.padding is None else gap[:, 0] + cache.padding
    return Aligned(x, x, Mask(bands=mask.bands), cache.seen, padding, lengths)


def _check_alignment(call: Call, cache: Cache) -> None:
    named = [band.align for band in call.mask.bands]
    named += [part.align for part in call.score_bias.by_distance]
    if cache.seen and "top-left" in named:
        raise MaskError(
            saw=f'align="top-left" with a cache that has seen {cache.seen} tokens',
            needed="the last query at the last key: a step begins after the first key",
            do='align="bottom-right", or no alignment, with a cache',
        )


def _check_lengths(call: Call) -> None:
    """Lengths with a cache: those of the new tokens, as queries and as keys, and nothing beside."""
    mask, (batch, new, _) = call.mask, call.x.shape
    queries, keys = mask.query_lengths, mask.key_lengths
    sizes = {"batch": batch, "heads": 1, "queries": new, "keys": new}
    Mask.lengths(queries=queries, keys=keys).bind(**sizes, device=call.x.device)
    if queries is None or keys is None or not _are_equal(queries, keys):
        raise MaskError(
            saw=f"a cache with {mask}",
            needed="one length for each sequence: how many of this call's tokens are real",
            do="Mask.lengths(queries=n, keys=n)",
        )
    if mask.dense or mask.segment_ids or call.score_bias.tensors:
        raise MaskError(
            saw=f"a cache with mask {mask} and score bias {call.score_bias}",
            needed="lengths alone, or clauses that name places alone: lengths move the sequences, "
            "so that all end together",
            do="leave out the lengths, and say by Mask.may_attend which keys may be attended",
        )


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a is b or not may_check_values(a) or torch.equal(a, b)


def _is_real(starts: Tensor, keys: int) -> Tensor:
    """(batch, keys): whether a key is a token of its sequence."""
    return torch.arange(keys, device=starts.device) >= starts[:, None]


def _places(x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """(length,) and (batch, 1): each place of a row, and how many of its tokens are padding."""
    assert lengths is not None
    length = x.shape[1]
    return torch.arange(length, device=x.device), (length - lengths)[:, None]


def _taken(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
