"""Cuts in memory: of a layer of headwise or torch, and of a model whose class stays the same."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.function.weights import State
from headwise.layers.attention import Attention
from headwise.layers.conversion import (
    canonical_state,
    constructor_arguments_from_weights,
    layer_state_dict_from_canonical,
    layout_of_layer,
    options_of_spec,
)
from headwise.layouts import registry
from headwise.scanning.call import ORIGINAL
from headwise.support.text import list_some
from headwise.surgery.cut import Cut, LayerCut
from headwise.surgery.models import ModelHeads, label_heads, resize
from headwise.surgery.plain import add_biases, find_plain_config

PLAIN = "a layer with weights of its own, in floating point and of all heads"


def cut_layer(cut: LayerCut, layer: Attention | nn.MultiheadAttention) -> Attention:
    """Return a new layer of the heads that a cut leaves; the given one stays as it is.

    A layer of torch, or headwise's drop-in for it, becomes an `Attention`, whose width and heads
    may differ: torch's class has no head_dim of its own. Its input is (batch, length, width).

    Raises:
        OptionError: see `LayerCut.apply`; or a layer with parts, adapters or quantised weights.
        ShapeError: see `LayerCut.apply`.
    """
    plain = layer if isinstance(layer, Attention) else _as_attention(layer)
    _require_plain(plain)
    state = cut.apply(canonical_state(plain, plain.state_dict()), plain.spec)
    stated = {**options_of_spec(plain.spec), "dropout": plain.dropout}
    made = Attention(**constructor_arguments_from_weights(state, plain.spec, stated))
    made.load_state_dict(layer_state_dict_from_canonical(state, made))
    made.requires_grad_(any(x.requires_grad for x in plain.parameters()))
    if ORIGINAL in vars(layer):
        vars(made)[ORIGINAL] = vars(layer)[ORIGINAL]
    label_heads(made, cut)
    return made.train(layer.training)


def _as_attention(layer: nn.MultiheadAttention) -> Attention:
    if layer.bias_k is not None or layer.add_zero_attn:
        raise OptionError(
            saw="a layer with add_bias_kv or add_zero_attn",
            needed="a layer without an additional key",
            do="cut a layer without these options",
        )
    packed = layer.in_proj_weight is not None
    return Attention.from_layout(
        layer.state_dict(),
        layout="torch-packed" if packed else "torch-separate",
        num_heads=layer.num_heads,
        dropout=layer.dropout,
    )


def _require_plain(layer: Attention) -> None:
    if layer.part is not None:
        raise OptionError(
            saw=f"a layer that computes {layer.part} of {layer.num_heads} heads",
            needed=PLAIN,
            do="load headwise.sharding.gather_state(layer) into a layer of its own first",
        )
    names = layer.state_dict().keys()
    if foreign := sorted(names - layout_of_layer(layer).tensors.keys()):
        quantised = registry.find_quantisation(names)
        raise OptionError(
            saw=f"a layer that holds {list_some(foreign)}"
            + (f": {quantised.reason}" if quantised else ""),
            needed=PLAIN,
            do=quantised.do if quantised else "merge adapters first: model.merge_and_unload()",
        )


def cut_model(cut: Cut, model: nn.Module, *, share: bool = False) -> Any:
    """Return a copy of a model with the heads that a cut leaves.

    The given model stays as it is. The copy has the same class; its attention modules have other
    sizes. Its config states them if it can, so that save_pretrained writes a folder that
    transformers loads; else it stays that of the original, and `headwise.surgery.write` has other
    forms. A layer of headwise is replaced as a whole, see `headwise.surgery.cut_layer`.

    Args:
        cut: of layers by their names in the model.
        model: a model of transformers, or a module made of layers of headwise.
        share: True to hold the tensors that do not change in common with the given model.

    Raises:
        OptionError: a model or a cut that cannot be cut; see `ModelHeads`.
        ShapeError: see `LayerCut.apply`.
        DeviceError: weights on several devices.
    """
    heads = ModelHeads(model)
    fitted = heads.fit(cut)
    tensors = (*model.parameters(), *model.buffers()) if share else ()
    shared = {id(tensor): tensor for tensor in tensors}
    if heads.layers:
        made: Any = copy.deepcopy(model, shared)
        for name, layer in fitted:
            smaller = cut_layer(layer, heads.layers[name])
            if not name:  # the model is the layer
                return smaller
            made.set_submodule(name.rstrip("."), smaller)
        return made
    shapes, changed = dict[str, State](), dict[str, Tensor]()
    for name, _ in fitted:  # one after another, since each is held twice meanwhile
        state = heads.read(name, fitted)
        shapes[name] = {tensor: x.to("meta") for tensor, x in state.items()}
        changed |= heads.pack({name: state})
    config = find_plain_config(heads, shapes.items())
    for name, biases in ({} if config.obstacle else config.biases).items():
        changed |= heads.pack({name: add_biases(heads.read(name, fitted), biases)})
    made = copy.deepcopy(model, shared)
    resize(made, heads, fitted, changed)
    if config.obstacle:
        return made
    kinds = {type(made.config), type(getattr(made.config, "text_config", made.config))}
    held = [c for m in made.modules() if type(c := getattr(m, "config", None)) in kinds]
    for stated in [*held, *(getattr(each, "text_config", each) for each in held)]:
        for name, (before, after) in config.changes.items():
            if getattr(stated, name, None) == before:
                setattr(stated, name, after)
    return made
