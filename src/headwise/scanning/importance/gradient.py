"""Importance by gradients: one forward and one backward pass for all heads of all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.scanning import selection
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.importance import losses
from headwise.scanning.importance.gates import Gates
from headwise.scanning.importance.losses import Loss
from headwise.scanning.importance.runs import Layer, Layers, inputs_for
from headwise.scanning.inputs import require_module
from headwise.scanning.reaching import reached
from headwise.scanning.readings import LayerScan
from headwise.scanning.running import notes_of
from headwise.scanning.statistics.importance import GRADIENTS
from headwise.support.modes import evaluating


def gradients(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Loss | None = None,
    layers: selection.Layers = None,
) -> HeadScan:
    """``gate_gradient``, ``gate_gradient_normalised`` and ``taylor`` of every head.

    The model runs in evaluation mode. Its flags, its parameters and their gradients are left as
    they were found. Of the model of bytes that ships with headwise, for example:

        model = tiny.load()
        scan = gradients(model, tiny.encode("def f(x):")[None])
        scan.top("gate_gradient", 3)

    Args:
        model: as for `headwise.scan`.
        inputs: what the model is called with: a tensor, a tuple of positional arguments, or a
            mapping of named ones; or a list of several such inputs, which are merged.
        loss: (output, input) -> (batch,): one number for each sequence, that depends on this
            sequence alone. By default `next_token`: the mean cross-entropy of each next token.
        layers: names of layers, or patterns such as "*layer.3.*"; all if None.

    Raises:
        OptionError: a loss without a gradient, no loss for a model that is not causal, layers that
            do not exist.
        ShapeError, DTypeError: a loss that is not one number for each sequence.
    """
    model = require_module(model)
    gates = Gates(Layers(layers), causal=loss is None)
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        evaluating(model),
        reached(model, gates) as reach,
    ):
        for one in inputs_for(model, inputs):
            output = one.run(model, reach)
            gates.backward(losses.of_run(model, reach, output, one.given, loss))
    ignored = [f"{name}: the loss does not depend on its heads" for name in gates.ignored]
    return HeadScan(
        model=type(model).__name__,
        sequences=gates.sequences,
        tokens=gates.tokens,
        notes=(*notes_of(reach), *ignored),
        statistics=GRADIENTS,
        layer_scans=tuple(_layer_scan(layer, gates) for layer in gates.layers.chosen()),
    )


def _layer_scan(layer: Layer, gates: Gates) -> LayerScan:
    reason, heads = gates.missing.get(layer.name), tuple(range(layer.num_heads))
    if reason is not None:
        return layer.scan(heads, {}, {s.definition.name: reason for s in GRADIENTS})
    return layer.scan(heads, gates.sums[layer.name].summaries(), {})
