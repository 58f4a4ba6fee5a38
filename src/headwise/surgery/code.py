"""Configs of cut models in the form "code": the class of transformers with other sizes by layer.

The folder holds ``headwise/checkpoints/modeling_cut.py`` itself, which transformers runs where it
is trusted. headwise reads such a folder by its config alone, and runs its own copy of the file.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checkpoints import config as configs
from headwise.checkpoints.config import CUT
from headwise.checkpoints.places import Place
from headwise.checkpoints.skeleton import list_run_errors
from headwise.checkpoints.transformers import (
    CONFIG,
    cut_classes,
    list_auto_classes,
    make_empty_model,
)
from headwise.errors import OptionError
from headwise.function.weights import HEADS, State
from headwise.layouts.plan import TensorHeader
from headwise.surgery.cut import Cut
from headwise.surgery.models import HeadPlaces, pack_in_memory, resize
from headwise.surgery.plain import PlainConfig, add_biases

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
    whole = {name: value for name, value in stored.items() if name not in (CUT, "auto_map")}
    original = make_empty_model(whole)
    off = {name for name, layer in cut if len(layer.origins.off) == len(layer.origins.query)}
    made, without = _make_model(heads, cut, dict(states), original, off)
    left_out = {owner: sizes for each in without.values() for owner, sizes in each.items()}
    before = heads.whole().layers
    counts = {}
    for name, spec in heads.specs.items():
        left = cut.layers.get(name, before[name]).origins
        if name not in without:
            counts[files[name].name] = [len(left.query), len(left.kv), int(spec.head_dim)]
    described = {
        "model_type": whole["model_type"],
        "heads": counts,
        "modules": dict(_find_modules(original, made, left_out)),
    }
    auto_map = dict(_list_classes(original))
    values = {**whole, "model_type": CUT, "auto_map": auto_map, CUT: described}
    return PlainConfig(values, without=without)


def _make_model(
    heads: HeadPlaces, cut: Cut, states: Mapping[str, State], original: Any, off: Collection[str]
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return the cut model without weights, and what is set in the modules of attentions ``off``.

    None is left out where the class needs one.
    """
    changed = dict[str, Tensor]()
    for name, state in states.items():
        changed |= pack_code(heads.places[name], state, heads.state, is_off=name in off)
    made = copy.deepcopy(heads.model)
    resize(made, heads, cut, changed)
    without = {name: _leave_out(made, heads.places[name]) for name in off}
    try:
        _require_runs(original, made.to("meta"))
    except OptionError:
        if not off:
            raise
        return _make_model(heads, cut, states, original, ())
    return made, without


def _leave_out(model: nn.Module, place: Place) -> dict[str, Any]:
    """Take all weights but the output projection out of an attention; return what was set."""
    owner = place.projections["v"].rpartition(".")[0]
    outside, _, output = place.projections["o"].rpartition(".")
    module, output = model.get_submodule(owner), output if outside == owner else ""
    parts: dict[str, Any] = {**dict(module.named_parameters(recurse=False)), **module._modules}
    gone = {name: None for name in parts if name != output and _has_weights(parts[name])}
    sizes = {**gone, "output_name": output, "forward": "no_heads"}
    cut_classes().resize(module, sizes)
    return {owner: sizes}


def _has_weights(part: Tensor | nn.Module | None) -> bool:
    return isinstance(part, Tensor) or (part is not None and any(True for _ in part.parameters()))


def pack_code(
    place: Place, state: State, stored: Mapping[str, TensorHeader], *, is_off: bool
) -> dict[str, Tensor]:
    """Return the tensors of an attention in the form "code": of its output alone where it is off.

    ``stored`` are those before the cut.
    """
    sizes = place.sizes(stored)
    if not is_off:
        return pack_in_memory(place, state, sizes)
    state = add_biases(state, () if "bo" in state else ("bo",))
    once, twice = (
        {name: _repeat_first(name, x, count) for name, x in state.items()} for count in (1, 2)
    )
    wider, left = pack_in_memory(place, twice, sizes), dict[str, Tensor]()
    for name, x in pack_in_memory(place, once, sizes).items():
        if name.startswith(f"{place.projections['o']}."):
            pairs = zip(x.shape, wider[name].shape, strict=True)
            left[name] = x[tuple(slice(n if n == m else 0) for n, m in pairs)]
    return left


def _repeat_first(name: str, tensor: Tensor, count: int) -> Tensor:
    """Return a canonical tensor of so many copies of its first head; one kv head stays one."""
    dim, axis = HEADS.get(name, (None, ""))
    if dim is None:
        return tensor
    copies = 1 if axis == "kv_heads" and tensor.shape[dim] == 1 else count
    return torch.cat([tensor.narrow(dim, 0, 1)] * copies, dim)


def _require_runs(original: Any, made: Any) -> None:
    """Raise OptionError where the class runs at its sizes on the meta device, and not at others."""
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


def _find_modules(
    original: Any, made: nn.Module, left_out: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the modules that differ, by their names in the model without a head of its own."""
    before = dict(original.named_modules())
    prefix = f"{original.base_model_prefix}."
    for name, module in made.named_modules():
        old = vars(before[name])
        sizes: dict[str, Any] = {
            attribute: value
            for attribute, value in vars(module).items()
            if isinstance(value, int | str)
            and old.get(attribute) != value
            and not attribute.startswith("_")
        }
        if type(config := getattr(module, "config", None)) is cut_classes().CutConfig:
            sizes["config"] = {a: n for a, n in vars(config).items() if a != "of_model"}
        sizes |= left_out.get(name, {})
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
