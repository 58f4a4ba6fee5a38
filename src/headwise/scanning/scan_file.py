"""A scan as a file: tensors in .safetensors, everything else as JSON in its metadata.

A tensor is called "layer_index/statistic/tensor_name". The JSON is one text under one key with its
keys sorted, since safetensors does not keep several keys in order; so the same scan gives the same
bytes.

The JSON holds a SHA-256 digest of all else: of the JSON without the digest, and of the name, dtype,
shape and values of each tensor. Each statistic has its words, for people, and an id, which says
that it is the same statistic whatever its words are (`Definition.id`). A digest that was computed
again after an edit proves nothing, so every field and tensor is checked as well.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_of
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.layer_scan import ScanReadings
from headwise.scanning.scan_schema import (
    WHOLE,
    FieldError,
    check_fields,
    checked,
    excerpt,
    fields_of_layer,
    fields_of_statistic,
    layers_of,
    shown,
    tensors_of,
)
from headwise.scanning.statistics import importance_statistics
from headwise.scanning.statistics.catalogue import STANDARD
from headwise.scanning.statistics.statistic import Definition, Statistic
from headwise.support.atomic_write import write_whole
from headwise.support.axes import describe_value
from headwise.support.private_torch import is_wrapper

VERSION = 2
KEY = "headwise.scan"  # of the metadata
FORMAT_1_NOTE = (
    "numbers of this scan come from a file in format 1, which has no digest: damage to them would "
    "not be noticed"
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of an object; other in every process
COPY_AGAIN = "copy it again from where it was saved, or scan again"


def write(scan: ScanReadings, path: Path, *, document: Mapping[str, Any] | None = None) -> Path:
    """Save a scan; ``document`` is kept beside it, for `read` to return.

    Raises:
        OptionError: nothing can be written there, or the scan could not be read again.
    """
    about: dict[str, Any] = {
        "version": VERSION,
        "headwise": metadata.version("headwise"),
        "model": scan.model,
        "sequences": scan.sequences,
        "tokens": scan.tokens,
        "notes": list(scan.notes),
        "statistics": [fields_of_statistic(statistic.definition) for statistic in scan.statistics],
        "layers": [fields_of_layer(layer) for layer in scan.layer_scans],
        "digest": "",
    }
    if document is not None:
        about["document"] = dict(document)
    tensors = tensors_of(scan)
    try:
        check_fields(about, has_digest=True)
        layers_of(about["layers"], tensors, scan.statistics)
    except FieldError as fault:
        raise OptionError(
            saw=f"this scan cannot be saved: {excerpt(str(fault))}",
            needed="a scan that HeadScan.load can read again",
            do="save a scan as headwise.scan or HeadScan.merge returned it",
        ) from fault
    about["digest"] = _digest(about, tensors)
    return write_whole(path, safetensors_of(tensors, metadata={KEY: _json(about)}))


def read(
    path: Path, statistics: Iterable[Statistic] = (), *, remedy: str = COPY_AGAIN
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the fields of the scan in a file, and what was kept beside it.

    Args:
        path: the file.
        statistics: those of the file that are not in headwise's catalogue.
        remedy: what to do where the file is damaged.

    Raises:
        FileNotFoundError: there is no such file.
        OptionError: as `HeadScan.load`.
    """
    statistics = tuple(statistics)
    for statistic in statistics:
        if not isinstance(statistic, Statistic):
            raise OptionError(
                saw=f"statistics with {describe_value(statistic)}",
                needed="the Statistic objects of the file that are not in headwise's catalogue",
                do="HeadScan.load(path) for headwise's own",
            )
    shipped = (*STANDARD, *importance_statistics.STATISTICS)
    known = {statistic.definition.name: statistic for statistic in (*shipped, *statistics)}
    try:
        about, tensors = _read_file(path)
        check_fields(about, has_digest=about["version"] > 1)
        own = tuple(_statistic(saved, known, path, about) for saved in about["statistics"])
        layer_scans = layers_of(about["layers"], tensors, own)
    except FieldError as fault:
        raise damaged(path, fault, remedy) from fault
    notes = about["notes"] + ([FORMAT_1_NOTE] if about["version"] == 1 else [])
    return {
        "model": about["model"],
        "sequences": about["sequences"],
        "tokens": about["tokens"],
        "notes": tuple(dict.fromkeys(notes)),
        "statistics": own,
        "layer_scans": layer_scans,
    }, about.get("document")


def damaged(path: Path, fault: FieldError, remedy: str) -> OptionError:
    """Return the error for a file that is not as it was written."""
    return OptionError(
        saw=f"the file {path} is damaged or was edited: {excerpt(str(fault))}",
        needed="the file exactly as headwise wrote it",
        do=remedy,
    )


def _json(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    rest = {name: value for name, value in about.items() if name != "digest"}
    return digest_of([_json(rest), tensors])


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON and the tensors of a file whose digest, if it has one, is right."""
    try:
        is_there = path.is_file()
    except OSError as error:  # a name that no file can have, as it is too long
        raise OptionError(
            saw=f"{describe_value(str(path))}: {error.strerror}",
            needed="the path of a file that HeadScan.save wrote",
            do="look at what gives the path",
        ) from error
    if not is_there:
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
            # What is read lazily would change with the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    # torch refuses a size that no tensor has with a TypeError or a RuntimeError.
    except (SafetensorError, TypeError, RuntimeError) as error:
        raise FieldError(f"it is no whole .safetensors file ({str(error)[:120]})") from error
    if text is None:
        raise OptionError(
            saw=f"{path}, a safetensors file that holds no scan",
            needed="a file that HeadScan.save wrote",
            do="scan the model first, if these are its weights",
        )
    try:
        about = checked(json.loads(text), {...: object}, "its metadata")
        is_as_written = _json(about) == text
    except (ValueError, RecursionError) as error:
        raise FieldError("its metadata cannot be read as the JSON of a scan") from error
    version = checked(about.get("version"), WHOLE, "version")
    if version not in (1, VERSION):
        raise OptionError(
            saw=f"{path}, a scan in format {version}, saved by headwise "
            f"{shown(about.get('headwise'))}",
            needed=f"format 1 or {VERSION}, which headwise {metadata.version('headwise')} reads",
            do="load it with the headwise that saved it",
        )
    if version == VERSION and not (
        is_as_written and about.get("digest") == _digest(about, tensors)
    ):
        raise FieldError("its content does not have the digest that was saved with it")
    return about, tensors


def _statistic(
    saved: Mapping[str, Any], known: Mapping[str, Statistic], path: Path, about: Mapping[str, Any]
) -> Statistic:
    """Return the statistic of that name, if it means what it meant."""
    statistic = known.get(saved["name"])
    name, formula = excerpt(saved["name"]), excerpt(saved["formula"])
    if statistic is None:
        raise OptionError(
            saw=f"{path} with statistic {name!r}, which headwise does not have",
            needed=f"the object that computes it: {formula}",
            do=f"HeadScan.load(path, statistics=[...]) with the {name} that you scanned with",
        )
    now, id_then = statistic.definition, saved.get("id")
    if id_then is None:  # in format 1, the id that its words have
        id_then = Definition(**{**saved, "axes": tuple(saved["axes"])}).id
    # A statistic that got a version later, with the words that it had, is still the same.
    if id_then not in (now.id, now.id_of_words):
        raise OptionError(
            saw=f"{path} with {name} as {formula} ({excerpt(id_then)})",
            needed=f"{name} as it is known here: {now.formula} ({now.id})",
            do=f"load it with headwise {excerpt(about['headwise'])} or the statistic "
            "that saved it, or scan again",
        )
    return statistic


# ---- the digest ---------------------------------------------------------------------------------


def digest_of(content: Any) -> str:
    """The SHA-256 of a text, number, tensor, or of mappings and sequences of such; in hex.

    It is the same in every process and on every device. A tensor counts with its dtype and shape,
    a mapping with its keys in sorted order, so a tokenizer's output and a ``state_dict()`` do.

    Raises:
        OptionError: something of another type, or a mapping whose keys are not text.
    """
    running = hashlib.sha256()
    _feed(running.update, content)
    return running.hexdigest()


def _feed(feed: Callable[[bytes | memoryview], None], content: Any) -> None:
    """Each piece with its kind and its length, so that no two contents read the same."""
    if content is None or isinstance(content, (bool, int, float)):
        _feed_piece(feed, type(content).__name__, repr(content).encode())
    elif isinstance(content, str):
        _feed_piece(feed, "str", content.encode("utf-8", "surrogatepass"))
    elif isinstance(content, Tensor) and is_wrapper(content):
        _feed_wrapper(feed, content)
    elif isinstance(content, Tensor):
        plain = content.detach().cpu().contiguous()
        _feed_piece(feed, f"{plain.dtype} {list(plain.shape)}", b"")
        feed(plain.flatten().view(torch.uint8).numpy().data)
    elif isinstance(content, Mapping):
        if odd := [key for key in content if not isinstance(key, str)]:
            raise _no_digest(f"a mapping with the key {odd[0]!r}")
        _feed_piece(feed, "mapping", str(len(content)).encode())
        for key in sorted(content):
            _feed(feed, key)
            _feed(feed, content[key])
    elif isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        _feed_piece(feed, "sequence", str(len(content)).encode())
        for item in content:
            _feed(feed, item)
    else:
        raise _no_digest(f"a {type(content).__name__}")


def _feed_wrapper(feed: Callable[[bytes | memoryview], None], content: Any) -> None:
    """Feed a tensor that is made of others, such as a quantised one: its class, parts and rest."""
    names, rest = content.__tensor_flatten__()
    _feed_piece(feed, type(content).__name__, _ADDRESS.sub("", repr(rest)).encode())
    _feed(feed, {name: getattr(content, name) for name in names})


def _feed_piece(feed: Callable[[bytes | memoryview], None], kind: str, value: bytes) -> None:
    feed(f"{kind} {len(value)} ".encode())
    feed(value)


def _no_digest(saw: str) -> OptionError:
    return OptionError(
        saw=f"{saw} as content",
        needed="text, numbers, tensors, sequences of such, or mappings whose keys are text",
        do="give scan_one what it needs in these; a file's text rather than its path",
    )
