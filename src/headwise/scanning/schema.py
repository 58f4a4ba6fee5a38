"""Content of a saved scan: JSON fields with their schemas, and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.scanning.layer import LayerScan, ScanReadings
from headwise.scanning.statistics.statistic import (
    Definition,
    Statistic,
    Summary,
    find_summary_fault,
)
from headwise.scanning.text import ScannedText

WORDS = ("name", "formula", "unit", "excluded", "source", "axes", "id")
WHOLE = range(2**63)
MOST_HEADS = 2**20  # of a layer
TEXTS_OF_LAYER = ("query_text", "key_text")
LONGEST_SHOWN = 40
LONGEST_EXCERPT = 400

# ---- schemas of the JSON, for `check_value` ------------------------------------------------------

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
    "⌊c i / n⌋ of c: 64 blocks if no other number was chosen",
}


class FieldError(Exception):
    """A wrong field of a saved scan, with its position and its value."""


def check_value(value: Any, schema: Any, where: str) -> Any:
    """Check a JSON value against a schema, and return the value.

    A schema is a range of whole numbers (True and 1.0 do not count), ``str``, a tuple of allowed
    strings, a list with the schema of its entries, or a mapping of field names to schemas, where
    ``...`` allows any name. ``object`` allows any value.

    Args:
        value: the value.
        schema: the schema.
        where: the name of the field; empty for the whole JSON.

    Raises:
        FieldError: the value does not fit the schema.
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


# ---- write --------------------------------------------------------------------------------------


def fields_of_statistic(definition: Definition) -> dict[str, Any]:
    """Return the words of a definition and its id."""
    return {**{name: getattr(definition, name) for name in WORDS}, "axes": list(definition.axes)}


def fields_of_layer(layer: LayerScan) -> dict[str, Any]:
    """Return the fields of a layer, without its tensors."""
    # The names of the tensors are saved too, so that a missing tensor is noticed.
    summaries = {name: list(summary) for name, summary in layer.summaries.items()}
    texts = {
        name: -1 if (text := getattr(layer, name)) is None else text for name in TEXTS_OF_LAYER
    }
    return {**vars(layer), "heads": list(layer.heads), "summaries": summaries, **texts}


def tensors_of_scan(scan: ScanReadings) -> dict[str, Tensor]:
    """Return every tensor of a scan by its name in a file."""
    texts = {
        f"texts/{number}/{part}": torch.as_tensor(value, dtype=torch.int32).clone()
        for number, text in enumerate(scan.texts)
        for part, value in text._asdict().items()
    }
    return texts | {
        # safetensors accepts neither views nor shared memory.
        f"{index}/{name}/{part}": tensor.clone(memory_format=torch.contiguous_format)
        for index, layer in enumerate(scan.layer_scans)
        for name, summary in layer.summaries.items()
        for part, tensor in summary.items()
    }


# ---- read ---------------------------------------------------------------------------------------


def upgrade_format_1(about: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a file of headwise 0.1.0 with the fields of today.

    Raises:
        FieldError: a wrong field.
    """
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


def check_scan_fields(about: dict[str, Any]) -> None:
    """Raise FieldError for the first wrong field in the JSON of a scan."""
    schema: dict[str, Any] = {**SCAN, "document": {...: object}} if "document" in about else SCAN
    check_value(about, schema, "")
    names = [saved["name"] for saved in about["statistics"]]
    if len({*names}) < len(names):
        raise FieldError("statistics has two entries of one name")
    for index, layer in enumerate(about["layers"]):
        _check_layer(layer, f"layers[{index}]", names)


def _check_layer(layer: dict[str, Any], where: str, names: list[str]) -> None:
    heads, missing, summaries = layer["heads"], layer["missing"], layer["summaries"]
    check_value(heads, [range(layer["num_heads"])], f"{where}.heads")
    if len({*heads}) < len(heads):
        raise FieldError(f"{where}.heads has a head twice")
    for name in names:
        if (name in missing) == (name in summaries):
            raise FieldError(
                f"{where} needs either a summary of {name} or a reason why it is missing"
            )
    if odd := sorted({*missing, *summaries} - {*names}):
        raise FieldError(f"{where} has {describe_json(odd[0])}, which is not in statistics")


def pop_texts(tensors: dict[str, Tensor]) -> tuple[ScannedText, ...]:
    """Return the texts, and remove their tensors.

    Raises:
        FieldError: a text lacks a tensor, or its lengths are not those of its tokens.
    """
    texts: list[ScannedText] = []
    while (ids := tensors.pop(f"texts/{len(texts)}/ids", None)) is not None:
        lengths = tensors.pop(f"texts/{len(texts)}/lengths", None)
        if lengths is None or not _is_valid_scanned_text(ids, lengths):
            raise FieldError(f"the lengths in texts/{len(texts)} are not those of its tokens")
        texts.append(ScannedText(ids, tuple(lengths.tolist())))
    return tuple(texts)


def _is_valid_scanned_text(ids: Tensor, lengths: Tensor) -> bool:
    is_list = all(tensor.dtype == torch.int32 and tensor.dim() == 1 for tensor in (ids, lengths))
    return is_list and bool((lengths >= 0).all()) and int(lengths.sum()) == len(ids)


def require_text_numbers_in_range(
    layers: Iterable[LayerScan], texts: tuple[ScannedText, ...]
) -> None:
    """Raise FieldError if a layer names a text that the scan does not have."""
    for layer in layers:
        for number in (layer.query_text, layer.key_text):
            if number is not None and number >= len(texts):
                raise FieldError(f"layer {layer.name} names text {number}, of {len(texts)} texts")


def rebuild_layers(
    layers: Iterable[Mapping[str, Any]],
    tensors: dict[str, Tensor],
    statistics: Iterable[Statistic],
) -> tuple[LayerScan, ...]:
    """Return the layers from checked fields and their tensors.

    Raises:
        FieldError: a tensor is wrong, is missing, or belongs to no layer.
    """
    by_name = {statistic.definition.name: statistic for statistic in statistics}
    rest = dict(tensors)
    scans = tuple(_rebuild_layer(index, layer, rest, by_name) for index, layer in enumerate(layers))
    if rest:
        raise FieldError(f"it holds a tensor {describe_json(min(rest))} that no layer has")
    return scans


def _rebuild_layer(
    index: int,
    saved: Mapping[str, Any],
    tensors: dict[str, Tensor],
    statistics: Mapping[str, Statistic],
) -> LayerScan:
    """Return a layer with its tensors, and remove these from ``tensors``."""
    summaries: dict[str, Summary] = {}
    for name, parts in saved["summaries"].items():
        where = f"layers[{index}].summaries.{name}"
        summary = summaries[name] = {}
        for part in parts:
            key = f"{index}/{name}/{part}"
            if key not in tensors:
                raise FieldError(f"it lacks the tensor {describe_json(key)}")
            summary[part] = tensors.pop(key)
        _check_summary(statistics[name], summary, len(saved["heads"]), where)
    texts = {name: None if saved.get(name, -1) < 0 else saved[name] for name in TEXTS_OF_LAYER}
    return LayerScan(**{**saved, "heads": tuple(saved["heads"]), "summaries": summaries, **texts})


def _check_summary(statistic: Statistic, summary: Summary, heads: int, where: str) -> None:
    if statistic.parts is not None:
        if (fault := find_summary_fault(statistic.parts, summary, num_heads=heads)) is not None:
            raise FieldError(f"{where}.{fault[0]} {fault[1]}")
        return
    # Without `parts`, only the shape of the result can be checked.
    try:
        result = statistic.result(summary)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise FieldError(f"{where} gives no result: {str(error)[:120]}") from error
    if result.dim() != 1 + len(statistic.definition.axes) or len(result) != heads:
        raise FieldError(f"{where} gives a result {tuple(result.shape)} for {heads} heads")
