"""A scan from what was asked for to its report: everything that can be refused is refused first."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

from headwise.cli.scan import passage
from headwise.cli.scan.asked import TABLE, Asked
from headwise.cli.scan.passage import Passage
from headwise.cli.scan.subject import Subject, of_folder, of_tiny
from headwise.reports.scan import ScanReport
from headwise.reports.telling import visible
from headwise.scanning import machine
from headwise.scanning.corpus import parts_in, scan_corpus
from headwise.scanning.estimate import Estimate, calls_of, estimate, require_memory
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.inputs import on_tokens
from headwise.scanning.scan import scan
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.statistic import TileStatistic
from headwise.support.progress import Progress
from headwise.support.whole_files import require_writable, write_whole

INSTEAD = "call headwise.scan(model, inputs) from Python with what it reads"
TRIAL = 16  # tokens that are read before the work, to see what comes


@dataclass(frozen=True, eq=False)
class Work:
    """A scan that can begin."""

    asked: Asked
    subject: Subject
    passages: Sequence[Passage]
    estimate: Estimate
    calls: int  # of attention, for each passage

    @property
    def what(self) -> str:
        """Which model reads what, in a line."""
        return visible(f"{self.subject.title} reads {self._read()}")

    @property
    def kept(self) -> int:
        """How many of the texts are in the folder already; 0 without a folder."""
        if self.asked.out is None:
            return 0
        return len(parts_in(self.asked.out))

    @property
    def begins_with(self) -> str:
        """What is in the folder already, in a line; nothing where nothing is."""
        texts = _texts(len(self.passages))
        if not self.kept:
            return ""
        if self.kept >= len(self.passages):
            done = "The text is" if len(self.passages) == 1 else f"All {texts} are"
            return f"{done} in {self.asked.out} already; nothing is read again."
        return f"{self.kept} of {texts} are in {self.asked.out} already."

    @property
    def when_interrupted(self) -> str:
        """What is left of a run that was stopped, in a line."""
        if self.asked.out is None:
            return "Interrupted; nothing is kept without --out."
        return (
            f"Interrupted; {self.kept} of {_texts(len(self.passages))} are kept in "
            f"{self.asked.out}; the same command goes on from there."
        )

    def run(self, progress: Progress) -> ScanReport:
        """Scan, keep the scan where that was asked for, and report."""
        found = self._kept(progress) if self.asked.out else self._scanned(progress)
        return ScanReport(
            scan=found,
            title=visible(self.subject.title),
            about=self.subject.about,
            read=visible(self._read()),
            chosen=self.subject.chosen,
            notes=self.subject.notes,
            name_of=self.subject.name_of,
            versions={name: metadata.version(name) for name in ("headwise", "torch")},
        )

    def _scanned(self, progress: Progress) -> HeadScan:
        return self._scan_one(self.passages[0].ids, _Steps(progress, self.calls, 1))

    def _kept(self, progress: Progress) -> HeadScan:
        assert self.asked.out is not None
        steps = _Steps(progress, self.calls, len(self.passages))
        names = [statistic.definition.name for statistic in _statistics(self.asked)]
        found = scan_corpus(
            lambda ids: self._scan_one(ids, steps),
            [(one.name, one.ids) for one in self.passages],
            self.asked.out,
            made_with={
                "weights": self.subject.model.state_dict(),
                "statistics (--stats)": names,
                "layers (--layers)": self.asked.layer_patterns,
                "length (--length)": self.asked.length,
                "separators": sorted(self.subject.separators.values()),
                "specials": sorted(self.subject.specials),
            },
            progress=steps.document,
        )
        write_whole(self.asked.out / TABLE, _csv(found))
        return found

    def _scan_one(self, ids: torch.Tensor, steps: _Steps) -> HeadScan:
        return _scan(self.asked, self.subject, ids, progress=steps.call)

    def _read(self) -> str:
        if len(self.passages) == 1:
            return self.passages[0].words
        count = sum(one.ids.numel() for one in self.passages)
        names = ", ".join(one.name for one in self.passages[:3])
        more = f" and {len(self.passages) - 3} more" if len(self.passages) > 3 else ""
        return f"{len(self.passages)} texts, {count:,} tokens: {names}{more}"


class _Steps:
    """Documents and calls of attention as one count."""

    def __init__(self, progress: Progress, calls: int, documents: int) -> None:
        self._progress, self._calls, self._documents = progress, calls, documents
        self._name, self._done = "", 0

    def document(self, name: str, done: int, _total: int) -> None:
        """Another document begins, or is done."""
        self._name, self._done = name, done
        self._tell(name, 0)

    def call(self, layer: str, seen: int, _total: int) -> None:
        """A layer was seen."""
        self._tell(self._name or layer, seen)

    def _tell(self, what: str, seen: int) -> None:
        total = self._calls * self._documents
        self._progress(what[-26:], min(total, self._done * self._calls + seen), total)


def prepare(asked: Asked) -> Work:
    """Load the model, look at what is to be read, try it on a few tokens, and estimate.

    Raises:
        HeadwiseError: whatever can be known to fail before the work.
    """
    statistics = _statistics(asked)
    require_writable(asked.page)
    subject = _subject(asked)
    passages = _passages(asked, subject)
    for one in passages:
        subject.require_tokens(one.ids)
    trial = passages[0].ids[:, :TRIAL]
    with on_tokens(subject.title, trial.shape[1], do=INSTEAD):
        _scan(asked, subject, trial)
        calls = calls_of(subject.model, lambda: _call(subject, trial))
    lengths = [one.ids.shape[1] for one in passages]
    expected = estimate(subject.model, calls, statistics, lengths, held=machine.in_use())
    if not asked.force:
        require_memory(
            expected.more,
            machine.available(),
            what=f"{max(lengths):,} tokens of {subject.title}",
            do="--length N with fewer tokens, --stats with fewer statistics, or --force",
        )
    return Work(asked, subject, passages, expected, len(calls))


def _subject(asked: Asked) -> Subject:
    if asked.model_dir is None:
        return of_tiny()
    from headwise.checkpoints.stored_model import require_model

    size = require_model(asked.model_dir)
    if not asked.force:
        require_memory(
            size,
            machine.available(),
            what=f"the weights in {asked.model_dir}",
            do="use a machine with more memory, or --force",
        )
    return of_folder(asked.model_dir, trust_remote_code=asked.trust_remote_code)


def _passages(asked: Asked, subject: Subject) -> list[Passage]:
    if asked.random_repeats or (asked.demo and not asked.texts and asked.tokens is None):
        # On random tokens a head that carries on a repeat has nothing else to go by.
        return [passage.repeats(subject, asked.length)]
    if asked.tokens is not None:
        return [passage.stored_tokens(subject, asked.tokens, asked.length)]
    if asked.texts:
        return passage.texts(subject, passage.files_of(asked.texts), asked.length)
    return [passage.shipped(subject, asked.length)]


def _statistics(asked: Asked) -> Sequence[TileStatistic]:
    return catalogue.STANDARD if asked.stats is None else catalogue.named(asked.stats)


def _scan(
    asked: Asked, subject: Subject, ids: torch.Tensor, *, progress: Progress | None = None
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


def _call(subject: Subject, ids: torch.Tensor) -> None:
    given = subject.inputs(ids)
    subject.model(**given) if isinstance(given, dict) else subject.model(*given)


def _texts(count: int) -> str:
    return f"{count:,} text" + ("" if count == 1 else "s")


def _csv(found: HeadScan) -> str:
    file = io.StringIO()
    columns = ["layer", "layer_index", "head", *found.scalars]
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found.table())
    return file.getvalue()
