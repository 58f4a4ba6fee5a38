"""Outputs against the same model in float64, within the error of its own float32.

As in `headwise.testing.Budget`: twice the largest error that the model's own attention makes over a
family of parameters and inputs, each moved by a few units in the last place, and as a floor how far
the exact outputs move when these move by one. In the float64 run nothing is float32: what a model
casts to it on the way is kept wide.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headwise.function.budget import Budget, BudgetVerdict
from headwise.function.rounding import DRAWS, FORWARD, REACH
from headwise.support.wide import WideMode, default_float64

Outputs = dict[str, Tensor]
WEIGHTS = ("attentions", "cross_attentions", "encoder_attentions", "decoder_attentions")


def budgets(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Budget]:
    """What each output of the model may be, and how far off."""
    wide = copy.deepcopy(model).double()
    narrow = copy.deepcopy(model)
    first: Outputs = {}
    plain: dict[str, float] = {}
    moved: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    for draw in range(DRAWS):
        if draw:
            _move(narrow, wide, model, generator)
        near = _neighbour(inputs, generator) if draw else inputs
        exact = outputs(_in_float64(wide, near), near)
        rounded = outputs(run(narrow, near), near)
        first = first or exact
        for name, x in exact.items():
            error = (rounded[name].double() - x).abs()
            plain[name] = max(plain.get(name, 0.0), _largest(error))
            moved[name] = max(moved.get(name, 0.0), _largest((x - first[name]).abs()))
    return {
        name: Budget(
            name,
            torch.float32,
            x,
            torch.full_like(x, FORWARD * plain[name] + moved[name] / REACH),
            tuple(f"axis {n}:" for n in range(x.dim())),
        )
        for name, x in first.items()
    }


def verdict(
    allowed: dict[str, Budget], found: Outputs, *, without: Collection[str] = ()
) -> BudgetVerdict | None:
    """Of the output that uses most of its allowance. None where there is nothing to compare."""
    wanted = {name for name in allowed if not name.startswith(WEIGHTS)}
    if wanted != {name for name in found if not name.startswith(WEIGHTS)}:
        raise ValueError(f"outputs {sorted(found)} in the place of {sorted(allowed)}")
    verdicts = [allowed[name].check(found[name]) for name in sorted(wanted.difference(without))]
    return max(verdicts, key=lambda v: v.ratio, default=None)


def vague(allowed: dict[str, Budget]) -> set[str]:
    """Outputs that are NaN, or may be off by more than their size: nothing is known of them."""
    return {
        name for name, budget in allowed.items() if not size(budget) >= float(budget.allowed.max())
    }


def size(budget: Budget) -> float:
    """The root mean square of an output."""
    return float(budget.exact.square().mean().sqrt())


def run(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """One forward pass; what a model draws at random is drawn alike each time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs)


def outputs(result: Any, inputs: dict[str, Any]) -> Outputs:
    """Every floating-point tensor of a result, at the real positions."""
    mask = inputs.get("attention_mask")
    found = {}
    for name, x in _tensors(result, ""):
        if isinstance(mask, Tensor) and mask.dim() == 2 and x.shape[:2] == mask.shape:
            x = x[mask.bool()]
        if x.numel():
            found[name] = x.detach()
    return found


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name or "output", value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}".strip("."))
    elif isinstance(value, (list, tuple)):
        for n, each in enumerate(value):
            yield from _tensors(each, f"{name}.{n}".strip("."))


def _largest(x: Tensor) -> float:
    x = x[x.isfinite()]
    return float(x.max()) if x.numel() else 0.0


# ---- float64 ---------------------------------------------------------------------------------


def _in_float64(model: nn.Module, inputs: dict[str, Any]) -> Any:
    with default_float64(), WideMode():
        return run(model, {name: _double(x) for name, x in inputs.items()})


def _double(value: Any) -> Any:
    return tree_map(
        lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, value
    )


# ---- the family ------------------------------------------------------------------------------


def _move(narrow: nn.Module, wide: nn.Module, model: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        own = dict(model.named_parameters())
        into = dict(wide.named_parameters())
        for name, parameter in narrow.named_parameters():
            parameter.copy_(_moved(own[name], generator))
            into[name].copy_(parameter.double())


def _neighbour(inputs: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    return {
        name: _moved(x, generator) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def _moved(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_floating_point():
        return x
    steps = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (x.detach().double() * (1 + REACH * steps * torch.finfo(x.dtype).eps)).to(x.dtype)
