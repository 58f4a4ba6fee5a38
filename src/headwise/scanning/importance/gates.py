"""Gates on the heads of a running model, and what the loss says of them.

A gate is a factor 1 of each head's output at each query. It changes no bit of the outputs, and its
gradient is ⟨O[i], ∂L/∂O[i]⟩, the head's output times what the loss would have of it. Sequences do
not meet in a model, so the gradient of the losses' sum at one sequence is that of its own loss: one
backward pass serves all sequences, heads and layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.scanning.calls import LayerCall
from headwise.scanning.importance import losses
from headwise.scanning.importance.runs import Layer, Layers
from headwise.scanning.statistics.statistic import Summary
from headwise.scanning.surroundings import Surroundings


@dataclass(frozen=True, eq=False)
class Sums:
    """Of one layer, over sequences: |signed sum over queries|, sum of absolute values, number."""

    signed: Float[Tensor, " heads"]
    absolute: Float[Tensor, " heads"]
    count: int

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.signed + other.signed, self.absolute + other.absolute, self.count + other.count
        )

    def summaries(self) -> dict[str, Summary]:
        """The summary of each statistic of `definitions.GRADIENTS`."""
        count = torch.full_like(self.signed, self.count)
        gate = {"sum": self.signed, "count": count}
        return {
            "gate_gradient": gate,
            "gate_gradient_normalised": {name: value.clone() for name, value in gate.items()},
            "taylor": {"sum": self.absolute, "count": count.clone()},
        }


UNRECORDED = "computed without a gradient: under torch.no_grad, or a reentrant checkpoint"


class Gates:
    """A watcher that puts gates on the layers that are asked for.

    Args:
        layers: which.
        causal: whether every call must be causal, as the default loss needs.
    """

    def __init__(self, layers: Layers, *, causal: bool) -> None:
        self.layers, self._causal = layers, causal
        self.sums: dict[str, Sums] = {}
        self.missing: dict[str, str] = {}
        self.ignored: dict[str, None] = {}  # layers on which the loss does not depend
        self.sequences, self.tokens = 0, 0
        self._placed: list[tuple[Layer, Tensor]] = []
        self._tokens: int | None = None
        self._is_backward = False

    def __call__(self, call: LayerCall) -> Tensor | None:
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
            self._tokens = real_tokens(call)
        layer = self.layers.see(call)
        if layer is None:
            return None
        if not torch.is_grad_enabled():
            self.missing[layer.name] = UNRECORDED
            return None
        outputs = call.outputs
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
        signed: dict[str, Tensor] = {}
        absolute: dict[str, Tensor] = {}
        self._is_backward = True
        found_of_all = _gradients(of_sequences, placed)
        self._is_backward = False
        for (layer, gate), found in zip(placed, found_of_all, strict=True):
            if len(gate) != count:
                self.missing[layer.name] = f"a batch of {len(gate)} for {count} sequences"
                continue
            if found is None:
                self.ignored[layer.name] = None
            of_queries = (torch.zeros_like(gate) if found is None else found).double()
            # A layer that attends twice in a pass has one gate: both times count together.
            signed[layer.name] = signed.get(layer.name, 0) + of_queries.sum(-1)
            absolute[layer.name] = absolute.get(layer.name, 0) + of_queries.abs().sum(-1)
        for name, own in signed.items():
            new = Sums(own.abs().sum(0).cpu(), absolute[name].sum(0).cpu(), count)
            self.sums[name] = self.sums[name] + new if name in self.sums else new


def real_tokens(call: LayerCall) -> int:
    """How many queries of a call are no padding."""
    return int(Surroundings().sequences_of(call).real_queries.sum())


def _gradients(
    of_sequences: Tensor, placed: list[tuple[Layer, Tensor]]
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
