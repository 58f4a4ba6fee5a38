"""Configs of cut models in the form "code": the class of transformers with other sizes by layer.

The folder holds ``headwise/checkpoints/modeling_cut.py`` itself, which transformers runs where it
is trusted. headwise reads such a folder by its config alone, and runs its own copy of the file.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checkpoints import config as configs
from headwise.checkpoints.config import CUT
from headwise.checkpoints.places import Place
from headwise.checkpoints.skeleton import list_run_errors
from headwise.checkpoints.transformers import CONFIG, list_auto_classes, make_empty_model
from headwise.errors import OptionError
from headwise.function.weights import State
from headwise.surgery.cut import Cut
from headwise.surgery.models import HeadPlaces, pack_in_memory, resize
from headwise.surgery.plain import PlainConfig

FILE = Path(configs.__file__).with_name("modeling_cut.py")


def make_code_config(
    heads: HeadPlaces,
    cut: Cut,
    states: Iterable[tuple[str, State]],
    stored: Mapping[str, Any],
    files: Mapping[str, Place],
) -> PlainConfig:
    """Return the config by which the file of the form "code" builds a fitted cut.

    Args:
        heads: of the model before the cut.
        cut: of its layers.
        states: the canonical tensors after the cut, by the names of attentions.
        stored: the config of its folder.
        files: the place of each attention in the folder.

    Raises:
        OptionError: a model whose code is in its folder, that no Auto class loads, or whose class
            takes the numbers of heads from elsewhere.
    """
    if stored.get("auto_map") and CUT not in stored:
        raise OptionError(
            saw=f"{CONFIG} with auto_map: the class of the model is code in its folder",
            needed='a class of transformers for the form "code"',
            do='{form} "full" or "headwise", which keep this code',
            parameter="form",
        )
    changed = dict[str, Tensor]()
    for name, state in states:
        changed |= pack_in_memory(heads.places[name], state, heads.places[name].sizes(heads.state))
    made = copy.deepcopy(heads.model)
    resize(made, heads, cut, changed)
    whole = {name: value for name, value in stored.items() if name not in (CUT, "auto_map")}
    original = make_empty_model(whole)
    before = heads.whole().layers
    counts = {}
    for name, spec in heads.specs.items():
        left = cut.layers.get(name, before[name]).origins
        counts[files[name].name] = [len(left.query), len(left.kv), int(spec.head_dim)]
    _require_runs(original, made.to("meta"))
    described = {
        "model_type": whole["model_type"],
        "heads": counts,
        "modules": dict(_find_modules(original, made)),
    }
    auto_map = dict(_list_classes(original))
    return PlainConfig({**whole, "model_type": CUT, "auto_map": auto_map, CUT: described})


def _require_runs(original: Any, made: Any) -> None:
    """Raise OptionError where the class runs at its sizes on the meta device, and not at others.

    Phi-3 takes the number of heads from the config of all layers, for one.
    """
    given = {name: x.to("meta") for name, x in original.dummy_inputs.items()}
    for model in (original, made):
        try:
            with torch.no_grad():
                model(**given)
        except list_run_errors() as error:
            if model is original:
                return
            raise OptionError(
                saw=f"{type(original).__name__}, which does not run at these sizes: {error}",
                needed="a class that takes the numbers of heads from its attention modules",
                do='{form} "plain", with as many heads in each layer, or "full"',
                parameter="form",
            ) from error


def state_pruned_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with ``pruned_heads``, which transformers 4 wrote, as one of the form "code".

    Its model_type stays that of the original, as `headwise.checkpoints.config.read_config` has it.
    """
    whole = {name: value for name, value in config.items() if name != "pruned_heads"}
    gone = {int(layer): numbers for layer, numbers in config["pruned_heads"].items()}
    heads = HeadPlaces(make_empty_model(whole))
    layers, states = {}, dict[str, State]()
    for name, layer in heads.whole():
        place = heads.places[name]
        if numbers := gone.get(place.module.layer):
            layers[name] = layer.drop(numbers)
            shapes = place.read(heads.state).items()
            zeros = {tensor: torch.zeros(x.shape) for tensor, x in shapes}
            states[name] = layers[name].apply(zeros, heads.specs[name])
    cut = Cut(layers)
    made = make_code_config(heads, cut, states.items(), whole, heads.places)
    return {**made.values, "model_type": whole["model_type"]}


def dump_config(values: Mapping[str, Any]) -> str:
    """Return a config as JSON, with each shape on one line."""
    text = json.dumps(values, indent=2) + "\n"
    return re.sub(r"\[\s*(\d[\d,\s]*?)\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def _find_modules(original: Any, made: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the modules that differ, by their names in the model without a head of its own."""
    before = dict(original.named_modules())
    prefix = f"{original.base_model_prefix}."
    for name, module in made.named_modules():
        old = vars(before[name])
        sizes: dict[str, Any] = {
            attribute: value
            for attribute, value in vars(module).items()
            if isinstance(value, int | str) and old.get(attribute) != value
        }
        for local, parameter in module.named_parameters(recurse=False):
            was = old["_parameters"].get(local)
            if was is None or was.shape != parameter.shape:
                sizes[local] = list(parameter.shape)
        if sizes:
            yield name.removeprefix(prefix), sizes


def _list_classes(original: Any) -> Iterator[tuple[str, str]]:
    """Yield the Auto classes of transformers that load a model, each with the name in the file."""
    yield "AutoConfig", f"{FILE.stem}.Cut{type(original.config).__name__}"
    classes = dict(list_auto_classes(original.config))
    if (kind := type(original).__name__) not in classes.values():
        raise OptionError(
            saw=f"{kind}, which no Auto class of transformers loads",
            needed='an Auto class for the form "code"',
            do='{form} "full" or "headwise"',
            parameter="form",
        )
    for auto, name in classes.items():
        yield auto, f"{FILE.stem}.{name}"
