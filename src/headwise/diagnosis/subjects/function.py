"""A function as the subject of a comparison: nothing but its outputs is known."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.diagnosis import watch
from headwise.diagnosis.outputs.runs import Runs
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.diagnosis.subjects.forms import (
    Form,
    NamedCall,
    list_forms,
    name_arguments,
    read_output,
    read_required,
)
from headwise.diagnosis.subjects.parts import Parts
from headwise.diagnosis.subjects.subject import Subject, describe_error, differentiate
from headwise.errors import OptionError
from headwise.function.rounding import is_coarser
from headwise.support.private_torch import DispatchMode

# An error of a caller's function, beside which nothing else runs: it may have a class of its own.
# It is shown, and kept as the cause.
FAILURES_OF_A_FUNCTION: tuple[type[Exception], ...] = (Exception,)
SLOW = 1.0  # seconds of a call
TRYING = 10.0  # seconds in which other forms of inputs are tried


class BlackBox(Subject):
    """A function of ``x``, and of ``source`` and ``mask`` where it takes them.

    It may take and return NumPy arrays, or inputs of another form, which `fit` finds. Its outputs
    are checked: of the right shape, not all NaN, the same in a second run and after other inputs,
    and without a change of its inputs.

    Attributes:
        dtype: the narrowest one that holds every output so far: a float16 function that ends in
            `.float()` computes in float16.
        seconds: that its last call took.
        keys: the names of required arguments that get the tokens of keys, such as k and v.
        form: of its inputs; None before its first call.
        lengths: of its inputs, in words; "" for any.
        reads_one_row: True if of a mask it reads the row of the first query alone.
        reads_one_head: True if of a mask it takes that of the first head by its number.
        misfit: the error on inputs of the usual form and length; "" where they run.
        is_random: True if a second run had another output, which is then no error any more.
    """

    is_random = False

    def __init__(
        self, function: Callable[..., Any], kind: str = "function", keys: tuple[str, ...] = ()
    ) -> None:
        self.function, self.kind, self.keys = function, kind, keys
        self.dtype = torch.float32
        names = name_arguments(function)
        self.takes_mask, self.takes_source = "mask" in names, "source" in names
        required = read_required(function)
        self.needs_mask, self.needs_source = "mask" in required, "source" in required
        self.squeezes_masks = False  # to (batch, keys), or (queries, keys)
        self.reads_one_row = self.reads_one_head = False
        self.form: Form | None = None
        self.lengths = self.misfit = ""
        self.parts: Parts | None = None  # whose outputs are stages
        self.seconds = 0.0
        self._first: tuple[Inputs, Tensor] | None = None

    @torch.no_grad()
    def output(self, inputs: Inputs) -> Tensor:
        """Return the output of a call.

        Raises:
            OptionError: the function fails, returns no tensor, has another output in a second run,
                returns NaN alone without a mask, or changes its input.
        """
        first = self._call_function(inputs)
        # A slow function runs twice on the first input alone.
        again = not self.is_random and (self._first is None or self.seconds < SLOW)
        second = self._call_function(inputs) if again else first
        if apart := _describe_change(first, second):
            self.is_random = True
            raise self._explain_second_run(inputs, apart)
        if first.shape[:2] != inputs.x.shape[:2] or first.dim() != 3:
            raise OptionError(
                saw=f"an output of shape {tuple(first.shape)} for x of shape "
                f"{tuple(inputs.x.shape)}",
                needed="an output of (batch, queries, out_dim)",
                do="compare(lambda x: layer(x)[1], ...) selects another output of a tuple",
            )
        is_finite, is_hidden = bool(first.isfinite().any()), inputs.mask is not None
        if not is_finite and not (is_hidden and self._first):  # else the mask alone makes it NaN
            raise OptionError(
                saw=f"{first.numel()} outputs of {self.kind}, which are all NaN or infinite",
                needed="a finite output at one token at least",
                do="look at its weights for numbers that are not finite, and at its masks",
            )
        if is_finite:
            held = _narrowest_dtype(first)
            self.dtype = held if self._first is None or is_coarser(self.dtype, held) else self.dtype
        self._first = self._first or (inputs, first)
        return first

    @torch.no_grad()
    def accepts(self, inputs: Inputs) -> bool:
        """True if the function runs on these inputs, whatever it returns."""
        try:
            self._run_on_copies(self._name_arguments(inputs), self._call_with_named_arguments)
        except OptionError:
            return False
        return True

    @torch.no_grad()
    def fit(self, candidates: Iterable[Inputs]) -> Inputs | None:
        """Find the first inputs, and their form, on which the function runs; None for none.

        ``misfit`` then says what is wrong with the first ones in the usual form.
        """
        start = time.monotonic()
        for inputs in candidates:
            for form in (self.form,) if self.form else list_forms():
                watch.current().progress(f"fitting inputs of {inputs.x.shape[1]} tokens", 0, 0)
                if not (error := self._find_misfit(form, inputs)):
                    self.form = form
                    return inputs
                self.misfit = self.misfit or f"x of shape {tuple(inputs.x.shape)} gives {error}"
                if time.monotonic() - start > TRYING or watch.current().is_spent():
                    return None
        return None

    @torch.no_grad()
    def find_mask_rows(self, inputs: Inputs) -> None:
        """Find whether the output depends on the mask of the first query and on no other row."""
        mask = inputs.mask
        if mask is None or mask.shape[2] == 1 or self.seconds >= SLOW:
            return
        first, others = mask.clone(), mask.clone()
        first[:, :, 0], others[:, :, 1:] = True, True
        with suppress(OptionError):  # of code that takes no such mask
            usual, *changed = (
                self._call_function(replace(inputs, mask=each)) for each in (mask, first, others)
            )
            depends = [not torch.equal(usual, each) for each in changed]
            self.reads_one_row = depends == [True, False]

    @torch.no_grad()
    def takes_heads(self, inputs: Inputs) -> bool:
        """True if it runs under a mask for each head, (batch, heads, queries, keys).

        Code that takes the mask of the first head by its number, ``mask[:, 0]``, takes none. Code
        that keeps the axis, ``mask[:, :1]``, repeats this mask for all heads.
        """
        mask = inputs.mask
        if mask is None or self.squeezes_masks or self.reads_one_row:
            return False
        try:
            with _HeadChoice(mask) as choice:
                whole, first = (
                    self._call_function(replace(inputs, mask=each)) for each in (mask, mask[:, :1])
                )
        except OptionError:
            return False
        is_chosen = choice.is_made or self.takes_arrays  # of which no operator is seen
        self.reads_one_head = is_chosen and torch.equal(whole, first)
        return whole.shape == first.shape and not self.reads_one_head

    def _find_misfit(self, form: Form, inputs: Inputs) -> str:
        """Return the error on inputs in a form; "" for none."""
        start = time.monotonic()
        try:
            given = self._name_arguments(inputs)
            result, _ = self._run_in_form(form, given, self._call_with_named_arguments)
            output = read_output(result)
        except FAILURES_OF_A_FUNCTION as error:
            return describe_error(error)
        self.seconds = time.monotonic() - start
        is_usual = output.dim() == 3 and output.shape[:2] == inputs.x.shape[:2]
        return "" if is_usual else f"an output of shape {tuple(output.shape)}"

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

    @property
    def has_run(self) -> bool:
        """True if it had an output."""
        return self._first is not None

    @property
    def takes_arrays(self) -> bool:
        """True if it ran on NumPy arrays."""
        return self.form is not None and self.form.is_array

    @property
    def limits(self) -> tuple[str, ...]:
        """A sentence on the inputs that it takes, where these are not the usual ones."""
        words = "compared under masks of padding alone: it reads the row of the first query"
        rows = [words] if self.reads_one_row else []
        words = "compared under masks that all heads share: it reads the mask of the first head"
        rows += [words] if self.reads_one_head else []
        layout = "" if self.form is None else str(self.form)
        if not (layout or self.lengths):
            return tuple(rows)
        taken = layout or f"sequences {self.lengths}"
        taken += f", {self.lengths}" if layout and self.lengths else ""
        return (f"compared with {taken}: {self.misfit}", *rows)

    @cached_property
    def runs(self) -> Runs:
        """Further runs, in float64 too where the function computes so."""
        return Runs(self._run_in_dtype_of_inputs, lambda: self.dtype)

    @torch.no_grad()
    def _run_in_dtype_of_inputs(self, inputs: Inputs) -> Tensor:
        return (self._wide if inputs.x.dtype == torch.float64 else self)._call_function(inputs)

    @cached_property
    def _wide(self) -> BlackBox:
        return self.in_dtype(torch.float64)

    def in_dtype(self, dtype: torch.dtype) -> BlackBox:
        """Return the function to run in a dtype: a module as a copy with weights of that dtype."""
        called = self.function
        called = copy.deepcopy(called).to(dtype) if isinstance(called, nn.Module) else called
        other = BlackBox(called, self.kind, self.keys)
        other.form, other.squeezes_masks = self.form, self.squeezes_masks
        if isinstance(called, nn.Module) and self.form is not None:
            other.form = replace(self.form, dtype=None)
        return other

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
        given = self._name_arguments(inputs)
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
        known, errors = self.form, list[Exception]()
        # Code for arrays may run on tensors until it meets a mask.
        forms = (Form(), Form(is_array=True)) if known in (None, Form()) else (known,)
        for form in forms:
            try:
                ran = self._run_in_form(form, given, call)
            except FAILURES_OF_A_FUNCTION as error:
                errors.append(error)
                continue
            self.form = form if errors else known
            return ran
        raise self._explain_failures(given, errors) from errors[0]

    def _explain_failures(
        self, given: Mapping[str, Tensor], errors: Sequence[Exception]
    ) -> OptionError:
        """Return the error for a function that fails in each form that was tried."""
        shapes = " and ".join(f"{name} of shape {tuple(x.shape)}" for name, x in given.items())
        first, *others = (f"({describe_error(error)})" for error in errors)
        failed = f"{shapes} {first}"
        tried = ""
        if self.form is None:
            failed = f"tensors {first} and on NumPy arrays {others[0]}"
            tried = "; other lengths, types and axes fail too" if self.misfit else ""
        return OptionError(
            saw=f"{self.kind} that fails on {failed}",
            needed=f"a function that runs on {shapes}, float32",
            do=f"run it on such an input first{tried}",
        )

    def _run_in_form(
        self, form: Form, given: Mapping[str, Tensor], call: NamedCall
    ) -> tuple[Any, Mapping[str, Tensor]]:
        copies = {name: x.clone() for name, x in given.items()}
        return form.run(copies, call), copies if form.dtype is None else given

    def _name_arguments(self, inputs: Inputs) -> dict[str, Tensor]:
        mask = inputs.mask
        if mask is not None and self.squeezes_masks:
            mask = mask[:, 0, 0] if mask.shape[2] == 1 else mask[0, 0]
        named = {"x": inputs.x, "source": inputs.source, "mask": mask}
        return {name: value for name, value in named.items() if value is not None}

    def _call_with_named_arguments(self, arguments: Mapping[str, Any]) -> Any:
        named = {**arguments}
        x = named.pop("x")
        if self.needs_mask and "mask" not in named:
            named["mask"] = _show_all_keys(x, named.get("source", x))
        if self.needs_source:
            named.setdefault("source", x)
        return self.function(x, *(x for _ in self.keys), **named)


class _HeadChoice(DispatchMode):  # type: ignore[misc]
    """Mode that notes if a head of a mask is taken by its number, which drops the axis."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.shape, self.is_made = mask.shape[1:], False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        del types
        if str(func) == "aten.select.int":
            self.is_made |= args[0].shape[args[1] :] == self.shape
        return func(*args, **(kwargs or {}))


def _describe_change(before: Tensor, now: Tensor) -> str:
    """Return how far two outputs are apart; "" for equal ones."""
    if before.shape != now.shape:
        return f"of shape {tuple(now.shape)} in place of {tuple(before.shape)}"
    if torch.equal(before.nan_to_num(), now.nan_to_num()):
        return ""
    return f"they differ by up to {float((before - now).abs().nan_to_num().max()):.3g}"


def _show_all_keys(x: Any, source: Any) -> Any:
    """Return a mask that hides nothing, (batch, 1, queries, keys), or without these axes."""
    *batch, queries, _ = x.shape
    shape = (*batch, 1, queries, source.shape[-2]) if batch else (queries, source.shape[-2])
    return (np if isinstance(x, np.ndarray) else torch).ones(shape, dtype=bool)


def _narrowest_dtype(x: Tensor) -> torch.dtype:
    x = x[x.isfinite()]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(x.to(dtype).to(x.dtype), x):
            return dtype if is_coarser(dtype, x.dtype) else x.dtype
    return x.dtype
