"""A scan of many documents that can be interrupted: what is done is kept, a file a document.

    out/parts/00000-first.safetensors     the scan of each document, and what it was made from
    out/parts/00001-second.safetensors
    out/scan.safetensors                  all of them as one, in their order

A run that was killed is simply started again. What it writes is byte for byte what it would have
written undisturbed. One run at a time may write to a folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from os import PathLike
from pathlib import Path
from typing import Any

from headwise.errors import OptionError
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.scan_file import damaged, digest_of, read, write
from headwise.scanning.scan_schema import FieldError, checked, excerpt
from headwise.scanning.statistics.statistic import Statistic

SCAN, PARTS = "scan.safetensors", "parts"
SUFFIX = ".safetensors"
# What is kept beside a part.
DOCUMENT = {"name": str, "digest": str, "made_with": {...: str}}
REMOVE = (
    "remove this file and start the same run again: the other parts are kept, and only the "
    "document of this part is scanned again"
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
    """Scan documents one by one, or go on where an earlier run ended.

    Args:
        scan_one: the scan of one document's inputs.
        documents: a name and the inputs of each, in the order in which they are merged.
        out: the folder to write to; it is made.
        made_with: what ``scan_one`` depends on, by name, as for `digest_of`:
            ``{"weights": model.state_dict(), "statistics": names}``. Parts that were made with
            other such are refused.
        statistics: those that are not in headwise's catalogue, for reading the parts.
        progress: is told a document's name, how many are done and how many there are: those met so
            far, where ``documents`` has no length.

    Returns:
        All documents as one scan, which is also in ``out/scan.safetensors``.

    Raises:
        OptionError: no documents; a part of other content, made with something else, or of no
            document; scans that do not fit together; a folder that holds a scan without parts.
    """
    folder = _Folder(Path(out).absolute(), made_with, tuple(statistics))
    total: HeadScan | None = None
    done = 0
    for index, (name, inputs) in enumerate(documents):
        known = len(documents) if isinstance(documents, Sized) else index + 1
        progress(name, done, known)
        scan = folder.scan(index, name, inputs, scan_one, fits=total)
        total = scan if total is None else total.merge(scan)
        done = index + 1
        progress(name, done, known)
    if total is None:
        raise OptionError(
            saw="no documents",
            needed="at least one (name, inputs)",
            do="look at where the documents come from; a generator can be read only once",
        )
    folder.refuse_parts_from(done)
    total.save(folder.out / SCAN)
    return total


def parts_in(out: Path) -> list[tuple[int, Path]]:
    """Return the number and the path of each part that a folder holds, in order."""
    found = sorted((out / PARTS).glob(f"[0-9]*-*{SUFFIX}"))
    named = [(path.name.partition("-")[0], path) for path in found if path.is_file()]
    return [(int(number), path) for number, path in named if re.fullmatch("[0-9]+", number)]


class _Folder:
    """The parts that there are, and what a part must be made from to be taken."""

    def __init__(
        self, out: Path, made_with: Mapping[str, Any], statistics: tuple[Statistic, ...]
    ) -> None:
        self.out, self.parts = out, out / PARTS
        self._made_with = {name: digest_of(value) for name, value in made_with.items()}
        self._statistics = statistics
        for left in [*out.glob(f".{SCAN}.*.part"), *self.parts.glob(f".*{SUFFIX}.*.part")]:
            left.unlink(missing_ok=True)  # of a run that was killed while it wrote
        self._found: dict[int, Path] = {}
        for index, path in parts_in(out):
            if index in self._found:
                raise _refused(path, f"beside {self._found[index].name}", "one part a document")
            self._found[index] = path
        if not self._found and (out / SCAN).exists():
            raise OptionError(
                saw=f"{out / SCAN}, a scan without its parts",
                needed="a folder of an earlier run, or one without a scan",
                do="name another folder",
            )

    def scan(
        self,
        index: int,
        name: str,
        inputs: Any,
        scan_one: Callable[[Any], HeadScan],
        *,
        fits: HeadScan | None,
    ) -> HeadScan:
        """A document's scan as it stands in its part, which is written where there is none."""
        document = {
            # Without half characters, which a file's name can have and UTF-8 cannot.
            "name": name.encode("utf-8", "backslashreplace").decode("utf-8"),
            "digest": digest_of(inputs),
            "made_with": self._made_with,
        }
        path = self._found.get(index)
        if path is None:
            # As a file can be called on every system.
            plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "document"
            path = self.parts / f"{index:05}-{plain}{SUFFIX}"
            fresh = scan_one(inputs)
            # What does not fit is not kept: without the document, the run can go on.
            if fits is not None and (difference := fits.difference(fresh)) is not None:
                raise OptionError(
                    saw=f"document {index}, {name}: {difference}",
                    needed="the layers, heads and statistics of the documents before it",
                    do="leave it out, or scan documents of its kind into a folder of their own",
                )
            write(fresh, path, document=document)
        fields, saved = read(path, self._statistics, remedy=REMOVE)
        if saved is None:
            raise _refused(path, "a scan that no run over documents wrote", "parts of such a run")
        try:
            checked(saved, DOCUMENT, "document")
        except FieldError as fault:
            raise damaged(path, fault, REMOVE) from fault
        self._check(path, saved, document)
        kept = HeadScan(**fields)
        if fits is not None and (difference := fits.difference(kept)) is not None:
            raise _refused(path, difference, "scans of the same layers, heads and statistics")
        return kept

    def refuse_parts_from(self, number: int) -> None:
        """Parts beyond the last document are of other documents."""
        if beyond := [path for index, path in self._found.items() if index >= number]:
            raise _refused(beyond[0], f"with {number} documents", "a part for each document")

    def _check(self, path: Path, saved: dict[str, Any], document: dict[str, Any]) -> None:
        if saved["name"] != document["name"]:
            was = excerpt(saved["name"])
            raise _refused(path, f"made from {was!r}", f"one of {document['name']!r}")
        # First, since it may be why the content is another: a length that cuts it, for one.
        before, now = saved["made_with"], document["made_with"]
        if other := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
            what = excerpt(other[0])
            raise _refused(path, f"made with other {what}", f"the {what} given now")
        if saved["digest"] != document["digest"]:
            raise _refused(
                path,
                f"made from other content of {document['name']!r}: "
                + excerpt(saved["digest"][:16]),
                f"one of the content given now, {document['digest'][:16]}",
            )


def _refused(path: Path, saw: str, needed: str) -> OptionError:
    return OptionError(
        saw=f"{path}, {saw}",
        needed=needed,
        do="name another folder, or remove the parts that are no longer wanted",
    )
