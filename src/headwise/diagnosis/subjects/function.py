"""A function as the subject of a comparison: nothing but its outputs is known."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from headwise.diagnosis.outputs.runs import Runs
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.diagnosis.subjects.parts import Parts
from headwise.diagnosis.subjects.subject import Subject, differentiate
from headwise.errors import OptionError
from headwise.function.rounding import is_coarser

# An error of a model. headwise's own code runs beside it, so others are left as they are.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    Warning,  # where a filter makes errors of warnings
)
# An error of a caller's function, beside which nothing else runs: it may have a class of its own.
# It is shown, and kept as the cause.
SLOW = 1.0  # seconds of a call
FAILURES_OF_A_FUNCTION: tuple[type[Exception], ...] = (Exception,)
NamedCall: TypeAlias = Callable[[Mapping[str, Any]], Any]  # of arguments by name


def describe_error(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class BlackBox(Subject):
    """A function of ``x``, and of ``source`` and ``mask`` where it takes them.

    It may take and return NumPy arrays. Its outputs are checked: of the right shape, finite, the
    same in a second run and after other inputs, and without a change of its inputs.

    Attributes:
        dtype: the narrowest one that holds every output so far: a float16 function that ends in
            `.float()` computes in float16.
        seconds: that its last call took.
        is_random: True if a second run had another output, which is then no error any more.
    """

    is_random = False

    def __init__(self, function: Callable[..., Any], kind: str = "function") -> None:
        self.function, self.kind = function, kind
        self.dtype = torch.float32
        names = name_arguments(function)
        self.takes_mask, self.takes_source = "mask" in names, "source" in names
        self.takes_arrays = False  # known after the first call
        self.parts: Parts | None = None  # whose outputs are stages
        self.seconds = 0.0
        self._first: tuple[Inputs, Tensor] | None = None

    @torch.no_grad()
    def output(self, inputs: Inputs) -> Tensor:
        """Return the output of a call.

        Raises:
            OptionError: the function fails, returns no tensor, has another output in a second run,
                returns NaN alone, or changes its input.
        """
        first = self._call_function(inputs)
        # A slow function runs twice on the first input alone.
        again = not self.is_random and (self._first is None or self.seconds < SLOW)
        second = self._call_function(inputs) if again else first
        if first.shape[:2] != inputs.x.shape[:2] or first.dim() != 3:
            raise OptionError(
                saw=f"an output of shape {tuple(first.shape)} for x of shape "
                f"{tuple(inputs.x.shape)}",
                needed="an output of (batch, queries, out_dim)",
                do="compare(lambda x: layer(x)[0], ...) selects the output of a tuple",
            )
        if not first.isfinite().any():
            raise OptionError(
                saw=f"{first.numel()} outputs of {self.kind}, which are all NaN or infinite",
                needed="a finite output at one token at least",
                do="look at its weights for numbers that are not finite, and at its masks",
            )
        if apart := _describe_change(first, second):
            self.is_random = True
            raise self._explain_second_run(inputs, apart)
        held = _narrowest_dtype(first)
        self.dtype = held if self._first is None or is_coarser(self.dtype, held) else self.dtype
        self._first = self._first or (inputs, first)
        return first

    @torch.no_grad()
    def accepts(self, inputs: Inputs) -> bool:
        """True if the function runs on these inputs, whatever it returns."""
        try:
            self._run_on_copies(_name_arguments(inputs), self._call_with_named_arguments)
        except OptionError:
            return False
        return True

    @torch.no_grad()
    def require_stateless(self) -> None:
        """Run the first input again, after all others.

        Raises:
            OptionError: the function has another output than before.
        """
        if self._first is not None and not self.is_random:
            inputs, output = self._first
            if apart := _describe_change(output, self._call_function(inputs)):
                raise OptionError(
                    saw=f"other outputs on the same input, after other inputs: {apart}",
                    needed="a function without state",
                    do="pass a fresh cache in each call, and keep no tensor between calls",
                )

    def _explain_second_run(self, inputs: Inputs, apart: str) -> OptionError:
        """Return the error for a function with another output in a second run."""
        if _describe_change(*(self._call_with_seed(inputs) for _ in range(2))):
            return OptionError(
                saw=f"other outputs in a second run on the same input: {apart}, after "
                "torch.manual_seed(0) too",
                needed="a function without randomness or state",
                do="pass a fresh cache in each call; call eval() first, which turns dropout off",
            )
        return OptionError(
            saw=f"random outputs: a second run on the same input has other ones ({apart}), and the "
            "same after torch.manual_seed(0)",
            needed="a function without randomness",
            do="call eval() first, which turns dropout off; functions take dropout_p=0.0",
        )

    def _call_with_seed(self, inputs: Inputs) -> Tensor:
        """Return the output after a seed; generators are then as they were before."""
        state = np.random.get_state()
        try:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                np.random.seed(0)
                return self._call_function(inputs)
        finally:
            np.random.set_state(state)

    def record(self, inputs: Inputs) -> RecordedCall:
        """Return the output, and the stages of known parts."""
        output = self.output(inputs)
        stages = {"output": output.double(), **self._record_parts(inputs)}
        return RecordedCall(inputs, stages, self.dtype, runs=self.runs)

    def _record_parts(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the stages that are the outputs of known parts."""
        if self.parts is None:
            return {}
        _, stages = self.parts.record(lambda: self._call_function(inputs))
        if lacking := sorted(self.parts.modules.keys() - stages.keys()):
            raise OptionError(
                saw=f"parts for {', '.join(lacking)} that {self.kind} does not call",
                needed="the modules that run when the function is called",
                do='give those of the same object: compare(port, layer, parts={"q": port.q_proj})',
            )
        return {stage: x.double() for stage, x in stages.items()}

    @cached_property
    def runs(self) -> Runs:
        """Further runs, in float64 too where the function computes so."""
        return Runs(self._run_in_dtype_of_inputs, lambda: self.dtype)

    @torch.no_grad()
    def _run_in_dtype_of_inputs(self, inputs: Inputs) -> Tensor:
        return (self._wide if inputs.x.dtype == torch.float64 else self)._call_function(inputs)

    @cached_property
    def _wide(self) -> BlackBox:
        wide = self.in_dtype(torch.float64)
        wide.takes_arrays = self.takes_arrays
        return wide

    def in_dtype(self, dtype: torch.dtype) -> BlackBox:
        """Return the function to run in a dtype: a module as a copy with weights of that dtype."""
        called = self.function
        called = copy.deepcopy(called).to(dtype) if isinstance(called, nn.Module) else called
        return BlackBox(called, self.kind)

    def gradients(self, inputs: Inputs, direction: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the gradients of the inputs.

        Raises:
            OptionError: no gradient of the output is recorded.
        """
        del dtype  # a function computes in its own

        def run(given: Inputs) -> Tensor:
            output = self._call_function(given)
            if not output.requires_grad:
                raise OptionError(
                    saw=f"{self.kind}, whose output records no gradient",
                    needed="torch operations from the input to the output, without detach() or "
                    "NumPy",
                    do="compare(a, b) without gradients",
                )
            return output

        return differentiate(run, inputs, direction, None)

    def _call_function(self, inputs: Inputs) -> Tensor:
        given = _name_arguments(inputs)
        for name in given.keys() - {"x"} - name_arguments(self.function):
            raise OptionError(
                saw=f"inputs with a {name} for {self.kind}, which has no argument {name}",
                needed=f"a function of x and {name}",
                do=f"compare(lambda x, {name}=None: function(x, {name}={name}), ...)",
            )
        return self._call_unchanged(given, self._call_with_named_arguments)

    def _call_unchanged(self, given: Mapping[str, Tensor], call: NamedCall) -> Tensor:
        """Return the output of a call, which may not change what it is given."""
        start = time.monotonic()
        result, used = self._run_on_copies(given, call)
        self.seconds = time.monotonic() - start
        changed = [name for name, x in used.items() if not torch.equal(x, given[name])]
        if changed:
            raise OptionError(
                saw=f"a function that changes its {'input' if 'x' in changed else changed[0]}",
                needed="an input that stays as it was",
                do="compare(lambda x: function(x.clone()), ...)",
            )
        return read_output(result)

    def _run_on_copies(
        self, given: Mapping[str, Tensor], call: NamedCall
    ) -> tuple[Any, Mapping[str, Tensor]]:
        """Return the result on copies, tensors or else arrays, and what is left of these."""
        if self.takes_arrays:
            return self._run_on_arrays(given, call)
        copies = {name: x.clone() for name, x in given.items()}
        try:
            return call(copies), copies
        except FAILURES_OF_A_FUNCTION as error:
            try:
                ran = self._run_on_arrays(given, call)
            except FAILURES_OF_A_FUNCTION as other:
                shapes = (f"{name} of shape {tuple(x.shape)}" for name, x in given.items())
                raise OptionError(
                    saw=f"{self.kind} that fails on tensors ({describe_error(error)}) and on NumPy "
                    f"arrays ({describe_error(other)})",
                    needed=f"a function that runs on {' and '.join(shapes)}, float32",
                    do="run it on such an input first",
                ) from error
            self.takes_arrays = True
            return ran

    def _run_on_arrays(
        self, given: Mapping[str, Tensor], call: NamedCall
    ) -> tuple[Any, Mapping[str, Tensor]]:
        copies = {name: x.detach().clone() for name, x in given.items()}
        return call({name: x.numpy() for name, x in copies.items()}), copies

    def _call_with_named_arguments(self, arguments: Mapping[str, Any]) -> Any:
        named = {**arguments}
        return self.function(named.pop("x"), **named)


def name_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's arguments; ``**kwargs``, which may ignore them, is none."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return frozenset(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return frozenset()


def read_output(result: Any) -> Tensor:
    """Return the output of a function as a tensor; of a tuple the first.

    Raises:
        OptionError: neither a tensor nor an array.
    """
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor | np.ndarray):
        result = result[0]
    if isinstance(result, np.ndarray):
        result = torch.from_numpy(result)
    if not isinstance(result, Tensor):
        raise OptionError(
            saw=f"an output of type {type(result).__name__}",
            needed="a tensor or a NumPy array of (batch, queries, out_dim)",
            do="compare(lambda x: function(x)[0], ...) selects one output of several",
        )
    return result


def _describe_change(before: Tensor, now: Tensor) -> str:
    """Return how far two outputs are apart; "" for equal ones."""
    if before.shape != now.shape:
        return f"of shape {tuple(now.shape)} in place of {tuple(before.shape)}"
    if torch.equal(before.nan_to_num(), now.nan_to_num()):
        return ""
    return f"they differ by up to {float((before - now).abs().nan_to_num().max()):.3g}"


def _name_arguments(inputs: Inputs) -> dict[str, Tensor]:
    named = {"x": inputs.x, "source": inputs.source, "mask": inputs.mask}
    return {name: value for name, value in named.items() if value is not None}


def _narrowest_dtype(x: Tensor) -> torch.dtype:
    x = x[x.isfinite()]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(x.to(dtype).to(x.dtype), x):
            return dtype if is_coarser(dtype, x.dtype) else x.dtype
    return x.dtype
