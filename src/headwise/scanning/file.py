"""Files of scans: tensors in .safetensors, everything else as JSON in the metadata.

The name of a tensor is "layer_index/statistic/tensor_name". safetensors does not keep the order of
several metadata keys, so the JSON is one string under one key, with sorted keys. The same scan
therefore gives the same bytes.

The JSON holds a SHA-256 digest of the rest of the JSON and of the name, dtype, shape and values of
each tensor. Each statistic has its words and its id (`Definition.id`). An edited file may carry a
new digest, so every field and tensor is checked as well. Files of headwise 0.1.0 are read by
`upgrade_format_1`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_of
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.layer import LayerScan, ScannedText, ScanReadings
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.maps import TopKeysOfEveryQuery
from headwise.scanning.statistics.statistic import Definition, Statistic, Summary, summary_fault
from headwise.scanning.written import WrittenText, span_fault
from headwise.support.files import parse_json_object, write_whole
from headwise.support.private_torch import is_wrapper
from headwise.support.text import describe_value

VERSION = 3
READABLE = (2, VERSION)  # format 2 has no texts as they were written; format 1 is upgraded
KEY = "headwise.scan"  # of the metadata
NOT_WHOLE = "it is no whole .safetensors file ({!s:.120})"
COPY_AGAIN = "copy it again from where it was saved, or scan again"
LONGEST_SHOWN = 40
LONGEST_EXCERPT = 400

# ---- schemas of the JSON, for `check_value` ------------------------------------------------------

WHOLE = range(2**63)
MOST_HEADS = 2**20  # of a layer
WORDS = ("name", "formula", "unit", "excluded", "source", "axes", "id")
TEXTS_OF_LAYER = ("query_text", "key_text")
STATISTIC = {**dict.fromkeys(WORDS, str), "axes": [str]}
LAYER = {
    "name": str,
    "num_heads": range(MOST_HEADS + 1),
    "heads": [WHOLE],
    "kind": ("self", "cross"),
    "calls": WHOLE,
    "missing": {...: str},
    "summaries": {...: [str]},
    **dict.fromkeys(TEXTS_OF_LAYER, range(-1, 2**16)),  # the number of a text, −1 for none
}
# The tensors of written texts: their bytes in UTF-8, the number of bytes of each, −1 for an unknown
# one, and the characters of each token.
WRITTEN = {"characters": (torch.uint8, 1), "sizes": (torch.int64, 1), "spans": (torch.int32, 2)}
NO_BYTES = torch.zeros(0, dtype=torch.uint8)
SCAN = {
    "version": WHOLE,
    "headwise": str,
    "model": str,
    "sequences": WHOLE,
    "tokens": WHOLE,
    "notes": [str],
    "statistics": [STATISTIC],
    "layers": [LAYER],
    "digest": str,
}


class FieldError(Exception):
    """A wrong field of a saved scan, with its position and its value."""


def check_value(value: Any, schema: Any, where: str) -> Any:
    """Check a JSON value against a schema, and return the value.

    A schema is a range of whole numbers (True and 1.0 do not count), ``str``, a tuple of allowed
    strings, a list with the schema of its entries, a mapping of field names to schemas (``...`` for
    any name), or ``object`` for any value. ``where`` names the field; empty for the whole JSON.
    """
    at, saw = where or "its JSON", f"{where or 'its JSON'} is {describe_json(value)}"
    if isinstance(schema, range):
        if type(value) is not int or value not in schema:
            raise FieldError(f"{saw} and no whole number from {schema.start} to {schema.stop - 1}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise FieldError(f"{saw} and no list")
        for index, entry in enumerate(value):
            check_value(entry, schema[0], f"{where}[{index}]")
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            raise FieldError(f"{saw} and no mapping")
        if absent := [name for name in schema if name is not ... and name not in value]:
            raise FieldError(f"{at} has no field {absent[0]!r}")
        if ... not in schema and (odd := sorted({*value} - {*schema})):
            raise FieldError(f"{at} has a field {describe_json(odd[0])} that no scan has")
        for name, entry in value.items():
            check_value(name, str, f"a key of {at}")
            check_value(entry, schema.get(name, schema.get(...)), f"{where}.{name}".lstrip("."))
    elif schema is not object:
        if not isinstance(value, str):
            raise FieldError(f"{saw} and no text")
        # Surrogates cannot be written in UTF-8.
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise FieldError(f"{at} holds half of a surrogate pair, which is no character")
        if schema is not str and value not in schema:
            raise FieldError(f"{saw} and none of {', '.join(schema)}")
    return value


def shorten_for_message(words: str) -> str:
    """Return a short excerpt of a string from a file for a message, without control codes."""
    short = words if len(words) <= LONGEST_EXCERPT else f"{words[:LONGEST_EXCERPT]}…"
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in short)


def describe_json(value: Any) -> str:
    """Describe a JSON value of any size in a few words."""
    if isinstance(value, dict):
        return f"a mapping of {len(value)} fields"
    if isinstance(value, list):
        return f"a list of {len(value)} entries"
    if isinstance(value, str) and len(value) > LONGEST_SHOWN:
        return f"a text of {len(value)} characters"
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a number of {value.bit_length()} bits"
    return ascii(value)


# ---- what headwise 0.1.0 wrote: no digest, no texts, and no ids ----------------------------------

FORMAT_1_NOTE = (
    "numbers of this scan come from a file in format 1, which has no digest, so damage to them "
    "cannot be detected"
)
# Statistics are known by their formulas; those whose words have changed since, with new words.
REWORDED = {
    "cell (a, b): mean over the queries of block a of Σⱼ A[i, j] over the keys of block b; "
    "the i-th of n real tokens is in block ⌊64 i / n⌋": "cell (a, b): mean over the queries of "
    "block a of Σⱼ A[i, j] over the keys of block b; the i-th of n real tokens is in block "
    "⌊c i / n⌋ of c: 64 blocks if no other number was chosen"
}


def upgrade_format_1(about: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a file of headwise 0.1.0 with the fields of today."""
    statistic = {name: schema for name, schema in STATISTIC.items() if name != "id"}
    layer = {name: schema for name, schema in LAYER.items() if name not in TEXTS_OF_LAYER}
    schema = {**SCAN, "statistics": [statistic], "layers": [layer]}
    del schema["digest"]
    check_value(about, schema | {name: object for name in about if name == "document"}, "")
    return {
        **about,
        "notes": list(dict.fromkeys([*about["notes"], FORMAT_1_NOTE])),
        "statistics": [
            {**saved, "id": "", "formula": REWORDED.get(saved["formula"], saved["formula"])}
            for saved in about["statistics"]
        ],
        "layers": [{**saved, **dict.fromkeys(TEXTS_OF_LAYER, -1)} for saved in about["layers"]],
        "digest": "",
    }


# ---- write ---------------------------------------------------------------------------------------


def write_scan_file(
    scan: ScanReadings, path: Path, *, document: Mapping[str, Any] | None = None, mark: str = ""
) -> Path:
    """Save a scan and ``document``; ``mark`` is a part of the name of the unfinished file."""
    about: dict[str, Any] = {
        "version": VERSION,
        "headwise": metadata.version("headwise"),
        "model": scan.model,
        "sequences": scan.sequences,
        "tokens": scan.tokens,
        "notes": list(scan.notes),
        "statistics": [fields_of_statistic(statistic.definition) for statistic in scan.statistics],
        "layers": [_fields_of_layer(layer) for layer in scan.layer_scans],
        "digest": "",
    }
    if document is not None:
        about["document"] = dict(document)
    tensors = {
        f"texts/{number}/{part}": tensor
        for number, text in enumerate(scan.texts)
        for part, tensor in _tensors_of_text(text).items()
    }
    tensors |= {
        # safetensors accepts neither views nor shared memory.
        f"{index}/{name}/{part}": tensor.clone(memory_format=torch.contiguous_format)
        for index, layer in enumerate(scan.layer_scans)
        for name, summary in layer.summaries.items()
        for part, tensor in summary.items()
    }
    try:
        _check_scan_fields(about)
        _rebuild_layers_and_texts(about["layers"], tensors, scan.statistics)
    except FieldError as fault:
        raise OptionError(
            saw=f"a scan that cannot be saved: {shorten_for_message(str(fault))}",
            needed="a scan that HeadScan.load can read again",
            do="save the scan that headwise.scan or HeadScan.merge returned, unchanged",
        ) from fault
    about["digest"] = _compute_digest(about, tensors)
    content = safetensors_of(tensors, metadata={KEY: _encode_json(about)})
    return write_whole(path, content, mark=mark)


def fields_of_statistic(definition: Definition) -> dict[str, Any]:
    """Return the words of a definition and its id."""
    return {**{name: getattr(definition, name) for name in WORDS}, "axes": list(definition.axes)}


def _fields_of_layer(layer: LayerScan) -> dict[str, Any]:
    # The names of the tensors are saved too, so that a missing tensor is noticed.
    summaries = {name: list(summary) for name, summary in layer.summaries.items()}
    texts = {name: getattr(layer, name) for name in TEXTS_OF_LAYER}
    texts = {name: -1 if text is None else text for name, text in texts.items()}
    return {**vars(layer), "heads": list(layer.heads), "summaries": summaries, **texts}


def _tensors_of_text(text: ScannedText) -> dict[str, Tensor]:
    """Return ids and lengths; and of written texts the characters, their bytes, and the spans."""
    tensors = {"ids": text.ids.int().clone(), "lengths": torch.tensor(text.lengths).int()}
    if not text.written:
        return tensors
    # A text that was made by hand may hold half of a surrogate pair.
    encoded = [
        None if each is None else each.text.encode("utf-8", "surrogatepass")
        for each in text.written
    ]
    whole = bytearray(b"".join(each or b"" for each in encoded))
    unknown = [torch.zeros(length, 2, dtype=torch.int32) for length in text.lengths]
    spans = [u if w is None else w.spans for w, u in zip(text.written, unknown, strict=True)]
    return tensors | {
        "characters": torch.frombuffer(whole, dtype=torch.uint8).clone() if whole else NO_BYTES,
        "sizes": torch.tensor([-1 if each is None else len(each) for each in encoded]),
        "spans": torch.cat(spans),
    }


def _encode_json(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _compute_digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    rest = {name: value for name, value in about.items() if name != "digest"}
    return hash_nested_content([_encode_json(rest), tensors])


# ---- read ----------------------------------------------------------------------------------------


def read_document(path: Path, *, remedy: str = COPY_AGAIN) -> Any:
    """Return what was saved beside a scan, without reading its numbers."""
    try:
        with safe_open(path, framework="pt") as file:
            return parse_json_object((file.metadata() or {}).get(KEY, "{}")).get("document")
    except (SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise damaged_file_error(path, FieldError(NOT_WHOLE.format(error)), remedy) from error


def read_scan_fields(
    path: Path, statistics: Iterable[Statistic] = (), *, remedy: str = COPY_AGAIN
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the fields of the scan in a file, and the document that was saved with it."""
    known: dict[str, list[Statistic]] = {}
    shipped = (*catalogue.STANDARD, TopKeysOfEveryQuery(), *catalogue.IMPORTANCE)
    for statistic in (*shipped, *catalogue.EARLIER):
        known.setdefault(statistic.definition.name, []).append(statistic)
    for statistic in statistics:
        if not isinstance(statistic, Statistic):
            saw = f"statistics with {describe_value(statistic)}"
            needed = "the Statistic objects of the file that are not in headwise's catalogue"
            raise OptionError(saw=saw, needed=needed, do="HeadScan.load(path) for headwise's own")
        known[statistic.definition.name] = [statistic]
    try:
        about, tensors = _read_file(path)
        _check_scan_fields(about)
        words = about["statistics"]
        in_file = tuple(_match_statistic(x, known, path, about["headwise"]) for x in words)
        layers, texts = _rebuild_layers_and_texts(about["layers"], tensors, in_file)
    except FieldError as fault:
        raise damaged_file_error(path, fault, remedy) from fault
    fields = {name: about[name] for name in ("model", "sequences", "tokens")}
    fields |= {"notes": tuple(about["notes"]), "statistics": in_file}
    return {**fields, "layer_scans": layers, "texts": texts}, about.get("document")


def damaged_file_error(path: Path, fault: FieldError, remedy: str) -> OptionError:
    """Return the error for a file that differs from what headwise wrote."""
    return OptionError(
        saw=f"the file {path} is damaged or was edited: {shorten_for_message(str(fault))}",
        needed="the file exactly as headwise wrote it",
        do=remedy,
    )


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
        raise FieldError(NOT_WHOLE.format(error)) from error
    if text is None:
        saw = f"{path}, a safetensors file that holds no scan"
        do = "if the file holds weights: headwise.scan(model, inputs).save(path) first"
        raise OptionError(saw=saw, needed="a file that HeadScan.save wrote", do=do)
    try:
        about = check_value(parse_json_object(text), {...: object}, "its metadata")
        is_as_written = _encode_json(about) == text
    except ValueError as error:
        raise FieldError("its metadata cannot be read as the JSON of a scan") from error
    version = check_value(about.get("version"), WHOLE, "version")
    if version == 1:
        return upgrade_format_1(about), tensors
    if version not in READABLE:
        raise OptionError(
            saw=f"{path}, a scan in format {version}, saved by headwise "
            f"{describe_json(about.get('headwise'))}",
            needed=f"a format up to {VERSION}, which headwise {metadata.version('headwise')} reads",
            do="load the file with the version of headwise that saved it",
        )
    if not (is_as_written and about.get("digest") == _compute_digest(about, tensors)):
        raise FieldError("its content does not have the digest that was saved with it")
    return about, tensors


def _check_scan_fields(about: dict[str, Any]) -> None:
    """Raise FieldError for the first wrong field in the JSON of a scan."""
    schema: dict[str, Any] = {**SCAN, "document": {...: object}} if "document" in about else SCAN
    check_value(about, schema, "")
    names = [saved["name"] for saved in about["statistics"]]
    if len({*names}) < len(names):
        raise FieldError("statistics has two entries of one name")
    for index, layer in enumerate(about["layers"]):
        where, heads, missing = f"layers[{index}]", layer["heads"], layer["missing"]
        check_value(heads, [range(layer["num_heads"])], f"{where}.heads")
        if len({*heads}) < len(heads):
            raise FieldError(f"{where}.heads has a head twice")
        for name in names:
            if (name in missing) == (name in layer["summaries"]):
                raise FieldError(
                    f"{where} needs either a summary of {name} or a reason why it is missing"
                )
        if odd := sorted({*missing, *layer["summaries"]} - {*names}):
            raise FieldError(f"{where} has {describe_json(odd[0])}, which is not in statistics")


def _match_statistic(
    saved: Mapping[str, Any], known: Mapping[str, list[Statistic]], path: Path, version: str
) -> Statistic:
    named, name = known.get(saved["name"], []), shorten_for_message(saved["name"])
    if not named:
        raise OptionError(
            saw=f"{path} with statistic {name!r}, which is not in headwise's catalogue",
            needed=f"the object that computes it: {shorten_for_message(saved['formula'])}",
            do=f"HeadScan.load(path, statistics=[...]) with the {name} that you scanned with",
        )
    then = Definition(**{**saved, "axes": tuple(saved["axes"])})
    for statistic in named:
        if then.has_meaning_of(statistic.definition):
            return statistic
    raise OptionError(
        saw=f"{path} with {name} as {shorten_for_message(then.formula_and_id)}",
        needed=f"{name} as this headwise defines it: {named[0].definition.formula_and_id}",
        do=f"load the file with headwise {shorten_for_message(version)} or the "
        "statistic that saved it, or scan again",
    )


def _rebuild_layers_and_texts(
    saved: Sequence[Any], tensors: Mapping[str, Tensor], statistics: Iterable[Statistic]
) -> tuple[tuple[LayerScan, ...], tuple[ScannedText, ...]]:
    by_name, rest = {each.definition.name: each for each in statistics}, dict(tensors)
    texts: list[ScannedText] = []
    while (ids := rest.pop(f"texts/{len(texts)}/ids", None)) is not None:
        where = f"texts/{len(texts)}"
        lengths = rest.pop(f"{where}/lengths", torch.zeros(0))
        is_list = all(x.dtype == torch.int32 and x.dim() == 1 for x in (ids, lengths))
        if not is_list or (lengths < 0).any() or int(lengths.sum()) != len(ids):
            raise FieldError(f"the lengths in {where} are not those of its tokens")
        written = {
            part: rest.pop(f"{where}/{part}") for part in WRITTEN if f"{where}/{part}" in rest
        }
        counts = tuple(lengths.tolist())
        texts.append(ScannedText(ids, counts, _rebuild_written(written, counts, where)))
    layers: list[LayerScan] = []
    heads_so_far = accumulate(len(fields["heads"]) for fields in saved)
    for index, (fields, so_far) in enumerate(zip(saved, heads_so_far, strict=True)):
        summaries: dict[str, Summary] = {}
        for name, parts in fields["summaries"].items():
            keys = {part: f"{index}/{name}/{part}" for part in parts}
            if lacking := [key for key in keys.values() if key not in rest]:
                raise FieldError(f"it lacks the tensor {describe_json(lacking[0])}")
            summary = summaries[name] = {part: rest.pop(key) for part, key in keys.items()}
            sizes = {"num_heads": len(fields["heads"]), "heads_so_far": so_far}
            if fault := summary_fault(by_name[name], summary, **sizes):
                raise FieldError(f"layers[{index}].summaries.{name}{fault}")
        numbers = {name: fields[name] if fields[name] >= 0 else None for name in TEXTS_OF_LAYER}
        for number in numbers.values():
            if number is not None and number >= len(texts):
                fault = f"layer {fields['name']} names text {number}, of {len(texts)} texts"
                raise FieldError(fault)
        heads = tuple(fields["heads"])
        layers.append(LayerScan(**{**fields, "heads": heads, "summaries": summaries, **numbers}))
    if rest:
        raise FieldError(f"it holds a tensor {describe_json(min(rest))} that no layer has")
    return tuple(layers), tuple(texts)


def _rebuild_written(
    parts: Mapping[str, Tensor], lengths: Sequence[int], where: str
) -> tuple[WrittenText | None, ...]:
    if not parts:
        return ()
    kinds = {name: (parts[name].dtype, parts[name].dim()) for name in WRITTEN if name in parts}
    characters, sizes, spans = (parts.get(name, NO_BYTES) for name in WRITTEN)
    known = sizes.clamp(min=0)
    if (
        kinds != WRITTEN
        or len(sizes) != len(lengths)
        or int(known.sum()) != len(characters)
        or spans.shape != (sum(lengths), 2)
    ):
        raise FieldError(f"the written texts in {where} are not those of its tokens")
    texts: list[WrittenText | None] = []
    each = zip(
        sizes.tolist(), characters.split(known.tolist()), spans.split([*lengths]), strict=True
    )
    for size, encoded, rows in each:
        try:
            text = encoded.numpy().tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise FieldError(f"{where}/characters is no text in UTF-8") from error
        if size >= 0 and (fault := span_fault(text, rows)) is not None:
            raise FieldError(f"{where}/spans has {fault}")
        texts.append(None if size < 0 else WrittenText(text, rows))
    return tuple(texts)


# ---- the digest ----------------------------------------------------------------------------------


def hash_nested_content(content: Any) -> str:
    """Return the hex SHA-256 of a string, number or tensor, or of mappings and sequences of these.

    It includes the dtype and shape of tensors, and is the same in every process, on every device.
    """
    digest = hashlib.sha256()
    _update_digest(digest.update, content)
    return digest.hexdigest()


def _update_digest(feed: Callable[[bytes | memoryview], None], content: Any) -> None:
    """Add content to a digest, with kinds and lengths, so that no two contents give one stream."""

    def begin(kind: str, value: bytes) -> None:
        feed(f"{kind} {len(value)} ".encode())
        feed(value)

    fault = ""
    if content is None or isinstance(content, (bool, int, float)):
        begin(type(content).__name__, repr(content).encode())
    elif isinstance(content, str):
        begin("str", content.encode("utf-8", "surrogatepass"))
    elif isinstance(content, Tensor) and is_wrapper(content):  # such as a quantised one
        wrapper: Any = content
        names, rest = wrapper.__tensor_flatten__()
        settings = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(rest))  # addresses differ by process
        begin(type(content).__name__, settings.encode())
        _update_digest(feed, {name: getattr(content, name) for name in names})
    elif isinstance(content, Tensor):
        plain = content.detach().cpu().contiguous()
        begin(f"{plain.dtype} {list(plain.shape)}", b"")
        feed(plain.flatten().view(torch.uint8).numpy().data)
    elif isinstance(content, Mapping):
        begin("mapping", str(len(content)).encode())
        if odd := [key for key in content if not isinstance(key, str)]:
            fault = f"a mapping with the key {odd[0]!r}"
        for key in () if odd else sorted(content):
            _update_digest(feed, key)
            _update_digest(feed, content[key])
    elif isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        begin("sequence", str(len(content)).encode())
        for entry in content:
            _update_digest(feed, entry)
    else:
        fault = f"a {type(content).__name__}"
    if fault:
        needed = "strings, numbers, tensors, or sequences and mappings of these with string keys"
        do = "pass the content itself, such as the text of a file instead of its path"
        raise OptionError(saw=f"{fault} as content", needed=needed, do=do)
