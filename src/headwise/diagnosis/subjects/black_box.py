"""A function as the subject of a comparison: nothing but its outputs is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.diagnosis.simulation.stages import Inputs, RecordedCall
from headwise.diagnosis.subjects.subject import Subject
from headwise.errors import OptionError


class BlackBox(Subject):
    """A function of ``x``, and of ``source`` and ``mask`` where a call has them.

    It may take and return NumPy arrays. Its outputs are checked: of the right shape, finite, the
    same in a second run, and without a change of its inputs.
    """

    def __init__(self, function: Callable[..., Any], kind: str = "function") -> None:
        self.function, self.kind = function, kind
        self.dtype = torch.float32

    @torch.no_grad()
    def output(self, inputs: Inputs) -> Tensor:
        """Return the output of a call.

        Raises:
            OptionError: the function returns no tensor, has another output in a second run, returns
                NaN, or changes its input.
        """
        first, second = self._call_function(inputs), self._call_function(inputs)
        if first.shape[:2] != inputs.x.shape[:2] or first.dim() != 3:
            raise _function_fault_error(
                f"an output of shape {tuple(first.shape)} for x of shape {tuple(inputs.x.shape)}",
                "an output of (batch, queries, out_dim)",
                "compare(lambda x: layer(x)[0], ...) selects the output of a tuple",
            )
        if not torch.equal(first.isnan(), torch.zeros_like(first, dtype=torch.bool)):
            raise _function_fault_error(
                f"{int(first.isnan().sum())} of {first.numel()} outputs that are NaN",
                "finite outputs",
                "look for rows whose keys are all hidden, or for weights that are not finite",
            )
        if not torch.equal(first, second):
            raise _function_fault_error(
                "other outputs in a second run on the same input: they differ by up to "
                f"{float((first - second).abs().max()):.3g}",
                "a function without randomness or state",
                "call eval() first, which turns dropout off, and pass a fresh cache in each call",
            )
        self.dtype = first.dtype
        return first

    def record(self, inputs: Inputs) -> RecordedCall:
        """Return the output alone."""
        output = self.output(inputs)
        return RecordedCall(inputs, {"output": output.double()}, output.dtype)

    def gradients(
        self,
        inputs: Inputs,
        direction: Tensor,
        dtype: torch.dtype,  # noqa: ARG002 (a function computes in its own)
    ) -> dict[str, Tensor]:
        """Return the gradients of the inputs.

        Raises:
            OptionError: no gradient of the output is recorded.
        """
        given = {"x": inputs.x, "source": inputs.source}
        leaves = {n: t.clone().requires_grad_() for n, t in given.items() if t is not None}
        with torch.enable_grad():
            output = self._call_function(
                replace(inputs, x=leaves["x"], source=leaves.get("source"))
            )
        if not output.requires_grad:
            raise _function_fault_error(
                f"{self.kind}, whose output records no gradient",
                "torch operations from the input to the output, without detach() or NumPy",
                "compare(a, b) without gradients",
            )
        (output * direction.to(output.dtype)).sum().backward()
        none = torch.zeros(())
        return {
            name: none.expand_as(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in leaves.items()
        }

    def _call_function(self, inputs: Inputs) -> Tensor:
        x = inputs.x.clone()
        named = {"source": inputs.source, "mask": inputs.mask}
        given = {name: value for name, value in named.items() if value is not None}
        result = self.function(x, **given)
        if not torch.equal(x, inputs.x):
            raise _function_fault_error(
                "a function that changes its input",
                "an input that stays as it was",
                "compare(lambda x: function(x.clone()), ...)",
            )
        if isinstance(result, np.ndarray):
            result = torch.from_numpy(result)
        if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
            result = result[0]
        if not isinstance(result, Tensor):
            raise _function_fault_error(
                f"an output of type {type(result).__name__}",
                "a tensor or a NumPy array of (batch, queries, out_dim)",
                "compare(lambda x: function(x)[0], ...) selects one output of several",
            )
        return result


def _function_fault_error(saw: str, needed: str, do: str) -> OptionError:
    return OptionError(saw=saw, needed=needed, do=do)
