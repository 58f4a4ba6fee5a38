"""A function that keeps keys and values between its calls, as the subject of a comparison.

It is an object with ``start(batch)``, which makes a state, and ``step(x, state)``, which returns
the output and the state, or the output alone where it changes the state in place. Or it is a
function with an argument for the state, such as ``cache``: it gets None in the first call, and the
last one of what it returns in the next. Steps may take ``mask``, (batch, heads, queries, keys) with
the keys of all calls, and ``positions``, (batch, queries).
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headwise.diagnosis.simulation.model import Inputs, RecordedCall, cut_mask
from headwise.diagnosis.subjects.forms import name_arguments, name_keys, read_output, read_required
from headwise.diagnosis.subjects.function import BlackBox
from headwise.diagnosis.subjects.subject import list_calls
from headwise.errors import OptionError

STATES = (
    "cache",
    "kv_cache",
    "past",
    "past_kv",
    "past_key_values",
    "past_key_value",
    "layer_past",
    "state",
)
POSITIONS = ("positions", "position_ids")


def make_function(function: Any, kind: str) -> BlackBox | None:
    """Return a function as a subject, by its calls with a state if it has them.

    None is returned for what cannot be called at all.
    """
    if callable(getattr(function, "start", None)) and callable(getattr(function, "step", None)):
        runs = callable(function)
        if isinstance(function, nn.Module):
            runs = type(function).forward is not nn.Module.forward
        return Decoder(function.start, function.step, function if runs else None, kind)
    if not callable(function):
        return None
    names = name_arguments(function)
    if (name := next((each for each in STATES if each in names), None)) is None:
        return BlackBox(function, kind, name_keys(read_required(function)))
    asked = {"use_cache": True} if "use_cache" in names else {}
    step = partial(_step_by_argument, function, name, asked)
    return Decoder(lambda _: None, step, function, kind, names)


def _step_by_argument(
    function: Callable[..., Any],
    name: str,
    asked: Mapping[str, Any],
    x: Any,
    state: Any,
    **more: Any,
) -> tuple[Any, Any]:
    result = function(x, **{name: state}, **asked, **more)
    if not isinstance(result, tuple) or len(result) < 2 or result[-1] is None:
        raise OptionError(
            saw=f"a function with an argument {name} that returns no {name}",
            needed=f"(output, {name}), whose {name} the next call gets; it is None in the first",
            do="compare an object with start(batch), which makes it, and step(x, state)",
        )
    return result[0], result[-1]


class Decoder(BlackBox):
    """A function of tokens that come in several calls, with a state between them.

    Attributes:
        runs_alone: True if it can also be called without a state.
    """

    decodes = True

    def __init__(
        self,
        start: Callable[[int], Any],
        step: Callable[..., Any],
        function: Callable[..., Any] | None,
        kind: str,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self.start, self.step = start, step
        self.names = names or name_arguments(step)
        self.positions = next((name for name in POSITIONS if name in self.names), None)
        self.step_arguments = self.names & {"mask"}
        self.step_arguments |= {"positions"} if self.positions else set()
        self.runs_alone = function is not None
        super().__init__(function or self._call_once, kind)
        if function is None:
            self.takes_mask = "mask" in self.names

    def _call_once(self, x: Any, mask: Any = None) -> Any:
        more = {} if mask is None else {"mask": mask}
        return self._run_step(x, self.start(len(x)), more)[0]

    def _run_step(self, x: Any, state: Any, more: Mapping[str, Any]) -> tuple[Any, Any]:
        result = self.step(x, state, **more)
        return result if isinstance(result, tuple) and len(result) == 2 else (result, state)

    def record_calls(self, inputs: Inputs) -> list[RecordedCall]:
        """Return the output of each call; a call knows those before it."""
        if not inputs.steps:
            return [self.record(inputs)]
        return list_calls(inputs, self.output(inputs), self.dtype, self.runs)

    def _call_function(self, inputs: Inputs) -> Tensor:
        if not inputs.steps:
            return super()._call_function(inputs)
        named = {"x": inputs.x, "mask": inputs.mask}
        if self.positions is not None:
            named[self.positions] = inputs.positions
        given = {name: value for name, value in named.items() if value is not None}
        return self._call_unchanged(given, partial(self._run_steps, inputs.steps))

    def _run_steps(self, steps: tuple[int, ...], arguments: Mapping[str, Any]) -> Tensor:
        named = {**arguments}
        x = named.pop("x")
        state, outputs = self.start(len(x)), []
        for first, end in pairwise(accumulate(steps, initial=0)):
            more = {
                name: cut_mask(value, first, end) if name == "mask" else value[:, first:end]
                for name, value in named.items()
            }
            part = x[:, first:end]
            part = part.contiguous() if isinstance(x, Tensor) else part.copy()
            result, state = self._run_step(part, state, more)
            outputs.append(read_output(result))
        return torch.cat(outputs, 1)
