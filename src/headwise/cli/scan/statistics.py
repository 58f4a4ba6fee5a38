"""The statistics that a scan of the command computes: the set, the size of maps, the top keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from headwise.cli.scan.options import ScanOptions
from headwise.errors import OptionError
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.maps import Map
from headwise.scanning.statistics.statistic import TileStatistic
from headwise.scanning.statistics.top_keys import TopKeysOfEveryQuery

ALL, NONE = "all", "none"
# Without --top-keys, every head has them up to so many rows of weights: some megabytes of a page.
MOST_ROWS = 2**18
CELLS = 128  # of a map on each side
_HEAD = re.compile(r"(\d+)\.(\d+)")


def choose_statistics(options: ScanOptions, trial: HeadScan, tokens: int) -> list[TileStatistic]:
    """Return the statistics for a text of so many tokens.

    Args:
        options: the options of the command.
        trial: a scan of a few tokens by the same model, which shows its layers and heads.
        tokens: the number of tokens of the longest text.

    Raises:
        OptionError: --top-keys names a head that the model does not have.
    """
    names = options.stats
    chosen: Sequence[TileStatistic] = (
        catalogue.STANDARD if names is None else catalogue.find_standard_statistics(names)
    )
    fine = Map(options.map_cells or CELLS)
    statistics = [fine if isinstance(statistic, Map) else statistic for statistic in chosen]
    heads = _parse_top_keys_heads(options, trial, tokens)
    return [*statistics, TopKeysOfEveryQuery(heads)] if heads else statistics


def _parse_top_keys_heads(
    options: ScanOptions, trial: HeadScan, tokens: int
) -> Literal["all"] | list[tuple[int | str, int]]:
    """Return "all", or the heads that --top-keys names; an empty list for none."""
    if options.top_keys is None:
        is_small = len(trial.heads) * tokens <= MOST_ROWS
        return "all" if is_small and options.stats is None and options.out is None else []
    if list(options.top_keys) in ([ALL], [NONE]):  # typer makes lists of tuples
        return "all" if ALL in options.top_keys else []
    known = {(layer, head) for _, layer, head in trial.heads}
    heads: list[tuple[int | str, int]] = []
    for name in options.top_keys:
        match = _HEAD.fullmatch(name)
        head = (int(match[1]), int(match[2])) if match else None
        if head is None or head not in known:
            layer, last = max(known)
            raise OptionError(
                saw=f"--top-keys {name}",
                needed=f"heads as layer.head, from 0.0 to {layer}.{last}; or {ALL}, or {NONE}",
                do=f"--top-keys {layer}.{last}",
            )
        heads.append(head)
    return heads
