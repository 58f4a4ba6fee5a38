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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.scanning import file, selection
from headwise.scanning.file import FieldError, shorten_for_message, write_scan_file
from headwise.scanning.result import HeadScan
from headwise.scanning.source import ModelToScan, TextToRead, open_model, read_texts
from headwise.scanning.statistics.maps import Map
from headwise.scanning.statistics.statistic import Statistic, TileStatistic
from headwise.scanning.written import WrittenText
from headwise.support.files import parse_json_object, write_whole
from headwise.support.progress import Progress, no_progress
from headwise.support.tensors import iterate_leaves
from headwise.support.text import describe_count, describe_value, list_some

SCAN, TABLE, PARTS, CORPUS = "scan.safetensors", "table.csv", "parts", "corpus.json"
DOCUMENT = {"name": str, "digest": str, "made_with": {...: str}}  # beside the scan of a document
WORDS = {
    **dict.fromkeys(("title", "about", "read", "chosen"), str),
    "notes": [str],
    "tokens": {...: str},
}
SCHEMA = {
    "documents": [{"name": str, "digest": str, "tokens": file.WHOLE}],
    "made_with": {...: str},
    "words": WORDS,
}
REMOVE = (
    "remove this file and start the same run again: it keeps the other parts and scans only the "
    "document of this part again"
)
ANOTHER = "name another folder, or remove the parts that you no longer need"
MAP_CELLS = 128  # of a map of a corpus on each side, if no other number was chosen
LONGEST_NAMED = 40  # characters of a value that a message shows
Part = tuple[int, int] | Literal["auto"]
Words = dict[str, Any]
Texts = Sequence[TextToRead | tuple[str, Any] | str | PathLike[str]]


# ---- the number of a part ------------------------------------------------------------------------


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
    """Return the part of this process, as torchrun or an array of Slurm numbers it."""
    slurm = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "COUNT")]
    launchers = (["RANK", "WORLD_SIZE"], slurm)
    given = [names for names in launchers if all(name in environment for name in names)]
    if len(given) != 1:
        raise OptionError(
            saw="{part} auto with the numbers of torchrun and of a Slurm array"
            if given
            else "{part} auto without the numbers of torchrun or of a Slurm array",
            needed="RANK and WORLD_SIZE, or SLURM_ARRAY_TASK_ID, _MIN and _COUNT",
            do="{part} with the number of the part and the number of parts, such as 3/8",
            parameter="part",
        )
    number, *first, count = (int(environment[name]) for name in given[0])
    return _require_part((number - sum(first) + 1, count))


def _require_part(part: tuple[int, int]) -> tuple[int, int]:
    is_tuple = isinstance(part, tuple)
    if not is_tuple or [*map(type, part)] != [int, int] or not 1 <= part[0] <= part[1]:
        shown = "/".join(map(str, part)) if is_tuple else describe_value(part)
        needed = "the number of a part, from 1 to the number of parts"
        do = "{part} 1/8 to 8/8 for eight parts; a Slurm array must have no gaps"
        raise OptionError(saw=f"{{part}} {shown}", needed=needed, do=do, parameter="part")
    return part


# ---- the documents -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Document:
    """A document of a corpus: its name, a digest of its inputs, and its number of tokens."""

    name: str
    digest: str
    tokens: int


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of a corpus, as corpus.json holds them."""

    documents: tuple[Document, ...]  # in the order of the merge
    made_with: Mapping[str, str]  # all that their scans depend on, in words or as digests
    words: Words  # what a page says of the model and its input, and the texts of the tokens

    @classmethod
    def read(cls, out: Path) -> Corpus | None:
        """Return the corpus of a folder, or None if the folder holds none."""
        path = out / CORPUS
        try:
            fields = file.check_value(parse_json_object(path.read_bytes()), SCHEMA, "")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, FieldError) as error:
            remedy = "remove it, and start the run again"
            raise file.damaged_file_error(path, FieldError(str(error)), remedy) from error
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
        return out / PARTS / f"{index:05}-{name or 'document'}.safetensors"

    def fields_of_document(self, index: int) -> dict[str, Any]:
        """Return what is saved beside the scan of a document."""
        document = self.documents[index]
        return {"name": document.name, "digest": document.digest, "made_with": {**self.made_with}}

    def load_document(
        self, index: int, path: Path, statistics: Iterable[Statistic], fits: HeadScan | None
    ) -> HeadScan:
        """Return the scan of a document from its file, which must fit the scans before it."""
        fields, document = file.read_scan_fields(path, statistics, remedy=REMOVE)
        if (saved := _check_document(path, document)) is None:
            raise _part_error(path, "a scan that scan_part did not write", "parts of a corpus")
        # Checked before the content: other options, such as a length, may explain other content.
        _require_same_values(path, saved["made_with"], self.made_with)
        _require_same_document(path, saved["name"], saved["digest"], self.documents[index])
        loaded = HeadScan(**fields)
        if fits is not None and (difference := fits.reason_not_mergeable(loaded)) is not None:
            raise _part_error(path, difference, "scans of the same layers, heads and statistics")
        return loaded

    def require_continued_by(self, later: Corpus, path: Path) -> None:
        """Raise OptionError if other values, or other documents, were given than those before."""
        _require_same_values(path, self.made_with, later.made_with)
        for before, now in zip(self.documents, later.documents, strict=False):
            _require_same_document(path, before.name, before.digest, now)
        if len(later.documents) < len(self.documents):
            saw = f"of {describe_count(len(self.documents), 'document')}"
            needed = f"the same documents, where {len(later.documents)} are given now"
            raise _part_error(path, saw, needed)


def words_of_model(model: ModelToScan, texts: Sequence[TextToRead | tuple[str, Any]]) -> Words:
    """Return what a page says of a model and its input, and the texts of the tokens."""
    pairs = [_name_and_inputs(text) for text in texts]
    names, tokens = [name for name, _ in pairs], sum(_count_tokens(x) for _, x in pairs)
    counts = f"{describe_count(len(names), 'text')}, {describe_count(tokens, 'token')}"
    read = f"{counts}: {list_some(names)}"
    if len(texts) == 1 and isinstance(texts[0], TextToRead):
        read = texts[0].description
    leaves = (x for _, inputs in pairs for x in iterate_leaves(model.inputs(inputs)))
    numbers = [x for x in leaves if isinstance(x, Tensor) and not x.is_floating_point()]
    seen = sorted({token for x in numbers for token in x.unique().tolist()})
    return {
        "title": model.title,
        "about": model.about,
        "read": _as_utf8(read),
        "chosen": model.separators_and_specials_in_words,
        "notes": list(model.notes),
        "tokens": {} if model.name_of is None else {str(n): model.name_of(n) for n in seen},
    }


def _name_and_inputs(text: TextToRead | tuple[str, Any]) -> tuple[str, Any]:
    return (text.name, text.ids) if isinstance(text, TextToRead) else text


def _count_tokens(inputs: Any) -> int:
    tensors = (x for x in iterate_leaves(inputs) if isinstance(x, Tensor))
    return next((int(x.shape[:2].numel()) for x in tensors), 1)


def _as_utf8(name: str) -> str:  # a file name can hold surrogates
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


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
    folder = open_corpus(model, texts, out, device=device, **options)
    corpus = folder.corpus
    chosen = divide_documents([document.tokens for document in corpus.documents], count)[number - 1]
    first: HeadScan | None = None
    for done, index in enumerate(chosen):
        progress(corpus.documents[index].name, done, len(chosen))
        result = folder.scan_or_load_document(index, fits=first, progress=progress)
        first = first or result
        progress(corpus.documents[index].name, done + 1, len(chosen))
    return tuple(corpus.path_of(folder.out, index) for index in chosen)


def open_corpus(
    model: ModelToScan | nn.Module | str | PathLike[str],
    texts: Texts,
    out: str | PathLike[str],
    *,
    device: str | None = None,
    statistics: selection.Statistics = None,
    layers: selection.Layers = None,
    separators: selection.Numbers = (),
    specials: selection.Numbers = (),
    length: int | None = None,
) -> PartFolder:
    """Load the model and the documents of a corpus, and check what is in its folder.

    Arguments are those of `scan_part` and `headwise.scan`; a tokenizer has its own separators and
    specials. ``length`` is the largest number of tokens of a file.
    """
    if isinstance(model, str | PathLike):
        model = open_model(model, device=device or "cpu")
    elif isinstance(model, nn.Module):
        model = ModelToScan.of_module(model, separators=separators, specials=specials)
    if device is not None:
        model.model.to(device)
    selected, _ = selection.select_statistics(statistics)
    read = _read_files(model, texts, length)
    pairs = [_name_and_inputs(text) for text in read]
    chosen = tuple(_limit_map(each) if len(pairs) > 1 else each for each in selected)
    made_with = {
        "weights": file.hash_nested_content(model.model.state_dict()),
        "statistics": ", ".join(map(_describe_statistic, chosen)),
        "layers": ", ".join(selection.normalise_layers_option(layers) or ["all"]),
        "length": str(length or "of the model"),
        **_describe_marks_and_machine(model),
    }
    inputs = [each for _, each in pairs]
    written = [each.written if isinstance(each, TextToRead) else None for each in read]
    documents = [
        Document(_as_utf8(name), _hash_document(x, text), _count_tokens(x))
        for (name, x), text in zip(pairs, written, strict=True)
    ]
    corpus = Corpus(tuple(documents), made_with, words_of_model(model, read))
    folder = PartFolder(Path(out).absolute(), corpus, model, inputs, written, chosen, layers)
    folder.continue_earlier_run()
    return folder


def _hash_document(inputs: Any, written: WrittenText | None) -> str:
    """Return the digest of a document; other texts may have the same tokens."""
    content = inputs if written is None else [inputs, written.text, written.spans]
    return file.hash_nested_content(content)


def _read_files(
    model: ModelToScan, texts: Texts, length: int | None
) -> list[TextToRead | tuple[str, Any]]:
    read: list[TextToRead | tuple[str, Any]] = []
    for text in texts:
        if isinstance(text, str | PathLike):
            read += read_texts(model, [text], length=length)
        else:
            read.append(text)
    if not read:
        saw = "no documents"
        do = "pass a list of documents; a generator can be read only once"
        raise OptionError(saw=saw, needed="at least one (name, inputs), or a file of text", do=do)
    return read


def _describe_marks_and_machine(model: ModelToScan) -> dict[str, str]:
    marks = {"separators": sorted(model.separators.values()), "specials": model.specials}
    is_cuda = model.device.type == "cuda"
    return {
        **{name: ", ".join(map(str, numbers)) or "none" for name, numbers in marks.items()},
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(model.device) if is_cuda else model.device.type,
        "dtype": ", ".join(sorted({str(p.dtype) for p in model.model.parameters()})),
        "threads": str(torch.get_num_threads()),
    }


def _limit_map(statistic: TileStatistic) -> TileStatistic:
    """Return a map of `MAP_CELLS` for one of the text's size: each document has a file."""
    is_unlimited = type(statistic) is Map and not statistic.cells
    return Map(MAP_CELLS) if is_unlimited else statistic


def _describe_statistic(statistic: Statistic) -> str:
    definition = statistic.definition
    settings = {name: getattr(statistic, name, None) for name in ("cells", "heads", "ranks")}
    options = "".join(f" {name}={value}" for name, value in settings.items() if value)
    return f"{definition.id or f'{definition.name}: {definition.formula}'}{options}"


@dataclass(frozen=True, eq=False)
class PartFolder:
    """A corpus with the model that scans it, and the folder of the finished documents."""

    out: Path
    corpus: Corpus
    model: ModelToScan
    inputs: Sequence[Any]
    written: Sequence[WrittenText | None]
    statistics: tuple[Any, ...]
    layers: selection.Layers

    def continue_earlier_run(self) -> None:
        """Check the documents in the folder, remove unfinished files, and write the corpus."""
        out, corpus, before = self.out, self.corpus, Corpus.read(self.out)
        remove_unfinished_files(out)
        if before is not None:
            before.require_continued_by(corpus, out / CORPUS)
        elif (out / SCAN).exists() and not list_parts(out):
            saw = f"{out / SCAN}, a scan without its parts"
            needed = "a folder of an earlier run, or one without a scan"
            raise OptionError(saw=saw, needed=needed, do="name another folder")
        for index, path in list_parts(out):
            if index >= (count := len(corpus.documents)):
                raise _part_error(path, f"with {count} documents", "a part for each document")
            if path != (expected := corpus.path_of(out, index)):
                raise _part_error(path, f"beside {expected.name}", "one part a document")
        if before is None or len(before.documents) < len(corpus.documents):
            corpus.write(out)

    def scan_or_load_document(
        self, index: int, *, fits: HeadScan | None = None, progress: Progress = no_progress
    ) -> HeadScan:
        """Return the scan of a document from its file, which is written if it is missing."""
        path = self.corpus.path_of(self.out, index)
        if not path.exists():
            options: dict[str, Any] = {"statistics": self.statistics, "layers": self.layers}
            options |= {"written": self.written[index], "progress": progress}
            fresh = self.model.scan(self.inputs[index], **options)
            # A scan that cannot be merged is not written, so the run can resume without it.
            if fits is not None and (difference := fits.reason_not_mergeable(fresh)) is not None:
                raise OptionError(
                    saw=f"document {index}, {self.corpus.documents[index].name}: {difference}",
                    needed="the layers, heads and statistics of the documents before it",
                    do="leave this document out, or scan documents of its kind into another folder",
                )
            fields = self.corpus.fields_of_document(index)
            write_scan_file(fresh, path, document=fields, mark=process_mark())
        return self.corpus.load_document(index, path, self.statistics, fits)


def list_parts(out: Path) -> list[tuple[int, Path]]:
    """Return the number and the path of each document in a folder, in order."""
    paths = sorted(path for path in (out / PARTS).glob("[0-9]*-*.safetensors") if path.is_file())
    numbered = [(path.name.partition("-")[0], path) for path in paths]
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


def _check_document(path: Path, saved: Any) -> Any:
    """Return what was saved beside a scan, or None; raise OptionError if it was edited."""
    try:
        return saved if saved is None else file.check_value(saved, DOCUMENT, "document")
    except FieldError as fault:
        raise file.damaged_file_error(path, fault, REMOVE) from fault


def _require_same_values(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise OptionError for the first value that differs from the one that a scan depends on."""
    for name in {**now, **before}:
        then, given = before.get(name, "none"), now.get(name, "none")
        if then != given and max(len(then), len(given)) > LONGEST_NAMED:
            raise _part_error(path, f"made with other {name}", f"the {name} given now")
        if then != given:
            do = f"OMP_NUM_THREADS={then}, or {ANOTHER}" if name == "threads" else ANOTHER
            shown = shorten_for_message(f"made with {name} {then}")
            raise _part_error(path, shown, f"the {name} given now, {given}", do)


def _require_same_document(path: Path, name: str, digest: str, now: Document) -> None:
    """Raise OptionError if a document has another name or content than the one given now."""
    shown = repr(shorten_for_message(name))
    if name != now.name:
        raise _part_error(path, f"made from {shown}", f"a part of {now.name!r}")
    if digest != now.digest:
        saw = f"made from other content of {shown}: {shorten_for_message(digest[:16])}"
        raise _part_error(path, saw, f"a part of the content given now, {now.digest[:16]}")


def _part_error(path: Path, saw: str, needed: str, do: str = ANOTHER) -> OptionError:
    return OptionError(saw=f"{path}, {saw}", needed=needed, do=do)


# ---- the merge ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FoundParts:
    """The documents of a corpus in one or several folders."""

    corpus: Corpus
    paths: Mapping[int, Path]  # of the documents that are there
    missing: tuple[str, ...]  # names of documents that are in no folder
    doubled: tuple[Path, ...]  # files of documents that are there twice
    foreign: tuple[Path, ...]  # files that belong to no document of the corpus

    @property
    def faults(self) -> list[str]:
        """Sentences on what prevents the merge."""
        count = describe_count(len(self.corpus.documents), "document")
        kinds = {f" of {count} missing": self.missing, " doubled": self.doubled}
        named = {kind: [*map(str, x)] for kind, x in {**kinds, " foreign": self.foreign}.items()}
        return [f"{len(x)}{kind}: {list_some(x, 5)}" for kind, x in named.items() if x]


def find_parts(folders: Sequence[str | PathLike[str]]) -> FoundParts:
    """Return the documents in the folders of a corpus, and what is missing, doubled or foreign.

    Raises:
        OptionError: a folder without a corpus, or folders of several corpora.
    """
    corpus: Corpus | None = None
    paths: dict[int, Path] = {}
    doubled, foreign = [], []
    for out in dict.fromkeys(Path(folder).resolve() for folder in folders):
        here = Corpus.read(out)
        if here is None:
            saw = f"{out}, which holds no {CORPUS}"
            needed = "folders that scan_part or headwise scan --out wrote"
            raise OptionError(saw=saw, needed=needed, do="name these folders")
        if corpus is not None:
            corpus.require_continued_by(here, out / CORPUS)
            here.require_continued_by(corpus, out / CORPUS)
        corpus = here
        for index, path in list_parts(out):
            is_foreign = index >= len(corpus.documents)
            if not is_foreign:
                saved = _check_document(path, file.read_document(path, remedy=REMOVE))
                is_foreign = saved != corpus.fields_of_document(index)
            if is_foreign:
                foreign.append(path)
            elif index in paths:
                doubled.append(path)
            else:
                paths[index] = path
    if corpus is None:
        raise OptionError(saw="no folder", needed="folders of a corpus", do="name at least one")
    missing = tuple(d.name for index, d in enumerate(corpus.documents) if index not in paths)
    return FoundParts(corpus, paths, missing, tuple(doubled), tuple(foreign))


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
        do = "scan the missing documents, or leave out the folder with other documents"
        raise OptionError(saw="; ".join(parts.faults), needed="one scan of each document", do=do)
    total: HeadScan | None = None
    for index in range(len(parts.corpus.documents)):
        document = parts.corpus.load_document(index, parts.paths[index], statistics, total)
        total = document if total is None else total.merge(document)
    assert total is not None  # a corpus has documents
    target = Path(out if out is not None else places[0]).absolute()
    remove_unfinished_files(target)
    write_scan_file(total, target / SCAN, mark=process_mark())
    table = io.StringIO()
    columns = ["layer", "layer_index", "head", *total.scalars]
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(total.table())
    write_whole(target / TABLE, table.getvalue(), mark=process_mark())
    return total
