"""The scan of a command, from its options to its report; all checks come before the work."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headwise.cli.processes import local_rank_count
from headwise.cli.scan.options import ScanOptions
from headwise.cli.scan.source import (
    ModelToScan,
    TextToRead,
    load_model,
    prepare_texts,
    require_room_for_model,
)
from headwise.cli.scan.statistics import choose_statistics
from headwise.reports.report import ScanReport
from headwise.scanning._scan import scan
from headwise.scanning.corpus import PARTS, SCAN, list_parts, scan_corpus
from headwise.scanning.estimate import (
    Estimate,
    estimate_scan,
    process_memory,
    record_call_sizes,
    require_memory,
)
from headwise.scanning.inputs import call_model_on_input, explain_failure_on_token_ids, list_inputs
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import Statistics
from headwise.scanning.statistics.statistic import TileStatistic
from headwise.support.files import make_parent_and_require_writable, write_whole
from headwise.support.progress import Progress, no_progress
from headwise.support.text import describe_count, escape_unprintable

if TYPE_CHECKING:
    from headwise.sharding.processes.job import Job

INSTEAD = "call headwise.scan(model, inputs) from Python, with all inputs of the model"
TABLE = "table.csv"  # in the folder of a scan
KEPT = f"The scan is saved as {SCAN}, {TABLE} and {PARTS}, with a file for each text:"
TRIAL = 16  # tokens of a trial run before the work
LOOK_UP_INTERVAL = 0.5  # seconds between two looks at the progress of other ranks


@dataclass(frozen=True, eq=False)
class PreparedScan:
    """A scan that has passed all checks."""

    options: ScanOptions
    subject: ModelToScan
    texts: Sequence[TextToRead]
    statistics: Sequence[TileStatistic]
    estimate: Estimate | None  # of a model on the processor
    calls: int  # attention calls for each text
    job: Job | None = None  # the ranks that share the texts

    @property
    def opening_lines(self) -> str:
        """Lines on the model and its input, the estimate, and texts that are already done."""
        texts = describe_count(len(self.texts), "text")
        begins = escape_unprintable(f"{self.subject.title} reads {self._describe_texts}")
        begins += f", in {self.job.count} processes" if self.job else ""
        begins += "." if self.estimate is None else f": {self.estimate}, by estimate."
        if not self._count_done_texts:
            return begins
        if self._count_done_texts < len(self.texts):
            return (
                f"{begins}\n{self._count_done_texts} of {texts} are in {self.options.out} already."
            )
        done = "The text is" if len(self.texts) == 1 else f"All {texts} are"
        return f"{begins}\n{done} in {self.options.out} already; nothing is read again."

    @property
    def interrupted_message(self) -> str:
        """A line on the saved files of an interrupted run."""
        return describe_interruption(self.options.out, len(self.texts))

    def run(self, progress: Progress) -> ScanReport:
        """Run the scan, save it if there is --out, and return the report."""
        steps: _AttentionCallProgress | _JobProgress = _AttentionCallProgress(
            progress, self.calls, len(self.texts)
        )
        if self.job is not None:
            steps = _JobProgress(progress, self.job, len(self.texts))
        scan_one = partial(
            _scan_text,
            self.options,
            self.subject,
            statistics=self.statistics,
            progress=steps.update_after_attention_call,
        )
        is_saved = self.options.out is not None
        return ScanReport(
            scan=self._scan_corpus(scan_one, steps) if is_saved else scan_one(self.texts[0].ids),
            title=escape_unprintable(self.subject.title),
            about=self.subject.about,
            read=escape_unprintable(self._describe_texts),
            chosen=self.subject.separators_and_specials_in_words,
            notes=self.subject.notes,
            name_of=self.subject.name_of,
            command=self.options.command_with_top_keys,
        )

    def _scan_corpus(
        self, scan_one: partial[HeadScan], steps: _AttentionCallProgress | _JobProgress
    ) -> HeadScan:
        options, subject = self.options, self.subject
        assert options.out is not None
        merged = self._function_that_scans_all_texts(
            scan_one,
            [(text.name, text.ids) for text in self.texts],
            options.out,
            made_with={
                "weights": subject.model.state_dict(),
                "statistics (--stats)": [s.definition.name for s in self.statistics],
                "maps (--map-cells)": max((s.cells for s in self.statistics), default=0),
                "top keys (--top-keys)": options.top_keys,
                "layers (--layers)": options.layer_patterns,
                "length (--length)": options.length,
                "separators": sorted(subject.separators.values()),
                "specials": sorted(subject.specials),
            },
            progress=steps.report_document,
        )
        if self.job is None or self.job.rank == 0:
            write_whole(options.out / TABLE, _format_csv(merged))
        return merged

    @property
    def _function_that_scans_all_texts(self) -> Callable[..., HeadScan]:
        if self.job is None:
            return scan_corpus
        from headwise.sharding.processes.documents import scan_in_job

        return partial(scan_in_job, self.job)

    @property
    def _count_done_texts(self) -> int:
        """Number of texts that are already in the folder; 0 without a folder."""
        return _count_saved_texts(self.options.out)

    @property
    def _describe_texts(self) -> str:
        if len(self.texts) == 1:
            return self.texts[0].description
        count = sum(text.ids.numel() for text in self.texts)
        names = ", ".join(text.name for text in self.texts[:3])
        more = f" and {len(self.texts) - 3} more" if len(self.texts) > 3 else ""
        return f"{len(self.texts)} texts, {count:,} tokens: {names}{more}"


class _AttentionCallProgress:
    """Progress over the attention calls of all documents."""

    def __init__(self, progress: Progress, calls: int, documents: int) -> None:
        self._progress, self._calls, self._total = progress, calls, calls * documents
        self._name, self._done = "", 0

    def report_document(self, name: str, done: int, _total: int) -> None:
        """Report that a document begins or is done."""
        self._name, self._done = name, done
        self.update_after_attention_call(name, 0, 0)

    def update_after_attention_call(self, layer: str, seen: int, _total: int) -> None:
        """Report an attention call of a layer."""
        done = min(self._total, self._done * self._calls + seen)
        self._progress((self._name or layer)[-26:], done, self._total)


class _JobProgress:
    """Progress over the documents of all ranks, which is looked up a few times a second."""

    def __init__(self, progress: Progress, job: Job, documents: int) -> None:
        from headwise.sharding.processes.documents import DONE

        is_shown = job.rank == 0
        self._progress, self._total = progress if is_shown else no_progress, documents
        self._look_up = partial(job.add_to_counter, DONE, 0)
        self._next_look = 0.0 if is_shown else math.inf
        self._name = ""

    def report_document(self, name: str, done: int, _total: int) -> None:
        """Report that a document of this rank begins or is done, or that all are waited for."""
        self._name = name or "waiting for other ranks"
        self._progress(self._name[-26:], done, self._total)

    def update_after_attention_call(self, _layer: str, _seen: int, _all: int) -> None:
        """Report the documents of the other ranks, after an attention call of this one."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_UP_INTERVAL
            self.report_document(self._name, self._look_up(), self._total)


def describe_interruption(out: Path | None, texts: int) -> str:
    """Return a line on the saved files of an interrupted run."""
    if out is None:
        return "Interrupted; nothing is saved without --out."
    return (
        f"Interrupted; {_count_saved_texts(out)} of {describe_count(texts, 'text')} are in {out}. "
        "Run the same command again to resume."
    )


def _count_saved_texts(out: Path | None) -> int:
    return len(list_parts(out)) if out else 0


def prepare_scan(options: ScanOptions, job: Job | None = None) -> PreparedScan:
    """Load the model and the texts, run a trial on a few tokens, and estimate the scan.

    Raises:
        HeadwiseError: a failure that can be known before the work.
    """
    make_parent_and_require_writable(options.page)
    copies = 1 if job is None else local_rank_count()
    require_room_for_model(options, copies=copies)
    if job is not None:
        job.barrier("memory looked up")  # before a rank uses more
    subject = load_model(options)
    prepared = prepare_texts(subject, options)
    texts = [text for text in prepared if not text.is_empty]
    if empty := [text.name for text in prepared if text.is_empty]:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        note = f"left out, with fewer than two tokens: {', '.join(empty[:3])}{more}"
        subject = replace(subject, notes=(*subject.notes, escape_unprintable(note)))
    for text in texts:
        subject.require_tokens_in_vocabulary(text.ids)
    trial = texts[0].ids[:, :TRIAL]
    with explain_failure_on_token_ids(subject.title, trial.shape[1], do=INSTEAD):
        (once,) = list_inputs(subject.inputs(trial))
        calls = record_call_sizes(subject.model, lambda: call_model_on_input(subject.model, once))
        start = time.perf_counter()
        tried = _scan_text(options, subject, trial, statistics=options.stats)
        trial_seconds = time.perf_counter() - start
    lengths = [text.ids.shape[1] for text in texts]
    statistics = choose_statistics(options, tried, max(lengths))
    expected = None
    if subject.device.type == "cpu":  # of another device, neither time nor memory is known
        expected = estimate_scan(
            subject.model,
            calls,
            statistics,
            lengths,
            held_bytes=process_memory(),
            trial_seconds=trial_seconds,
        )
    if job is not None:
        job.barrier("model loaded")
        expected = expected and expected.for_several_processes(job.count, of=len(texts))
    if expected is not None and not options.force:
        times = f"{copies} times " if copies > 1 else ""
        require_memory(
            expected.extra_bytes,
            what=f"{times}{max(lengths):,} tokens of {subject.title}",
            do="--length N with fewer tokens, --stats with fewer statistics, or --force",
        )
    return PreparedScan(options, subject, texts, statistics, expected, len(calls), job)


def _scan_text(
    options: ScanOptions,
    subject: ModelToScan,
    ids: torch.Tensor,
    *,
    statistics: Statistics,
    progress: Progress | None = None,
) -> HeadScan:
    return scan(
        subject.model,
        subject.inputs(ids),
        statistics=statistics,
        layers=options.layer_patterns,
        separators=tuple(subject.separators.values()),
        specials=subject.specials,
        progress=progress,
    )


def _format_csv(result: HeadScan) -> str:
    file = io.StringIO()
    columns = ["layer", "layer_index", "head", *result.scalars]
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(result.table())
    return file.getvalue()
