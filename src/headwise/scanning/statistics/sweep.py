"""Any number of statistics of one attention call, in one pass over its weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headwise.errors import OptionError
from headwise.scanning.statistics.observation import Observation
from headwise.scanning.statistics.statistic import Statistic, Summary
from headwise.scanning.statistics.tile import WeightTile
from headwise.support.eager import without_autocast


@torch.no_grad()
def sweep(observation: Observation, statistics: Iterable[Statistic]) -> dict[str, Summary]:
    """The summary of each statistic by its name; ``statistic.result(summary)`` reads it.

    Memory grows with queries and with keys, never with queries x keys.

    Raises:
        OptionError: a statistic needs what the observation does not have; `Statistic.missing` says
            so beforehand.
    """
    statistics = tuple(statistics)
    for statistic in statistics:
        if (reason := statistic.missing(observation)) is not None:
            raise OptionError(
                saw=f"{statistic.definition.name}: {reason}",
                needed=", ".join(statistic.needs),
                do="say it in the Observation, or leave the statistic out",
            )
    with without_autocast(observation.matrix.q):
        return _sweep(observation, statistics)


def _sweep(observation: Observation, statistics: tuple[Statistic, ...]) -> dict[str, Summary]:
    gathered = [statistic.start(observation) for statistic in statistics]
    looking = [
        (statistic, own)
        for statistic, own in zip(statistics, gathered, strict=True)
        if type(statistic).update is not Statistic.update
    ]
    if looking:
        reach = max(statistic.reach for statistic, _ in looking)
        tiles = observation.matrix.tiles(
            with_scores=any(statistic.reads_scores for statistic, _ in looking),
            with_lowest=any(statistic.reads_lowest for statistic, _ in looking),
        )
        for observed in tiles:
            tile = WeightTile(observed, observation, reach=reach)
            for statistic, own in looking:
                tile.reach = statistic.reach
                statistic.update(own, tile)
    return {
        statistic.definition.name: statistic.finish(own, observation)
        for statistic, own in zip(statistics, gathered, strict=True)
    }
