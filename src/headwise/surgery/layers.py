"""Cuts of one layer of headwise or torch."""

from __future__ import annotations

from torch import nn

from headwise.errors import OptionError
from headwise.layers.attention import Attention
from headwise.layers.conversion import (
    canonical_state,
    constructor_arguments_from_weights,
    layer_state_dict_from_canonical,
    layout_of_layer,
    options_of_spec,
)
from headwise.layouts import registry
from headwise.scanning.call import ORIGINAL, OriginalHeads
from headwise.support.text import list_some
from headwise.surgery.cut import LayerCut

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


def label_heads(module: nn.Module, cut: LayerCut) -> None:
    """Let a module state the original numbers of its heads, which a scan takes as labels."""
    whole = OriginalHeads(cut.num_heads, tuple(range(cut.num_heads)))
    before: OriginalHeads = vars(module).get(ORIGINAL, whole)
    left = tuple(before.numbers[head] for head in cut.origins.query)
    vars(module)[ORIGINAL] = OriginalHeads(before.total, left)


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
