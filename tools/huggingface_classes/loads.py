"""Which layers of a stored model `load_attention` loads, with the outputs of the model's own run.

A load is proved by itself, on the model's class with probes. Here the layer is compared once more,
by other means: with what the recorder saw of the whole model, in float32.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.checkpoints.config import layer_attends, layout_name
from headwise.checkpoints.description import COUNTS, Checkpoint, open_checkpoint
from headwise.checkpoints.inputs import list_coordinates
from headwise.checkpoints.loading import StoredLayers
from headwise.checkpoints.turns import HandedPlaces, Turn
from headwise.errors import HeadwiseError
from headwise.layers.attention import Attention
from headwise.layouts import registry
from headwise.layouts.modules import find_modules
from headwise.masks.mask import Mask
from headwise.scanning.call import CapturedCall
from headwise.scanning.record import record_attention

EQUAL = 1e-4  # of the largest head output
MOST = 12  # modules that are tried
LOADED, SOME, OTHER, UNPROVED, REFUSED = (
    "loaded",
    "some layers",
    "other numbers",
    "not proved",
    "refused",
)

WITH_INPUTS = "with inputs=..."  # of a load whose class does not run on made-up inputs


def load_of(model: PreTrainedModel, given: dict[str, Any]) -> tuple[str, str]:
    """How the stored layers load, and the reason of the first that does not.

    What is refused is tried once more, with the inputs of the model as the caller's.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        opened = open_checkpoint(folder, dict.fromkeys(COUNTS))
        prefixes = list(_prefixes(opened))[:MOST]
        # What transformers reads from the folder, where a null of the config may be a default.
        stored = type(model).from_pretrained(folder).eval()
        with _kept_positions(stored) as positions, _kept_sources(stored) as sources:
            calls = _calls(stored, given)
        image, config = given.get("pixel_values"), model.config.to_dict()
        if isinstance(image, Tensor):  # of towers that turn by row and column
            states = [call.state for call in calls if call.state is not None]
            parts = [config, *(part for part in config.values() if isinstance(part, dict))]
            flat = [x for x in states if x.dim() == 3]
            each = (list_coordinates(part, image, x) for part in parts for x in flat)
            positions += [x for x in each if x is not None]
        alone, beside = StoredLayers(opened), StoredLayers(replace(opened, inputs=given))
        outcomes = []
        for prefix in prefixes:
            kind, why = _outcome(alone, prefix, calls, positions, sources)
            if kind == REFUSED and "no made-up input runs" in why:
                kind, why = _outcome(beside, prefix, calls, positions, sources)
                why = WITH_INPUTS if kind == LOADED else why
            if kind == LOADED:
                layer = (beside if why == WITH_INPUTS else alone).load(0, prefix)
                kind, other = _outcome_of_tower(layer, stored, given, calls)
                why = why if kind == LOADED else other
            outcomes.append((kind, why))
    if not outcomes:
        return _outcome(alone, None, calls, positions, sources)
    kinds = {kind for kind, _ in outcomes}
    needed = WITH_INPUTS if (LOADED, WITH_INPUTS) in outcomes else ""
    reason = next((why for kind, why in outcomes if kind != LOADED), needed)
    for kind in (OTHER, LOADED):
        if kind in kinds:
            return (SOME if kind == LOADED and len(kinds) > 1 else kind), reason
    return (UNPROVED if UNPROVED in kinds else REFUSED), reason


def _prefixes(opened: Checkpoint) -> Iterator[str]:
    """The prefixes of modules that a layout has whole, where the config does not deny a softmax."""
    name, headers = layout_name(opened.config), opened.source.headers
    every = registry.layouts_by_name().values()
    seen, denied = set(), set()
    listed = None if name is None else registry.layout(name)
    is_listed = listed is not None and bool(find_modules(listed, headers))
    for layout in [listed] if is_listed and listed else every:
        for module in find_modules(layout, headers) if layout.required else ():
            whole = layout.required <= {*module.tensors.values()}
            linear = "text_config" not in opened.config and not layer_attends(
                opened.config, module.layer
            )
            if whole and linear:
                denied.add(module.prefix)
            elif whole and module.prefix not in seen:
                seen.add(module.prefix)
                yield module.prefix
    if not seen:  # the kinds of layers were those of a convolution
        yield from sorted(denied)


def _calls(model: nn.Module, given: dict[str, Any]) -> list[CapturedCall]:
    calls: list[CapturedCall] = []
    try:
        with record_attention(model, on_complete=calls.append) as recorder, torch.no_grad():
            recorder.begin_input()
            model(**given)
    except HeadwiseError:
        return []
    return calls


@contextmanager
def _kept_positions(model: nn.Module) -> Iterator[list[Tensor]]:
    """The positions of several axes that a rotation of the model got."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        every = (*args, *kwargs.values())
        kept.extend(x for x in every if isinstance(x, Tensor) and not x.is_floating_point())

    rotations = (m for m in model.modules() if getattr(m, "mrope_section", None))
    hooks = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in rotations]
    yield kept
    for hook in hooks:
        hook.remove()


@contextmanager
def _kept_sources(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The weight and the input of each linear projection that ran."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Linear, args: tuple[Any, ...], _: Any) -> None:
        kept.extend((module.weight, x) for x in args[:1])

    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    hooks = [m.register_forward_hook(keep) for m in linear]
    yield kept
    for hook in hooks:
        hook.remove()


def _inputs_of(
    layer: Attention, state: Tensor, sources: list[tuple[Tensor, Tensor]]
) -> dict[str, Any] | None:
    """What the layer gets: the state, or the inputs of its projections, where the proof names them.

    None where these are not of one shape, or of several calls.
    """
    if layer.proof.endswith("tokens"):
        return {"x": state}
    projections = {"x": layer.q_proj, "source": layer.k_proj, "value_source": layer.v_proj}
    found = {
        name: [x for weight, x in sources if torch.equal(weight, projection.weight)]
        for name, projection in projections.items()
    }
    if not all(len(each) == 1 and each[0].shape == state.shape for each in found.values()):
        return None
    return {name: x for name, (x,) in found.items()}


def _shorten(words: str, folder: Path) -> str:
    """The reason without the folder, and what all unknown types have."""
    words = words.replace(f"{folder}/", "").replace(f"{folder} ", "")
    words = re.sub(r".*catalogue lacks[;:] ", "", words)
    return words.removeprefix("not proved: ")[:200]


def _has_output_of(layer: Attention, call: CapturedCall) -> bool:
    """True if a call is of this layer: towers have layers of one name."""
    heads = layer.out_proj.weight.mT.unflatten(0, (layer.num_heads, layer.value_dim))
    return call.out_proj is not None and torch.equal(heads, call.out_proj)


def _outcome(
    layers: StoredLayers,
    prefix: str | None,
    calls: Iterable[CapturedCall],
    positions: list[Tensor],
    sources: list[tuple[Tensor, Tensor]],
) -> tuple[str, str]:
    folder = layers.opened.source.folder
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer = layers.load(0, prefix)
    except HeadwiseError as error:
        return REFUSED, _shorten(error.saw, folder)
    if not layer.proof.startswith("proved"):
        return UNPROVED, _shorten(layer.proof, folder)
    several = layer.rotary is not None and layer.rotary.axis_count > 1
    name = "" if prefix is None else prefix.rstrip("./")
    for call in calls:
        theirs = call.outputs if call.mixed is None else None
        is_same = call.layer.endswith(name) or name.endswith(call.layer)
        if (
            not is_same
            or not _has_output_of(layer, call)
            or theirs is None
            or call.state is None
            or call.is_cross
        ):
            continue
        if call.state.dim() != 3 or call.state.shape[:2] != (theirs.shape[0], theirs.shape[2]):
            continue
        if layer.score_bias is None and call.matrix.score_bias.tensors:
            continue  # a mask of finite numbers, made of what the model sees
        fitting = (x for x in positions if x.shape[-2:] == call.state.shape[:2])
        places = next(fitting, None) if several else None
        if places is None and layer.rotary is not None and layer.rotary.numbers is not None:
            continue  # nobody says the row and the column of each token
        if (inputs := _inputs_of(layer, call.state, sources)) is None:
            continue
        with torch.no_grad():
            mine = layer.head_outputs(**inputs, mask=call.matrix.mask, positions=places)
        if mine.shape != theirs.shape:
            return OTHER, f"{prefix}: head outputs of another shape"
        real = call.real_queries[:, None, :, None]
        gap = float(((mine - theirs) * real).abs().max() / theirs.abs().max())
        if not gap < EQUAL:
            return OTHER, f"{prefix}: head outputs differ by {gap:.2g} of the largest"
    return LOADED, ""


def _outcome_of_tower(
    layer: Attention, model: nn.Module, given: dict[str, Any], calls: Iterable[CapturedCall]
) -> tuple[str, str]:
    """Compare a layer on images in one row, or on places along several axes, as the model has them.

    Each image of a row is a call of its own.
    """
    by_name: dict[str, list[tuple[CapturedCall, Tensor, Tensor]]] = {}
    for call in calls:
        if call.state is not None and call.outputs is not None and call.mixed is None:
            by_name.setdefault(call.layer, []).append((call, call.state, call.outputs))
    is_turned = layer.rotary is not None and layer.rotary.axis_count > 1
    for name, of_layer in by_name.items():
        attention = model.get_submodule(name.partition(" (")[0])
        call, state, theirs = of_layer[0]
        is_row = state.dim() == 2
        is_same = any(torch.equal(layer.out_proj.weight, x) for x in attention.parameters())
        if not is_same or not (is_turned or is_row):
            continue
        x, mask = state[None] if is_row else state.flatten(1, -2), call.matrix.mask
        real = call.real_queries[:, None, :, None]
        if is_row:
            theirs = torch.cat([outputs for _, _, outputs in of_layer], 2)
            lengths = torch.tensor([outputs.shape[2] for _, _, outputs in of_layer])
            image = torch.arange(len(lengths)).repeat_interleave(lengths)
            mask = Mask.may_attend((image[:, None] == image)[None], axes="batch queries keys")
            real = torch.ones(())
        turn = _turn_of(model, attention, given)
        if theirs.shape[::2] != x.shape[:2] or (is_turned and turn is None):
            continue
        places = turn.positions(*x.shape[:2]) if is_turned and turn is not None else None
        with torch.no_grad():
            mine = layer.head_outputs(x, mask=mask, positions=places)
        gap = float(((mine - theirs) * real).abs().max() / theirs.abs().max())
        if not gap < EQUAL:
            return OTHER, f"{name}: head outputs differ by {gap:.2g} of the largest"
    return LOADED, ""


def _turn_of(model: nn.Module, attention: nn.Module, given: dict[str, Any]) -> Turn | None:
    kept = HandedPlaces()
    with kept.keep(model, attention), torch.no_grad():
        model(**given)
    return kept.find_turn()
