"""Resumable scan of many documents, with one file for each document.

    out/parts/00000-first.safetensors     the scan of one document, with digests of its inputs
    out/parts/00001-second.safetensors
    out/scan.safetensors                  the merged scan, in the order of the documents

Start a killed run again to resume it. The files are byte for byte those of an uninterrupted run.
Only one run at a time may write to a folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from os import PathLike
from pathlib import Path
from typing import Any

from headwise.errors import OptionError
from headwise.scanning.file import (
    damaged_file_error,
    hash_nested_content,
    read_scan_fields,
    write_scan_file,
)
from headwise.scanning.result import HeadScan
from headwise.scanning.schema import FieldError, check_value, shorten_for_message
from headwise.scanning.statistics.statistic import Statistic

SCAN, PARTS = "scan.safetensors", "parts"
SUFFIX = ".safetensors"
# The schema of the document entry in a part.
DOCUMENT = {"name": str, "digest": str, "made_with": {...: str}}
REMOVE = (
    "remove this file and start the same run again: it keeps the other parts and scans only the "
    "document of this part again"
)


def scan_corpus(
    scan_one: Callable[[Any], HeadScan],
    documents: Iterable[tuple[str, Any]],
    out: str | PathLike[str],
    *,
    made_with: Mapping[str, Any],
    statistics: Iterable[Statistic] = (),
    progress: Callable[[str, int, int], None] = lambda _name, _done, _total: None,
) -> HeadScan:
    """Scan documents one by one, or resume an earlier run.

    Args:
        scan_one: a function that scans the inputs of one document.
        documents: the name and the inputs of each document, in the order of the merge.
        out: the folder to write to; a missing folder is made.
        made_with: all that ``scan_one`` depends on, by name, as for `hash_nested_content`:
            ``{"weights": model.state_dict(), "statistics": names}``. Parts that were made with
            other values are refused.
        statistics: statistics that are not in headwise's catalogue, to read the parts.
        progress: called with a document's name, the number of documents done, and their total
            (the number so far, if ``documents`` has no length).

    Returns:
        The merged scan of all documents, which is also in ``out/scan.safetensors``.

    Raises:
        OptionError: no documents; a part of other content, made with other values, or of no
            document; scans that cannot be merged; a folder that holds a scan without parts.
    """
    folder = CorpusFolder(out, hash_each_value(made_with), tuple(statistics))
    return folder.scan_all(scan_one, documents, progress)


def list_parts(out: Path) -> list[tuple[int, Path]]:
    """Return the number and the path of each part in a folder, in order."""
    paths = sorted((out / PARTS).glob(f"[0-9]*-*{SUFFIX}"))
    numbered = [(path.name.partition("-")[0], path) for path in paths if path.is_file()]
    return [(int(number), path) for number, path in numbered if re.fullmatch("[0-9]+", number)]


def hash_each_value(made_with: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each value that a scan depends on."""
    return {name: hash_nested_content(value) for name, value in made_with.items()}


def no_documents_error() -> OptionError:
    """Return the error for a corpus without documents."""
    return OptionError(
        saw="no documents",
        needed="at least one (name, inputs)",
        do="pass a list of documents; a generator can be read only once",
    )


class CorpusFolder:
    """The existing parts in a folder, and the checks that a part must pass.

    Opening a folder removes files that a killed run left half-written.

    Args:
        out: the folder.
        made_with: the digest of each value that the scan depends on.
        statistics: statistics that are not in headwise's catalogue.
    """

    def __init__(
        self,
        out: str | PathLike[str],
        made_with: Mapping[str, str],
        statistics: tuple[Statistic, ...] = (),
    ) -> None:
        self.out = Path(out).absolute()
        self.parts = self.out / PARTS
        self._made_with, self._statistics = dict(made_with), statistics
        for partial in [*self.out.glob(f".{SCAN}.*.part"), *self.parts.glob(f".*{SUFFIX}.*.part")]:
            partial.unlink(missing_ok=True)
        self._parts_by_index: dict[int, Path] = {}
        for index, path in list_parts(self.out):
            if index in self._parts_by_index:
                raise _part_error(
                    path, f"beside {self._parts_by_index[index].name}", "one part a document"
                )
            self._parts_by_index[index] = path
        if not self._parts_by_index and (self.out / SCAN).exists():
            raise OptionError(
                saw=f"{self.out / SCAN}, a scan without its parts",
                needed="a folder of an earlier run, or one without a scan",
                do="name another folder",
            )

    def scan_all(
        self,
        scan_one: Callable[[Any], HeadScan],
        documents: Iterable[tuple[str, Any]],
        progress: Callable[[str, int, int], None],
    ) -> HeadScan:
        """Scan the documents that have no part, and save and return the merge of all."""
        total: HeadScan | None = None
        done = 0
        for index, (name, inputs) in enumerate(documents):
            known = len(documents) if isinstance(documents, Sized) else index + 1
            progress(name, done, known)
            scan = self.scan_or_load_document(index, name, inputs, scan_one, fits=total)
            total = scan if total is None else total.merge(scan)
            done = index + 1
            progress(name, done, known)
        if total is None:
            raise no_documents_error()
        self.refuse_parts_from(done)
        total.save(self.out / SCAN)
        return total

    def scan_or_load_document(
        self,
        index: int,
        name: str,
        inputs: Any,
        scan_one: Callable[[Any], HeadScan],
        *,
        fits: HeadScan | None,
    ) -> HeadScan:
        """Return the scan of a document from its part, which is written if it is missing."""
        document = {
            # A file name can hold surrogates, which UTF-8 cannot.
            "name": name.encode("utf-8", "backslashreplace").decode("utf-8"),
            "digest": hash_nested_content(inputs),
            "made_with": self._made_with,
        }
        path = self._parts_by_index.get(index)
        if path is None:
            # A file name that every system accepts.
            plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "document"
            path = self.parts / f"{index:05}-{plain}{SUFFIX}"
            fresh = scan_one(inputs)
            # A scan that cannot be merged is not written, so the run can resume without it.
            if fits is not None and (difference := fits.reason_not_mergeable(fresh)) is not None:
                raise OptionError(
                    saw=f"document {index}, {name}: {difference}",
                    needed="the layers, heads and statistics of the documents before it",
                    do="leave this document out, or scan documents of its kind into another folder",
                )
            write_scan_file(fresh, path, document=document)
        fields, saved = read_scan_fields(path, self._statistics, remedy=REMOVE)
        if saved is None:
            raise _part_error(path, "a scan that scan_corpus did not write", "parts of a corpus")
        try:
            check_value(saved, DOCUMENT, "document")
        except FieldError as fault:
            raise damaged_file_error(path, fault, REMOVE) from fault
        self._require_same_part(path, saved, document)
        scan = HeadScan(**fields)
        if fits is not None and (difference := fits.reason_not_mergeable(scan)) is not None:
            raise _part_error(path, difference, "scans of the same layers, heads and statistics")
        return scan

    def refuse_parts_from(self, number: int) -> None:
        """Raise OptionError if there are parts beyond the last document."""
        if beyond := [path for index, path in self._parts_by_index.items() if index >= number]:
            raise _part_error(beyond[0], f"with {number} documents", "a part for each document")

    def _require_same_part(
        self, path: Path, saved: dict[str, Any], document: dict[str, Any]
    ) -> None:
        if saved["name"] != document["name"]:
            raise _part_error(
                path,
                f"made from {shorten_for_message(saved['name'])!r}",
                f"a part of {document['name']!r}",
            )
        # Checked before the content: other options, such as a length, may explain other content.
        before, now = saved["made_with"], document["made_with"]
        if other := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
            option = shorten_for_message(other[0])
            raise _part_error(path, f"made with other {option}", f"the {option} given now")
        if saved["digest"] != document["digest"]:
            raise _part_error(
                path,
                f"made from other content of {document['name']!r}: "
                + shorten_for_message(saved["digest"][:16]),
                f"a part of the content given now, {document['digest'][:16]}",
            )


def _part_error(path: Path, saw: str, needed: str) -> OptionError:
    return OptionError(
        saw=f"{path}, {saw}",
        needed=needed,
        do="name another folder, or remove the parts that you no longer need",
    )
