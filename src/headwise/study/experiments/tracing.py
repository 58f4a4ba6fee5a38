"""What a layer really computes: every operation of a forward pass, and how far it has come.

A pass goes through four stages. A product with parameters takes the input to ``PROJECTED``, and
what has been attended to ``OUTPUT``; a product of activations with each other takes what is
projected to ``ATTENDED``. Everything else (views, copies, scaling, softmax) stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headwise.support.nested_tensors import leaves
from headwise.support.private_torch import DispatchMode

INPUT, PROJECTED, ATTENDED, OUTPUT = range(4)

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")
FUSED = "_scaled_dot_product"  # both products of attention in one operation

# What each axis is. "a*b" is one axis that holds a and b.
AXES = {
    "torch": {
        "x": ("batch", "length", "embed_dim"),
        "q": ("length", "batch", "embed_dim"),
        "per_head": ("batch*heads", "length", "head_dim"),
        "weights": ("batch*heads", "length", "length"),
        "head_outputs": ("batch*heads", "length", "head_dim"),
        "merged": ("length*batch", "embed_dim"),
        "output": ("length", "batch", "embed_dim"),
        "returned": ("batch", "length", "embed_dim"),
    },
    "native": {
        "x": ("batch", "length", "embed_dim"),
        "q": ("batch", "length", "embed_dim"),
        "per_head": ("batch", "heads", "length", "head_dim"),
        "weights": ("batch", "heads", "length", "length"),
        "head_outputs": ("batch", "heads", "length", "head_dim"),
        "merged": ("batch", "length", "embed_dim"),
        "output": ("batch", "length", "embed_dim"),
        "returned": ("batch", "length", "embed_dim"),
    },
}
SAME = (("q", "per_head"), ("head_outputs", "merged"), ("output", "returned"))  # in another order


@dataclass(frozen=True, eq=False)
class TracedStep:
    """One operation of a forward pass.

    Attributes:
        operation: torch's name of it.
        stage: how far its result is.
        given: the activations that it read, without parameters.
        results: all that it gave.
    """

    operation: str
    stage: int
    given: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @property
    def result(self) -> Tensor:
        """What it gave; the first, where it gave several."""
        return self.results[0]

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices."""
        return _is_product(self.operation)

    @property
    def is_view(self) -> bool:
        """Whether its result is the memory of what it was given: nothing is computed."""
        return _memory(self.result) in {_memory(x) for x in self.given}


def trace(layer: nn.Module, x: Tensor, forward: Callable[[Tensor], Any]) -> tuple[TracedStep, ...]:
    """The operations of ``forward(x)`` that ``x`` has a part in.

    Args:
        layer: whose parameters tell a projection from a product of activations.
        x: the input.
        forward: the pass, e.g. ``lambda x: layer(x, x, x)``.
    """
    recorder = _Recorder(layer, x)
    with recorder:
        forward(x)
    return tuple(recorder.steps)


def cuts(steps: Sequence[TracedStep], *, head_dim: int) -> tuple[TracedStep, ...]:
    """The steps that cut a wider last axis into heads of this width."""
    return tuple(
        step
        for step in steps
        if step.result.shape[-1] == head_dim
        and step.given[0].shape[-1] > head_dim
        and not step.is_product
    )


def on_the_way(steps: Sequence[TracedStep], *, head_dim: int) -> dict[str, Tensor]:
    """The tensors between the input and the output of a pass, by what they are.

    ``weights`` is missing where a fused operation keeps them to itself.
    """
    attending = [step for step in steps if step.is_product and step.stage == ATTENDED]
    merged = next(
        step
        for step in steps[steps.index(attending[-1]) + 1 :]
        if step.result.shape[-1] > step.given[0].shape[-1]
    )
    found = {
        "x": steps[0].given[0],
        "q": cuts(steps, head_dim=head_dim)[0].given[0],
        "per_head": attending[0].given[0],
        "weights": attending[-1].given[0],
        "head_outputs": attending[-1].result,
        "merged": merged.result,
        "output": next(s for s in steps if s.stage == OUTPUT and s.result.dim() == 3).result,
        "returned": [s for s in steps if s.stage == OUTPUT][-1].result,
    }
    if len(attending) == 1:
        del found["weights"]
    return found


def in_order(
    tensors: dict[str, Tensor], axes: dict[str, tuple[str, ...]], sizes: dict[str, int]
) -> bool:
    """Whether stages that hold the same numbers have them where the names of the axes say."""
    known = with_head_dim(sizes)
    (q, per_head), *rest = (
        [taken_apart(tensors[key], axes[key], known) for key in pair] for pair in SAME
    )
    scaled = q * math.sqrt(1 / known["head_dim"])  # torch's layer scales q, not the scores
    return any(per_head.equal(x) for x in (q, scaled)) and all(a.equal(b) for a, b in rest)


def with_head_dim(sizes: dict[str, int]) -> dict[str, int]:
    """These sizes and the one that follows from them."""
    return sizes | {"head_dim": sizes["embed_dim"] // sizes["heads"]}


def by_axes(sizes: dict[str, int]) -> dict[str, dict[str, list[int]]]:
    """The shapes that the names of the axes say."""
    known = with_head_dim(sizes)
    return {
        layer: {
            stage: [math.prod(known[part] for part in axis.split("*")) for axis in axes]
            for stage, axes in stages.items()
        }
        for layer, stages in AXES.items()
    }


def taken_apart(x: Tensor, axes: Sequence[str], sizes: Mapping[str, int]) -> Tensor:
    """(batch, length, heads, head_dim): what a tensor holds, if its axes are what they are called.

    Args:
        x: the tensor.
        axes: the name of each axis. "a*b" is one axis that holds a and b, a outside; "embed_dim"
            is "heads*head_dim".
        sizes: how many each name stands for.
    """
    names = "*".join(axes).replace("embed_dim", "heads*head_dim").split("*")
    order = [names.index(name) for name in ("batch", "length", "heads", "head_dim")]
    return x.reshape([sizes[name] for name in names]).permute(order)


class _Recorder(DispatchMode):  # type: ignore[misc]
    """Knows tensors by their memory, and keeps all it knows, so that no memory is used again."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.parameters = {_memory(p) for p in layer.parameters()}
        self.stages = {_memory(x): INPUT}
        self.steps: list[TracedStep] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        given = tuple(x for x in read if _memory(x) in self.stages)
        results = tuple(x for x in leaves(out) if isinstance(x, Tensor))
        if given and results:
            operation = func.overloadpacket.__name__
            stage = max(self.stages[_memory(x)] for x in given)
            if _is_product(operation):
                stage = self._after_product(stage, read)
            for result in results:
                self.stages[_memory(result)] = stage
            self.steps.append(TracedStep(operation, stage, given, results))
        return out

    def _after_product(self, stage: int, read: list[Tensor]) -> int:
        if any(_memory(x) in self.parameters for x in read):
            return PROJECTED if stage < ATTENDED else OUTPUT
        return max(stage, ATTENDED)


def _is_product(operation: str) -> bool:
    return operation in PRODUCTS or operation.startswith(FUSED)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
