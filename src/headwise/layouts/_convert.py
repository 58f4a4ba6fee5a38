"""`convert`: tensors in one layout to the same function in another, checked as it goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.layouts import modules, plan
from headwise.layouts._layout import Layout
from headwise.layouts.registry import layout
from headwise.support.tensors import same_bytes, tensors_of_arrays


class RoundTripError(HeadwiseError, RuntimeError):
    """A conversion that did not lead back to the bytes it began with."""


def convert(
    state: Mapping[str, Tensor | np.ndarray],
    source: str | Layout,
    target: str | Layout,
    *,
    accept: Iterable[str] = (),
    root: str | None = None,
    **known: int,
) -> dict[str, Tensor]:
    """Convert the tensors of a module, or of a whole model, to another layout.

    Every rewritten tensor is converted back and compared byte for byte. A tensor that both layouts
    store in the same way, or that is outside of attention, is copied under its name in the target.
    A tensor that either layout does not list keeps its name. The result shares no memory with
    ``state``.

    Args:
        state: name -> tensor or NumPy array; as from ``state_dict()`` or a file.
        source: the layout they are in, or its name.
        target: the wanted one.
        accept: settings of `AttentionSpec` that may differ.
        root: what stands before all names of the target, such as "transformer."; what stands
            before those of the source if None.
        known: heads, and other counts that follow from no shape: kv_heads, rotary_width.

    Raises:
        OptionError, ShapeError, DTypeError: see `headwise.layouts.plan_conversion`.
        RoundTripError: the way back does not lead to the same bytes.
    """
    converted: dict[str, Tensor] = {}
    stored, form = tensors_of_arrays(state), modules.NameForm(root=root)
    for step in plan.plan_conversion(
        stored, layout(source), layout(target), accept=accept, form=form, **known
    ):
        tensors = run_round_trip_checked_step(step, {name: stored[name] for name in step.inputs})
        converted |= {name: x.clone() for name, x in tensors.items()} if step.is_copy else tensors
    return converted


def run_round_trip_checked_step(
    step: plan.ConversionStep, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Run one step and its inverse, and compare the bytes.

    Raises:
        RoundTripError: they differ.
    """
    made = step.convert(stored)
    if step.sides is None or not step.outputs:
        return made
    reader, writer = step.sides
    back = reader.write(writer.read(made))
    for name, tensor in stored.items():
        if not same_bytes(tensor, back[name]):
            raise RoundTripError(
                saw=f"{name}, which does not come back from {', '.join(made)}",
                needed="the same bytes",
                do="nothing was written; the layouts' patterns contradict each other",
            )
    return made
