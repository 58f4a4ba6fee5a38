"""Base class of the attention modules of a comparison."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from headwise.diagnosis.simulation.stages import Inputs
from headwise.diagnosis.subjects.subject import Subject
from headwise.support.quantised import require_unquantised

DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")  # attributes, the surest one first


class ModuleSubject(Subject):
    """An attention module; it runs as a copy in eval mode, and is never changed.

    Attributes:
        module: the copy, in the dtype of its weights.
        dropout: of the weights as the module was given: 0 in eval mode, None where not known.
    """

    def __init__(self, module: nn.Module, kind: str) -> None:
        require_unquantised(**dict(module.named_parameters()))
        self.kind = kind
        self.dropout = read_dropout(module)
        self.module = copy.deepcopy(module).eval()
        self.dtype = next(module.parameters()).dtype

    @abstractmethod
    def run_module(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Return the output of the module, or of a copy in another dtype."""

    @abstractmethod
    def subject_of_module(self, module: nn.Module) -> Self:
        """Return the subject of another module of this kind."""

    @torch.no_grad()
    def output(self, inputs: Inputs) -> Tensor:
        """Return the output of the module in its dtype."""
        return self.run_module(self.module, inputs)

    def gradients(self, inputs: Inputs, direction: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the gradients of the inputs, and of the weights where the module is known."""
        module = copy.deepcopy(self.module).to(dtype).requires_grad_()
        given = {"x": inputs.x, "source": inputs.source}
        leaves = {n: t.to(dtype).requires_grad_() for n, t in given.items() if t is not None}
        with torch.enable_grad():
            output = self.run_module(
                module, replace(inputs, x=leaves["x"], source=leaves.get("source"))
            )
            if output.requires_grad:
                (output * direction.to(dtype)).sum().backward()
        gradients = {name: _gradient_or_zeros(leaf) for name, leaf in leaves.items()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(_gradient_or_zeros(parameter))
        # Gradients have the shapes of the weights, and are read in the same layout.
        model = self.subject_of_module(module).model
        return gradients | ({} if model is None else dict(model.weights))


def read_dropout(module: nn.Module) -> float | None:
    """Return the dropout of a module's weights: 0 in eval mode, None where it is not known."""
    if not module.training:
        return 0.0
    for name in DROPOUTS:
        value = getattr(module, name, None)
        value = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(value, int | float):
            return float(value)
    return None


def describe_dropout_difference(first: float | None, second: float | None) -> str:
    """Return the sentence on two dropouts that differ, which no run in eval mode shows."""
    if first is None or second is None or first == second:
        return ""
    return (
        f"dropout is {first:g} in the first and {second:g} in the second, which shows in training "
        "alone: call eval() on both if only inference counts"
    )


def _gradient_or_zeros(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
