"""Plan of the scan of a stored model: a trial on a few tokens, the statistics, and the estimate.

The estimated time is that of a short trial, of the model's matrix products, and of one pass over
the weights of each head, at the speed measured on problems of the length of the texts. The memory
is that of the process now, plus the largest tensors that a layer holds at once.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from headwise.errors import OptionError
from headwise.masks.mask import Mask
from headwise.matrix.kernels.tiles import TILE_ELEMENTS
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning import call
from headwise.scanning.inputs import call_model_on_input, explain_failure_on_token_ids, list_inputs
from headwise.scanning.record import record_attention
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import Layers, select_statistics
from headwise.scanning.source import ModelToScan, TextToRead
from headwise.scanning.statistics import similarity
from headwise.scanning.statistics.maps import MOST_CELLS, Map, TopKeysOfEveryQuery, most_blocks
from headwise.scanning.statistics.statistic import TileStatistic, compute_summaries
from headwise.support.memory import available_memory, process_memory
from headwise.support.progress import Progress
from headwise.support.text import escape_unprintable, human_bytes, list_some

INSTEAD = "call headwise.scan(model, inputs) from Python, with all inputs of the model"
# Without a choice, every head has top keys up to so many rows of weights, heads x tokens of all
# texts: those of 1,024 heads and 4,096 tokens. A row takes 32 bytes of a scan.
MOST_ROWS = 2**22
TRIAL = 16  # tokens of a trial run before the work
TILES_AT_ONCE = 8  # scores, weights, and temporary tensors of statistics
STATES_AT_ONCE = 6  # tensors of the model's width: residuals, normalised ones, inputs of a product
LONGEST_SAMPLE = 16_384  # tokens of a timed problem
SAMPLE_ROWS = 8192  # queries times heads of a timed problem, unless it has one head
MEASURED_SECONDS = 0.15  # of each timed problem: several turns of a busy processor
FLOAT = 4  # bytes


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PlannedScan:
    """The scan of texts by a stored model, which has passed all checks."""

    model: ModelToScan
    texts: tuple[TextToRead, ...]  # without those that are empty
    statistics: tuple[TileStatistic, ...]
    layers: Layers
    calls: int  # of attention, for each text
    estimate: Estimate | None  # for a model on the processor

    def scan_text(self, text: TextToRead, progress: Progress | None = None) -> HeadScan:
        """Return the scan of one text."""
        options: dict[str, Any] = {"statistics": self.statistics, "layers": self.layers}
        options |= {"written": text.written, "progress": progress}
        return self.model.scan(text.ids, **options)


def require_room_for_model(folder: str | PathLike[str], *, copies: int = 1) -> None:
    """Raise OptionError if there is no model, or too little memory for ``copies`` of it."""
    from headwise.checkpoints.transformers import measure_model_bytes

    times = f"{copies} times " if copies > 1 else ""
    needed, what = measure_model_bytes(Path(folder)) * copies, f"{times}the weights in {folder}"
    require_memory(needed, what=what, do="use a machine with more memory, or --skip-memory-check")


def plan_scan(
    model: ModelToScan,
    texts: Sequence[TextToRead],
    *,
    statistics: Sequence[str] | None = None,
    layers: Layers = None,
    top_keys: Sequence[str] | None = None,
    map_cells: int | None = None,
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
            "none". If None, all heads, if heads x tokens of all texts are at most `MOST_ROWS`.
        map_cells: most blocks of a map on each side. If None, those of `Map`, and fewer where all
            heads would have more than 38 million cells.
        processes: the number of processes of this machine that share the texts.
        checks_memory: False to skip the check of the memory.

    Raises:
        HeadwiseError: a failure that can be known before the work.
    """
    model, texts = _leave_out_empty(model, texts)
    lengths = [text.ids.shape[1] for text in texts]
    trial, longest = texts[0].ids[:, :TRIAL], max(lengths)
    with explain_failure_on_token_ids(model.title, trial.shape[1], do=INSTEAD):
        (once,) = list_inputs(model.inputs(trial))
        calls = record_call_sizes(model.model, lambda: call_model_on_input(model.model, once))
        start = time.perf_counter()
        tried = model.scan(trial, statistics=statistics, layers=layers)
        seconds = time.perf_counter() - start
    if map_cells is None:
        map_cells = _cells_within_bounds(len(tried.heads), longest)
    of_size, (selected, _) = Map(map_cells), select_statistics(statistics)
    chosen = tuple(of_size if isinstance(each, Map) else each for each in selected)
    heads = _choose_top_keys(top_keys, tried, sum(lengths), by_default=statistics is None)
    chosen += (TopKeysOfEveryQuery(heads),) if heads else ()
    estimate = None
    if model.device.type == "cpu":  # of another device, neither time nor memory is known
        options: dict[str, Any] = {"trial_seconds": seconds, "processes": processes}
        estimate = estimate_scan(model.model, calls, chosen, lengths, **options)
        if checks_memory:
            _require_memory_of_scan(model, estimate, longest, processes)
    return PlannedScan(model, texts, chosen, layers, len(calls), estimate)


def _require_memory_of_scan(
    model: ModelToScan, estimate: Estimate, longest: int, processes: int
) -> None:
    copies = sum(p.nbytes for p in model.model.parameters()) * (processes - 1)
    times = f"{processes} times " if processes > 1 else ""
    what = f"{times}{longest:,} tokens of {model.title}"
    do = "--length N with fewer tokens, --stats with fewer statistics, or --skip-memory-check"
    require_memory(estimate.extra_bytes + copies, what=what, do=do)


def _cells_within_bounds(heads: int, tokens: int) -> int | None:
    """Return None if maps of their own size have at most `MOST_CELLS`, or else fewer blocks."""
    cells = usual = most_blocks(tokens)
    while heads * min(tokens, cells) ** 2 > MOST_CELLS:
        cells //= 2
    return None if cells == usual else cells


def _leave_out_empty(
    model: ModelToScan, texts: Sequence[TextToRead]
) -> tuple[ModelToScan, tuple[TextToRead, ...]]:
    if empty := [text.name for text in texts if text.is_empty]:
        note = f"left out, with fewer than two tokens: {list_some(empty)}"
        model = replace(model, notes=(*model.notes, escape_unprintable(note)))
    kept = tuple(text for text in texts if not text.is_empty)
    for text in kept:
        model.require_tokens_in_vocabulary(text.ids)
    return model, kept


def _choose_top_keys(
    names: Sequence[str] | None, trial: HeadScan, tokens: int, *, by_default: bool
) -> Literal["all"] | list[tuple[int | str, int]]:
    if names is None:
        return "all" if by_default and len(trial.heads) * tokens <= MOST_ROWS else []
    if list(names) in (["all"], ["none"]):
        return "all" if "all" in names else []
    known = {f"{layer}.{head}": (layer, head) for _, layer, head in trial.heads}
    heads: list[tuple[int | str, int]] = []
    for name in names:
        if name not in known:
            last = "{}.{}".format(*max(known.values()))
            raise OptionError(
                saw=f"{{top_keys}} {name}",
                needed=f"heads as layer.head, from 0.0 to {last}; or all, or none",
                do=f"{{top_keys}} {last}",
                parameter="top_keys",
            )
        heads.append(known[name])
    return heads


# ---- the estimate --------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallSizes:
    """The sizes of one attention call."""

    heads: int
    width: int  # head_dim plus value_dim
    is_causal: bool
    span: int | None  # keys that a query may attend to, under a window

    def mean_visible_keys(self, length: int) -> float:
        """Return the number of keys that a query may attend to, as a mean over the queries."""
        if self.span is not None and self.span < length:
            return float(self.span)
        return length / (2 if self.is_causal else 1)

    def count_weights_read(self, length: int) -> float:
        """Return the number of weights that the statistics read."""
        return self.heads * length * self.mean_visible_keys(length)


@dataclass(frozen=True)
class Speed:
    """Seconds of the operations of a scan on this machine.

    ``rows`` are sorted pairs of a number of keys, and the seconds of `row`.
    """

    product: float  # one multiply-add of a matrix product
    rows: tuple[tuple[float, float], ...]
    difference: float  # of two weights, where heads are compared

    def row(self, keys: float) -> float:
        """Return the seconds of all statistics for one query of one head with so many keys."""
        numbers, seconds = zip(*self.rows, strict=True)
        return float(np.interp(keys, numbers, seconds) * max(1.0, keys / numbers[-1]))


@dataclass(frozen=True)
class Estimate:
    """Seconds of a scan, its additional bytes, and the bytes of the whole process."""

    seconds: float
    extra_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        """``about 40 s, 1.9 GB``."""
        seconds = max(1.0, self.seconds)
        time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        time = f"{seconds / 3600:.1f} h" if seconds >= 6000 else time
        return f"about {time}, {human_bytes(self.total_bytes)}"


@torch.no_grad()
def record_call_sizes(model: nn.Module, run: Callable[[], Any]) -> list[CallSizes]:
    """Return the sizes of the attention calls of a short run."""
    calls: list[CallSizes] = []

    def watch(captured: call.CapturedCall) -> None:
        matrix, bound = captured.matrix, captured.matrix.bound_mask
        left, right = bound.reach
        span = None if left is None or right is None else left + right + 1
        width = matrix.q.shape[-1] + call.require_not_none(captured.values).shape[-1]
        calls.append(CallSizes(matrix.shape[1], width, bound.is_causal, span))

    with record_attention(model, watch):
        run()
    return calls


def estimate_scan(
    model: nn.Module,
    calls: Sequence[CallSizes],
    statistics: Iterable[TileStatistic],
    lengths: Sequence[int],
    *,
    held_bytes: int | None = None,
    trial_seconds: float = 0.0,
    speed: Speed | None = None,
    processes: int = 1,
) -> Estimate:
    """Estimate a scan of sequences of these lengths, one after the other or by several processes.

    A process with the model holds ``held_bytes``, those of this process if None. A sequence takes
    at least ``trial_seconds``. The ``speed`` of this machine is measured if it is None.
    """
    statistics = tuple(statistics)
    speed = speed or measure_speed(calls, statistics, max(lengths))
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    products = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
    seconds = trial_seconds * len(lengths)
    for length in lengths:
        seconds += speed.product * length * products
        for each in calls:
            seconds += speed.product * each.count_weights_read(length) * each.width
            seconds += each.heads * length * speed.row(each.mean_visible_keys(length))
        seconds += speed.difference * _estimate_comparison(calls, statistics, length)[0]
    extra_bytes = estimate_memory(model, calls, statistics, max(lengths)) * processes
    held_bytes = (process_memory() if held_bytes is None else held_bytes) * processes
    return Estimate(seconds / min(processes, len(lengths)), extra_bytes, held_bytes + extra_bytes)


def estimate_memory(
    model: nn.Module, calls: Sequence[CallSizes], statistics: Sequence[TileStatistic], length: int
) -> int:
    """Return the bytes that a scan of ``length`` tokens needs in addition to the model."""
    heads = max(each.heads for each in calls)
    width = max(each.heads * each.width for each in calls)
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    sides = [max(p.shape) for p in model.parameters() if p.dim() == 2 and p.shape[0] not in rows]
    numbers = STATES_AT_ONCE * width + 2 * max(sides, default=0)
    # A model with logits_to_keep computes those of one token.
    find_last: Callable[[], Any] = getattr(model, "get_output_embeddings", lambda: None)
    last = find_last()
    if last is not None and "logits_to_keep" not in inspect.signature(model.forward).parameters:
        numbers += last.weight.shape[0]
    scalars = sum(not statistic.definition.axes for statistic in statistics)
    gathered = 9 * heads * length * scalars + 8 * heads * length
    for statistic in statistics:
        if isinstance(statistic, Map):
            side = min(length, statistic.cells or most_blocks(length))
            # Those of one layer while it runs, and those of all layers.
            gathered += FLOAT * side**2 * (heads + sum(each.heads for each in calls))
    top_keys = sum(each.ranks for each in statistics if isinstance(each, TopKeysOfEveryQuery))
    gathered += 2 * FLOAT * top_keys * length * sum(each.heads for each in calls)
    tiles = TILES_AT_ONCE * FLOAT * max(TILE_ELEMENTS, length * 2)
    compared = _estimate_comparison(calls, statistics, length)[1]
    return FLOAT * length * numbers + gathered + tiles + compared


def _estimate_comparison(
    calls: Sequence[CallSizes], statistics: Iterable[TileStatistic], length: int
) -> tuple[float, int]:
    """Return the differences and the bytes that a comparison of all heads takes."""
    if not any(isinstance(each, similarity.HeadDistance) for each in statistics):
        return 0, 0
    weights_read = sum(each.count_weights_read(length) for each in calls)
    heads = [each.heads for each in calls]
    return similarity.estimate_comparison(heads, length, weights_read=weights_read)


def measure_speed(
    calls: Sequence[CallSizes], statistics: Sequence[TileStatistic], length: int
) -> Speed:
    """Measure matrix products, and the statistics of rows with as many keys as those of the calls.

    A problem of a quarter of the length is for shorter sequences. The mean of several runs counts:
    on a busy machine the best run would be faster than a scan can be.
    """
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(512, 512, generator=generator) for _ in range(2))
    _ = x @ w  # the first run loads what all need
    product = _measure_mean_seconds(lambda: x @ w) / 512**3
    is_causal = all(each.is_causal for each in calls)
    keys_of_token = 0.5 if is_causal else 1.0  # those of a mean query, for each token
    needed = {round(each.mean_visible_keys(length) / keys_of_token) for each in calls}
    lengths = {max(1, min(tokens, LONGEST_SAMPLE)) for tokens in needed}
    lengths.add(max(1, max(lengths) // 4))
    rows: list[tuple[float, float]] = []
    for tokens in sorted(lengths):
        heads = max(1, min(max(each.heads for each in calls), SAMPLE_ROWS // tokens))
        width = max(1, max(each.width for each in calls) // 2)
        q, k, v = (torch.randn(1, heads, tokens, width, generator=generator) for _ in range(3))
        matrix = AttentionMatrix(q, k, mask=Mask.causal() if is_causal else Mask())
        ids = torch.randint(tokens, (1, tokens), generator=generator)
        chosen = ids < tokens // 16
        sample = call.CapturedCall.for_self_attention(
            matrix, tokens=ids, separators=chosen, specials=chosen, values=v, outputs=v
        )
        fitting = [s for s in statistics if s.reason_not_computable(sample) is None]
        if not rows:
            compute_summaries(sample, fitting)
        seconds = _measure_mean_seconds(partial(compute_summaries, sample, fitting))
        rows.append((tokens * keys_of_token, seconds / (heads * tokens)))
    x, w = (torch.rand(1, 16, 4096, generator=generator) for _ in range(2))
    compare = partial(similarity.half_sums_of_differences, x, w)
    return Speed(product, tuple(rows), _measure_mean_seconds(compare) / (16 * 16 * 4096))


def _measure_mean_seconds(run: Callable[[], Any]) -> float:
    runs, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < MEASURED_SECONDS or not runs:
        run()
        runs += 1
    return elapsed / runs


def require_memory(needed: int, *, what: str, do: str) -> None:
    """Raise OptionError if more memory is needed than this machine has left."""
    free = available_memory()
    if needed > free:
        more, left = human_bytes(needed), human_bytes(free)
        if more == left:
            more, left = f"{needed:,} B", f"{free:,} B"
        limit = f"at most {left}, which is what this machine has left"
        raise OptionError(saw=f"{what}: about {more} more memory", needed=limit, do=do)
