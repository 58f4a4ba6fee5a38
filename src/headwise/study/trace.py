"""Tracing of a forward pass: every operation, and its stage between input and output.

A pass has four stages. A product with parameters leads from ``INPUT`` to ``PROJECTED``, a product
of activations from ``PROJECTED`` to ``ATTENDED``, and a product with parameters from there to
``OUTPUT``. All other operations (views, copies, scaling, softmax) keep the stage of their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headwise.scanning.tape import Node, Tape

INPUT, PROJECTED, ATTENDED, OUTPUT = range(4)

_TOKENS, _PER_HEAD = ("batch", "length", "embed_dim"), ("batch", "heads", "length", "head_dim")
# The axes of each stage. "a*b" is one axis that holds a and b.
AXES: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {
        "x": _TOKENS,
        "q": ("length", "batch", "embed_dim"),
        "per_head": ("batch*heads", "length", "head_dim"),
        "weights": ("batch*heads", "length", "length"),
        "head_outputs": ("batch*heads", "length", "head_dim"),
        "merged": ("length*batch", "embed_dim"),
        "output": ("length", "batch", "embed_dim"),
        "returned": _TOKENS,
    },
    "native": {
        **dict.fromkeys(("x", "q", "merged", "output", "returned"), _TOKENS),
        **dict.fromkeys(("per_head", "head_outputs"), _PER_HEAD),
        "weights": ("batch", "heads", "length", "length"),
    },
}
# Pairs of stages that hold the same numbers in another order of axes.
SAME_NUMBERS = (("q", "per_head"), ("head_outputs", "merged"), ("output", "returned"))


@dataclass(frozen=True, eq=False)
class TracedStep:
    """One operation of a forward pass."""

    operation: str  # torch's name
    stage: int  # of its results
    inputs: tuple[Tensor, ...]  # the activations among its arguments, without parameters
    results: tuple[Tensor, ...]

    @property
    def result(self) -> Tensor:
        """The first result."""
        return self.results[0]

    is_product: bool  # True if the operation multiplies matrices

    @property
    def is_view(self) -> bool:
        """True if the result shares memory with an input: nothing is computed."""
        address, *inputs = (x.untyped_storage().data_ptr() for x in (self.result, *self.inputs))
        return address in inputs


def trace_operations(
    layer: nn.Module, x: Tensor, forward: Callable[[Tensor], Any]
) -> tuple[TracedStep, ...]:
    """Return the operations that depend on ``x``; the parameters of ``layer`` mark projections."""
    with Tape([x]) as tape, tape.follow_modules(layer):
        forward(x)
    runs: dict[Any, list[Node]] = {}
    for node in tape.nodes[1:]:
        if node.is_activation:
            runs.setdefault(node.place and node.place[:3], []).append(node)
    stages, steps = {tape.nodes[0]: INPUT}, list[TracedStep]()
    for first, *others in runs.values():
        inputs = [each for each in first.parents if each.is_activation]
        stage = max(stages[each] for each in inputs)
        if first.is_projection:
            stage = PROJECTED if stage < ATTENDED else OUTPUT
        elif first.is_product:
            stage = max(stage, ATTENDED)
        results = first, *others
        stages |= dict.fromkeys(results, stage)
        given, made = (tuple(each.value for each in nodes) for nodes in (inputs, results))
        steps.append(TracedStep(first.operation, stage, given, made, first.is_product))
    return tuple(steps)


def head_splits(steps: Sequence[TracedStep], *, head_dim: int) -> tuple[TracedStep, ...]:
    """Return the steps that split a wider last axis into heads of width ``head_dim``."""
    return tuple(
        step
        for step in steps
        if step.result.shape[-1:] == (head_dim,)
        and head_dim < step.inputs[0].shape[-1]
        and not step.is_product
    )


def stage_tensors(steps: Sequence[TracedStep], *, head_dim: int) -> dict[str, Tensor]:
    """Return the tensors between input and output of a pass, by the names in `AXES`.

    ``weights`` is missing if a fused operation does not return them.
    """
    attending = [step for step in steps if step.is_product and step.stage == ATTENDED]
    later = steps[steps.index(attending[-1]) + 1 :]
    outputs = [step.result for step in steps if step.stage == OUTPUT]
    tensors = {
        "x": steps[0].inputs[0],
        "q": head_splits(steps, head_dim=head_dim)[0].inputs[0],
        "per_head": attending[0].inputs[0],
        "weights": attending[-1].inputs[0],
        "head_outputs": attending[-1].result,
        "merged": next(s.result for s in later if s.result.shape[-1] > s.inputs[0].shape[-1]),
        "output": next(x for x in outputs if x.dim() == 3),
        "returned": outputs[-1],
    }
    if len(attending) == 1:
        del tensors["weights"]
    return tensors


def has_axis_order(
    tensors: dict[str, Tensor], axes: dict[str, tuple[str, ...]], sizes: dict[str, int]
) -> bool:
    """Check that paired stages hold the same numbers in the order of their axis names."""
    all_sizes = sizes_with_head_dim(sizes)
    (q, per_head), *rest = (
        [rearrange_to_common_axes(tensors[key], axes[key], all_sizes) for key in pair]
        for pair in SAME_NUMBERS
    )
    scaled = q * math.sqrt(1 / all_sizes["head_dim"])  # torch's layer scales q, not the scores
    return any(per_head.equal(x) for x in (q, scaled)) and all(a.equal(b) for a, b in rest)


def sizes_with_head_dim(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes with head_dim = embed_dim / heads added."""
    return sizes | {"head_dim": sizes["embed_dim"] // sizes["heads"]}


def expected_shapes_from_axis_names(sizes: dict[str, int]) -> dict[str, dict[str, list[int]]]:
    """Return the shapes that follow from the axis names."""
    all_sizes = sizes_with_head_dim(sizes)
    return {
        layer: {
            stage: [math.prod(all_sizes[part] for part in axis.split("*")) for axis in axes]
            for stage, axes in stages.items()
        }
        for layer, stages in AXES.items()
    }


def rearrange_to_common_axes(x: Tensor, axes: Sequence[str], sizes: Mapping[str, int]) -> Tensor:
    """Return a tensor as (batch, length, heads, head_dim), from the names of its axes.

    "a*b" is one axis that holds a and b, a outside; "embed_dim" is "heads*head_dim".
    """
    names = "*".join(axes).replace("embed_dim", "heads*head_dim").split("*")
    order = [names.index(name) for name in ("batch", "length", "heads", "head_dim")]
    return x.reshape([sizes[name] for name in names]).permute(order)
