"""An attention in its model as a function: its module, called with what its model gave it.

The tokens are other ones. Masks, rotations and positions are those of the model, cut to the length
and the batch of the tokens, so that no more tokens can be given than the model had.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.diagnosis.outputs.runs import Runs
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.diagnosis.subjects.subject import FAILURES, is_near
from headwise.errors import OptionError
from headwise.function.rounding import default_tolerance
from headwise.layers.hooks import ModuleRun, record_modules
from headwise.support.tensors import map_leaves
from headwise.support.tracing import evaluation_mode

AROUND = 3  # modules around an attention that may have its projections
TOLERANCE = default_tolerance(torch.float32)


class PlacedModule(NamedTuple):
    """A module that ran once in its model, and the part of it whose output is the attention's."""

    module: nn.Module
    given: ModuleRun
    call: RecordedCall
    part: str = ""

    @torch.no_grad()
    def run(self, inputs: Inputs) -> Tensor:
        """Return the output for other tokens."""
        args, kwargs = map_leaves(
            lambda value: self._fit(value, inputs), (self.given.args, self.given.kwargs)
        )
        part = self.module.get_submodule(self.part)
        try:
            with record_modules([part]) as runs, evaluation_mode(self.module):
                self.module(*args, **kwargs)
        except FAILURES as error:
            raise OptionError(
                saw=f"{type(self.module).__name__}, which fails on {inputs.x.shape[1]} tokens",
                needed="a module that runs on fewer tokens than its model had",
                do="compare the modules alone",
            ) from error
        output: Tensor = read_first(runs[part][0].output)
        return output

    def _fit(self, value: Any, inputs: Inputs) -> Any:
        """Return an argument for other tokens: these, or what belongs to them."""
        if not isinstance(value, Tensor):
            return None if hasattr(value, "get_seq_length") else value  # no cache
        dtype = next(self.module.parameters()).dtype if value.is_floating_point() else value.dtype
        known = self.call.inputs
        for tokens, new in ((known.x, inputs.x), (known.source, inputs.source)):
            if tokens is not None and new is not None and is_near(value, tokens, TOLERANCE):
                return new.to(dtype)
        batch, length = known.x.shape[:2]
        lengths = {length: inputs.x.shape[1]}
        if known.source is not None and inputs.source is not None:
            lengths.setdefault(known.source.shape[1], inputs.source.shape[1])
        axes = {1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}.get(value.dim(), ())
        for axis in axes:
            value = value.narrow(axis, 0, lengths.get(value.shape[axis], value.shape[axis]))
        if value.dim() > 1 and value.shape[0] == batch:
            value = value[:1].expand(len(inputs.x), *value.shape[1:])
        return value.to(dtype)


def read_first(output: Any) -> Any:
    """Return the first of the results of a module."""
    return output[0] if isinstance(output, list | tuple) and output else output


@torch.no_grad()
def make_runs(
    model: nn.Module, arguments: tuple[tuple[Any, ...], Any], name: str, call: RecordedCall
) -> Runs | None:
    """Return further runs of an attention of a model; None where it cannot be called.

    ``name`` is that of its module, and ``call`` has the tokens and the output that it had.
    """
    if "output" not in call.stages or call.earlier:
        return None
    for place in _list_places(model, arguments, name, call):
        with suppress(OptionError):
            if is_near(place.run(call.inputs), call.stages["output"], TOLERANCE):
                wide = place._replace(module=copy.deepcopy(place.module).double())
                return Runs(partial(_run_in_dtype_of_inputs, place, wide), lambda: torch.float32)
    return None


def _run_in_dtype_of_inputs(place: PlacedModule, wide: PlacedModule, inputs: Inputs) -> Tensor:
    return (wide if inputs.x.dtype == torch.float64 else place).run(inputs)


def _list_places(
    model: nn.Module, arguments: tuple[tuple[Any, ...], Any], name: str, call: RecordedCall
) -> Iterator[PlacedModule]:
    """Yield the module of an attention, and those around it, where one ran once with its tokens."""
    words = name.split(".")
    names = (".".join(words[: len(words) - n]) for n in range(min(AROUND, len(words))))
    modules = [x for each in names if (x := dict(model.named_modules()).get(each)) is not None]
    inner = modules[-1].modules() if modules else ()
    with record_modules(inner) as runs, suppress(*FAILURES), evaluation_mode(model):
        model(*arguments[0], **arguments[1])
    for module in modules:
        if len(runs[module]) != 1:
            continue
        given = runs[module][0]
        tokens = (x for x in (*given.args, *given.kwargs.values()) if isinstance(x, Tensor))
        if any(is_near(x, call.inputs.x, TOLERANCE) for x in tokens):
            parts = (
                part_name
                for part_name, part in module.named_modules()
                if len(runs[part]) == 1
                and isinstance(output := read_first(runs[part][0].output), Tensor)
                and is_near(output, call.stages["output"], TOLERANCE)
            )
            yield from (
                PlacedModule(module, given, call, part_name) for part_name in islice(parts, 1)
            )
