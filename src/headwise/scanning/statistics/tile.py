"""Tile of the weights of one call, with values that several statistics share."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.matrix.kernels.readings import ObservedTile
from headwise.scanning.call import CapturedCall, require_not_none


class WeightTile(ObservedTile):
    """Whole rows of the weights of some heads, as a statistic receives them.

    A tile extends the record of the kernel by ``call``, to which it belongs. The slices
    ``batches``, ``heads``, ``rows`` (queries) and ``columns`` (keys) locate the tile in the matrix.
    Keys outside of the columns are hidden from all of its queries.

    ``weights`` is (batches, heads, rows, columns), and so is ``scores`` if the statistic has
    ``reads_scores``. ``maximum``, ``logsumexp``, ``entropy``, ``highest`` (the largest score) and
    ``allowed`` (the number of keys that may be attended) are (batches, heads, rows), and so is
    ``lowest`` (the smallest score) with ``reads_lowest``. ``sink`` is the sink's share, or None.

    ``reach`` is the reach of the statistic that reads the tile.

    The next tile reuses the memory: keep results, not views.
    """

    def __init__(self, observed: ObservedTile, call: CapturedCall, *, reach: int) -> None:
        vars(self).update(vars(observed))
        self.call = call
        self.batches, self.heads = self.place.batches, self.place.heads
        self.rows, self.columns = self.place.rows, self.place.columns
        # One band serves all statistics; its width is that of the largest reach.
        self.reach = self._widest = reach
        self._samples_copied = False

    @cached_property
    def is_counted_query(self) -> Tensor:
        """(batches, heads, rows): True for real queries that may attend to a key."""
        real = self.call.real_queries[self.batches, self.rows]
        return real[:, None] & (self.allowed > 0)

    @cached_property
    def key_positions_of_queries(self) -> Tensor:
        """(rows,): the key at the position of each query."""
        rows = torch.arange(self.rows.start, self.rows.stop, device=self.weights.device)
        return rows + require_not_none(self.call.own_key)

    def sum_weights_times_key_entries(self, chosen: Tensor) -> Tensor:
        """Return (batches, heads, rows): the weight on keys, each times its entry of ``chosen``.

        ``chosen`` is (batch, keys) or (batch, heads, keys), of numbers or bools.
        """
        share = chosen[self.batches] if chosen.dim() == 2 else chosen[self.batches, self.heads]
        share = share[..., self.columns].to(self.weights.dtype)
        if chosen.dim() == 2:
            share = share[:, None].expand(-1, self.weights.shape[1], -1)
        return torch.matmul(self.weights, share[..., None]).squeeze(-1)

    def diagonal(self, offset: int) -> Tensor:
        """Return (batches, heads, rows): the weight on the key ``offset`` after the query's."""
        self._require_distance_within_reach(abs(offset), call_text=f"diagonal({offset})")
        return self._widest_band[..., self._widest + offset]

    def weight_within(self, reach: int) -> Tensor:
        """Return (batches, heads, rows): the weight on keys at most ``reach`` positions away."""
        return self.band(reach).sum(-1)

    def band(self, reach: int) -> Tensor:
        """Return (batches, heads, rows, 2 * reach + 1): the weight on keys around the query's."""
        self._require_distance_within_reach(reach, call_text=f"band({reach})")
        return self._widest_band[..., self._widest - reach : self._widest + reach + 1]

    def _require_distance_within_reach(self, distance: int, *, call_text: str) -> None:
        # The reach of this statistic counts: it must not depend on the others in the same pass.
        if not 0 <= distance <= self.reach:
            raise OptionError(
                saw=f"{call_text} by a statistic with reach {self.reach}",
                needed=f"a distance from 0 to {self.reach}",
                do=f"set reach = {abs(distance)} in the statistic",
            )

    @cached_property
    def _widest_band(self) -> Tensor:
        """The band of the largest reach; 0 where there is no key."""
        batches, heads, rows, columns = self.weights.shape
        wide = rows + 2 * self._widest
        block = self.weights.new_zeros(batches, heads, rows, wide)
        first = (
            int(self.key_positions_of_queries[0]) - self._widest - self.columns.start
        )  # column 0 of the block
        start, stop = max(0, first), min(columns, first + wide)
        if start < stop:
            block[..., start - first : stop - first] = self.weights[..., start:stop]
        # Row r of the band begins r columns later than row r - 1.
        size = (batches, heads, rows, 2 * self._widest + 1)
        stride = (heads * rows * wide, rows * wide, wide + 1, 1)
        return block.as_strided(size, stride)

    @cached_property
    def weight_by_query_block(self) -> tuple[slice, Tensor]:
        """The blocks of a map in this tile, and the weights summed over the real queries of each.

        The sums are (batches, heads, blocks, columns).
        """
        cells = self.call.query_map_block[self.batches, self.rows]
        real = cells[cells >= 0]
        blocks = slice(int(real.min()), int(real.max()) + 1) if real.numel() else slice(0, 0)
        index = torch.arange(blocks.start, blocks.stop, device=cells.device)
        member = (cells[:, None, :] == index[:, None]).to(self.weights.dtype)
        return blocks, torch.matmul(member[:, None], self.weights)

    @cached_property
    def indices_of_earlier_repeats(self) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, row, key) of the earlier keys with the token of the row's query.

        Batches and rows are counted from the start of the tile, keys from 0.
        """
        return self.call.repeated_tokens.earlier_repeat_pairs(
            self.batches, self.key_positions_of_queries
        )

    @cached_property
    def contribution_norms(self) -> Tensor:
        """(batches, heads, rows): the norm of each head's contribution."""
        factors = self.call.norm_preserving_out_proj_factors.to(self.weights.dtype)[self.heads]
        z = require_not_none(self.call.outputs)[self.batches, self.heads, self.rows].to(
            factors.dtype
        )
        norms: Tensor = torch.linalg.vector_norm(torch.matmul(z, factors), dim=-1)
        return norms

    def copy_sampled_rows_to_call(self) -> None:
        """Copy the tile's sampled rows to the samples of the call, once."""
        if self._samples_copied:
            return
        self._samples_copied = True
        samples = self.call.sampled_rows
        queries = samples.queries[self.batches]
        inside = (queries >= self.rows.start) & (queries < self.rows.stop)
        batch, sample = (inside & samples.real[self.batches]).nonzero(as_tuple=True)
        row, sequence = queries[batch, sample] - self.rows.start, batch + self.batches.start
        samples.weights[sequence, self.heads, sample, self.columns] = self.weights[batch, :, row]
        samples.counted[sequence, self.heads, sample] = self.is_counted_query[batch, :, row]
        if self.sink is not None:
            samples.sink[sequence, self.heads, sample] = self.sink[batch, :, row]
