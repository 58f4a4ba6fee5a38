"""Padding of the tokens of one call, and the inverse for its output.

* `Unpacked`: the batch of the call, unchanged.
* `Packed`: the real tokens of all sequences in a single row, so that padding costs nothing.
* `LeftPadded`: sequences of unequal lengths that end at the same position, as in a cache.

Padded queries have zero head outputs in all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import MaskError
from headwise.layers.base import HeadPart
from headwise.layers.cache import Cache, CachedKeys
from headwise.layers.hooks import has_attention_hook
from headwise.layers.linear import project
from headwise.masks.bound import zero_padding
from headwise.masks.clause import MatrixSizes, Rectangle, Span
from headwise.masks.clauses.dense import Dense
from headwise.masks.clauses.lengths import KEYS, QUERIES, Lengths, PaddingClause, Starts
from headwise.masks.clauses.segments import PackedRow, Segments
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.kernels import varlen
from headwise.support.text import describe_count
from headwise.support.tracing import may_check_values, may_read_values

_STATES_PADDING = (PaddingClause, Segments, PackedRow)


class CallInputs(NamedTuple):
    """Inputs of one call, with the layer's window and score bias added."""

    x: Tensor
    source: Tensor  # x itself in self-attention
    mask: Mask
    score_bias: ScoreBias
    cache: Cache | None
    gate: Tensor | None = None
    places: Tensor | None = None  # the caller's positions, (batch, queries, axes)
    is_packable: bool = True  # False if the layer adds a dense bias to the scores
    value_source: Tensor | None = None  # the input of values; None for that of keys

    def prepare_tensors_for_part(self, part: HeadPart) -> CallInputs:
        tensors = self.score_bias.all_tensors()
        biases = {f"score_bias {i}": tensor for i, tensor in enumerate(tensors)}
        inputs = {"x": self.x} | biases
        if self.source is not self.x:
            inputs["source"] = self.source
        if self.value_source is not None:
            inputs["value_source"] = self.value_source
        if self.gate is not None:
            inputs["gate"] = self.gate
        inputs = part.check_inputs_and_sum_gradients(inputs)
        names = iter(biases)
        return self._replace(
            x=inputs["x"],
            source=inputs.get("source", inputs["x"]),
            score_bias=self.score_bias.map_tensors(lambda _: inputs[next(names)]),
            gate=part.cut_channels(inputs["gate"], dim=-1) if "gate" in inputs else None,
            value_source=inputs.get("value_source"),
        )


@dataclass(eq=False)
class Unpacked:
    """The batch of a call, unchanged."""

    x: Tensor
    source: Tensor
    mask: Mask
    first: int = 0  # the position of the first token
    padding: Tensor | None = None  # (batch,), padding before each sequence, cached tokens included
    lengths: Tensor | None = None  # (batch,), for a cache: real new tokens, which come last
    cached: CachedKeys | None = None  # for a cache: what it holds once the call has succeeded
    is_zeroed: bool = False  # True if padding of queries and keys is 0, cached tokens included
    places: Tensor | None = None  # the caller's positions of these tokens, (batch, length, axes)
    reached: Tensor | None = None  # lengths of the sequences, for frequencies that change with them
    last: Tensor | None = None  # (batch,), tokens up to the last real one; None for all
    value_source: Tensor | None = None  # see CallInputs

    @property
    def of_values(self) -> Tensor:
        """The input of values."""
        return self.source if self.value_source is None else self.value_source

    def positions(self) -> Tensor:
        """Return the position of each token in its sequence: (length,), or (batch, length).

        With several axes they are (axes, batch, length).
        """
        if self.places is not None:
            return self.places[..., 0] if self.places.shape[-1] == 1 else self.places.movedim(-1, 0)
        positions = torch.arange(self.x.shape[1], device=self.x.device) + self.first
        return positions if self.padding is None else positions - self.padding[:, None]

    def lengths_of_sequences(self) -> Tensor:
        """Return the tokens of each sequence, cached ones included, (batch, 1).

        With positions of the caller it is the last one, and one more.
        """
        if self.places is not None:
            return self.places.amax((1, 2))[:, None] + 1
        shown = torch.full((self.x.shape[0],), self.x.shape[1], device=self.x.device)
        lengths = (shown if self.last is None else self.last) + self.first
        return (lengths if self.padding is None else lengths - self.padding)[:, None]

    def expand_gate(self, gate: Tensor) -> Tensor:
        """Reshape a gate, (heads,) or (batch, heads), to a factor of the head outputs."""
        return gate[..., None, None]

    def mask_with_cache(self, starts: Tensor | None) -> Mask:
        """Return the mask over a cache's keys; keys before a sequence's start are hidden."""
        return self.mask if starts is None else self.mask & Mask.starts(keys=starts)

    def project_and_restore_batch(self, merged: Tensor, projection: nn.Module) -> Tensor:
        return project(projection, merged)

    @classmethod
    def of(cls, call: CallInputs) -> Unpacked:
        """Return the batch of a call without a cache, with zeros for padded tokens.

        ``padding`` is left padding, or None.
        """
        x, source, mask, values = call.x, call.source, call.mask, call.value_source
        clauses = tuple(c for kind in _STATES_PADDING for c in mask.clauses_of_kind(kind))
        if not clauses:
            return Unpacked(x, source, mask, places=call.places, value_source=values)
        sizes = {"batch": x.shape[0], "heads": 1, "queries": x.shape[1], "keys": source.shape[1]}
        bound = Mask(clauses).bind(**sizes, device=x.device)
        queries, keys = bound.stated_tokens(QUERIES), bound.stated_tokens(KEYS)
        is_zeroed = source is not x
        if source is not x:
            x, source = zero_padding(x, queries), zero_padding(source, keys)
        elif queries is not None and keys is not None:
            x = source = zero_padding(x, queries | keys)
            is_zeroed = may_check_values(queries) and torch.equal(queries, keys)
        values = None if values is None else zero_padding(values, keys)
        padding, last = bound.first_real_keys(), None
        if (real := queries if keys is None or keys is queries else keys) is not None:
            last = (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(1)
        given: dict[str, Any] = {"padding": padding, "last": last, "places": call.places}
        return Unpacked(x, source, mask, is_zeroed=is_zeroed, value_source=values, **given)


def select_packing(call: CallInputs) -> Unpacked:
    """Return left-padded tokens for a cache, packed ones where that saves work, else the batch."""
    if call.cache is not None:
        return left_pad_tokens(call, call.cache)
    if not call.mask.clauses:
        values = call.value_source
        return Unpacked(call.x, call.source, call.mask, places=call.places, value_source=values)
    # An attention hook gets the batch of the call, not packed tokens.
    packed = pack_real_tokens(call) if _is_packable(call) and not has_attention_hook() else None
    return packed or Unpacked.of(call)


# ---- real tokens only --------------------------------------------------------------------------


@dataclass(eq=False)
class Packed(Unpacked):
    """Real tokens in one row; ``pieces`` are their rectangles in the batch's matrix."""

    pieces: tuple[Rectangle, ...] = ()
    batch: int = 0
    queries: int = 0

    def positions(self) -> Tensor:
        if self.places is not None:
            return super().positions()
        origins, device = self._origins(), self.x.device
        counted = [torch.arange(*p.queries, device=device) - origins[p.batch] for p in self.pieces]
        return torch.cat(counted)

    def lengths_of_sequences(self) -> Tensor:
        """Return the tokens of each token's sequence, (tokens,)."""
        origins = self._origins()
        ends = {p.batch: p.queries.stop - origins[p.batch] for p in self.pieces}  # in order
        if self.last is not None:  # those of the caller's positions
            ends = dict(enumerate(self.last.tolist()))
        rows = [ends[p.batch] for p in self.pieces for _ in range(p.queries.size)]
        return torch.tensor(rows, device=self.x.device)

    def _origins(self) -> list[int]:
        return [0] * self.batch if self.padding is None else self.padding.tolist()

    def expand_gate(self, gate: Tensor) -> Tensor:
        """Return the gate of each token's sequence, (1, heads, tokens, 1), or (heads, 1, 1)."""
        if gate.dim() == 1:
            return gate[:, None, None]
        rows = [piece.batch for piece in self.pieces for _ in range(piece.queries.size)]
        row = torch.tensor(rows, device=gate.device)
        return gate.index_select(0, row).mT[None, :, :, None]

    def project_and_restore_batch(self, merged: Tensor, projection: nn.Module) -> Tensor:
        merged = torch.cat([merged, merged.new_zeros(1, 1, merged.shape[2])], dim=1)
        lengths = [piece.queries.size for piece in self.pieces]
        *tokens, blank = project(projection, merged)[0].split([*lengths, 1])
        parts, at = [], 0
        for part, piece in zip(tokens, self.pieces, strict=True):
            first = piece.batch * self.queries + piece.queries.first
            parts += [blank.expand(first - at, -1), part]
            at = first + len(part)
        parts.append(blank.expand(self.batch * self.queries - at, -1))
        return torch.cat(parts).view(self.batch, self.queries, -1)


def pack_real_tokens(call: CallInputs) -> Packed | None:
    """Return the real tokens alone, if the mask has padded queries and packing saves work."""
    x, source, mask = call.x, call.source, call.mask
    batch, queries, width = x.shape
    least = varlen.call_overhead(x.device)
    if batch * queries * width * width <= least:
        return None  # before the lengths are read, since reading waits for an accelerator
    bound = mask.bind(batch=batch, heads=1, queries=queries, keys=source.shape[1], device=x.device)
    division = bound.rectangles_of_allowed_pairs()
    if division is None or not all(clause.is_relative for clause in division.rest.clauses):
        return None
    pieces = division.rectangles
    real = sum(piece.queries.size for piece in pieces)
    saved = (batch * queries - real) * width * width
    if not pieces or saved <= least * len(pieces):
        return None
    if source is x and any(piece.queries != piece.keys for piece in pieces):
        return None  # the real queries and the real keys are different tokens
    packed_x = _pack_rows(x, [(piece.batch, piece.queries) for piece in pieces])
    offsets = _cumulative_lengths([piece.queries for piece in pieces], x.device)
    if source is x:
        source, key_offsets = packed_x, offsets
    else:
        source = _pack_rows(source, [(piece.batch, piece.keys) for piece in pieces])
        key_offsets = _cumulative_lengths([piece.keys for piece in pieces], x.device)
    # Each query has the position of its key, so clauses without an alignment need none.
    mask = Mask((*division.rest.clauses, PackedRow(offsets, key_offsets)))
    packed = Packed(packed_x, source, mask, 0, bound.first_real_keys())
    packed.pieces, packed.batch, packed.queries = pieces, batch, queries
    if call.value_source is not None:
        packed.value_source = _pack_rows(call.value_source, [(p.batch, p.keys) for p in pieces])
    if call.places is not None:
        packed.places = _pack_rows(call.places, [(p.batch, p.queries) for p in pieces])
        packed.last = call.places.amax((1, 2)) + 1
    return packed


def _is_packable(call: CallInputs) -> bool:
    # A dense clause names its keys by their place in the batch.
    is_dense = call.score_bias.tensors or call.mask.clauses_of_kind(Dense)
    if is_dense or not call.is_packable or not may_read_values(call.x):
        return False
    # In cross attention packing changes the distances between queries and keys.
    by_distance = call.score_bias.by_distance or any(c.is_relative for c in call.mask.clauses)
    return call.source is call.x or not by_distance


def _pack_rows(x: Tensor, spans: list[tuple[int, Span]]) -> Tensor:
    """Concatenate spans (row, span) of a batch to (1, tokens, width)."""
    parts: list[Tensor] = []
    for index, row in enumerate(x.split(1)):
        chosen = [span for of, span in spans if of == index]
        parts += varlen.cut_tensor_into_spans(row, chosen, dim=1)
    return torch.cat(parts, dim=1)


def _cumulative_lengths(spans: list[Span], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(span.size for span in spans)], device=device)


# ---- for a cache -------------------------------------------------------------------------------


@dataclass(eq=False)
class LeftPadded(Unpacked):
    """Sequences that end at the same position, with padding before them.

    ``end_together`` is True if the call's batch was left-padded already.
    """

    end_together: bool = False

    def mask_with_cache(self, starts: Tensor | None) -> Mask:
        """Return the mask over a cache's keys, without padded queries and padded keys."""
        _, gap = _row_positions_and_padding_counts(self.x, self.lengths)
        return self.mask & Mask.starts(queries=gap[:, 0], keys=starts)

    def project_and_restore_batch(self, merged: Tensor, projection: nn.Module) -> Tensor:
        """Project and move each sequence back to position 0, with the output of padding after."""
        output = project(projection, merged)
        if self.end_together:
            return output
        position, gap = _row_positions_and_padding_counts(output, self.lengths)
        index = (position + gap).masked_fill(position >= position.shape[0] - gap, 0)
        return _gather_tokens(output, index)


def left_pad_tokens(call: CallInputs, cache: Cache) -> Unpacked:
    """Return the tokens of a call with a cache: sequences of unequal lengths end together.

    Raises:
        MaskError: lengths that are not those of the new tokens, or beside clauses by position; a
            top-left alignment after the first step; no mask for keys that an earlier one hid.
    """
    x, mask = call.x, call.mask
    _check_mask_positions_fit_cache(call, cache)
    _require_mask_for_hidden_cached_keys(call, cache)
    if not mask.clauses_of_kind(PaddingClause):
        is_zeroed = not any(clause.names_every_key for clause in mask.clauses)
        seen = cache.seen, cache.padding
        return Unpacked(x, x, mask, *seen, is_zeroed=is_zeroed, places=call.places)
    lengths, end_together = _real_token_counts_and_padding_side(call)
    position, gap = _row_positions_and_padding_counts(x, lengths)
    places = call.places
    if not end_together:
        x = _gather_tokens(x, (position - gap).clamp(min=0))
        if places is not None:
            places = _gather_tokens(places, (position - gap).clamp(min=0))
    x = zero_padding(x, position >= gap)
    padding = gap[:, 0] if cache.padding is None else gap[:, 0] + cache.padding
    mask = mask.without_kind(PaddingClause)
    given = (x, x, mask, cache.seen, padding, lengths)
    return LeftPadded(*given, is_zeroed=True, places=places, end_together=end_together)


def _check_mask_positions_fit_cache(call: CallInputs, cache: Cache) -> None:
    named = [getattr(clause, "align", None) for clause in call.mask.clauses]
    named += [part.align for part in call.score_bias.by_distance]
    if cache.seen and "top-left" in named:
        raise MaskError(
            saw=f'align="top-left" with a cache that holds {cache.seen} tokens',
            needed="the last query aligned with the last key, since earlier keys are cached",
            do='use align="bottom-right", or leave out align',
        )
    new = call.x.shape[1]
    # Such a clause hides other tokens once a cache has dropped some.
    by_position = [
        clause
        for clause in call.mask.without_kind(PaddingClause).clauses
        if not (clause.is_relative or clause.names_every_key)
    ]
    # In this order: a graph should compare sizes of the cache only where it must.
    if by_position and cache.key_count_after(new) != cache.seen + new:
        raise MaskError(
            saw=f"{by_position[0]} with a cache that has dropped tokens older than its window",
            needed="a mask that depends on distances alone, or one bool for each cached key",
            do="use Mask.may_attend, or a layer without a window",
        )
    if by_position and cache.padding is not None:
        raise MaskError(
            saw=f"{by_position[0]} with a cache in which lengths have moved sequences",
            needed="a mask that depends on distances alone, or one bool for each cached key: "
            "padding stands before the tokens of a shorter sequence",
            do='Mask.may_attend(m, axes="batch queries keys")',
        )
    for packed in call.mask.clauses_of_kind(PackedRow):
        if cache.seen and packed.key_offsets is packed.query_offsets:
            raise MaskError(
                saw=f"{packed} without key_cu_seqlens, with a cache that holds {cache.seen} tokens",
                needed=f"offsets of the {describe_count(new, 'new token')} and offsets of all "
                f"{cache.key_count_after(new)} keys",
                do="Mask.packed(cu_seqlens, key_cu_seqlens)",
            )


def _require_mask_for_hidden_cached_keys(call: CallInputs, cache: Cache) -> None:
    if cache.needs_mask and not any(clause.names_every_key for clause in call.mask.clauses):
        keys = cache.key_count_after(call.x.shape[1])
        raise MaskError(
            saw=f"a cache with {call.mask}, after a mask that hid cached keys from every query",
            needed=f"a boolean mask over all {keys} keys in each call, or segments or offsets of "
            "them: a cache stores lengths only",
            do='Mask.lengths(queries=n, keys=n, side="left") in the first call, and none after it; '
            'or Mask.may_attend(m, axes="batch keys") in every call',
        )


def keep_cached_keys(call: CallInputs, cache: Cache, tokens: Unpacked) -> None:
    """Let the cache of a call hold the keys of its tokens, after all else of the call succeeded."""
    cached = tokens.cached
    assert cached is not None
    (batch, new, _), clauses = call.x.shape, call.mask.clauses
    if new > 1 and may_read_values(call.x):
        # Does a mask that names every key hide one from all of several queries, as padding is?
        sizes = MatrixSizes(batch, 1, new, cached.k.shape[2])
        real = [clause.real_tokens(KEYS, sizes) for clause in clauses if clause.names_every_key]
        cache.needs_mask |= any(part is not None and not bool(part.all()) for part in real)
    cache.keep(cached)
    cache.has_places, cache.reached = call.places is not None, tokens.reached


def _real_token_counts_and_padding_side(call: CallInputs) -> tuple[Tensor, bool]:
    """Return the number of real new tokens, (batch,), and whether they come last.

    Lengths move the sequences of a cache, so clauses by position are refused beside them.
    """
    mask, (batch, new, _) = call.mask, call.x.shape
    for clause in mask.clauses_of_kind(Lengths):
        numbers = clause.numbers
        if may_check_values(numbers) and numbers.numel() and int(numbers.max()) > new:
            raise MaskError(
                saw=f"{clause} with lengths up to {int(numbers.max())}, and a cache, in a call of "
                f"{describe_count(new, 'new token')}",
                needed="lengths that count the tokens of this call, without the cached ones",
                do="Mask.lengths in the first call alone, and Mask.causal() in later calls",
            )
    padding = Mask(mask.clauses_of_kind(PaddingClause)).bind(
        batch=batch, heads=1, queries=new, keys=new, device=call.x.device
    )
    by_axis = {(c.kind, c.axis): c.numbers for c in padding.clauses if isinstance(c, PaddingClause)}
    kind = padding.clauses[0].kind
    queries, keys = by_axis.get((kind, QUERIES)), by_axis.get((kind, KEYS))
    if (
        len(by_axis) > 2
        or queries is None
        or keys is None
        or not (queries is keys or not may_check_values(queries) or torch.equal(queries, keys))
    ):
        raise MaskError(
            saw=f"a cache with {mask}",
            needed="queries= and keys= with the same lengths: how many of this call's tokens are "
            "real in each sequence",
            do='Mask.lengths(queries=n, keys=n), with side="left" where padding stands before them',
        )
    others = mask.without_kind(PaddingClause).clauses
    if call.score_bias.tensors or not all(clause.is_relative for clause in others):
        raise MaskError(
            saw=f"a cache with mask {mask} and score bias {call.score_bias}",
            needed="lengths with clauses by distance only: lengths move the sequences of the cache "
            "so that all end together",
            do='replace the lengths by Mask.may_attend(m, axes="batch keys")',
        )
    is_left = kind == Starts.kind
    return (new - queries if is_left else queries), is_left


def _row_positions_and_padding_counts(x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the positions of a row, (length,), and its padding tokens, (batch, 1)."""
    assert lengths is not None
    length = x.shape[1]
    return torch.arange(length, device=x.device), (length - lengths)[:, None]


def _gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
