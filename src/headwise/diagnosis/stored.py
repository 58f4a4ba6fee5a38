"""Sides of a comparison that are stored: files, folders and state dicts, also beside a module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor, nn

from headwise.checkpoints.attention import load_attention
from headwise.checkpoints.source import CheckpointSource
from headwise.diagnosis._detect import GivenWeights, open_weights
from headwise.diagnosis._verify import verify_opened
from headwise.diagnosis.results.diagnosis import Diagnosis
from headwise.diagnosis.subjects.native import NativeSubject
from headwise.diagnosis.subjects.recording import is_recording
from headwise.diagnosis.subjects.run import LayerRun, ModelRun
from headwise.diagnosis.subjects.transformers import (
    is_transformers_attention,
    layer_index,
    stated_layer_index,
)
from headwise.errors import OptionError
from headwise.layers.attention import Attention
from headwise.layouts.modules import NamedModule

WEIGHTS = (str, os.PathLike, Mapping)
NAMED_LAYERS = (Attention, nn.MultiheadAttention)


def is_stored_weights(value: object) -> TypeGuard[str | Path | Mapping[str, Tensor]]:
    """True for weights: a file, a folder or a state dict."""
    return isinstance(value, WEIGHTS) and not is_recording(value)


def can_compare_as_weights(a: object, b: object) -> bool:
    """True for two sets of weights, and for a set with a module whose weights have names.

    Those are layers of headwise and torch and, beside a state dict, modules with a config.
    """
    pairs = ((a, b), (b, a))
    return all(map(is_stored_weights, (a, b))) or any(
        is_stored_weights(stored) and _is_module_with_named_weights(module, stored)
        for stored, module in pairs
    )


def _is_module_with_named_weights(module: object, stored: object) -> TypeGuard[nn.Module]:
    has_config = isinstance(stored, Mapping) and hasattr(module, "config")
    return isinstance(module, NAMED_LAYERS) or (has_config and isinstance(module, nn.Module))


def compare_stored_weights(*sides: Any) -> Diagnosis:
    """Compare two sets of weights; of a module, those in its state dict."""
    module = next((side for side in sides if isinstance(side, nn.Module)), None)
    config = None
    if module is not None and not isinstance(module, NAMED_LAYERS):
        config = module.config.to_dict()  # type: ignore[operator, union-attr]
    heads = module.num_heads if isinstance(module, NAMED_LAYERS) else None
    kv_heads = module.num_kv_heads if isinstance(module, Attention) else None
    counts = {"heads": heads, "kv_heads": kv_heads}
    first, second = (
        open_weights(
            side.state_dict() if isinstance(side, nn.Module) else side,
            counts,
            config=config,
            title=f"the {which} state dict",
        )
        for which, side in zip(("first", "second"), sides, strict=True)
    )
    if module is not None:
        first, second = (
            weights if isinstance(side, nn.Module) else _take_layer_like(module, weights)
            for weights, side in zip((first, second), sides, strict=True)
        )
    return verify_opened(first, second)


def _take_layer_like(module: nn.Module, stored: GivenWeights) -> GivenWeights:
    """Return the stored weights of the layer that a module is; all for a whole model.

    Raises:
        OptionError: one layer beside several, and it does not say which of them it is.
    """
    is_layer = isinstance(module, NAMED_LAYERS) or is_transformers_attention(module)
    modules = matching = _find_stored_attention_modules(stored) if is_layer else ()
    if len(modules) > 1:
        number = stated_layer_index(module) if is_transformers_attention(module) else None
        matching = tuple(each for each in modules if each.layer == number)
    if len(matching) == 1:
        start, tensors = matching[0].prefix, stored.tensors
        names = [name for name in tensors if name.startswith(start)]
        return replace(stored, tensors={n.removeprefix(start): tensors[n] for n in names})
    if not modules:
        return stored
    example = modules[-1]
    raise OptionError(
        saw=f"one layer beside weights of {len(modules)} attention layers",
        needed="the weights of the layer that it is compared with",
        do="name the layer: compare(layer, headwise.checkpoints.load_attention(path, "
        f"layer={example.layer}))"
        if isinstance(stored.tensors, CheckpointSource)
        else f"give the tensors of one layer, such as `{example.prefix}`, without this prefix",
    )


def _find_stored_attention_modules(stored: GivenWeights) -> tuple[NamedModule, ...]:
    """Return the attention modules of stored weights, in the layout that finds most."""
    detection = replace(stored, known={}).detection()  # by names: the layer may have other counts
    groups = (*detection.candidates, *detection.misplaced, *detection.damaged)
    return max((group[0].modules for group in groups), key=len, default=())


def load_layer_of_same_number(value: object, other: object) -> object:
    """Return the stored layer of the same number, for files beside an attention of transformers."""
    is_file = isinstance(value, str | Path) and not is_recording(value)
    if is_file and is_transformers_attention(other):
        return load_attention(Path(str(value)), layer=layer_index(other))
    return value


def run_stored_layers(path: Path, model: ModelRun) -> ModelRun:
    """Load as many layers as a model has, and run each on the input of the model's layer.

    Args:
        path: the weights, with the settings of their model beside them or in their metadata.
        model: the run of the model.

    Raises:
        CheckpointError, OptionError: a layer cannot be loaded.
    """
    layers = []
    for number, other in enumerate(model.layers):
        subject = NativeSubject(load_attention(path, layer=number))
        call = subject.record(other.call.inputs)
        run = LayerRun(f"layer {number} of {path.name}", call, subject.model, stored=subject.dtype)
        layers.append(run)
    return ModelRun(path.name, layers, None, model.inputs)
