"""The tiled kernel as one operator, so that torch.compile and torch.export see one node.

A Python loop over tiles would be unrolled, and recompiled at every length. ``headwise::sweep``
and ``headwise::sweep_backward`` are opaque instead, with shapes for tracing and their own gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.kernels import dense, tiled
from headwise.kernels.bound_scores import BoundScores
from headwise.kernels.kernel import Cost, Kernel, Task
from headwise.kernels.tiled import Gradients, KernelResult, Requested, UpstreamGradients
from headwise.kernels.tiles import TILE_ELEMENTS
from headwise.masks import clauses
from headwise.masks.bound_mask import BoundMask
from headwise.masks.clause import MatrixSizes
from headwise.masks.score_bias import BoundBias
from headwise.support.nested_tensors import leaves, mapped
from headwise.support.tracing import needs_plain_torch

# Everything a Problem holds, as an operator can carry it; pack and unpack keep the same order.
_PROBLEM = (
    "Tensor q, Tensor k, Tensor? sink, Tensor? table, Tensor[] biases, str mask, "
    "Tensor[] mask_tensors, SymInt[] mask_integers, float scale, float? softcap"
)
_READINGS = ", ".join(["Tensor"] * len(KernelResult._fields))
_UPSTREAM = ", ".join(f"Tensor? d_{name}" for name in KernelResult._fields)

Packed = tuple[Any, ...]


def pack(problem: BoundScores) -> Packed:
    """The problem as the operator's leading arguments."""
    bias = problem.bias
    return (
        *(problem.q, problem.k, problem.sink, bias.table, list(bias.tensors)),
        *clauses.lowered(problem.mask.clauses),
        *(problem.scale, problem.softcap),
    )


def unpack(packed: Packed) -> BoundScores:
    """The inverse of ``pack``."""
    q, k, sink, table, biases, kinds, tensors, integers, scale, softcap = packed
    sizes = MatrixSizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    mask = BoundMask(sizes, q.device, clauses.lifted(kinds, tensors, integers))
    bias = BoundBias(queries=sizes.queries, keys=sizes.keys, table=table, tensors=tuple(biases))
    return BoundScores(q=q, k=k, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink)


COUNT = 10  # arguments that describe the problem


# The plain library interface: `torch.library.custom_op` wraps every call in a guard that loads the
# whole compiler, 80 MB and a second, at the first one.
_LIBRARY = torch.library.Library("headwise", "DEF")
_LIBRARY.define(
    f"sweep({_PROBLEM}, Tensor? v, Tensor? y, bool entropy, bool received, bool average, "
    "SymInt query_blocks, SymInt key_blocks)"
    f" -> ({_READINGS})"
)
_LIBRARY.define(
    f"sweep_backward({_PROBLEM}, Tensor? v, Tensor? y, Tensor peak, Tensor log_sum, {_UPSTREAM}, "
    "bool table_needed, bool[] biases_needed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])"
)


def sweep(*arguments: Any) -> tuple[Tensor, ...]:
    """Every asked reading of the attention matrix in one pass; see `tiled.forward`."""
    v, y, *asked = arguments[COUNT:]
    return tuple(tiled.forward(unpack(arguments[:COUNT]), v, y, Requested(*asked)))


def _fake_sweep(*arguments: Any) -> tuple[Tensor, ...]:
    v, y, *asked = arguments[COUNT:]
    return tuple(tiled.empty_readings(arguments[0], arguments[1], v, y, Requested(*asked)))


def sweep_backward(*arguments: Any) -> tuple[Any, ...]:
    """Gradients of q, k, v, y, sink, table and biases; see `tiled.backward`."""
    problem = unpack(arguments[:COUNT])
    v, y, peak, log_sum = arguments[COUNT : COUNT + 4]
    upstream = UpstreamGradients(*arguments[COUNT + 4 : -2])
    found = tiled.backward(problem, v, y, (peak, log_sum), upstream, arguments[-2:])
    return _cast(found, problem, v, y)


def _cast(found: Gradients, problem: BoundScores, v: Tensor | None, y: Tensor | None) -> Packed:
    """Each gradient in its input's dtype; one without elements stands for "not needed"."""

    def like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor:
        if gradient is None or tensor is None:
            return problem.q.new_zeros(0)
        return gradient.to(tensor.dtype)

    biases = problem.bias.tensors
    return (
        *(like(found.q, problem.q), like(found.k, problem.k), like(found.v, v), like(found.y, y)),
        *(like(found.sink, problem.sink), like(found.table, problem.bias.table)),
        [like(g, bias) for g, bias in zip(found.tensors, biases, strict=True)],
    )


def _fake_sweep_backward(*arguments: Any) -> tuple[Any, ...]:
    q, k, sink, table, biases = arguments[:5]
    v, y = arguments[COUNT : COUNT + 2]
    table_needed, biases_needed = arguments[-2:]

    def like(tensor: Tensor | None, needed: bool = True) -> Tensor:
        if tensor is None or not needed:
            tensor = q[:0, 0, 0, 0]
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    return (
        *(like(q), like(k), like(v), like(y), like(sink), like(table, table_needed)),
        [like(bias, needed) for bias, needed in zip(biases, biases_needed, strict=True)],
    )


def _setup(ctx: Any, inputs: Packed, output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    # Lists of tensors are saved one by one, and put back in place in the backward pass.
    saved = [inputs, output[2:4]]
    ctx.save_for_backward(*(x for x in leaves(saved) if isinstance(x, Tensor)))
    ctx.form = mapped(lambda x: Tensor if isinstance(x, Tensor) else x, saved)
    table, biases = inputs[3:5]
    ctx.biases_needed = [bias.requires_grad for bias in biases]
    ctx.table_needed = table is not None and table.requires_grad


def _backward(ctx: Any, *upstream: Tensor | None) -> Packed:
    tensors = iter(ctx.saved_tensors)
    arguments, (peak, log_sum) = mapped(lambda x: next(tensors) if x is Tensor else x, ctx.form)
    if torch.is_grad_enabled():
        return _differentiable_backward(arguments, upstream)
    q, k, v, y, sink, table, biases = torch.ops.headwise.sweep_backward(
        *(*arguments[: COUNT + 2], peak, log_sum, *upstream),
        *(ctx.table_needed, ctx.biases_needed),
    )

    def given(gradient: Tensor, index: int) -> Tensor | None:
        return None if arguments[index] is None else gradient

    return (
        *(q, k, given(sink, 2), table if ctx.table_needed else None),
        [g if needed else None for g, needed in zip(biases, ctx.biases_needed, strict=True)],
        *map(_no_gradient, arguments[5:COUNT]),
        *(given(v, COUNT), given(y, COUNT + 1)),
        *([None] * len(arguments[COUNT + 2 :])),
    )


def _no_gradient(argument: Any) -> list[None] | None:
    """In the form that torch expects: a list for a list of tensors, and for an empty one."""
    is_list = isinstance(argument, list) and all(isinstance(x, Tensor) for x in argument)
    return [None] * len(argument) if is_list else None


def _differentiable_backward(arguments: Packed, upstream: tuple[Tensor | None, ...]) -> Packed:
    """The same gradients from the dense weights, so that they have gradients themselves."""

    def needs_gradient(x: Any) -> bool:
        return isinstance(x, Tensor) and x.requires_grad

    # Aliases: a tensor that is given twice, as q and as k, has a gradient as each.
    packed = mapped(lambda x: x.view_as(x) if needs_gradient(x) else x, arguments)
    v, y, *asked = packed[COUNT:]
    readings = dense.read(unpack(packed[:COUNT]), v, y, Requested(*asked))
    used = [
        (reading, own)
        for reading, own in zip(readings, upstream, strict=True)
        if own is not None and reading.requires_grad
    ]
    found = torch.autograd.grad(
        [reading for reading, _ in used],
        [x for x in leaves(packed) if needs_gradient(x)],
        [own for _, own in used],
        create_graph=True,
        allow_unused=True,
    )
    each = iter(found)
    gradients: Packed = mapped(lambda x: next(each) if needs_gradient(x) else None, packed)
    return (*gradients[:5], *map(_no_gradient, packed[5:COUNT]), *gradients[COUNT:])


def _in_own_dtype(function: Callable[..., Packed]) -> Callable[..., Packed]:
    """Tiles keep their accumulation dtype under autocast, which would round every product."""

    def kept(*arguments: Any) -> Packed:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return function(*arguments)

    return kept


_LIBRARY.impl("sweep", _in_own_dtype(sweep), "CompositeExplicitAutograd")
_LIBRARY.impl("sweep_backward", _in_own_dtype(sweep_backward), "CompositeExplicitAutograd")
torch.library.register_fake("headwise::sweep", _fake_sweep, lib=_LIBRARY)
torch.library.register_fake("headwise::sweep_backward", _fake_sweep_backward, lib=_LIBRARY)
torch.library.register_autograd("headwise::sweep", _backward, setup_context=_setup, lib=_LIBRARY)


class TiledKernel(Kernel):
    """Every reading, differentiable, through the operator: one tile at a time."""

    name = "tiled"

    def refuses(self, task: Task) -> str | None:
        """See `Kernel.refuses`."""
        if task.dropout_p:
            return "weights are dropped one by one, where they are written down"
        if needs_plain_torch():
            return "ONNX, torch.func and forward-mode AD see through torch's own operators alone"
        return None

    def run(self, task: Task) -> KernelResult:
        """See `Kernel.run`."""
        operands = (*pack(task.problem), task.v, task.y, *task.readings)
        return KernelResult(*torch.ops.headwise.sweep(*operands))

    def cost(self, task: Task) -> Cost:
        """See `Kernel.cost`; two buffers of a tile are held."""
        width = task.problem.q.new_empty(0, dtype=task.problem.accumulate).element_size()
        return Cost(task.operations, min(2 * TILE_ELEMENTS, 2 * max(task.cells, 1)) * width)
