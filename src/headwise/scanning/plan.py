"""Plan of the scan of a stored model: a trial on a few tokens, the statistics, and the estimate."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Literal

from headwise.errors import OptionError
from headwise.scanning.estimate import (
    Estimate,
    estimate_scan,
    record_call_sizes,
    require_memory,
)
from headwise.scanning.inputs import call_model_on_input, explain_failure_on_token_ids, list_inputs
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import Layers
from headwise.scanning.source import ModelToScan, TextToRead
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.maps import Map
from headwise.scanning.statistics.statistic import TileStatistic
from headwise.scanning.statistics.top_keys import TopKeysOfEveryQuery
from headwise.support.progress import Progress
from headwise.support.text import escape_unprintable

INSTEAD = "call headwise.scan(model, inputs) from Python, with all inputs of the model"
ALL, NONE = "all", "none"
# Without a choice, every head has top keys up to so many rows of weights: megabytes of a page.
MOST_ROWS = 2**18
CELLS = 128  # of a map on each side
TRIAL = 16  # tokens of a trial run before the work
_HEAD = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, eq=False)
class PlannedScan:
    """The scan of texts by a stored model, which has passed all checks.

    Attributes:
        model: the model.
        texts: the texts, without those that are empty.
        statistics: the statistics.
        layers: as for `headwise.scan`.
        calls: attention calls for each text.
        estimate: time and memory, for a model on the processor.
    """

    model: ModelToScan
    texts: tuple[TextToRead, ...]
    statistics: tuple[TileStatistic, ...]
    layers: Layers
    calls: int
    estimate: Estimate | None

    def scan_text(self, text: TextToRead, progress: Progress | None = None) -> HeadScan:
        """Return the scan of one text."""
        return self.model.scan(
            text.ids, statistics=self.statistics, layers=self.layers, progress=progress
        )


def require_room_for_model(folder: str | PathLike[str], *, copies: int = 1) -> None:
    """Raise OptionError if there is no model, or too little memory for ``copies`` of it."""
    from headwise.checkpoints.transformers import measure_model_bytes

    times = f"{copies} times " if copies > 1 else ""
    require_memory(
        measure_model_bytes(Path(folder)) * copies,
        what=f"{times}the weights in {folder}",
        do="use a machine with more memory, or --force",
    )


def plan_scan(
    model: ModelToScan,
    texts: Sequence[TextToRead],
    *,
    statistics: Sequence[str] | None = None,
    layers: Layers = None,
    top_keys: Sequence[str] | None = None,
    map_cells: int | None = None,
    single_tokens: bool = True,
    processes: int = 1,
    checks_memory: bool = True,
) -> PlannedScan:
    """Run a trial on a few tokens, choose the statistics, and estimate the scan.

    Args:
        model: the model, from `open_model`.
        texts: what it is to read; empty texts are left out, with a note.
        statistics: names of the standard set; all if None.
        layers: as for `headwise.scan`.
        top_keys: heads as "layer.head" for which each query has its largest weights, or "all" or
            "none".
        map_cells: blocks of a map on each side; 128 if None.
        single_tokens: True for top keys of all heads if none are chosen and these are few.
        processes: the number of processes of this machine that share the texts.
        checks_memory: False to skip the check of the memory.

    Raises:
        HeadwiseError: a failure that can be known before the work.
    """
    model, texts = _leave_out_empty(model, texts)
    trial, longest = texts[0].ids[:, :TRIAL], max(text.ids.shape[1] for text in texts)
    with explain_failure_on_token_ids(model.title, trial.shape[1], do=INSTEAD):
        (once,) = list_inputs(model.inputs(trial))
        calls = record_call_sizes(model.model, lambda: call_model_on_input(model.model, once))
        start = time.perf_counter()
        tried = model.scan(trial, statistics=statistics, layers=layers)
        seconds = time.perf_counter() - start
    chosen = _choose_statistics(statistics, map_cells)
    by_default = single_tokens and statistics is None
    heads = _choose_top_keys(top_keys, tried, longest, by_default=by_default)
    chosen += (TopKeysOfEveryQuery(heads),) if heads else ()
    estimate = None
    if model.device.type == "cpu":  # of another device, neither time nor memory is known
        lengths = [text.ids.shape[1] for text in texts]
        estimate = estimate_scan(
            model.model, calls, chosen, lengths, trial_seconds=seconds, processes=processes
        )
        if checks_memory:
            _require_memory(model, estimate, longest, processes)
    return PlannedScan(model, texts, chosen, layers, len(calls), estimate)


def _leave_out_empty(
    model: ModelToScan, texts: Sequence[TextToRead]
) -> tuple[ModelToScan, tuple[TextToRead, ...]]:
    """Return the texts that are not empty, and the model with a note on the others."""
    if empty := [text.name for text in texts if text.is_empty]:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        note = f"left out, with fewer than two tokens: {', '.join(empty[:3])}{more}"
        model = replace(model, notes=(*model.notes, escape_unprintable(note)))
    kept = tuple(text for text in texts if not text.is_empty)
    for text in kept:
        model.require_tokens_in_vocabulary(text.ids)
    return model, kept


def _require_memory(model: ModelToScan, estimate: Estimate, longest: int, processes: int) -> None:
    copies = sum(p.nbytes for p in model.model.parameters()) * (processes - 1)
    times = f"{processes} times " if processes > 1 else ""
    require_memory(
        estimate.extra_bytes + copies,
        what=f"{times}{longest:,} tokens of {model.title}",
        do="--length N with fewer tokens, --stats with fewer statistics, or --force",
    )


def _choose_statistics(
    names: Sequence[str] | None, map_cells: int | None
) -> tuple[TileStatistic, ...]:
    chosen: Sequence[TileStatistic] = (
        catalogue.STANDARD if names is None else catalogue.find_standard_statistics(names)
    )
    fine = Map(map_cells or CELLS)
    return tuple(fine if isinstance(statistic, Map) else statistic for statistic in chosen)


def _choose_top_keys(
    names: Sequence[str] | None, trial: HeadScan, tokens: int, *, by_default: bool
) -> Literal["all"] | list[tuple[int | str, int]]:
    """Return "all", or the heads of these names; an empty list for none."""
    if names is None:
        return "all" if by_default and len(trial.heads) * tokens <= MOST_ROWS else []
    if list(names) in ([ALL], [NONE]):
        return "all" if ALL in names else []
    known = {(layer, head) for _, layer, head in trial.heads}
    heads: list[tuple[int | str, int]] = []
    for name in names:
        match = _HEAD.fullmatch(name)
        head = (int(match[1]), int(match[2])) if match else None
        if head is None or head not in known:
            layer, last = max(known)
            raise OptionError(
                saw=f"{{top_keys}} {name}",
                needed=f"heads as layer.head, from 0.0 to {layer}.{last}; or {ALL}, or {NONE}",
                do=f"{{top_keys}} {layer}.{last}",
                parameter="top_keys",
            )
        heads.append(head)
    return heads
