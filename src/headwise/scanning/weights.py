"""Weights of running modules as plain tensors: quantised, divided over devices, split by head.

Heads may be divided over devices too, so that a call computes only some of them. The output
projection shows it: its weight is divided along the inputs, and the local part has as many columns
as the call has channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.function.rounding import allow_product
from headwise.matrix.operator import AttentionMatrix
from headwise.support.private_torch import is_wrapper

DISTRIBUTED = "torch.distributed."  # begins the module of a class that FSDP2 puts in front
COLUMNS = 4096  # of a weight that are compared at once


def unwrap_compiled(model: Any) -> Any:
    """Return the model or module inside the wrapper of torch.compile, if there is one."""
    return getattr(model, "_orig_mod", model)


def plain_tensors_of_weight(weight: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of a weight: the weight, or its integers and scales."""
    if not is_wrapper(weight):
        yield weight
        return
    for name in weight.__tensor_flatten__()[0]:
        part = getattr(weight, name)
        if isinstance(part, Tensor):  # the parts of a sharded weight include its mesh
            yield from plain_tensors_of_weight(part)


def is_divided_over_devices(weight: Tensor) -> TypeGuard[Any]:
    """True if a weight is divided over devices, and each process holds a part."""
    return is_wrapper(weight) and hasattr(weight, "full_tensor")


def class_name_without_fsdp(module: nn.Module | None) -> str:
    """Return the name of a module's class, without the class that FSDP2 puts in front of it."""
    kind = type(module)
    is_derived = len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith(DISTRIBUTED)
    return kind.__bases__[1].__name__ if is_derived else kind.__name__


def dequantize_weight(weight: Tensor) -> Tensor | None:
    """Return a weight as a plain floating-point tensor, dequantised if necessary; else None.

    Every process has to gather a weight that is divided over devices at the same time.
    """
    if is_divided_over_devices(weight):
        weight = weight.full_tensor()
    if is_wrapper(weight):
        if type(weight).dequantize is Tensor.dequantize:
            return None
        weight = weight.dequantize()
    return weight if weight.is_floating_point() else None


def find_unembedding(model: Any) -> tuple[Any, Tensor | None]:
    """Return the last layer of a language model, and its (vocabulary, embed_dim) weight, if any."""
    getter = getattr(model, "get_output_embeddings", None)
    module = getter() if getter is not None else getattr(model, "unembedding", None)
    module = unwrap_compiled(module)
    weight = module if isinstance(module, Tensor) else getattr(module, "weight", None)
    weight = dequantize_weight(weight.detach()) if isinstance(weight, Tensor) else None
    return module, weight if weight is not None and weight.dim() == 2 else None


# ---- linear layers -------------------------------------------------------------------------------


def split_weight_by_head(module: nn.Module, outputs: Tensor) -> Tensor | None:
    """Return (heads, value_dim, embed_dim): each head's part of the weight of a module."""
    matrix = _weight_inputs_by_outputs(module)
    _, heads, _, value_dim = outputs.shape
    if matrix is None or matrix.shape[0] != heads * value_dim:
        return None
    parts: Tensor = matrix.detach().unflatten(0, (heads, value_dim))
    return parts


def has_own_matrix(module: nn.Module) -> bool:
    """True if a module multiplies by more than its submodules do, such as an adapter's."""
    return any(p is not None and p.dim() == 2 for p in module._parameters.values())


def _weight_inputs_by_outputs(module: nn.Module) -> Tensor | None:
    stored = getattr(module, "weight", None)
    weight = dequantize_weight(stored.detach()) if isinstance(stored, Tensor) else None
    if weight is None or weight.dim() != 2:
        return None
    # The Conv1D of transformers, as in GPT-2, stores (in, out); linear layers store (out, in).
    return weight if type(module).__name__.startswith("Conv1D") else weight.mT


def is_linear_output(module: nn.Module, inputs: Tensor, result: Tensor) -> bool:
    """True if a module's first output is its first inputs times its weight, plus its bias."""
    matrix = _weight_inputs_by_outputs(module)
    stored = getattr(module, "bias", None)
    bias = dequantize_weight(stored.detach()) if isinstance(stored, Tensor) else None
    if matrix is None or result.shape[-1] != matrix.shape[1]:
        return False
    x, first = inputs.double(), result.reshape(-1, matrix.shape[1])[0]
    for start in range(0, matrix.shape[1], COLUMNS):  # of a vocabulary, all are large in float64
        part = slice(start, start + COLUMNS)
        w = matrix[:, part].double()
        exact = x @ w + (0.0 if bias is None else bias[part].double())
        allowed = allow_product(x, w, exact, result.dtype)
        if not bool(((first[part].double() - exact).abs() <= allowed).all()):
            return False
    return True


def find_plain_unembedding(model: Any) -> Tensor | None:
    """Return the (vocabulary, embed_dim) weight that maps a state to logits.

    None if the last layer of the model, run on one state, is more than a product with its weight,
    such as an adapter. A divided layer cannot run alone; it only has to own its weight.
    """
    module, weight = find_unembedding(model)
    # A tensor, and the table of an embedding, are multiplied by a function.
    if weight is None or isinstance(module, (Tensor, nn.Embedding)):
        return weight
    if is_divided_over_devices(module.weight):
        return weight if "weight" in module._parameters else None
    if weight.is_meta:
        return None
    state = torch.linspace(0.5, 1.5, weight.shape[1], dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        result = module(state[None, None])
    return weight if is_linear_output(module, state, result) else None


# ---- heads divided over devices ------------------------------------------------------------------

# (tensor with some heads on axis 1, divided weight of the output projection) -> all heads
JoinHeads = Callable[[Tensor, Any], Tensor]

_join: ContextVar[JoinHeads | None] = ContextVar("join", default=None)


@contextmanager
def use_head_joiner(join: JoinHeads) -> Iterator[None]:
    """Join divided heads in the block, so that each captured call has all heads of its layer."""
    token = _join.set(join)
    try:
        yield
    finally:
        _join.reset(token)


def find_divided_projection(modules: Iterable[nn.Module], width: int) -> Tensor | None:
    """Return the weight of an output projection of which ``width`` inputs are here, not all."""
    for weight in (each for module in modules for each in module.parameters()):
        if weight.dim() != 2 or not is_divided_over_devices(weight):
            continue
        if weight.to_local().shape[1] == width != weight.shape[1]:
            return cast(Tensor, weight)
    return None


def join_divided_heads(
    matrix: AttentionMatrix, v: Tensor, outputs: Tensor, weight: Tensor, *, layer: str
) -> tuple[AttentionMatrix, Tensor, Tensor]:
    """Return the matrix, the values and the head outputs of all heads."""
    join = _join.get()
    heads, width = matrix.shape[1], weight.shape[1]
    if join is None:
        raise OptionError(
            saw=f"{layer}, whose output projection is divided over devices: {heads} of "
            f"{width // outputs.shape[-1]} heads are computed here",
            needed="all heads of each layer",
            do="headwise.sharding.scan_sharded(model, inputs) on every rank",
        )
    bias = matrix.score_bias
    has_tables = bool(bias.by_distance) or any(tensor.shape[1] > 1 for tensor in bias.tensors)
    if has_tables or matrix.mask.known_sizes()["heads"] > 1:
        raise OptionError(
            saw=f"{layer}, whose heads are divided over devices and have "
            f"{'score biases' if has_tables else 'masks'} of their own",
            needed="a mask and a score bias that all heads share",
            do="scan the model without dividing its heads",
        )
    q, k, v, outputs = (join(x, weight) for x in (matrix.q, matrix.k, v, outputs))
    options = {"scale": matrix.scale, "softcap": matrix.softcap}
    sink = None if matrix.sink is None else join(matrix.sink[None], weight)[0]
    whole = AttentionMatrix(q, k, mask=matrix.mask, score_bias=bias, sink=sink, **options)
    return whole, v, outputs
