"""Scan of a corpus by parts. Documents are independent, so processes share them without messages.

    out/corpus.json                       the documents, and all that their scans depend on
    out/parts/00000-first.safetensors     the scan of one document, with a digest of its inputs
    out/scan.safetensors, out/table.csv   the merged scan, from `merge_parts`

The share of a part depends on the documents and the number of parts alone. Parts may write to one
folder or to one each. A document that is there counts, whatever the number of parts was, and is
not scanned again. An unfinished file carries the host and the process that writes it; a later run
on this host removes it once the process has ended. The same documents give the same bytes, in any
number of parts, for one type of machine, device, dtype and number of threads.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.scanning.file import (
    damaged_file_error,
    hash_nested_content,
    read_document,
    read_scan_fields,
    write_scan_file,
)
from headwise.scanning.result import HeadScan
from headwise.scanning.schema import WHOLE, FieldError, check_value, shorten_for_message
from headwise.scanning.selection import (
    Layers,
    Numbers,
    Statistics,
    normalise_layers_option,
    select_statistics,
)
from headwise.scanning.source import ModelToScan, TextToRead, open_model, read_texts
from headwise.scanning.statistics.statistic import Statistic
from headwise.support.files import write_whole
from headwise.support.json_object import parse_json_object
from headwise.support.progress import Progress, no_progress
from headwise.support.text import describe_count, describe_value

SCAN, TABLE, PARTS, CORPUS = "scan.safetensors", "table.csv", "parts", "corpus.json"
SUFFIX = ".safetensors"
DOCUMENT = {"name": str, "digest": str, "made_with": {...: str}}  # beside the scan of a document
WORDS = {
    **dict.fromkeys(("title", "about", "read", "chosen"), str),
    "notes": [str],
    "tokens": {...: str},
}
SCHEMA = {
    "documents": [{"name": str, "digest": str, "tokens": WHOLE}],
    "made_with": {...: str},
    "words": WORDS,
}
REMOVE = (
    "remove this file and start the same run again: it keeps the other parts and scans only the "
    "document of this part again"
)
ANOTHER = "name another folder, or remove the parts that you no longer need"
LONGEST_NAMED = 40  # characters of a value that a message shows
Part = tuple[int, int] | Literal["auto"]
Words = dict[str, Any]
Texts = Sequence[TextToRead | tuple[str, Any] | str | PathLike[str]]


@dataclass(frozen=True, eq=False)
class Document:
    """A document of a corpus: its name, a digest of its inputs, and its number of tokens."""

    name: str
    digest: str
    tokens: int

    @classmethod
    def of(cls, name: str, inputs: Any) -> Document:
        """Return the document of a name and the inputs of a model."""
        # A file name can hold surrogates, which UTF-8 cannot.
        plain = name.encode("utf-8", "backslashreplace").decode("utf-8")
        return cls(plain, hash_nested_content(inputs), _count_tokens(inputs))


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of a corpus, as corpus.json holds them.

    Attributes:
        documents: the documents, in the order of the merge.
        made_with: all that their scans depend on, in words or as digests.
        words: what a page says of the model and its input, and the texts of the tokens.
    """

    documents: tuple[Document, ...]
    made_with: Mapping[str, str]
    words: Words

    @classmethod
    def read(cls, out: Path) -> Corpus | None:
        """Return the corpus of a folder, or None if the folder holds none."""
        path = out / CORPUS
        try:
            fields = check_value(parse_json_object(path.read_bytes()), SCHEMA, "")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, FieldError) as error:
            fault = error if isinstance(error, FieldError) else FieldError(str(error))
            raise damaged_file_error(path, fault, "remove it, and start the run again") from error
        documents = tuple(Document(**saved) for saved in fields["documents"])
        return cls(documents, fields["made_with"], fields["words"])

    def write(self, out: Path) -> None:
        """Write the corpus into a folder."""
        fields = {**vars(self), "documents": [asdict(document) for document in self.documents]}
        content = json.dumps(fields, ensure_ascii=False, indent=1)
        write_whole(out / CORPUS, content, mark=process_mark())

    def path_of(self, out: Path, index: int) -> Path:
        """Return the file of a document, under a name that every system accepts."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.documents[index].name).strip("-.")[:40]
        return out / PARTS / f"{index:05}-{name or 'document'}{SUFFIX}"

    def require_continued_by(self, later: Corpus, path: Path) -> None:
        """Raise OptionError if other values, or other documents, were given than those before."""
        _require_same_values(path, self.made_with, later.made_with)
        for before, now in zip(self.documents, later.documents, strict=False):
            _require_same_document(path, before.name, before.digest, now)
        if len(later.documents) < len(self.documents):
            raise _part_error(
                path,
                f"of {describe_count(len(self.documents), 'document')}",
                f"the same documents, where {len(later.documents)} are given now",
            )


@dataclass(frozen=True, eq=False)
class CorpusScan:
    """A corpus with the model that scans it."""

    corpus: Corpus
    inputs: Sequence[Any]
    scan_one: Callable[..., HeadScan]
    statistics: tuple[Statistic, ...]


# ---- a part -------------------------------------------------------------------------------------


def scan_part(
    model: ModelToScan | nn.Module | str | PathLike[str],
    texts: Texts,
    out: str | PathLike[str],
    *,
    part: Part = (1, 1),
    device: str | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> tuple[Path, ...]:
    """Scan one of several parts of a corpus, or resume an earlier run of it.

    Documents go to the part with the fewest tokens so far, longest first. `merge_parts` merges the
    parts, once all are done.

    Args:
        model: a model; or the folder of one, with its tokenizer; or what `open_model` returned.
        texts: a name and the inputs of each document, in the order of the merge; or, with a
            tokenizer, files and folders of text; or what `read_texts` returned. All parts get the
            same.
        out: the folder to write to; a missing folder is made.
        part: the number of this part, from 1, and the number of parts; or "auto", for torchrun's
            RANK and WORLD_SIZE, or the ID, MIN and COUNT of Slurm's arrays.
        device: where the model runs; where it is if None. With "auto", "cuda" is the device with
            the number of the part.
        progress: called with a document, the documents of this part that are done, and all of
            them; and during a document with a layer, the attention calls so far, and 0.
        options: ``statistics``, ``layers``, ``separators``, ``specials`` and ``length``, as for
            `open_corpus`.

    Returns:
        The files of the documents of this part.

    Raises:
        OptionError: no documents, or a part that is not there; a folder with parts of other
            documents or with other options, weights or machines; or as `headwise.scan`.
    """
    (number, count), device = number_part(part, device)
    folder = PartFolder(out, open_corpus(model, texts, device=device, **options))
    documents = folder.ready.corpus.documents
    chosen = divide_documents([document.tokens for document in documents], count)[number - 1]
    first: HeadScan | None = None
    for done, index in enumerate(chosen):
        progress(documents[index].name, done, len(chosen))
        result = folder.scan_or_load_document(index, fits=first, progress=progress)
        first = first or result
        progress(documents[index].name, done + 1, len(chosen))
    return tuple(folder.ready.corpus.path_of(folder.out, index) for index in chosen)


def divide_documents(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Return the numbers of the documents of each part, given the tokens of each document."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(tokens)), key=lambda index: -tokens[index]):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += tokens[index]
    return shares


def number_part(part: Part, device: str | None) -> tuple[tuple[int, int], str | None]:
    """Return the numbers of a part, and its device; see `scan_part`."""
    if part != "auto":
        return _require_part(part), device
    number, count = part_of_environment()
    if device == "cuda":
        device = f"cuda:{(number - 1) % max(1, torch.cuda.device_count())}"
    return (number, count), device


def part_of_environment(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the part of this process, as torchrun or an array of Slurm numbers it.

    Raises:
        OptionError: neither has numbered it, both have, or the array has gaps.
    """
    known = ("RANK", "WORLD_SIZE"), ("ARRAY_TASK_ID", "ARRAY_TASK_MIN", "ARRAY_TASK_COUNT")
    torchrun = [environment.get(name) for name in known[0]]
    slurm = [environment.get(f"SLURM_{name}") for name in known[1]]
    is_set = [all(value is not None for value in values) for values in (torchrun, slurm)]
    if sum(is_set) != 1:
        raise OptionError(
            saw="{part} auto with the numbers of torchrun and of a Slurm array"
            if all(is_set)
            else "{part} auto without the numbers of torchrun or of a Slurm array",
            needed="RANK and WORLD_SIZE, or SLURM_ARRAY_TASK_ID, _MIN and _COUNT",
            do="{part} with the number of the part and the number of parts, such as 3/8",
            parameter="part",
        )
    if is_set[0]:
        return _require_part((int(torchrun[0] or 0) + 1, int(torchrun[1] or 0)))
    task, first, count = (int(value or 0) for value in slurm)
    return _require_part((task - first + 1, count))


def _require_part(part: tuple[int, int]) -> tuple[int, int]:
    is_pair = isinstance(part, tuple) and len(part) == 2
    if not is_pair or not all(type(n) is int for n in part) or not 1 <= part[0] <= part[1]:
        shown = "/".join(map(str, part)) if is_pair else describe_value(part)
        raise OptionError(
            saw=f"{{part}} {shown}",
            needed="the number of a part, from 1 to the number of parts",
            do="{part} 1/8 to 8/8 for eight parts; a Slurm array must have no gaps",
            parameter="part",
        )
    return part


def open_corpus(
    model: ModelToScan | nn.Module | str | PathLike[str],
    texts: Texts,
    *,
    device: str | None = None,
    statistics: Statistics = None,
    layers: Layers = None,
    separators: Numbers = (),
    specials: Numbers = (),
    length: int | None = None,
) -> CorpusScan:
    """Load the model and the documents of a corpus.

    Args:
        model: as for `scan_part`.
        texts: as for `scan_part`.
        device: where the model runs; where it is if None.
        statistics: as for `headwise.scan`.
        layers: as for `headwise.scan`.
        separators: as for `headwise.scan`; a tokenizer has its own.
        specials: as for `headwise.scan`; a tokenizer has its own.
        length: the largest number of tokens of a file.

    Raises:
        OptionError: no documents; or as `open_model` and `read_texts`.
    """
    subject = _load_subject(model, device, separators=separators, specials=specials)
    chosen, _ = select_statistics(statistics)
    read = list(_read_files(subject, texts, length))
    if not read:
        raise OptionError(
            saw="no documents",
            needed="at least one (name, inputs), or a file of text",
            do="pass a list of documents; a generator can be read only once",
        )
    pairs = [(text.name, text.ids) if isinstance(text, TextToRead) else text for text in read]
    marks = {"separators": sorted(subject.separators.values()), "specials": subject.specials}
    made_with = {
        "weights": hash_nested_content(subject.model.state_dict()),
        "statistics": ", ".join(map(_describe_statistic, chosen)),
        "layers": ", ".join(normalise_layers_option(layers) or ["all"]),
        "length": str(length or "of the model"),
        **{name: ", ".join(map(str, numbers)) or "none" for name, numbers in marks.items()},
        **_describe_machine(subject),
    }
    documents = tuple(Document.of(name, inputs) for name, inputs in pairs)
    corpus = Corpus(documents, made_with, words_of_model(subject, read))
    scan_one = partial(subject.scan, statistics=chosen, layers=layers)
    return CorpusScan(corpus, [inputs for _, inputs in pairs], scan_one, chosen)


def _load_subject(
    model: ModelToScan | nn.Module | str | PathLike[str],
    device: str | None,
    *,
    separators: Numbers,
    specials: Numbers,
) -> ModelToScan:
    if isinstance(model, nn.Module):
        model = ModelToScan.of_module(model, separators=separators, specials=specials)
    elif isinstance(model, str | PathLike):
        return open_model(model, device=device or "cpu")
    if device is not None:
        model.model.to(device)
    return model


def _read_files(
    model: ModelToScan, texts: Texts, length: int | None
) -> Iterator[TextToRead | tuple[str, Any]]:
    for text in texts:
        if isinstance(text, str | PathLike):
            yield from read_texts(model, [text], length=length)
        else:
            yield text


def _count_tokens(inputs: Any) -> int:
    """Return the length of a document: batch x length of its first tensor."""
    if isinstance(inputs, Tensor):
        return int(inputs.shape[:2].numel())
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    several = isinstance(inputs, Mapping | Sequence) and not isinstance(inputs, str)
    counts = (_count_tokens(value) for value in values) if several else iter(())
    return next(counts, 1)


def _describe_statistic(statistic: Statistic) -> str:
    definition = statistic.definition
    settings = {name: getattr(statistic, name, None) for name in ("cells", "heads", "ranks")}
    options = "".join(f" {name}={value}" for name, value in settings.items() if value)
    return f"{definition.id or f'{definition.name}: {definition.formula}'}{options}"


def _describe_machine(model: ModelToScan) -> dict[str, str]:
    """Return all that the bits of a scan depend on, beside its options."""
    device = model.device
    is_cuda = device.type == "cuda"
    return {
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "dtype": ", ".join(sorted({str(p.dtype) for p in model.model.parameters()})),
        "threads": str(torch.get_num_threads()),
    }


def words_of_model(model: ModelToScan, texts: Sequence[TextToRead | tuple[str, Any]]) -> Words:
    """Return what a page says of a model and its input, and the texts of the tokens."""
    pairs = [(text.name, text.ids) if isinstance(text, TextToRead) else text for text in texts]
    names, tokens = [name for name, _ in pairs], sum(_count_tokens(x) for _, x in pairs)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    read = f"{describe_count(len(names), 'text')}, {describe_count(tokens, 'token')}: "
    read += f"{', '.join(names[:3])}{more}"
    if len(texts) == 1 and isinstance(texts[0], TextToRead):
        read = texts[0].description
    seen = sorted({token for _, x in pairs for token in _list_token_ids(model.inputs(x))})
    return {
        "title": model.title,
        "about": model.about,
        "read": read.encode("utf-8", "backslashreplace").decode("utf-8"),
        "chosen": model.separators_and_specials_in_words,
        "notes": list(model.notes),
        "tokens": {} if model.name_of is None else {str(n): model.name_of(n) for n in seen},
    }


def _list_token_ids(inputs: Any) -> Iterator[int]:
    """Yield the whole numbers in the inputs of a model."""
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        yield from inputs.unique().tolist()
    elif isinstance(inputs, Mapping | tuple | list):
        values = inputs.values() if isinstance(inputs, Mapping) else inputs
        for value in values:
            yield from _list_token_ids(value)


# ---- the folder of a corpus ---------------------------------------------------------------------


class PartFolder:
    """The finished documents in a folder, and the checks that they must pass.

    Args:
        out: the folder.
        ready: the corpus, with its model.

    Raises:
        OptionError: documents of another corpus, or a folder that holds a scan without parts.
    """

    def __init__(self, out: str | PathLike[str], ready: CorpusScan) -> None:
        self.out, self.ready = Path(out).absolute(), ready
        corpus, before = ready.corpus, Corpus.read(self.out)
        remove_unfinished_files(self.out)
        if before is not None:
            before.require_continued_by(corpus, self.out / CORPUS)
        elif (self.out / SCAN).exists() and not any(list_parts(self.out)):
            raise OptionError(
                saw=f"{self.out / SCAN}, a scan without its parts",
                needed="a folder of an earlier run, or one without a scan",
                do="name another folder",
            )
        for index, path in list_parts(self.out):
            if index >= len(corpus.documents):
                raise _part_error(
                    path, f"with {len(corpus.documents)} documents", "a part for each document"
                )
            if path != (expected := corpus.path_of(self.out, index)):
                raise _part_error(path, f"beside {expected.name}", "one part a document")
        if before is None or len(before.documents) < len(corpus.documents):
            corpus.write(self.out)

    def scan_or_load_document(
        self, index: int, *, fits: HeadScan | None = None, progress: Progress = no_progress
    ) -> HeadScan:
        """Return the scan of a document from its file, which is written if it is missing.

        Raises:
            OptionError: a scan that cannot be merged with ``fits``, or a file of something else.
        """
        corpus = self.ready.corpus
        path, document = corpus.path_of(self.out, index), corpus.documents[index]
        if not path.exists():
            fresh = self.ready.scan_one(self.ready.inputs[index], progress=progress)
            # A scan that cannot be merged is not written, so the run can resume without it.
            if fits is not None and (difference := fits.reason_not_mergeable(fresh)) is not None:
                raise OptionError(
                    saw=f"document {index}, {document.name}: {difference}",
                    needed="the layers, heads and statistics of the documents before it",
                    do="leave this document out, or scan documents of its kind into another folder",
                )
            made_with = dict(corpus.made_with)
            beside = {"name": document.name, "digest": document.digest, "made_with": made_with}
            write_scan_file(fresh, path, document=beside, mark=process_mark())
        return _load_document(corpus, index, path, self.ready.statistics, fits)


def list_parts(out: Path) -> list[tuple[int, Path]]:
    """Return the number and the path of each document in a folder, in order."""
    paths = sorted((out / PARTS).glob(f"[0-9]*-*{SUFFIX}"))
    numbered = [(path.name.partition("-")[0], path) for path in paths if path.is_file()]
    return [(int(number), path) for number, path in numbered if re.fullmatch("[0-9]+", number)]


def process_mark() -> str:
    """Return the host and the number of this process, for the name of an unfinished file."""
    return f"{re.sub('[^A-Za-z0-9]+', '-', socket.gethostname())[:30]}-{os.getpid()}"


def remove_unfinished_files(out: Path) -> None:
    """Remove what processes of this host that have ended left half-written in a folder."""
    host = process_mark().rpartition("-")[0]
    for path in [*out.glob(".*.part"), *out.glob(f"{PARTS}/.*.part")]:
        match = re.search(r"\.([A-Za-z0-9-]+)-(\d+)\.\w+\.part$", path.name)
        if match and match[1] == host and not psutil.pid_exists(int(match[2])):
            path.unlink(missing_ok=True)


def _load_document(
    corpus: Corpus,
    index: int,
    path: Path,
    statistics: Iterable[Statistic],
    fits: HeadScan | None,
) -> HeadScan:
    fields, saved = read_scan_fields(path, statistics, remedy=REMOVE)
    if saved is None:
        raise _part_error(path, "a scan that scan_part did not write", "parts of a corpus")
    try:
        check_value(saved, DOCUMENT, "document")
    except FieldError as fault:
        raise damaged_file_error(path, fault, REMOVE) from fault
    # Checked before the content: other options, such as a length, may explain other content.
    _require_same_values(path, saved["made_with"], corpus.made_with)
    _require_same_document(path, saved["name"], saved["digest"], corpus.documents[index])
    loaded = HeadScan(**fields)
    if fits is not None and (difference := fits.reason_not_mergeable(loaded)) is not None:
        raise _part_error(path, difference, "scans of the same layers, heads and statistics")
    return loaded


def _require_same_values(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise OptionError for the first value that differs from the one that a scan depends on."""
    for name in {**now, **before}:
        then, given = before.get(name, "none"), now.get(name, "none")
        if then == given:
            continue
        if max(len(then), len(given)) > LONGEST_NAMED:
            raise _part_error(path, f"made with other {name}", f"the {name} given now")
        do = f"OMP_NUM_THREADS={then}, or {ANOTHER}" if name == "threads" else ANOTHER
        shown = shorten_for_message(f"made with {name} {then}")
        raise _part_error(path, shown, f"the {name} given now, {given}", do)


def _require_same_document(path: Path, name: str, digest: str, now: Document) -> None:
    """Raise OptionError if a document has another name or content than the one given now."""
    shown = repr(shorten_for_message(name))
    if name != now.name:
        raise _part_error(path, f"made from {shown}", f"a part of {now.name!r}")
    if digest != now.digest:
        raise _part_error(
            path,
            f"made from other content of {shown}: {shorten_for_message(digest[:16])}",
            f"a part of the content given now, {now.digest[:16]}",
        )


def _part_error(path: Path, saw: str, needed: str, do: str = ANOTHER) -> OptionError:
    return OptionError(saw=f"{path}, {saw}", needed=needed, do=do)


# ---- the merge ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FoundParts:
    """The documents of a corpus in one or several folders.

    Attributes:
        corpus: the corpus of the folders.
        paths: the file of each document that is there.
        missing: names of the documents that are in no folder.
        doubled: files of documents that are there twice.
        foreign: files that belong to no document of the corpus.
    """

    corpus: Corpus
    paths: Mapping[int, Path]
    missing: tuple[str, ...]
    doubled: tuple[Path, ...]
    foreign: tuple[Path, ...]

    @property
    def faults(self) -> list[str]:
        """Sentences on what prevents the merge."""
        count = len(self.corpus.documents)
        shown: dict[str, Sequence[str | Path]] = {
            f"{len(self.missing)} of {describe_count(count, 'document')} missing": self.missing,
            f"{len(self.doubled)} doubled": self.doubled,
            f"{len(self.foreign)} foreign": self.foreign,
        }
        return [f"{fault}: {_list_names(names)}" for fault, names in shown.items() if names]


def find_parts(folders: Sequence[str | PathLike[str]]) -> FoundParts:
    """Return the documents in the folders of a corpus, and what is missing, doubled or foreign.

    Raises:
        OptionError: a folder without a corpus, or folders of several corpora.
    """
    places = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    corpus: Corpus | None = None
    paths: dict[int, Path] = {}
    doubled, foreign = [], []
    for out in places:
        here = Corpus.read(out)
        if here is None:
            raise OptionError(
                saw=f"{out}, which holds no {CORPUS}",
                needed="folders that scan_part or headwise scan --out wrote",
                do="name these folders",
            )
        if corpus is not None:
            corpus.require_continued_by(here, out / CORPUS)
            here.require_continued_by(corpus, out / CORPUS)
        corpus = here
        for index, path in list_parts(out):
            if index >= len(corpus.documents) or not _is_of_corpus(corpus, index, path):
                foreign.append(path)
            elif index in paths:
                doubled.append(path)
            else:
                paths[index] = path
    if corpus is None:
        raise OptionError(saw="no folder", needed="folders of a corpus", do="name at least one")
    missing = tuple(d.name for index, d in enumerate(corpus.documents) if index not in paths)
    return FoundParts(corpus, paths, missing, tuple(doubled), tuple(foreign))


def _is_of_corpus(corpus: Corpus, index: int, path: Path) -> bool:
    try:
        saved = read_document(path, remedy=REMOVE)
        document = corpus.documents[index]
        return saved is not None and check_value(saved, DOCUMENT, "document") == {
            "name": document.name,
            "digest": document.digest,
            "made_with": corpus.made_with,
        }
    except FieldError as fault:
        raise damaged_file_error(path, fault, REMOVE) from fault


def merge_parts(
    folders: Sequence[str | PathLike[str]] | str | PathLike[str],
    out: str | PathLike[str] | None = None,
    *,
    statistics: Iterable[Statistic] = (),
) -> HeadScan:
    """Merge the documents of a corpus, in their order, and save the scan and its table.

    Args:
        folders: the folder that all parts wrote to, or the folders of the parts, in any order.
        out: the folder of the merged scan; the first folder if None.
        statistics: statistics that are not in headwise's catalogue, to read the parts.

    Raises:
        OptionError: a document that is missing, doubled or foreign; or scans that cannot be merged.
    """
    places = [folders] if isinstance(folders, str | PathLike) else list(folders)
    parts, statistics = find_parts(places), tuple(statistics)
    if parts.faults:
        raise OptionError(
            saw="; ".join(parts.faults),
            needed="one scan of each document",
            do="scan the missing documents, or leave out the folder with other documents",
        )
    total: HeadScan | None = None
    for index in range(len(parts.corpus.documents)):
        document = _load_document(parts.corpus, index, parts.paths[index], statistics, total)
        total = document if total is None else total.merge(document)
    assert total is not None  # a corpus has documents
    target = Path(out if out is not None else places[0]).absolute()
    remove_unfinished_files(target)
    write_scan_file(total, target / SCAN, mark=process_mark())
    write_whole(target / TABLE, _format_csv(total), mark=process_mark())
    return total


def _format_csv(result: HeadScan) -> str:
    file = io.StringIO()
    columns = ["layer", "layer_index", "head", *result.scalars]
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(result.table())
    return file.getvalue()


def _list_names(names: Sequence[str | Path]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(map(str, names[:5]))}{more}"
