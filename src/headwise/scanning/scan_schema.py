"""Content of a saved scan: its JSON fields, by their schemas, and its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from headwise.scanning.layer_scan import LayerScan, ScanReadings
from headwise.scanning.statistics.statistic import Definition, Statistic, Summary, fault_of_summary

WORDS = ("name", "formula", "unit", "excluded", "source", "axes")
WHOLE = range(2**63)
MOST_HEADS = 2**20  # of a layer
LONGEST_SHOWN = 40
LONGEST_EXCERPT = 400

# ---- what the JSON holds: schemas, as `checked` reads them ---------------------------------------

STATISTIC = {**dict.fromkeys(WORDS, str), "axes": [str]}
LAYER = {
    "name": str,
    "num_heads": range(MOST_HEADS + 1),
    "heads": [WHOLE],
    "kind": ("self", "cross"),
    "calls": WHOLE,
    "missing": {...: str},
    "summaries": {...: [str]},
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
}


class FieldError(Exception):
    """A field that no scan has: where it is, and what it is."""


def checked(value: Any, schema: Any, where: str) -> Any:
    """Return a value of JSON that is as its schema says.

    A schema is a range of whole numbers, of which True and 1.0 are none; str, or a tuple of the
    texts that there may be; a list with the schema of its entries; or a mapping of all the fields
    to their schemas, with ``...`` for any field. ``object`` is anything.

    Args:
        value: the value.
        schema: its schema.
        where: the name of the field; empty for the whole JSON.

    Raises:
        FieldError: it is not.
    """
    at, saw = where or "its JSON", f"{where or 'its JSON'} is {shown(value)}"
    if isinstance(schema, range):
        if type(value) is not int or value not in schema:
            raise FieldError(f"{saw} and no whole number from {schema.start} to {schema.stop - 1}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise FieldError(f"{saw} and no list")
        for index, entry in enumerate(value):
            checked(entry, schema[0], f"{where}[{index}]")
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            raise FieldError(f"{saw} and no mapping")
        if absent := [name for name in schema if name is not ... and name not in value]:
            raise FieldError(f"{at} has no field {absent[0]!r}")
        if ... not in schema and (odd := sorted({*value} - {*schema})):
            raise FieldError(f"{at} has a field {shown(odd[0])} that no scan has")
        for name, entry in value.items():
            checked(name, str, f"a key of {at}")
            checked(entry, schema.get(name, schema.get(...)), f"{where}.{name}".lstrip("."))
    elif schema is not object:
        if not isinstance(value, str):
            raise FieldError(f"{saw} and no text")
        # What can be written in UTF-8.
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise FieldError(f"{at} holds half of a surrogate pair, which is no character")
        if schema is not str and value not in schema:
            raise FieldError(f"{saw} and none of {', '.join(schema)}")
    return value


def excerpt(words: str) -> str:
    """Return a text from a file, short and without control codes, for a message."""
    short = words if len(words) <= LONGEST_EXCERPT else f"{words[:LONGEST_EXCERPT]}…"
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in short)


def shown(value: Any) -> str:
    """Describe a value in a few words, whatever its size."""
    if isinstance(value, dict):
        return f"a mapping of {len(value)} fields"
    if isinstance(value, list):
        return f"a list of {len(value)} entries"
    if isinstance(value, str) and len(value) > LONGEST_SHOWN:
        return f"a text of {len(value)} characters"
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a number of {value.bit_length()} bits"
    return ascii(value)


# ---- to write -----------------------------------------------------------------------------------


def fields_of_statistic(definition: Definition) -> dict[str, Any]:
    """Return the words of a statistic, for people, and its id, for `HeadScan.load`."""
    words = {name: value for name, value in asdict(definition).items() if name in WORDS}
    return {**words, "axes": list(definition.axes), "id": definition.id}


def fields_of_layer(layer: LayerScan) -> dict[str, Any]:
    """Return all of a layer but its tensors."""
    # The file says itself which tensors it should hold, in the order of the summary.
    summaries = {name: list(summary) for name, summary in layer.summaries.items()}
    return {**vars(layer), "heads": list(layer.heads), "summaries": summaries}


def tensors_of(scan: ScanReadings) -> dict[str, Tensor]:
    """Return every tensor of a scan by its name in a file."""
    return {
        # safetensors takes no views, and no memory that is shared.
        f"{index}/{name}/{part}": tensor.clone(memory_format=torch.contiguous_format)
        for index, layer in enumerate(scan.layer_scans)
        for name, summary in layer.summaries.items()
        for part, tensor in summary.items()
    }


# ---- to read ------------------------------------------------------------------------------------


def check_fields(about: dict[str, Any], *, has_digest: bool) -> None:
    """Raise FieldError for the first field of a scan's JSON that no scan has.

    Args:
        about: the JSON.
        has_digest: True if it has a digest, and an id for each statistic; False in format 1.
    """
    schema: dict[str, Any] = {**SCAN, "document": {...: object}} if "document" in about else SCAN
    if has_digest:
        schema = {**schema, "digest": str, "statistics": [{**STATISTIC, "id": str}]}
    checked(about, schema, "")
    names = [saved["name"] for saved in about["statistics"]]
    if len({*names}) < len(names):
        raise FieldError("statistics has two entries of one name")
    for index, layer in enumerate(about["layers"]):
        _check_layer(layer, f"layers[{index}]", names)


def _check_layer(layer: dict[str, Any], where: str, names: list[str]) -> None:
    heads, missing, summaries = layer["heads"], layer["missing"], layer["summaries"]
    checked(heads, [range(layer["num_heads"])], f"{where}.heads")
    if len({*heads}) < len(heads):
        raise FieldError(f"{where}.heads has a head twice")
    for name in names:
        if (name in missing) == (name in summaries):
            raise FieldError(
                f"{where} needs either a summary of {name} or a reason why it is missing"
            )
    if odd := sorted({*missing, *summaries} - {*names}):
        raise FieldError(f"{where} has {shown(odd[0])}, which is not in statistics")


def layers_of(
    layers: Iterable[Mapping[str, Any]],
    tensors: dict[str, Tensor],
    statistics: Iterable[Statistic],
) -> tuple[LayerScan, ...]:
    """Return the layers of checked fields with their tensors.

    Raises:
        FieldError: a tensor is wrong, is not there, or belongs to no layer.
    """
    by_name = {statistic.definition.name: statistic for statistic in statistics}
    rest = dict(tensors)
    found = tuple(_layer(index, layer, rest, by_name) for index, layer in enumerate(layers))
    if rest:
        raise FieldError(f"it holds a tensor {shown(min(rest))} that no layer has")
    return found


def _layer(
    index: int,
    saved: Mapping[str, Any],
    tensors: dict[str, Tensor],
    statistics: Mapping[str, Statistic],
) -> LayerScan:
    """Return a layer with its tensors, which are taken out of ``tensors``."""
    summaries: dict[str, Summary] = {}
    for name, parts in saved["summaries"].items():
        where = f"layers[{index}].summaries.{name}"
        summary = summaries[name] = {}
        for part in parts:
            key = f"{index}/{name}/{part}"
            if key not in tensors:
                raise FieldError(f"it lacks the tensor {shown(key)}")
            summary[part] = tensors.pop(key)
        _check_summary(statistics[name], summary, len(saved["heads"]), where)
    return LayerScan(**{**saved, "heads": tuple(saved["heads"]), "summaries": summaries})


def _check_summary(statistic: Statistic, summary: Summary, heads: int, where: str) -> None:
    if statistic.parts is not None:
        if (fault := fault_of_summary(statistic.parts, summary, num_heads=heads)) is not None:
            raise FieldError(f"{where}.{fault[0]} {fault[1]}")
        return
    # Only the statistic itself can say what its summary holds: its result has a known shape.
    try:
        result = statistic.result(summary)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise FieldError(f"{where} gives no result: {str(error)[:120]}") from error
    if result.dim() != 1 + len(statistic.definition.axes) or len(result) != heads:
        raise FieldError(f"{where} gives a result {tuple(result.shape)} for {heads} heads")
