"""The tiled kernel as a custom operator, a single node for torch.compile and torch.export.

The compiler would unroll a Python loop over tiles, and recompile it at every length. The operators
``headwise::sweep`` and ``headwise::sweep_backward`` are opaque: they have fake implementations for
tracing and their own gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headwise.masks import clauses
from headwise.masks.bound import BoundMask
from headwise.masks.clause import MatrixSizes
from headwise.masks.clauses.predicate import is_carrier
from headwise.masks.score_bias import BoundBias
from headwise.matrix.kernels import dense, kernel, tiled, tiles
from headwise.matrix.kernels.kernel import KernelInput, KernelResult, Requested, Task
from headwise.support import private_torch
from headwise.support.tensors import iterate_leaves, map_leaves
from headwise.support.tracing import needs_plain_torch, without_autocast

# The fields of KernelInput as operator arguments, in the order of pack and unpack.
_PROBLEM = (
    "Tensor q, Tensor k, Tensor? sink, Tensor? table, Tensor[] biases, str mask, "
    "Tensor[] mask_tensors, SymInt[] mask_integers, float scale, float? softcap"
)
_RESULTS = ", ".join(["Tensor"] * len(KernelResult._fields))
_UPSTREAM = ", ".join(f"Tensor? d_{name}" for name in KernelResult._fields)

Packed = tuple[Any, ...]


def pack_arguments(problem: KernelInput) -> Packed:
    """Return the problem as the operator's leading arguments."""
    bias = problem.bias
    return (
        *(problem.q, problem.k, problem.sink, bias.table, list(bias.tensors)),
        *clauses.lower_clauses(problem.mask.clauses),
        *(problem.scale, problem.softcap),
    )


def unpack_arguments(packed: Packed) -> KernelInput:
    """Return the problem of packed arguments: the inverse of `pack_arguments`."""
    q, k, sink, table, biases, kinds, tensors, integers, scale, softcap = packed
    sizes = MatrixSizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    mask = BoundMask(sizes, q.device, clauses.rebuild_clauses(kinds, tensors, integers))
    bias = BoundBias(queries=sizes.queries, keys=sizes.keys, table=table, tensors=tuple(biases))
    return KernelInput(q=q, k=k, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink)


COUNT = 10  # arguments that describe the problem


# Not `torch.library.custom_op`, whose guard loads the whole compiler in the first call: 80 MB and a
# second.
_LIBRARY = torch.library.Library("headwise", "DEF")
_LIBRARY.define(
    f"sweep({_PROBLEM}, Tensor? v, Tensor? y, bool entropy, bool received, bool average, "
    "SymInt query_blocks, SymInt key_blocks)"
    f" -> ({_RESULTS})"
)
_LIBRARY.define(
    f"sweep_backward({_PROBLEM}, Tensor? v, Tensor? y, Tensor peak, Tensor log_sum, {_UPSTREAM}, "
    "bool table_needed, bool[] biases_needed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])"
)


def sweep(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute the requested results in one pass over the matrix; see `tiled.compute_results`."""
    v, y, *statistics = arguments[COUNT:]
    problem, requested = unpack_arguments(arguments[:COUNT]), Requested(*statistics)
    with without_autocast(problem.q):
        return tuple(tiled.compute_results(problem, v, y, requested))


def _fake_sweep(*arguments: Any) -> tuple[Tensor, ...]:
    v, y, *statistics = arguments[COUNT:]
    return tuple(tiled.initial_result(arguments[0], arguments[1], v, y, Requested(*statistics)))


def sweep_backward(*arguments: Any) -> tuple[Any, ...]:
    """Compute the gradients of q, k, v, y, sink, table, biases; see `tiled.compute_gradients`."""
    problem = unpack_arguments(arguments[:COUNT])
    v, y, peak, log_sum = arguments[COUNT : COUNT + 4]
    upstream = tiled.UpstreamGradients(*arguments[COUNT + 4 : -2])
    rows, needed = (peak, log_sum), arguments[-2:]
    with without_autocast(problem.q):
        gradients = tiled.compute_gradients(problem, v, y, rows, upstream, needed)

    def like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor:
        if gradient is None or tensor is None:
            return problem.q.new_zeros(0)  # not needed
        return gradient.to(tensor.dtype)

    biases = problem.bias.tensors
    return (
        *(like(gradients.q, problem.q), like(gradients.k, problem.k)),
        *(like(gradients.v, v), like(gradients.y, y)),
        *(like(gradients.sink, problem.sink), like(gradients.table, problem.bias.table)),
        [like(g, bias) for g, bias in zip(gradients.tensors, biases, strict=True)],
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


def separate_tensors(value: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of nested containers, and the containers with ``Tensor`` in their places.

    Hooks of `torch.autograd.graph` may copy, pickle or offload the tensors that are saved for a
    backward pass, so the tensor that carries a mask's function stays in the containers.
    """

    def is_saved(x: Any) -> bool:
        return isinstance(x, Tensor) and not is_carrier(x)

    tensors = [x for x in iterate_leaves(value) if is_saved(x)]
    if not torch.compiler.is_compiling():
        # A mask may have been made in inference mode, of which torch saves clones only.
        tensors = [x.clone() if x.is_inference() else x for x in tensors]
    return tensors, map_leaves(lambda x: Tensor if is_saved(x) else x, value)


def restore_tensors(tensors: Iterable[Tensor], form: Any) -> Any:
    each = iter(tensors)
    return map_leaves(lambda x: next(each) if x is Tensor else x, form)


def _save_for_backward(ctx: Any, inputs: Packed, output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    tensors, ctx.form = separate_tensors([inputs, output[2:4]])
    ctx.save_for_backward(*tensors)
    table, biases = inputs[3:5]
    ctx.biases_needed = [bias.requires_grad for bias in biases]
    ctx.table_needed = table is not None and table.requires_grad


def _run_sweep_backward(ctx: Any, *upstream: Tensor | None) -> Packed:
    arguments, (peak, log_sum) = restore_tensors(ctx.saved_tensors, ctx.form)
    if torch.is_grad_enabled():
        return _differentiable_backward(arguments, upstream)
    q, k, v, y, sink, table, biases = torch.ops.headwise.sweep_backward(
        *(*arguments[: COUNT + 2], peak, log_sum, *upstream), *(ctx.table_needed, ctx.biases_needed)
    )

    def if_present(gradient: Tensor, index: int) -> Tensor | None:
        return None if arguments[index] is None else gradient

    return (
        *(q, k, if_present(sink, 2), table if ctx.table_needed else None),
        [g if needed else None for g, needed in zip(biases, ctx.biases_needed, strict=True)],
        *map(_replace_tensors_by_none, arguments[5:COUNT]),
        *(if_present(v, COUNT), if_present(y, COUNT + 1)),
        *([None] * len(arguments[COUNT + 2 :])),
    )


def _replace_tensors_by_none(argument: Any) -> list[None] | None:
    is_list = isinstance(argument, list) and all(isinstance(x, Tensor) for x in argument)
    return [None] * len(argument) if is_list else None


def _differentiable_backward(arguments: Packed, upstream: tuple[Tensor | None, ...]) -> Packed:
    """Compute the gradients from dense weights, so that they are differentiable."""

    def needs_gradient(x: Any) -> bool:
        return isinstance(x, Tensor) and x.requires_grad

    # Views: a tensor that is passed twice, as q and as k, needs a gradient for each.
    packed = map_leaves(lambda x: x.view_as(x) if needs_gradient(x) else x, arguments)
    v, y, *statistics = packed[COUNT:]
    results = dense.dense_result(unpack_arguments(packed[:COUNT]), v, y, Requested(*statistics))
    pairs = zip(results, upstream, strict=True)
    used = [(x, gradient) for x, gradient in pairs if gradient is not None and x.requires_grad]
    leaves = [x for x in iterate_leaves(packed) if needs_gradient(x)]
    given, given_gradients = [x for x, _ in used], [gradient for _, gradient in used]
    flat = torch.autograd.grad(given, leaves, given_gradients, create_graph=True, allow_unused=True)
    each = iter(flat)
    gradients: Packed = map_leaves(lambda x: next(each) if needs_gradient(x) else None, packed)
    return (*gradients[:5], *map(_replace_tensors_by_none, packed[5:COUNT]), *gradients[COUNT:])


def _gradients_of_batch(arguments: Packed, dims: Packed, size: int) -> Packed:
    each = [
        torch.ops.headwise.sweep_backward(
            *(x.select(dim, i) if dim == 0 else x for x, dim in zip(arguments, dims, strict=True))
        )
        for i in range(size)
    ]
    *single, biases = zip(*each, strict=True)
    return (*map(torch.stack, single), [torch.stack(parts) for parts in zip(*biases, strict=True)])


def _map_sweep_backward(info: Any, in_dims: Packed, *arguments: Any) -> tuple[Packed, Packed]:
    upstream = [
        x.movedim(dim, 0) if isinstance(dim, int) else x
        for x, dim in zip(arguments, in_dims, strict=True)
    ]
    dims = tuple(0 if isinstance(dim, int) else None for dim in in_dims)
    gradients = _gradients_of_batch(tuple(upstream), dims, info.batch_size)
    return gradients, map_leaves(lambda _: 0, gradients)


def _sweep_backward_of_batch(*arguments: Any) -> Packed:
    """Compute the batch of gradients of ``torch.autograd.grad(..., is_grads_batched=True)``."""
    level = private_torch.batch_level()
    plain, dims = zip(*(private_torch.remove_batch(x, level) for x in arguments), strict=True)
    size = next(len(x) for x, dim in zip(plain, dims, strict=True) if dim == 0)
    gradients = _gradients_of_batch(plain, dims, size)
    return tuple(map_leaves(lambda x: private_torch.add_batch(x, level), gradients))


_LIBRARY.impl("sweep", sweep, "CompositeExplicitAutograd")
_LIBRARY.impl("sweep_backward", sweep_backward, "CompositeExplicitAutograd")
torch.library.register_fake("headwise::sweep", _fake_sweep, lib=_LIBRARY)
torch.library.register_fake("headwise::sweep_backward", _fake_sweep_backward, lib=_LIBRARY)
torch.library.register_autograd(
    "headwise::sweep", _run_sweep_backward, setup_context=_save_for_backward, lib=_LIBRARY
)
torch.library.register_vmap("headwise::sweep_backward", _map_sweep_backward, lib=_LIBRARY)
if private_torch.HAS_BATCHES:
    _LIBRARY.impl("sweep_backward", _sweep_backward_of_batch, "Batched")


class TiledKernel(kernel.Kernel):
    """Kernel for all results, differentiable, one tile at a time."""

    name = "tiled"

    def refusal_reason(self, task: Task) -> str | None:
        if task.dropout_p:
            return "dropout needs the weights in queries x keys memory"
        if needs_plain_torch():
            return "ONNX, torch.func and forward-mode AD need torch's own operators"
        return None

    def run(self, task: Task) -> KernelResult:
        operands = (*pack_arguments(task.problem), task.v, task.y, *task.requested_statistics)
        return KernelResult(*torch.ops.headwise.sweep(*operands))

    def cost(self, task: Task) -> kernel.Cost:
        """The memory is that of two tiles."""
        cells = min(
            tiles.tile_elements(task.problem.q.device), max(1, tiles.count_cells(task.problem))
        )
        memory = 2 * cells * task.problem.accumulation_dtype.itemsize
        return kernel.Cost(tiles.count_operations(task), memory)
