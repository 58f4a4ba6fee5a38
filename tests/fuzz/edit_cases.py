"""Cases of in-place edits between a forward and its backward pass.

Either the gradient is that of what was computed, or torch says that a tensor was modified.
"""

import torch
from torch import Tensor

from tests.fuzz.draw import Chance, Shaping, add_masks
from tests.fuzz.findings import DifferenceError
from tests.fuzz.gradient_cases import GRADIENTS
from tests.fuzz.layer_cases import draw_layer
from tests.fuzz.matrix_cases import describing, draw, tiled

MODIFIED = "inplace"  # in each of torch's messages for it


def changed(x: Tensor) -> None:
    """Change every element in place, as an optimizer's step or a reused buffer does."""
    with torch.no_grad():
        if x.dtype == torch.bool:
            x.logical_not_()
        elif x.is_floating_point():
            x.mul_(3).add_(1)
        else:
            x.zero_()


def is_one_memory(x: Tensor) -> bool:
    """Whether several elements share one place: torch refuses to change these in place."""
    return any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))


def edit_case(chance: Chance) -> str:
    """One reading of a matrix, with one of its tensors changed before the backward pass."""
    p = draw(chance, grad=True)
    name = chance.choose(sorted(GRADIENTS))
    tensors = dict(p.leaves) | {f"mask {n}": x for n, x in enumerate(p.shaping.tensors)}
    target = chance.choose(sorted(tensors))
    said = f"{name} with {target} changed, of {p}"
    if is_one_memory(tensors[target]):
        return "nothing to change: " + said
    with describing(said), tiled(chance):
        read = GRADIENTS[name](p)
        a = p.matrix()
        found, again = read.of(a), read.of(a)
        if not found.numel():
            return said
        g = chance.normal(*found.shape, dtype=found.dtype)
        _compare_edited(list(p.leaves.values()), found, again, g, tensors[target])
    return said


def _compare_edited(
    leaves: list[Tensor], found: Tensor, again: Tensor, g: Tensor, target: Tensor
) -> None:
    """The gradient after a change is that before it, unless torch refuses."""
    expected = torch.autograd.grad(
        found, leaves, g, allow_unused=True, materialize_grads=True, retain_graph=True
    )
    changed(target)
    try:
        after = torch.autograd.grad(again, leaves, g, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        if MODIFIED not in str(error):
            raise
        return
    for number, (one, other) in enumerate(zip(expected, after, strict=True)):
        if not torch.allclose(one, other, rtol=1e-2, atol=1e-3, equal_nan=True):
            apart = float((one - other).abs().max())
            raise DifferenceError(f"gradient {number} is {apart:.3g} off after a change in place")


def edited_layer_case(chance: Chance) -> str:
    """A layer, one of whose parameters or inputs is changed before the backward pass."""
    drawn = draw_layer(chance, torch.float64)
    layer = drawn.layer
    batch, queries = chance.choose((1, 2)), chance.between(1, 9)
    keys = queries if layer.source_dim == layer.embed_dim else chance.between(1, 9)
    x = chance.normal(batch, queries, layer.embed_dim).requires_grad_()
    inputs = {"x": x}
    if keys != queries or layer.source_dim != layer.embed_dim:
        inputs["source"] = chance.normal(batch, keys, layer.source_dim).requires_grad_()
    shaping = Shaping()
    add_masks(chance, shaping, (batch, layer.num_heads, queries, keys), most=1)
    leaves = inputs | dict(layer.named_parameters())
    tensors = leaves | {f"mask {n}": t for n, t in enumerate(shaping.tensors)}
    target = chance.choose(sorted(tensors))
    said = f"{drawn.said} with {target} changed {shaping.words}"
    if is_one_memory(tensors[target]):
        return "nothing to change: " + said
    with describing(said), tiled(chance):
        found, again = (layer(**inputs, mask=shaping.mask) for _ in range(2))
        g = chance.normal(*found.shape)
        _compare_edited(list(leaves.values()), found, again, g, tensors[target])
    return said
