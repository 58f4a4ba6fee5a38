"""Configs of cut models: the fields that state heads, and whether the model's class holds a cut."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headwise.checkpoints.config import NAMES
from headwise.checkpoints.transformers import CONFIG, list_load_errors
from headwise.function.weights import BIASES, State
from headwise.surgery.models import Counts, HeadPlaces, counts_of, pack_in_memory

Shapes = Mapping[str, tuple[int, ...]]  # canonical tensor -> its sizes
SIZES = ("heads", "kv_heads", "head_dim")
# Fields that a config may leave out, since others imply them.
ADDED = {"heads": (), "kv_heads": ("num_key_value_heads",), "head_dim": ("head_dim",)}
BIAS_FLAG = "attention_bias"


@dataclass(frozen=True)
class PlainConfig:
    """Config of a cut model, and the reason why the model's class does not hold the cut."""

    values: Mapping[str, Any]  # config.json with the fields of the cut model
    # field -> its value before and after; None for none before
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    # name of an attention -> biases of zeros that its class adds
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    obstacle: str = ""  # the first difference, "" where plain transformers loads the model
    # names of attentions that are left out, since no head has an output
    without: Collection[str] = ()


def find_plain_config(
    heads: HeadPlaces, states: Iterable[tuple[str, State]], stored: Mapping[str, Any] | None = None
) -> PlainConfig:
    """Return the config by which the model's class builds the sizes of a cut model.

    The class is built on the meta device, and every shape is compared. ``states`` are the canonical
    tensors after the cut by the names of attentions; ``stored`` is the config as its file has it.
    """
    config = dict(heads.config if stored is None else stored)
    cut = {name: {t: tuple(x.shape) for t, x in state.items()} for name, state in states}
    after = {name: (s["wq"][0], s["wk"][0], s["wq"][1]) for name, s in cut.items()}
    edited, obstacle = _edit_counts(config, heads, after)
    if any("bo" in shapes and "bo" not in shapes_of(heads, name) for name, shapes in cut.items()):
        section = _section(edited)
        if section.get(BIAS_FLAG) is False:
            section[BIAS_FLAG] = True
    changes = dict(_find_changes(config, edited))
    if obstacle:
        return PlainConfig(edited, changes, obstacle=obstacle)
    stated = ", ".join(f"{name} {value}" for name, (_, value) in changes.items())
    words = type(heads.model).__name__ + (f" with {stated}" if stated else "")
    model: Any = heads.model
    try:
        with torch.device("meta"):
            built = type(model)(type(model.config).from_dict(dict(edited)))
    except list_load_errors() as error:
        reason = " ".join(str(error).split())[:200]
        return PlainConfig(edited, changes, obstacle=f"{words}: {reason}")
    biases: dict[str, tuple[str, ...]] = {}
    names = built.state_dict().keys()
    for name, place in heads.places.items():
        patterns, shapes = place.layout.patterns, cut.get(name, shapes_of(heads, name))
        held = {t for n, p in patterns.items() if place.name + n in names for t in p.tensors}
        if missing := tuple(b for b in BIASES if b in held and b not in shapes):
            biases[name] = missing
    made = {name: tuple(x.shape) for name, x in heads.state.items()}
    for name in {**cut, **biases}:
        place, sizes = heads.places[name], heads.places[name].sizes(heads.state)
        after_cut = cut.get(name, shapes_of(heads, name)).items()
        state = {tensor: torch.empty(size, device="meta") for tensor, size in after_cut}
        packed = pack_in_memory(place, add_biases(state, biases.get(name, ())), sizes)
        made |= {tensor: tuple(x.shape) for tensor, x in packed.items()}
    obstacle = next(_find_differences(heads.model, made, built, words), "")
    return PlainConfig(edited, changes, biases, obstacle)


def shapes_of(heads: HeadPlaces, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the canonical tensors that an attention stores."""
    place = heads.places[name]
    sizes = place.sizes(heads.state)
    return place.layout.canonical_shapes(place.module.tensors.values(), sizes)


def add_biases(state: State, names: tuple[str, ...]) -> State:
    """Return canonical tensors with biases of zeros."""
    axes = {"bq": "wq", "bk": "wk", "bv": "wv"}
    zeros = {
        name: state[axes[name]].new_zeros(state[axes[name]].shape[:2])
        for name in names
        if name in axes
    }
    if "bo" in names:
        zeros["bo"] = state["wo"].new_zeros(state["wo"].shape[-1])
    return {**state, **zeros}


def _edit_counts(
    config: Mapping[str, Any], heads: HeadPlaces, cut: Mapping[str, Counts]
) -> tuple[dict[str, Any], str]:
    """Return the config with the counts of the cut, and the reason why it cannot state them."""
    edited = {name: dict(x) if isinstance(x, dict) else x for name, x in config.items()}
    old = {name: counts_of(spec) for name, spec in heads.specs.items()}
    new = {**old, **cut}
    if old == new:
        return edited, ""
    first, *others = new
    if other := next((name for name in others if new[name] != new[first]), None):
        few, many = (f"{each[0]} heads and {each[1]} kv heads" for each in (new[first], new[other]))
        return edited, (
            f"{few} in {first}, {many} in {other}, where {CONFIG} states one number for all layers"
        )
    section = _section(edited)
    for size, count in zip(SIZES, new[first], strict=True):
        present = [name for name in NAMES[size].split() if isinstance(section.get(name), int)]
        is_implied = size == "kv_heads" and new[first][0] == new[first][1]
        added = [name for name in ADDED[size] if not is_implied and _has_place(heads.model, name)]
        for name in present or added:
            section[name] = count
    return edited, ""


def _has_place(model: Any, name: str) -> bool:
    """False for a field that the class of the config computes, as Falcon's does head_dim."""
    return getattr(getattr(type(model.config), name, None), "fset", name) is not None


def _section(config: dict[str, Any]) -> dict[str, Any]:
    """Return the section of the language model in a config of several models, else all of it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _find_changes(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, value in after.items():
        if isinstance(value, dict):
            yield from _find_changes(before[name], value)
        elif name not in before or before[name] != value:
            yield name, (before.get(name), value)


def _find_differences(
    model: nn.Module, made: Mapping[str, tuple[int, ...]], built: nn.Module, words: str
) -> Iterator[str]:
    wanted = {name: tuple(x.shape) for name, x in built.state_dict().items()}
    for name in sorted({*made, *wanted}):
        if made.get(name) != wanted.get(name):
            after, needed = (str(each.get(name, "no such tensor")) for each in (made, wanted))
            yield f"{name}: {after} after the cut, {needed} in {words}"
    buffers = {name: tuple(x.shape) for name, x in built.named_buffers()}
    for name, buffer in model.named_buffers():
        if buffers.get(name) != tuple(buffer.shape):
            yield f"{name}: {tuple(buffer.shape)} before the cut, {buffers.get(name)} in {words}"
    modules = dict(built.named_modules())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            other = vars(modules[path]).get(name) if path in modules else value
            if isinstance(value, float) and other != value:
                yield f"{path}.{name}: {value} before the cut, {other} in {words}"
