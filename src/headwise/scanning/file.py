"""Files of scans: tensors in .safetensors, everything else as JSON in the metadata.

The name of a tensor is "layer_index/statistic/tensor_name". safetensors does not keep the order of
several metadata keys, so the JSON is one string under one key, with sorted keys. The same scan
therefore gives the same bytes.

The JSON holds a SHA-256 digest of the rest of the JSON and of the name, dtype, shape and values of
each tensor. Each statistic has its words and its id (`Definition.id`). An edited file may carry a
new digest, so every field and tensor is checked as well. Files of headwise 0.1.0 are read by
`schema.upgrade_format_1`.
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
from headwise.scanning.layer import ScanReadings
from headwise.scanning.schema import (
    WHOLE,
    FieldError,
    check_scan_fields,
    check_value,
    describe_json,
    fields_of_layer,
    fields_of_statistic,
    pop_texts,
    rebuild_layers,
    require_text_numbers_in_range,
    shorten_for_message,
    tensors_of_scan,
    upgrade_format_1,
)
from headwise.scanning.statistics import importance
from headwise.scanning.statistics.catalogue import STANDARD
from headwise.scanning.statistics.statistic import Definition, Statistic
from headwise.scanning.statistics.top_keys import TopKeysOfEveryQuery
from headwise.support.files import write_whole
from headwise.support.json_object import parse_json_object
from headwise.support.private_torch import is_wrapper
from headwise.support.text import describe_value

VERSION = 2
KEY = "headwise.scan"  # of the metadata
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of an object; differs between processes
COPY_AGAIN = "copy it again from where it was saved, or scan again"


def write_scan_file(
    scan: ScanReadings, path: Path, *, document: Mapping[str, Any] | None = None, mark: str = ""
) -> Path:
    """Save a scan, and ``document`` with it, for `read_scan_fields` to return.

    ``mark`` is a part of the name of the unfinished file.

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
    tensors = tensors_of_scan(scan)
    try:
        check_scan_fields(about)
        rest = dict(tensors)
        pop_texts(rest)
        rebuild_layers(about["layers"], rest, scan.statistics)
    except FieldError as fault:
        raise OptionError(
            saw=f"a scan that cannot be saved: {shorten_for_message(str(fault))}",
            needed="a scan that HeadScan.load can read again",
            do="save the scan that headwise.scan or HeadScan.merge returned, unchanged",
        ) from fault
    about["digest"] = _compute_digest(about, tensors)
    content = safetensors_of(tensors, metadata={KEY: _encode_json(about)})
    return write_whole(path, content, mark=mark)


def read_document(path: Path, *, remedy: str = COPY_AGAIN) -> Any:
    """Return what was saved beside a scan, without reading its numbers.

    Raises:
        OptionError: a file that is no whole .safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = parse_json_object((file.metadata() or {}).get(KEY, "{}"))
    except (SafetensorError, TypeError, ValueError, RuntimeError) as error:
        fault = FieldError(f"it is no whole .safetensors file ({str(error)[:120]})")
        raise damaged_file_error(path, fault, remedy) from error
    return about.get("document")


def read_scan_fields(
    path: Path, statistics: Iterable[Statistic] = (), *, remedy: str = COPY_AGAIN
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the fields of the scan in a file, and the document that was saved with it.

    Args:
        path: the file.
        statistics: statistics of the file that are not in headwise's catalogue.
        remedy: the advice of the error for a damaged file.

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
    shipped = (*STANDARD, TopKeysOfEveryQuery(), *importance.STATISTICS)
    known = {statistic.definition.name: statistic for statistic in (*shipped, *statistics)}
    try:
        about, tensors = _read_file(path)
        check_scan_fields(about)
        in_file = tuple(
            _match_statistic(saved, known, path, about) for saved in about["statistics"]
        )
        texts = pop_texts(tensors)
        layer_scans = rebuild_layers(about["layers"], tensors, in_file)
        require_text_numbers_in_range(layer_scans, texts)
    except FieldError as fault:
        raise damaged_file_error(path, fault, remedy) from fault
    return {
        "model": about["model"],
        "sequences": about["sequences"],
        "tokens": about["tokens"],
        "notes": tuple(about["notes"]),
        "statistics": in_file,
        "layer_scans": layer_scans,
        "texts": texts,
    }, about.get("document")


def damaged_file_error(path: Path, fault: FieldError, remedy: str) -> OptionError:
    """Return the error for a file that differs from what headwise wrote."""
    return OptionError(
        saw=f"the file {path} is damaged or was edited: {shorten_for_message(str(fault))}",
        needed="the file exactly as headwise wrote it",
        do=remedy,
    )


def _encode_json(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _compute_digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    rest = {name: value for name, value in about.items() if name != "digest"}
    return hash_nested_content([_encode_json(rest), tensors])


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON and the tensors of a file whose digest, if it has one, is right."""
    try:
        is_there = path.is_file()
    except OSError as error:  # the name may be too long for any file
        raise OptionError(
            saw=f"{describe_value(str(path))}: {error.strerror}",
            needed="the path of a file that HeadScan.save wrote",
            do="HeadScan.load(path) with the path that HeadScan.save returned",
        ) from error
    if not is_there:
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
            # A tensor that is read lazily would change with the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    # torch raises TypeError or RuntimeError for an impossible size.
    except (SafetensorError, TypeError, RuntimeError) as error:
        raise FieldError(f"it is no whole .safetensors file ({str(error)[:120]})") from error
    if text is None:
        raise OptionError(
            saw=f"{path}, a safetensors file that holds no scan",
            needed="a file that HeadScan.save wrote",
            do="if the file holds weights: headwise.scan(model, inputs).save(path) first",
        )
    try:
        about = check_value(parse_json_object(text), {...: object}, "its metadata")
        is_as_written = _encode_json(about) == text
    except ValueError as error:
        raise FieldError("its metadata cannot be read as the JSON of a scan") from error
    version = check_value(about.get("version"), WHOLE, "version")
    if version == 1:
        return upgrade_format_1(about), tensors
    if version != VERSION:
        raise OptionError(
            saw=f"{path}, a scan in format {version}, saved by headwise "
            f"{describe_json(about.get('headwise'))}",
            needed=f"a format up to {VERSION}, which headwise {metadata.version('headwise')} reads",
            do="load the file with the version of headwise that saved it",
        )
    if not (is_as_written and about.get("digest") == _compute_digest(about, tensors)):
        raise FieldError("its content does not have the digest that was saved with it")
    return about, tensors


def _match_statistic(
    saved: Mapping[str, Any], known: Mapping[str, Statistic], path: Path, about: Mapping[str, Any]
) -> Statistic:
    """Return the known statistic of a saved name, if both have the same meaning."""
    statistic = known.get(saved["name"])
    name, formula = shorten_for_message(saved["name"]), shorten_for_message(saved["formula"])
    if statistic is None:
        raise OptionError(
            saw=f"{path} with statistic {name!r}, which is not in headwise's catalogue",
            needed=f"the object that computes it: {formula}",
            do=f"HeadScan.load(path, statistics=[...]) with the {name} that you scanned with",
        )
    definition = statistic.definition
    then = Definition(**{**saved, "axes": tuple(saved["axes"])})
    if not then.has_meaning_of(definition):
        raise OptionError(
            saw=f"{path} with {name} as {shorten_for_message(then.formula_and_id)}",
            needed=f"{name} as this headwise defines it: {definition.formula_and_id}",
            do=f"load the file with headwise {shorten_for_message(about['headwise'])} or the "
            "statistic that saved it, or scan again",
        )
    return statistic


# ---- the digest ---------------------------------------------------------------------------------


def hash_nested_content(content: Any) -> str:
    """Return the hex SHA-256 of a string, number or tensor, or of mappings and sequences of these.

    The digest is the same in every process and on every device. It includes the dtype and shape of
    tensors and the sorted keys of mappings, so a tokenizer's output or ``state_dict()`` will do.

    Raises:
        OptionError: content of another type, or a mapping whose keys are not strings.
    """
    digest = hashlib.sha256()
    _update_digest(digest.update, content)
    return digest.hexdigest()


def _update_digest(feed: Callable[[bytes | memoryview], None], content: Any) -> None:
    """Add content to a digest, with kinds and lengths, so that no two contents give one stream."""
    if content is None or isinstance(content, (bool, int, float)):
        _feed_length_prefixed_bytes(feed, type(content).__name__, repr(content).encode())
    elif isinstance(content, str):
        _feed_length_prefixed_bytes(feed, "str", content.encode("utf-8", "surrogatepass"))
    elif isinstance(content, Tensor) and is_wrapper(content):
        _update_with_wrapper_tensor(feed, content)
    elif isinstance(content, Tensor):
        plain = content.detach().cpu().contiguous()
        _feed_length_prefixed_bytes(feed, f"{plain.dtype} {list(plain.shape)}", b"")
        feed(plain.flatten().view(torch.uint8).numpy().data)
    elif isinstance(content, Mapping):
        if odd := [key for key in content if not isinstance(key, str)]:
            raise _unhashable_content_error(f"a mapping with the key {odd[0]!r}")
        _feed_length_prefixed_bytes(feed, "mapping", str(len(content)).encode())
        for key in sorted(content):
            _update_digest(feed, key)
            _update_digest(feed, content[key])
    elif isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        _feed_length_prefixed_bytes(feed, "sequence", str(len(content)).encode())
        for entry in content:
            _update_digest(feed, entry)
    else:
        raise _unhashable_content_error(f"a {type(content).__name__}")


def _update_with_wrapper_tensor(feed: Callable[[bytes | memoryview], None], content: Any) -> None:
    """Add a tensor that wraps others, such as a quantised one: its class, parts and settings."""
    names, rest = content.__tensor_flatten__()
    _feed_length_prefixed_bytes(feed, type(content).__name__, _ADDRESS.sub("", repr(rest)).encode())
    _update_digest(feed, {name: getattr(content, name) for name in names})


def _feed_length_prefixed_bytes(
    feed: Callable[[bytes | memoryview], None], kind: str, value: bytes
) -> None:
    feed(f"{kind} {len(value)} ".encode())
    feed(value)


def _unhashable_content_error(saw: str) -> OptionError:
    return OptionError(
        saw=f"{saw} as content",
        needed="strings, numbers, tensors, or sequences and mappings of these with string keys",
        do="pass the content itself, such as the text of a file instead of its path",
    )
