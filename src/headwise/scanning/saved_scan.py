"""The content of a saved scan: its JSON fields and its tensors, each checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal, cast

import torch
from torch import Tensor

from headwise.scanning import saved_fields
from headwise.scanning.readings import LayerScan, Readings
from headwise.scanning.saved_fields import FieldError
from headwise.scanning.statistics.parts import fault_of_summary
from headwise.scanning.statistics.statistic import Definition, Statistic, Summary

MOST_HEADS = 2**20  # of a layer
FIELDS = ("version", "headwise", "model", "sequences", "tokens", "notes", "statistics", "layers")
WORDS = ("name", "formula", "unit", "excluded", "source", "axes")
LAYER = ("name", "num_heads", "heads", "kind", "calls", "missing", "summaries")


# ---- to write -----------------------------------------------------------------------------------


def fields_of_statistic(definition: Definition) -> dict[str, Any]:
    """Return the words of a statistic, for people, and its id, for `HeadScan.load`."""
    words = {name: value for name, value in asdict(definition).items() if name in WORDS}
    return {**words, "axes": list(definition.axes), "id": definition.id}


def fields_of_layer(layer: LayerScan) -> dict[str, Any]:
    """Return all of a layer but its tensors."""
    return {
        "name": layer.name,
        "num_heads": layer.num_heads,
        "heads": list(layer.heads),
        "kind": layer.kind,
        "calls": layer.calls,
        "missing": dict(layer.missing),
        # The file says itself which tensors it should hold, in the order of the summary.
        "summaries": {name: list(summary) for name, summary in layer.summaries.items()},
    }


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


def check_fields(about: dict[str, Any], *, has_digest: bool) -> None:
    """Raise FieldError for the first field of a scan's JSON that no scan has.

    Args:
        about: the JSON.
        has_digest: True if it has a digest, and an id for each statistic; False in format 1.
    """
    needed = (*FIELDS, "digest") if has_digest else FIELDS
    saved_fields.fields(about, "its JSON", needed=needed, optional=("document",))
    for name in ("headwise", "model"):
        saved_fields.text(about[name], name)
    for name in ("sequences", "tokens"):
        saved_fields.whole(about[name], name)
    saved_fields.texts(about["notes"], "notes")
    if "document" in about:
        saved_fields.mapping(about["document"], "document")
    names = [
        _checked_name(saved, f"statistics[{index}]", has_id=has_digest)
        for index, saved in enumerate(saved_fields.entries(about["statistics"], "statistics"))
    ]
    if len({*names}) < len(names):
        raise FieldError("statistics has two entries of one name")
    for index, layer in enumerate(saved_fields.entries(about["layers"], "layers")):
        _check_layer(layer, f"layers[{index}]", names)


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
        raise FieldError(f"it holds a tensor {saved_fields.shown(min(rest))} that no layer has")
    return found


def _checked_name(saved: Any, where: str, *, has_id: bool) -> str:
    """Return the name of a statistic whose every field is right."""
    found = saved_fields.fields(saved, where, needed=(*WORDS, "id") if has_id else WORDS)
    for name, value in found.items():
        if name == "axes":
            saved_fields.texts(value, f"{where}.axes")
        else:
            saved_fields.text(value, f"{where}.{name}")
    return str(found["name"])


def _check_layer(saved: Any, where: str, names: list[str]) -> None:
    layer = saved_fields.fields(saved, where, needed=LAYER)
    saved_fields.text(layer["name"], f"{where}.name")
    count = saved_fields.whole(layer["num_heads"], f"{where}.num_heads", most=MOST_HEADS)
    heads = saved_fields.entries(layer["heads"], f"{where}.heads")
    for place, head in enumerate(heads):
        saved_fields.whole(head, f"{where}.heads[{place}]", most=count - 1)
    if len({*heads}) < len(heads):
        raise FieldError(f"{where}.heads has a head twice")
    saved_fields.text(layer["kind"], f"{where}.kind", one_of=("self", "cross"))
    saved_fields.whole(layer["calls"], f"{where}.calls")
    missing = saved_fields.texts_by_name(layer["missing"], f"{where}.missing")
    summaries = saved_fields.mapping(layer["summaries"], f"{where}.summaries")
    for name, parts in summaries.items():
        saved_fields.texts(parts, f"{where}.summaries.{name}")
    for name in names:
        if (name in missing) == (name in summaries):
            raise FieldError(
                f"{where} needs either a summary of {name} or a reason why it is missing"
            )
    if odd := sorted({*missing, *summaries} - {*names}):
        raise FieldError(f"{where} has {saved_fields.shown(odd[0])}, which is not in statistics")


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
                raise FieldError(f"it lacks the tensor {saved_fields.shown(key)}")
            summary[part] = tensors.pop(key)
        _check_summary(statistics[name], summary, len(saved["heads"]), where)
    return LayerScan(
        name=saved["name"],
        num_heads=saved["num_heads"],
        heads=tuple(saved["heads"]),
        kind=cast(Literal["self", "cross"], saved["kind"]),
        calls=saved["calls"],
        summaries=summaries,
        missing=saved["missing"],
    )


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
