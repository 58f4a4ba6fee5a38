"""Any number of statistics of one attention call, in one pass over its weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headwise.errors import OptionError
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.statistics.statistic import Summary, TileStatistic
from headwise.scanning.statistics.tile import WeightTile
from headwise.support.eager import without_autocast


@torch.no_grad()
def sweep(call: CapturedCall, statistics: Iterable[TileStatistic]) -> dict[str, Summary]:
    """The summary of each statistic by its name; ``statistic.result(summary)`` reads it.

    Memory grows with queries and with keys, never with queries x keys.

    Raises:
        OptionError: a statistic needs what the call does not have; `TileStatistic.missing` says
            so beforehand.
    """
    statistics = tuple(statistics)
    for statistic in statistics:
        if (reason := statistic.missing(call)) is not None:
            raise OptionError(
                saw=f"{statistic.definition.name}: {reason}",
                needed=", ".join(statistic.needs),
                do="say it in the CapturedCall, or leave the statistic out",
            )
    with without_autocast(call.matrix.q):
        return _sweep(call, statistics)


def _sweep(call: CapturedCall, statistics: tuple[TileStatistic, ...]) -> dict[str, Summary]:
    gathered = [statistic.start(call) for statistic in statistics]
    looking = [
        (statistic, own)
        for statistic, own in zip(statistics, gathered, strict=True)
        if type(statistic).update is not TileStatistic.update
    ]
    if looking:
        reach = max(statistic.reach for statistic, _ in looking)
        tiles = call.matrix.tiles(
            with_scores=any(statistic.reads_scores for statistic, _ in looking),
            with_lowest=any(statistic.reads_lowest for statistic, _ in looking),
        )
        for observed in tiles:
            tile = WeightTile(observed, call, reach=reach)
            for statistic, own in looking:
                tile.reach = statistic.reach
                statistic.update(own, tile)
    return {
        statistic.definition.name: statistic.finish(own, call)
        for statistic, own in zip(statistics, gathered, strict=True)
    }
