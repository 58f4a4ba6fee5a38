"""A scan from what was asked for to its report: everything that can be refused is refused first."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headwise.cli.scan.model_and_text import ModelToScan, TextToRead, model_of, passages_of
from headwise.cli.scan.scan_options import ScanOptions
from headwise.reports.scan_page import ScanReport
from headwise.reports.wording import visible
from headwise.scanning.corpus_scan import PARTS, SCAN, parts_in, scan_corpus
from headwise.scanning.estimate import Estimate, calls_of, estimate, in_use, require_memory
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.model_inputs import inputs_of, on_tokens, run
from headwise.scanning.scan import scan
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.statistic import TileStatistic
from headwise.support.atomic_write import require_writable, write_whole
from headwise.support.axes import many
from headwise.support.progress import Progress

INSTEAD = "call headwise.scan(model, inputs) from Python with what it reads"
TABLE = "table.csv"  # in the folder that keeps a scan
KEPT = f"The scan is kept in {SCAN}, {TABLE} and {PARTS}, with a file for each text:"
TRIAL = 16  # tokens that are read before the work, to see what comes


@dataclass(frozen=True, eq=False)
class PreparedScan:
    """A scan that can begin."""

    asked: ScanOptions
    subject: ModelToScan
    passages: Sequence[TextToRead]
    estimate: Estimate
    calls: int  # of attention, for each passage

    @property
    def begins_with(self) -> str:
        """Which model reads what, the estimate, and what is in the folder already: a line each."""
        texts = many(len(self.passages), "text")
        begins = visible(f"{self.subject.title} reads {self._read}")
        begins += f": {self.estimate}, by estimate."
        if not self._kept:
            return begins
        if self._kept < len(self.passages):
            return f"{begins}\n{self._kept} of {texts} are in {self.asked.out} already."
        done = "The text is" if len(self.passages) == 1 else f"All {texts} are"
        return f"{begins}\n{done} in {self.asked.out} already; nothing is read again."

    @property
    def when_interrupted(self) -> str:
        """What is left of a run that was stopped, in a line."""
        if self.asked.out is None:
            return "Interrupted; nothing is kept without --out."
        return (
            f"Interrupted; {self._kept} of {many(len(self.passages), 'text')} are kept in "
            f"{self.asked.out}; the same command goes on from there."
        )

    def run(self, progress: Progress) -> ScanReport:
        """Scan, keep the scan where that was asked for, and report."""
        steps = _CallCount(progress, self.calls, len(self.passages))
        scan_one = partial(_scan, self.asked, self.subject, progress=steps.call)
        kept = self.asked.out is not None
        return ScanReport(
            scan=self._corpus(scan_one, steps) if kept else scan_one(self.passages[0].ids),
            title=visible(self.subject.title),
            about=self.subject.about,
            read=visible(self._read),
            chosen=self.subject.chosen,
            notes=self.subject.notes,
            name_of=self.subject.name_of,
        )

    def _corpus(self, scan_one: partial[HeadScan], steps: _CallCount) -> HeadScan:
        asked, subject = self.asked, self.subject
        assert asked.out is not None
        found = scan_corpus(
            scan_one,
            [(one.name, one.ids) for one in self.passages],
            asked.out,
            made_with={
                "weights": subject.model.state_dict(),
                "statistics (--stats)": [s.definition.name for s in _statistics(asked)],
                "layers (--layers)": asked.layer_patterns,
                "length (--length)": asked.length,
                "separators": sorted(subject.separators.values()),
                "specials": sorted(subject.specials),
            },
            progress=steps.document,
        )
        write_whole(asked.out / TABLE, _csv(found))
        return found

    @property
    def _kept(self) -> int:
        """How many of the texts are in the folder already; 0 without a folder."""
        return len(parts_in(self.asked.out)) if self.asked.out else 0

    @property
    def _read(self) -> str:
        if len(self.passages) == 1:
            return self.passages[0].words
        count = sum(one.ids.numel() for one in self.passages)
        names = ", ".join(one.name for one in self.passages[:3])
        more = f" and {len(self.passages) - 3} more" if len(self.passages) > 3 else ""
        return f"{len(self.passages)} texts, {count:,} tokens: {names}{more}"


class _CallCount:
    """Documents and calls of attention as one count."""

    def __init__(self, progress: Progress, calls: int, documents: int) -> None:
        self._progress, self._calls, self._total = progress, calls, calls * documents
        self._name, self._done = "", 0

    def document(self, name: str, done: int, _total: int) -> None:
        """Another document begins, or is done."""
        self._name, self._done = name, done
        self.call(name, 0, 0)

    def call(self, layer: str, seen: int, _total: int) -> None:
        """A layer was seen."""
        done = min(self._total, self._done * self._calls + seen)
        self._progress((self._name or layer)[-26:], done, self._total)


def prepare(asked: ScanOptions) -> PreparedScan:
    """Load the model, look at what is to be read, try it on a few tokens, and estimate.

    Raises:
        HeadwiseError: whatever can be known to fail before the work.
    """
    statistics = _statistics(asked)
    require_writable(asked.page)
    subject = model_of(asked)
    passages = passages_of(subject, asked)
    for one in passages:
        subject.require_tokens(one.ids)
    trial = passages[0].ids[:, :TRIAL]
    with on_tokens(subject.title, trial.shape[1], do=INSTEAD):
        _scan(asked, subject, trial)
        (once,) = inputs_of(subject.inputs(trial))
        calls = calls_of(subject.model, lambda: run(subject.model, once))
    lengths = [one.ids.shape[1] for one in passages]
    expected = estimate(subject.model, calls, statistics, lengths, held=in_use())
    if not asked.force:
        require_memory(
            expected.more,
            what=f"{max(lengths):,} tokens of {subject.title}",
            do="--length N with fewer tokens, --stats with fewer statistics, or --force",
        )
    return PreparedScan(asked, subject, passages, expected, len(calls))


def _statistics(asked: ScanOptions) -> Sequence[TileStatistic]:
    return catalogue.STANDARD if asked.stats is None else catalogue.named(asked.stats)


def _scan(
    asked: ScanOptions, subject: ModelToScan, ids: torch.Tensor, *, progress: Progress | None = None
) -> HeadScan:
    return scan(
        subject.model,
        subject.inputs(ids),
        statistics=asked.stats,
        layers=asked.layer_patterns,
        separators=tuple(subject.separators.values()),
        specials=subject.specials,
        progress=progress,
    )


def _csv(found: HeadScan) -> str:
    file = io.StringIO()
    columns = ["layer", "layer_index", "head", *found.scalars]
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found.table())
    return file.getvalue()
