"""A part of one call's weights, with the readings that several statistics share."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.kernels.observe_tiles import ObservedTile
from headwise.scanning.captured_call import CapturedCall, known


class WeightTile(ObservedTile):
    """Whole rows of the weights of some heads: what a statistic is shown, one after the other.

    It is the record of the kernel, with the call that it is a part of, ``call``. ``batches``,
    ``heads``, ``rows`` (queries) and ``columns`` (keys) say which part of the matrix it is. Keys
    outside of the columns are hidden from all of its queries.

    ``weights`` is (batches, heads, rows, columns), and so is ``scores`` for a statistic that
    ``reads_scores``; ``maximum``, ``logsumexp``, ``entropy``, ``highest`` (the largest score) and
    ``allowed``, the number of keys that may be attended, are (batches, heads, rows), and so is
    ``lowest``, the smallest score, for one that ``reads_lowest``. ``sink`` is the sink's share, or
    None.

    ``reach`` is that of the statistic which looks at it: how far from a query's own key it may ask.

    The memory is used again for the next tile: keep results, not parts of it.
    """

    def __init__(self, observed: ObservedTile, call: CapturedCall, *, reach: int) -> None:
        vars(self).update(vars(observed))
        self.call = call
        self.batches, self.heads = self.place.batches, self.place.heads
        self.rows, self.columns = self.place.rows, self.place.columns
        # One band serves all statistics, as wide as the widest of them asks for.
        self.reach = self._widest = reach
        self._samples_kept = False

    @cached_property
    def counted(self) -> Tensor:
        """(batches, heads, rows): queries that are no padding and may attend to something."""
        real = self.call.real_queries[self.batches, self.rows]
        return real[:, None] & (self.allowed > 0)

    @cached_property
    def own(self) -> Tensor:
        """(rows,): the key that stands where each query stands."""
        rows = torch.arange(self.rows.start, self.rows.stop, device=self.weights.device)
        return rows + known(self.call.own_key)

    def on(self, chosen: Tensor) -> Tensor:
        """(batches, heads, rows): weight on keys, each times its share in ``chosen``.

        ``chosen`` is (batch, keys) or (batch, heads, keys), of numbers or bools.
        """
        share = chosen[self.batches] if chosen.dim() == 2 else chosen[self.batches, self.heads]
        share = share[..., self.columns].to(self.weights.dtype)
        if chosen.dim() == 2:
            share = share[:, None].expand(-1, self.weights.shape[1], -1)
        return torch.matmul(self.weights, share[..., None]).squeeze(-1)

    def diagonal(self, offset: int) -> Tensor:
        """(batches, heads, rows): weight on the key ``offset`` places after the query's own."""
        self._require_reach(abs(offset), asked=f"diagonal({offset})")
        return self._band[..., self._widest + offset]

    def within(self, reach: int) -> Tensor:
        """(batches, heads, rows): weight on keys at most ``reach`` places away."""
        return self.band(reach).sum(-1)

    def band(self, reach: int) -> Tensor:
        """(batches, heads, rows, 2 * reach + 1): weight on the keys around the query's own."""
        self._require_reach(reach, asked=f"band({reach})")
        return self._band[..., self._widest - reach : self._widest + reach + 1]

    def _require_reach(self, distance: int, *, asked: str) -> None:
        # That of this statistic alone: another one's would make it run here and fail elsewhere.
        if not 0 <= distance <= self.reach:
            raise OptionError(
                saw=f"{asked} by a statistic with reach {self.reach}",
                needed=f"at most {self.reach} places from the query's own, and no fewer than 0",
                do=f"say reach = {abs(distance)} in the statistic",
            )

    @cached_property
    def _band(self) -> Tensor:
        """The widest band that was asked for; 0 where there is no key."""
        batches, heads, rows, columns = self.weights.shape
        wide = rows + 2 * self._widest
        block = self.weights.new_zeros(batches, heads, rows, wide)
        first = int(self.own[0]) - self._widest - self.columns.start  # column 0 of the block
        start, stop = max(0, first), min(columns, first + wide)
        if start < stop:
            block[..., start - first : stop - first] = self.weights[..., start:stop]
        # Row r of the band begins r columns later than row r - 1.
        size = (batches, heads, rows, 2 * self._widest + 1)
        stride = (heads * rows * wide, rows * wide, wide + 1, 1)
        return block.as_strided(size, stride)

    @cached_property
    def by_cell(self) -> tuple[slice, Tensor]:
        """Weights summed over the counted queries of each block of a map.

        The blocks, and (batches, heads, blocks, columns).
        """
        cells = self.call.query_cells[self.batches, self.rows]
        real = cells[cells >= 0]
        blocks = slice(int(real.min()), int(real.max()) + 1) if real.numel() else slice(0, 0)
        index = torch.arange(blocks.start, blocks.stop, device=cells.device)
        member = (cells[:, None, :] == index[:, None]).to(self.weights.dtype)
        return blocks, torch.matmul(member[:, None], self.weights)

    @cached_property
    def repeats(self) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, row, key) of the earlier keys that hold the token of the row's own key.

        Batches and rows are counted from where the tile begins, keys from 0.
        """
        return self.call.repeats.pairs(self.batches, self.own)

    @cached_property
    def contribution_norms(self) -> Tensor:
        """(batches, heads, rows): the norm of what each head writes."""
        factors = self.call.out_proj_factors.to(self.weights.dtype)[self.heads]
        z = known(self.call.outputs)[self.batches, self.heads, self.rows].to(factors.dtype)
        norms: Tensor = torch.linalg.vector_norm(torch.matmul(z, factors), dim=-1)
        return norms

    def keep_samples(self) -> None:
        """Copy the tile's sampled rows to those of the call, once."""
        if self._samples_kept:
            return
        self._samples_kept = True
        kept = self.call.samples
        places = kept.places[self.batches]
        inside = (places >= self.rows.start) & (places < self.rows.stop)
        batch, sample = (inside & kept.real[self.batches]).nonzero(as_tuple=True)
        row, sequence = places[batch, sample] - self.rows.start, batch + self.batches.start
        kept.weights[sequence, self.heads, sample, self.columns] = self.weights[batch, :, row]
        kept.counted[sequence, self.heads, sample] = self.counted[batch, :, row]
        if self.sink is not None:
            kept.sink[sequence, self.heads, sample] = self.sink[batch, :, row]
