"""Content of a saved scan: its JSON fields, from tables of checks, and its tensors.

Each check returns the field, or says where it is and what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.scanning.readings import LayerScan, Readings
from headwise.scanning.statistics.statistic import Definition, Statistic, Summary, fault_of_summary

Fields = dict[str, Callable[[Any, str], Any]]
MOST_HEADS = 2**20  # of a layer
WORDS = ("name", "formula", "unit", "excluded", "source", "axes")
MOST = 2**63 - 1  # the largest number of a field
LONGEST_SHOWN = 40
LONGEST_EXCERPT = 400


# ---- checks of single fields ---------------------------------------------------------------------


class FieldError(Exception):
    """A field that no scan has: where it is, and what it is."""


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Return a mapping whose keys are text, as all keys of JSON are."""
    if not isinstance(value, dict):
        raise FieldError(f"{where} is {shown(value)} and no mapping")
    return value


def checked(
    value: Any, where: str, needed: Fields, *, optional: Fields | None = None
) -> dict[str, Any]:
    """Return a mapping with all needed fields, and none that is neither needed nor optional.

    Each field passes its check. ``where`` is empty for the whole JSON.
    """
    every = needed | (optional or {})
    found = mapping(value, where or "its JSON")
    if absent := [name for name in needed if name not in found]:
        raise FieldError(f"{where or 'its JSON'} has no field {absent[0]!r}")
    if odd := sorted({*found} - {*every}):
        raise FieldError(f"{where or 'its JSON'} has a field {shown(odd[0])} that no scan has")
    for name, check in every.items():
        if name in found:
            check(found[name], f"{where}.{name}" if where else name)
    return found


def text(value: Any, where: str, *, one_of: Collection[str] = ()) -> str:
    """Return a text that can be written in UTF-8."""
    if not isinstance(value, str):
        raise FieldError(f"{where} is {shown(value)} and no text")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise FieldError(f"{where} holds half of a surrogate pair, which is no character")
    if one_of and value not in one_of:
        raise FieldError(f"{where} is {shown(value)} and none of {', '.join(one_of)}")
    return value


def whole(value: Any, where: str, *, least: int = 0, most: int = MOST) -> int:
    """Return a whole number in a range; True and 1.0 are none."""
    if type(value) is not int or not least <= value <= most:
        raise FieldError(f"{where} is {shown(value)} and no whole number from {least} to {most}")
    return value


def entries(value: Any, where: str) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise FieldError(f"{where} is {shown(value)} and no list")
    return value


def texts(value: Any, where: str) -> tuple[str, ...]:
    """Return a list of texts, as a tuple."""
    found = entries(value, where)
    return tuple(text(entry, f"{where}[{index}]") for index, entry in enumerate(found))


def texts_by_name(value: Any, where: str) -> dict[str, str]:
    """Return a mapping of names to texts."""
    return {
        text(name, f"a key of {where}"): text(entry, f"{where}.{name}")
        for name, entry in mapping(value, where).items()
    }


def lists_by_name(value: Any, where: str) -> dict[str, tuple[str, ...]]:
    """Return a mapping of names to lists of texts."""
    found = mapping(value, where)
    return {name: texts(entry, f"{where}.{name}") for name, entry in found.items()}


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
    if isinstance(value, int) and value.bit_length() > MOST.bit_length():
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


def tensors_of(scan: Readings) -> dict[str, Tensor]:
    """Return every tensor of a scan by its name in a file."""
    return {
        # safetensors takes no views, and no memory that is shared.
        f"{index}/{name}/{part}": tensor.clone(memory_format=torch.contiguous_format)
        for index, layer in enumerate(scan.layer_scans)
        for name, summary in layer.summaries.items()
        for part, tensor in summary.items()
    }


# ---- to read ------------------------------------------------------------------------------------


STATISTIC: Fields = {**dict.fromkeys(WORDS, text), "axes": texts}
LAYER: Fields = {
    "name": text,
    "num_heads": partial(whole, most=MOST_HEADS),
    "heads": entries,
    "kind": partial(text, one_of=("self", "cross")),
    "calls": whole,
    "missing": texts_by_name,
    "summaries": lists_by_name,
}
SCAN: Fields = {
    "version": whole,
    "headwise": text,
    "model": text,
    "sequences": whole,
    "tokens": whole,
    "notes": texts,
    "statistics": entries,
    "layers": entries,
}


def check_fields(about: dict[str, Any], *, has_digest: bool) -> None:
    """Raise FieldError for the first field of a scan's JSON that no scan has.

    Args:
        about: the JSON.
        has_digest: True if it has a digest, and an id for each statistic; False in format 1.
    """
    digest, id_of_statistic = ({"digest": text}, {"id": text}) if has_digest else ({}, {})
    checked(about, "", SCAN | digest, optional={"document": mapping})
    names = [
        str(checked(saved, f"statistics[{index}]", STATISTIC | id_of_statistic)["name"])
        for index, saved in enumerate(about["statistics"])
    ]
    if len({*names}) < len(names):
        raise FieldError("statistics has two entries of one name")
    for index, layer in enumerate(about["layers"]):
        _check_layer(checked(layer, f"layers[{index}]", LAYER), f"layers[{index}]", names)


def _check_layer(layer: dict[str, Any], where: str, names: list[str]) -> None:
    heads, missing, summaries = layer["heads"], layer["missing"], layer["summaries"]
    for place, head in enumerate(heads):
        whole(head, f"{where}.heads[{place}]", most=layer["num_heads"] - 1)
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
