"""Which matrix a layer's head outputs go through: observed, not named.

A module is the output projection if it is given the head outputs side by side, number for number;
multiplies them by a matrix of its own and does nothing else; and, where it lies inside of the
attention module, gives what that module gives. An adapter around the matrix, a gate beside it, or
a norm in between is none of it: then no projection is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.kernels.problem import accumulation_dtype
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.modules import Running, as_floats


class Pending:
    """A call whose output projection has not been seen yet.

    Args:
        call: what was shown.
        block: the block around it, whose state the output is added to; None where it is not known.
        version: of the head outputs when they were shown: it counts changes in place.
    """

    def __init__(self, call: CapturedCall, block: Running | None, *, version: int) -> None:
        self.call, self.block, self.version = call, block, version
        assert call.outputs is not None
        self._outputs = call.outputs
        self.is_settled = False
        self.was_read = False  # a module was given the head outputs, as they are
        self._given: dict[Running, bool] = {}  # what runs on the outputs: whether inside the module
        self._inside: list[tuple[Tensor, Tensor]] = []  # projections there, and what they gave

    def before(self, running: Running, around: list[nn.Module]) -> None:
        """A module is about to run; ``around`` are those that are running."""
        if running.state is not None and _is_merged(running.state, self._outputs):
            self._given[running], self.was_read = self.call.module in around, True

    def after(self, running: Running, output: Any) -> None:
        """A module has run."""
        given = _first_tensor(output)
        if running.module is self.call.module:
            fitting = [by for by, own in self._inside if given is not None and _begin(own, given)]
            self.call.out_proj = fitting[0] if fitting else None
            self.is_settled = bool(self._inside)
            return
        is_inside = self._given.pop(running, None)
        if is_inside is None or given is None:
            return
        found = by_head(running.module, self._outputs)
        if found is None or not _is_product(running, given):
            return
        if is_inside:
            self._inside.append((found, given))
        else:
            self.call.out_proj, self.is_settled = found, True


def by_head(module: nn.Module, outputs: Tensor) -> Tensor | None:
    """(heads, value_dim, embed_dim): the part of a module's matrix that each head goes through."""
    matrix = _matrix(module)
    _, heads, _, value_dim = outputs.shape
    if matrix is None or matrix.shape[0] != heads * value_dim:
        return None
    parts: Tensor = matrix.detach().unflatten(0, (heads, value_dim))
    return parts


def _matrix(module: nn.Module) -> Tensor | None:
    """(in, out), of floating-point numbers."""
    held = getattr(module, "weight", None)
    weight = as_floats(held.detach()) if isinstance(held, Tensor) else None
    if weight is None or weight.dim() != 2:
        return None
    # transformers' Conv1D, as in GPT-2, holds it so; linear layers the other way round.
    return weight if type(module).__name__.startswith("Conv1D") else weight.mT


def _is_product(running: Running, given: Tensor) -> bool:
    """Whether a module gave its first token times its matrix, plus its bias, up to rounding.

    Off by at most n u (|x| |W|) in the sum of n products, in the dtype of accumulation, and by two
    roundings of the result (docs/budget.md).
    """
    matrix, state = _matrix(running.module), running.state
    assert matrix is not None
    assert state is not None
    x, w = state.reshape(-1, matrix.shape[0])[0].double(), matrix.double()
    bias = getattr(running.module, "bias", None)
    exact = x @ w + (bias.double() if isinstance(bias, Tensor) else 0.0)
    if given.shape[-1] != len(exact):
        return False
    unit = torch.finfo(accumulation_dtype(given.dtype)).eps
    allowed = len(x) * unit * (x.abs() @ w.abs()) + 2 * torch.finfo(given.dtype).eps * exact.abs()
    return bool(((given.reshape(-1, len(exact))[0].double() - exact).abs() <= allowed).all())


def _is_merged(state: Tensor, outputs: Tensor) -> bool:
    """Whether a module's input is the head outputs side by side: the first token, the last."""
    if state.numel() != outputs.numel() or not state.numel():
        return False
    tokens = state.reshape(-1, outputs.shape[1] * outputs.shape[3])
    first, last = outputs[0, :, 0].flatten(), outputs[-1, :, -1].flatten()
    return torch.equal(tokens[0], first) and torch.equal(tokens[-1], last)


def _begin(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin with the same token."""
    return a.shape[-1] == b.shape[-1] and torch.equal(
        a.reshape(-1, a.shape[-1])[0], b.reshape(-1, b.shape[-1])[0]
    )


def _first_tensor(output: Any) -> Tensor | None:
    parts = output if isinstance(output, (tuple, list)) else [output]
    return next((part for part in parts if isinstance(part, Tensor)), None)
