"""Cuts of a model in memory: the same class with smaller attention modules."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from headwise.surgery.cut import Cut
from headwise.surgery.layers import cut_layer
from headwise.surgery.models import ModelHeads, resize
from headwise.surgery.plain import PlainConfig, add_biases, find_plain_config


def cut_model(cut: Cut, model: nn.Module) -> Any:
    """Return a copy of a model with the heads that a cut leaves.

    The given model stays as it is. The copy has the same class; its attention modules have other
    sizes. Its config states them if it can, so that save_pretrained writes a folder that
    transformers loads; else it stays that of the original, and `headwise.surgery.write` has other
    forms. A layer of headwise is replaced as a whole, see `headwise.surgery.cut_layer`.

    Raises:
        OptionError: a model or a cut that cannot be cut; see `ModelHeads`.
        ShapeError: see `LayerCut.apply`.
        DeviceError: weights on several devices.
    """
    heads = ModelHeads(model)
    fitted = heads.fit(cut)
    if heads.layers:
        return _replace_layers(fitted, heads)
    states = heads.read(fitted)
    shapes = {
        name: {tensor: tuple(x.shape) for tensor, x in state.items()}
        for name, state in states.items()
    }
    config = find_plain_config(heads, shapes)
    for name, biases in ({} if config.obstacle else config.biases).items():
        state = states.get(name) or heads.canonical(name)
        states[name] = add_biases(state, biases)
    changed = heads.pack(states)
    made = copy.deepcopy(model)
    resize(made, heads, fitted, changed)
    if not config.obstacle:
        _set_config(made, config)
    return made


def _replace_layers(cut: Cut, heads: ModelHeads) -> Any:
    made = copy.deepcopy(heads.model)
    for name, layer in cut:
        smaller = cut_layer(layer, heads.layers[name])
        if not name:  # the model is the layer
            return smaller
        made.set_submodule(name.rstrip("."), smaller)
    return made


def _set_config(model: nn.Module, plain: PlainConfig) -> None:
    stated: Any = model.config
    kinds = {type(stated), type(getattr(stated, "text_config", stated))}
    held = [c for m in model.modules() if type(c := getattr(m, "config", None)) in kinds]
    for config in [*held, *(getattr(config, "text_config", config) for config in held)]:
        for name, (before, after) in plain.changes.items():
            if getattr(config, name, None) == before:
                setattr(config, name, after)
