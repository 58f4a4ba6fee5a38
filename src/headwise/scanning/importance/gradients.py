"""Importance by gradients: one forward and one backward pass for all heads of all layers.

A gate is a factor 1 of each head's output at each query. It changes no bit of the outputs, and its
gradient is ⟨O[i], ∂L/∂O[i]⟩, the head's output times what the loss would have of it. Sequences do
not meet in a model, so the gradient of the losses' sum at one sequence is that of its own loss: one
backward pass serves all sequences, heads and layers.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError
from headwise.scanning import selection
from headwise.scanning.capture import reached
from headwise.scanning.captured_call import CapturedCall, known
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.importance import losses
from headwise.scanning.importance.losses import Loss
from headwise.scanning.layer_scan import LayerScan
from headwise.scanning.model_inputs import inputs_of, prepared, require_module, run
from headwise.scanning.selection import SelectedLayers
from headwise.scanning.statistics.importance_statistics import GRADIENTS
from headwise.support.module_modes import evaluating

UNRECORDED = "computed without a gradient: under torch.no_grad, or a reentrant checkpoint"


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
    gates = Gates(SelectedLayers(layers), causal=loss is None)
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        evaluating(model),
        reached(model, gates) as reach,
    ):
        for one in prepared(model, inputs_of(inputs), with_logits=True):
            reach.begin()
            output = run(model, one)
            gates.backward(losses.of_run(model, reach, output, one.given, loss))
    ignored = [f"{name}: the loss does not depend on its heads" for name in gates.ignored]
    return HeadScan(
        model=type(model).__name__,
        sequences=gates.sequences,
        tokens=gates.tokens,
        notes=(*reach.notes, *ignored),
        statistics=GRADIENTS,
        layer_scans=gates.layers.complete(),
    )


class Gates:
    """A watcher that puts gates on the layers that are asked for.

    Args:
        layers: which.
        causal: whether every call must be causal, as the default loss needs.
    """

    def __init__(self, layers: SelectedLayers, *, causal: bool) -> None:
        self.layers, self._causal = layers, causal
        self.ignored: dict[str, None] = {}  # layers on which the loss does not depend
        self.sequences, self.tokens = 0, 0
        self._placed: list[tuple[LayerScan, Tensor]] = []
        self._tokens: int | None = None
        self._is_backward = False

    def __call__(self, call: CapturedCall) -> Tensor | None:
        """The head outputs behind their gates.

        Raises:
            OptionError: it is computed once more, for the backward pass.
        """
        if self._is_backward:
            raise OptionError(
                saw=f"{call.layer}, which is computed again in the backward pass "
                "(torch.utils.checkpoint)",
                needed="a model that keeps its activations: the gates are in the first pass",
                do="switch checkpointing off: model.gradient_checkpointing_disable(), or the like",
            )
        if self._causal:
            losses.require_causal(call)
        if self._tokens is None:
            self._tokens = int(call.real_queries.sum())
        layer = self.layers.see(call)
        if layer is None:
            return None
        if not torch.is_grad_enabled():
            _leave_out(layer, UNRECORDED)
            return None
        outputs = known(call.outputs)
        # Wider than half: what a gate receives is a sum over value_dim.
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        shape = outputs.shape[:3]
        gate = torch.ones(shape, dtype=dtype, device=outputs.device, requires_grad=True)
        self._placed.append((layer, gate))
        return (outputs * gate[..., None]).to(outputs.dtype)

    def backward(self, of_sequences: Float[Tensor, " batch"]) -> None:
        """Gather what the losses of one batch say of the gates that its pass went through.

        Raises:
            OptionError: the losses have no gradient.
            ShapeError: there are not as many of them as any layer has sequences.
        """
        placed, self._placed = self._placed, []
        tokens, self._tokens = self._tokens, None
        self.layers.chosen()
        count = len(of_sequences)
        if placed and not any(len(gate) == count for _, gate in placed):
            layer, gate = placed[0]
            raise ShapeError(
                saw=f"a loss that gave {count} numbers; {layer.name} has a batch of {len(gate)}",
                needed="one for each sequence, (batch,)",
                do="a mean over the tokens of each sequence: loss.mean(-1)",
            )
        self.sequences += count
        self.tokens += tokens or 0
        self._is_backward = True
        found_of_all = _gradients(of_sequences, placed)
        self._is_backward = False
        of_layers: dict[str, tuple[LayerScan, list[Tensor]]] = {}
        for (layer, gate), found in zip(placed, found_of_all, strict=True):
            if len(gate) != count:
                _leave_out(layer, f"a batch of {len(gate)} for {count} sequences")
                continue
            if found is None:
                self.ignored[layer.name] = None
            of_queries = (torch.zeros_like(gate) if found is None else found).double()
            of_layers.setdefault(layer.name, (layer, []))[1].append(of_queries)
        for layer, several in of_layers.values():
            _add(layer, several)


def _add(layer: LayerScan, several: list[Tensor]) -> None:
    """Add (batch, heads, queries) of one batch to the sums of a layer.

    A layer that attends twice in a pass has two gates: both times count together.
    """
    signed = torch.stack([of_queries.sum(-1) for of_queries in several]).sum(0)
    absolute = torch.stack([of_queries.abs().sum(-1) for of_queries in several]).sum(0)
    gate, taylor = signed.abs().sum(0).cpu(), absolute.sum(0).cpu()
    for statistic, total in zip(GRADIENTS, (gate, gate.clone(), taylor), strict=True):
        layer.add(statistic, {"sum": total, "count": torch.full_like(total, len(signed))})


def _leave_out(layer: LayerScan, reason: str) -> None:
    layer.missing |= {statistic.definition.name: reason for statistic in GRADIENTS}


def _gradients(
    of_sequences: Tensor, placed: list[tuple[LayerScan, Tensor]]
) -> tuple[Tensor | None, ...]:
    if not placed:
        return ()
    if not of_sequences.requires_grad:
        raise OptionError(
            saw="a loss that has no gradient",
            needed="one that is computed from the model's output by torch",
            do="no detach, no torch.no_grad and no numpy in the loss or in the model",
        )
    gates = [gate for _, gate in placed]
    # Of the gates alone: no parameter receives a gradient.
    return torch.autograd.grad(of_sequences.sum(), gates, allow_unused=True)
