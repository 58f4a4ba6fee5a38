"""`convert`: tensors in one layout to the same function in another, checked as it goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.layouts.conversion_plan import plan
from headwise.layouts.conversion_steps import ConversionStep
from headwise.layouts.equality import same_bytes
from headwise.layouts.layout import Layout
from headwise.layouts.module_names import NameForm
from headwise.layouts.registry import layout


class RoundTripError(HeadwiseError, RuntimeError):
    """A conversion that did not lead back to the bytes it began with."""


def convert(
    state: Mapping[str, Tensor],
    source: str | Layout,
    target: str | Layout,
    *,
    accept: Iterable[str] = (),
    root: str | None = None,
    **known: int,
) -> dict[str, Tensor]:
    """The tensors of a module, or of a whole model, in another layout.

    Every tensor that is rewritten is moved back and compared byte for byte. What is stored in the
    same way in both, or is not attention, is copied, under the name that the target has for it if
    both layouts know it. The result shares no memory with ``state``.

    Args:
        state: name -> tensor; as from ``state_dict()`` or a file.
        source: the layout they are in, or its name.
        target: the wanted one.
        accept: what may be used differently afterwards, by its name in `Function`.
        root: what stands before all names of the target, such as "transformer."; what stands
            before those of the source if None.
        known: heads, and what else no shape tells: kv_heads, rotary_width.

    Raises:
        OptionError, ShapeError, DTypeError: see `headwise.layouts.conversion_plan.plan`.
        RoundTripError: the way back does not lead to the same bytes.
    """
    made: dict[str, Tensor] = {}
    form = NameForm(root=root)
    for step in plan(state, layout(source), layout(target), accept=accept, form=form, **known):
        found = run(step, {name: state[name] for name in step.inputs})
        made |= {name: x.clone() for name, x in found.items()} if step.is_copy else found
    return made


def run(step: ConversionStep, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One step, and its way back, compared byte for byte.

    Raises:
        RoundTripError: they differ.
    """
    made = step.run(stored)
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
