"""Importance by gradients: one forward and one backward pass for all heads of all layers.

A gate is a factor 1 on each head's output at each query. The factor changes no bit of the outputs,
and its gradient is ⟨O[i], ∂L/∂O[i]⟩. Sequences of a batch do not interact, so the gradient of the
summed loss at one sequence is that of its loss. One backward pass serves all sequences, heads and
layers.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError
from headwise.scanning import selection
from headwise.scanning.call import CapturedCall, require_not_none
from headwise.scanning.importance import losses
from headwise.scanning.importance.losses import Loss
from headwise.scanning.inputs import (
    check_tokens_and_limit_outputs,
    list_inputs,
    require_module,
)
from headwise.scanning.layer import LayerScan
from headwise.scanning.record import record_attention
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import SelectedLayers
from headwise.scanning.statistics.importance import GRADIENTS
from headwise.scanning.weights import class_name_without_fsdp

UNRECORDED = "computed without a gradient: under torch.no_grad, or a reentrant checkpoint"


def gradients(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Loss | None = None,
    layers: selection.Layers = None,
) -> HeadScan:
    """Measure ``gate_gradient``, ``gate_gradient_normalised`` and ``taylor`` of every head.

    The model runs in evaluation mode and keeps its flags, parameters and gradients. For example,
    with the model of bytes that ships with headwise:

        model = tiny.load()
        scan = gradients(model, tiny.encode("def f(x):")[None])
        scan.top("gate_gradient", 3)

    Args:
        model: as for `headwise.scan`.
        inputs: a tensor, a tuple of positional arguments, or a mapping of named ones; or a list of
            several such inputs, which are merged.
        loss: (output, input) -> (batch,): one number for each sequence, which depends on this
            sequence alone. By default `next_token`: the mean cross-entropy of each next token.
        layers: names of layers, or patterns such as `"*layer.3.*"`; all if None.

    Raises:
        OptionError: a loss without a gradient, no loss for a model that is not causal, layers that
            do not exist.
        ShapeError, DTypeError: a loss that is not one number for each sequence.
    """
    model, gates = require_module(model), Gates(SelectedLayers(layers), causal=loss is None)
    model_inputs = check_tokens_and_limit_outputs(model, list_inputs(inputs), with_logits=True)
    with record_attention(model, gates, gradients=True) as recorder:
        for model_input in model_inputs:
            output, original = recorder.run(model_input), model_input.original
            of_batch = losses.apply_loss_per_sequence(model, recorder, output, original, loss)
            gates.add_gradients_of_losses(of_batch)
    return HeadScan(
        model=class_name_without_fsdp(model),
        sequences=gates.sequences,
        tokens=gates.tokens,
        notes=(*recorder.notes, *gates.notes),
        statistics=GRADIENTS,
        layer_scans=gates.layers.drop_incomplete_summaries(),
    )


class Gates:
    """Watcher that puts gates on the selected layers.

    Args:
        layers: the selected layers.
        causal: True if every call must be causal, as for the default loss.
    """

    def __init__(self, layers: SelectedLayers, *, causal: bool) -> None:
        self.layers, self._causal = layers, causal
        self.notes: dict[str, None] = {}  # on layers on which the loss does not depend
        self.sequences, self.tokens = 0, 0
        self._placed: list[tuple[LayerScan, Tensor]] = []
        self._tokens: int | None = None
        self._is_backward = False

    def __call__(self, call: CapturedCall) -> Tensor | None:
        """Return the gated head outputs, or None for a layer without gates.

        Raises:
            OptionError: the layer is computed once more, in the backward pass.
        """
        if self._is_backward:
            raise OptionError(
                saw=f"{call.layer}, which is computed again in the backward pass "
                "(torch.utils.checkpoint)",
                needed="a model that keeps its activations, since the gates are in the first pass",
                do="model.gradient_checkpointing_disable(), or your model's equivalent",
            )
        if self._causal:
            losses.require_causal(call)
        if self._tokens is None:
            self._tokens = int(call.real_queries.sum())
        layer = self.layers.record_call_and_find_layer(call)
        if layer is None:
            return None
        if not torch.is_grad_enabled():
            _mark_layer_missing(layer, UNRECORDED)
            return None
        outputs = require_not_none(call.outputs)
        # Wider than half precision: the gradient of a gate is a sum over value_dim.
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        shape = outputs.shape[:3]
        gate = torch.ones(shape, dtype=dtype, device=outputs.device, requires_grad=True)
        self._placed.append((layer, gate))
        return (outputs * gate[..., None]).to(outputs.dtype)

    def add_gradients_of_losses(self, losses: Float[Tensor, " batch"]) -> None:
        """Add the gradients of the gates of one batch to the sums of their layers.

        Raises:
            OptionError: the losses have no gradient.
            ShapeError: the number of losses is the batch size of no layer.
        """
        placed, self._placed = self._placed, []
        tokens, self._tokens = self._tokens, None
        self.layers.selected_layers()
        count = len(losses)
        if placed and not any(len(gate) == count for _, gate in placed):
            layer, gate = placed[0]
            raise ShapeError(
                saw=f"a loss that gave {count} numbers; {layer.name} has a batch of {len(gate)}",
                needed="one number for each sequence, (batch,)",
                do="a mean over the tokens of each sequence: loss.mean(-1)",
            )
        self.sequences += count
        self.tokens += tokens or 0
        self._is_backward = True
        gradients = _gate_gradients(losses, placed)
        self._is_backward = False
        by_layer: dict[str, tuple[LayerScan, list[Tensor]]] = {}
        for (layer, gate), gradient in zip(placed, gradients, strict=True):
            if len(gate) != count:
                _mark_layer_missing(layer, f"a batch of {len(gate)} for {count} sequences")
                continue
            if gradient is None:
                self.notes[f"{layer.name}: the loss does not depend on its heads"] = None
                gradient = torch.zeros_like(gate)
            by_layer.setdefault(layer.name, (layer, []))[1].append(gradient.double())
        for layer, of_gates in by_layer.values():
            _add_gradients(layer, of_gates)


def _add_gradients(layer: LayerScan, gradients: list[Tensor]) -> None:
    """Add the gradients (batch, heads, queries) of one batch to the sums of a layer.

    A layer that attends twice in a pass has two gates, whose gradients count together.
    """
    signed = torch.stack([gradient.sum(-1) for gradient in gradients]).sum(0)
    absolute = torch.stack([gradient.abs().sum(-1) for gradient in gradients]).sum(0)
    gate, taylor = signed.abs().sum(0).cpu(), absolute.sum(0).cpu()
    for statistic, total in zip(GRADIENTS, (gate, gate.clone(), taylor), strict=True):
        layer.add_summary(statistic, {"sum": total, "count": torch.full_like(total, len(signed))})


def _mark_layer_missing(layer: LayerScan, reason: str) -> None:
    layer.missing |= {statistic.definition.name: reason for statistic in GRADIENTS}


def _gate_gradients(
    losses: Tensor, placed: list[tuple[LayerScan, Tensor]]
) -> tuple[Tensor | None, ...]:
    if not placed:
        return ()
    if not losses.requires_grad:
        raise OptionError(
            saw="a loss that has no gradient",
            needed="a loss that torch computes from the model's output",
            do="no detach, torch.no_grad or numpy in the loss and the model",
        )
    gates = [gate for _, gate in placed]
    # autograd.grad of the gates alone, so that no parameter receives a gradient.
    return torch.autograd.grad(losses.sum(), gates, allow_unused=True)
