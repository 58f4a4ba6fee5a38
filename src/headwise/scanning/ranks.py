"""Layers whose heads are divided over devices, so that a call computes only some of them.

The output projection shows it: its weight is divided along the inputs, and the local part has as
many columns as the call has channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.modules import is_divided_over_devices

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
    """Return the weight of an output projection that is divided along its inputs.

    Args:
        modules: modules around an attention call, innermost first.
        width: number of channels of the heads that the call computes.
    """
    for module in modules:
        for weight in module.parameters():
            if weight.dim() == 2 and is_divided_over_devices(weight):
                local = weight.to_local()
                if local.shape[1] == width != weight.shape[1]:
                    return cast(Tensor, weight)
    return None


def join_divided_heads(
    matrix: AttentionMatrix, v: Tensor, outputs: Tensor, weight: Tensor, *, layer: str
) -> tuple[AttentionMatrix, Tensor, Tensor]:
    """Return the matrix, the values and the head outputs of all heads.

    Raises:
        OptionError: nothing joins them; or a mask or a score bias that differs between heads.
    """
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
    sink = matrix.sink
    whole = AttentionMatrix(
        join(matrix.q, weight),
        join(matrix.k, weight),
        mask=matrix.mask,
        score_bias=bias,
        scale=matrix.scale,
        softcap=matrix.softcap,
        sink=None if sink is None else join(sink[None], weight)[0],
    )
    return whole, join(v, weight), join(outputs, weight)
