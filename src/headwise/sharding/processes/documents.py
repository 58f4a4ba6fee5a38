"""`scan_documents`: the scan of a corpus over all ranks, with the same bytes as over one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from headwise.errors import OptionError
from headwise.scanning.corpus import (
    SCAN,
    CorpusFolder,
    hash_each_value,
    list_parts,
    no_documents_error,
)
from headwise.scanning.file import hash_nested_content
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.statistic import Statistic
from headwise.sharding.processes.job import TIMEOUT, Job, open_group_job
from headwise.support.progress import Progress, no_progress

DONE = "documents done"  # the counter of a job


def scan_documents(
    scan_one: Callable[[Any], HeadScan],
    documents: Sequence[tuple[str, Any]],
    out: str | PathLike[str],
    *,
    made_with: Mapping[str, Any],
    statistics: Iterable[Statistic] = (),
    progress: Progress = no_progress,
    timeout: float = TIMEOUT,
) -> HeadScan:
    """Scan documents over all ranks of the default process group, or resume an earlier run.

    Each rank takes the next document as soon as it is free, and writes its part into the folder.
    The rank that finishes last merges all parts in the order of the documents. Files are those of
    `headwise.scanning.corpus.scan_corpus` over the same documents, byte for byte if every
    rank has as many threads. Either function resumes the other's run, with any number of ranks.

    Args:
        scan_one: a function that scans the inputs of one document by itself, without the other
            ranks.
        documents: the name and the inputs of each document, the same on every rank.
        out: the folder to write to, which all ranks reach under this path.
        made_with: all that ``scan_one`` depends on, by name, as for `scan_corpus`. Digests are
            compared between ranks before the work.
        statistics: statistics that are not in headwise's catalogue, to read the parts.
        progress: called with a document's name, the number of documents that all ranks have done,
            and their total.
        timeout: seconds without a sign of life after which a rank counts as lost.

    Returns:
        The merged scan of all documents, on every rank.

    Raises:
        OptionError: no process group; documents or ``made_with`` that differ between ranks; or
            as `scan_corpus`.
        LostProcessError: another rank ended, stopped or failed. Finished documents are kept.
    """
    with open_group_job("scan_documents(...)", timeout=timeout) as job:
        return scan_in_job(
            job,
            scan_one,
            documents,
            out,
            made_with=made_with,
            statistics=tuple(statistics),
            progress=progress,
        )


def scan_in_job(
    job: Job,
    scan_one: Callable[[Any], HeadScan],
    documents: Sequence[tuple[str, Any]],
    out: str | PathLike[str],
    *,
    made_with: Mapping[str, Any],
    statistics: tuple[Statistic, ...] = (),
    progress: Progress = no_progress,
) -> HeadScan:
    """Scan documents over the ranks of a job; see `scan_documents`."""
    if not documents:
        raise no_documents_error()
    digests = hash_each_value(made_with)
    everything = [[name, hash_nested_content(inputs)] for name, inputs in documents]
    job.require_same({**digests, "documents": hash_nested_content(everything)})
    folder = CorpusFolder(out, digests, statistics)
    folder.refuse_parts_from(len(documents))
    # Opening a folder removes half-written files: no rank writes before all have opened it.
    job.barrier("folder opened")
    _scan_share(job, scan_one, documents, folder, progress)
    if job.arrive("finished"):
        _require_parts(folder.out, len(documents))
        merged = CorpusFolder(out, digests, statistics).scan_all(scan_one, documents, no_progress)
        job.announce("merged")
        return merged
    job.wait_for_announcement(
        "merged", meanwhile=lambda: progress("", job.add_to_counter(DONE, 0), len(documents))
    )
    _require_parts(folder.out, len(documents))
    return HeadScan.load(folder.out / SCAN, statistics)


def _scan_share(
    job: Job,
    scan_one: Callable[[Any], HeadScan],
    documents: Sequence[tuple[str, Any]],
    folder: CorpusFolder,
    progress: Progress,
) -> None:
    """Scan documents until all have been taken."""
    first: HeadScan | None = None
    while (index := job.take_next_number("document")) < len(documents):
        name, inputs = documents[index]
        progress(name, job.add_to_counter(DONE, 0), len(documents))
        scan = folder.scan_or_load_document(index, name, inputs, scan_one, fits=first)
        first = scan if first is None else first
        progress(name, job.add_to_counter(DONE, 1), len(documents))


def _require_parts(out: Path, count: int) -> None:
    """Raise OptionError if the folder lacks parts: other ranks wrote them to another disk."""
    indexes = {index for index, _ in list_parts(out)}
    if missing := [index for index in range(count) if index not in indexes]:
        raise OptionError(
            saw=f"{out}, which lacks {len(missing)} of {count} parts, the first of document "
            f"{missing[0]}",
            needed="one folder that every rank writes to",
            do="name a folder on a disk that all machines of the job share",
        )
