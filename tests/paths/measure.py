"""What a path must keep: every output and gradient within the budget, and no queries x keys."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headwise.function.budget import Budget
from headwise.function.rounding import BACKWARD, FORWARD, measure_family
from headwise.matrix.kernels import tiled_op, tiles, varlen
from tests.memory import LargestTensor
from tests.paths.subjects import BATCH, EMBED, HEADS, Outputs, Subject

LENGTHS = (24, 29)
# Long enough that queries x keys of one head is more than anything that is linear in them.
LONG = (211, 307)
# Small tiles, so that a tile of LONG is not the matrix.
TILE_ELEMENTS = 2**15

Call = Callable[..., Outputs]


# ---- values ------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """The outputs of a call, and the gradients of its float inputs and its parameters."""

    outputs: Any
    gradients: Any = ()


def leaves(module: nn.Module, inputs: Outputs) -> list[Tensor]:
    """What has a gradient: the float inputs that need one, then the parameters."""
    return [x for x in inputs if x.requires_grad] + list(module.parameters())


def requiring_grad(inputs: Outputs) -> Outputs:
    """Copies; the float ones, but for masks of 0 and -inf, need a gradient."""
    return tuple(x.clone().requires_grad_(is_vector(x)) for x in inputs)


def is_vector(x: Tensor) -> bool:
    return x.is_floating_point() and x.dim() > 2


def upstream(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A seeded gradient of each output."""
    return [_drawn(i, x.shape, x.dtype) for i, x in enumerate(outputs)]


@cache  # also for torch.func, which must not draw
def _drawn(seed: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    # Numbers that every dtype holds, and no larger than the output while they are drawn.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16).to(dtype)


def run(call: Call, module: nn.Module, inputs: Outputs, *, backward: bool = True) -> Ran:
    """Call, and where asked the gradients by ``torch.autograd.grad``."""
    if not backward:
        return Ran(call(*inputs))
    inputs = requiring_grad(inputs)
    outputs = call(*inputs)
    return Ran(outputs, gradients(outputs, leaves(module, inputs)))


def gradients(outputs: Outputs, of: Sequence[Tensor]) -> Outputs:
    return torch.autograd.grad(outputs, of, upstream(outputs))


def budgets(subject: Subject, module: nn.Module, inputs: Outputs, dtype: torch.dtype) -> Ran:
    """The budgets of outputs and gradients, in the order of `run`, for ``inputs`` in ``dtype``."""
    names = [name for name, _ in module.named_parameters()]
    values = [p.detach() for p in module.parameters()]
    vectors = [i for i, x in enumerate(inputs) if is_vector(x)]

    def outputs(*floats: Tensor) -> Outputs:
        given = [x.to(floats[0].dtype) if x.is_floating_point() else x for x in inputs]
        for place, x in zip(vectors, floats, strict=False):
            given[place] = x
        own = dict(zip(names, floats[len(vectors) :], strict=True))
        return subject.reference(own, *given)

    def slopes(*floats: Tensor) -> Outputs:
        own = [x.detach().requires_grad_() for x in floats]
        return gradients(outputs(*own), own)

    floats = [x.to(dtype) for x in (*(inputs[i] for i in vectors), *values)]
    with torch.no_grad():
        first = _budgets(outputs, floats, FORWARD, "output", dtype)
    return Ran(first, _budgets(slopes, floats, BACKWARD, "gradient", dtype))


def _budgets(
    function: Call, floats: list[Tensor], factor: float, name: str, dtype: torch.dtype
) -> Any:
    # Budget.for_function for all results of one call: the encoder has 26 gradients.
    family = measure_family(function, floats)
    return tuple(
        Budget(f"{name} {i}", dtype, exact, family.allowed(i, factor=factor))
        for i, exact in enumerate(family.exact)
    )


def check(allowed: Ran, found: Ran, *, skip: int = 0) -> None:
    """Every output but the first ``skip``, and every gradient that was taken, is within."""
    assert len(found.outputs) == len(allowed.outputs)
    for own, x in zip(allowed.outputs[skip:], found.outputs[skip:], strict=True):
        own.assert_holds(x)
    if found.gradients:
        for own, x in zip(allowed.gradients, found.gradients, strict=True):
            own.assert_holds(x)


def check_close(found: Any, expected: Any) -> None:
    """By torch's own tolerances, for tensors scaled to a largest value of 1.

    For what sums in another order, over more terms than the budget's family shows.
    """
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        largest = b.abs().max()
        torch.testing.assert_close(a / largest, b / largest)


def same(one: Any, other: Any) -> bool:
    """Bit by bit."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# ---- memory ------------------------------------------------------------------------------------


class Inside(LargestTensor):
    """`LargestTensor`, which also looks inside the tiled kernel."""

    _INSIDE = {  # noqa: RUF012
        torch.ops.headwise.sweep.default: tiled_op.sweep,
        torch.ops.headwise.sweep_backward.default: tiled_op.sweep_backward,
    }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        implementation = self._INSIDE.get(func)
        if implementation is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return implementation(*args)


@contextmanager
def small_tiles(elements: int = TILE_ELEMENTS) -> Iterator[None]:
    before = tiles.TILE_ELEMENTS
    tiles.TILE_ELEMENTS = elements
    try:
        yield
    finally:
        tiles.TILE_ELEMENTS = before


@contextmanager
def as_traced() -> Iterator[None]:
    """Eager mode does what a trace holds, no pieces and F.linear, to be compared bit for bit."""
    before = varlen.CALL
    varlen.CALL = 2**60
    try:
        with torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        varlen.CALL = before


def is_dense(call: Callable[[], Any], inputs: Outputs, *, times: int = 1) -> bool:
    """Whether the call wrote more than what is given, returned, or linear in the lengths.

    What is linear may be written ``times`` at once.
    """
    with small_tiles(), Inside() as seen:
        result = call()
    return seen.bytes > times * limit(inputs, tree_leaves(result))


def limit(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """In bytes: the packed projection of the longer input, or the largest input or output."""
    linear = 4 * BATCH * max(LONG) * 3 * EMBED
    assert linear < 4 * BATCH * HEADS * LONG[0] * LONG[1] / 6  # or nothing could be seen
    return max([linear] + [x.nbytes for x in (*inputs, *outputs) if isinstance(x, Tensor)])


def largest_node(graphs: Sequence[torch.fx.GraphModule]) -> int:
    """The bytes of the largest tensor that a node of the graphs returns, at the traced lengths."""
    sizes = [0]
    for graph in graphs:
        for node in graph.graph.nodes:
            for value in tree_leaves(node.meta.get("val")):
                if isinstance(value, Tensor):
                    sizes.append(hint(value.numel()) * value.element_size())
    return max(sizes)


def hint(size: int | torch.SymInt) -> int:
    """A symbolic size at the lengths of the trace."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def count_nodes(graphs: Sequence[torch.fx.GraphModule], name: str) -> int:
    """How many nodes call ``headwise::name``."""
    return sum(
        node.op == "call_function" and str(node.target) == f"headwise.{name}.default"
        for graph in graphs
        for node in graph.graph.nodes
    )


# ---- dropout -----------------------------------------------------------------------------------


def check_dropout(call: Call, exact: Tensor, inputs: Outputs, draws: int = 300) -> None:
    """The first output has ``exact`` as its mean over draws, and is random."""
    drawn = torch.stack([call(*inputs)[0].detach().double() for _ in range(draws)])
    deviation = drawn.std(0)
    assert (deviation > 0).double().mean() > 0.6  # a sample of padding only is not random
    score = (drawn.mean(0) - exact.double()) / (deviation / draws**0.5)
    # The mean square of a standard normal is 1; elements of one row move together.
    assert score[deviation > 0].square().mean() < 1.3


def check_dropped_gradient(module: nn.Module, found: Ran) -> None:
    """The backward pass dropped what the forward pass dropped.

    The output, less out_proj's bias, is linear in the weight and bias of the values, so that
    by Euler <dL/dw, w> + <dL/db, b> is the loss itself. The weights have their own share in
    neither: they do not depend on the values.
    """
    layer = module.inner
    names = [name for name, _ in module.named_parameters()]
    own = dict(zip(names, found.gradients[-len(names) :], strict=True))
    euler = torch.zeros((), dtype=torch.float64)
    for name in ("in_proj_weight", "in_proj_bias"):
        of_values = own[f"inner.{name}"][-EMBED:] * getattr(layer, name)[-EMBED:]
        euler += of_values.double().sum()
    output = found.outputs[0].double() - layer.out_proj.bias.double()
    loss = (output * upstream(found.outputs)[0].double()).sum()
    torch.testing.assert_close(euler, loss, rtol=1e-4, atol=1e-3)
