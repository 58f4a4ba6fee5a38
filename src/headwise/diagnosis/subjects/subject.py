"""Base class of the subjects of a comparison."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from headwise.diagnosis.outputs.runs import CLOSE, Runs
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from headwise.errors import DTypeError, OptionError
from headwise.function.rounding import default_tolerance, is_near
from headwise.layouts._layout import require_unquantised
from headwise.layouts.equality import PARTS
from headwise.support.tracing import evaluation_mode

# An error of a model. headwise's own code runs beside it, so others are left as they are.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    Warning,  # where a filter makes errors of warnings
)


def describe_error(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def describe_run_as_given(kind: str, dtype: torch.dtype) -> str:
    """Return the sentence on a module of which no copy runs."""
    name = str(dtype).removeprefix("torch.")
    return f"{kind} ran as it was given, in {name}: a copy in float64 has other outputs, or fails"


class Subject(ABC):
    """An attention that can be run or was recorded."""

    kind: str  # what it is, in a few words for reports
    dtype: torch.dtype  # of its weights or, for a function, of its outputs
    takes_mask: bool = True  # True if calls may have a mask
    takes_source: bool = False  # True if keys and values may come from another sequence
    # Of "mask" and "positions" those that calls with a cache take; None for one without a cache.
    step_arguments: frozenset[str] | None = None
    decodes: bool = False  # True if calls with a cache are compared without being asked for
    # True if queries attend to no later key without a mask of the caller; None where that is said
    # by the mask of a call.
    is_causal: bool | None = None
    # Of the weights as it was given: 0 in eval mode, None where it is not known.
    dropout: float | None = None

    @property
    def has_run(self) -> bool:
        """True if it had an output, and may fail on other inputs by its own code."""
        return False

    @property
    def limits(self) -> tuple[str, ...]:
        """Sentences on how it ran, where that is not the usual way."""
        return ()

    @property
    def runs(self) -> Runs | None:
        """Further runs, of which outputs alone are read; None where it cannot run again."""
        return None

    @property
    def model(self) -> AttentionModel | None:
        """The attention as data, None where only its outputs are known."""
        return None

    @property
    def input_widths(self) -> tuple[int, int] | None:
        """Widths of ``x`` and of the source, None where they are not known."""
        model = self.model
        if model is None:
            return None
        return model.token_widths

    @abstractmethod
    def output(self, inputs: Inputs) -> Tensor:
        """Return the output in the dtype of the subject, (batch, queries, out_dim)."""

    def record_calls(self, inputs: Inputs) -> list[RecordedCall]:
        """Return the recorded calls, one after the other with the same cache.

        Raises:
            OptionError: steps with a cache for a subject that takes none.
        """
        if not inputs.steps:
            return [self.record(inputs)]
        raise OptionError(
            saw=f"inputs with steps for {self.kind}",
            needed="an attention that is called with a cache",
            do="leave steps out",
        )

    @abstractmethod
    def record(self, inputs: Inputs) -> RecordedCall:
        """Return the stages that can be reached, computed in float64 where that is possible."""

    def gradients(
        self,
        inputs: Inputs,  # noqa: ARG002 (what subjects with gradients take)
        direction: Tensor,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Return the gradients of the sum of output * direction, computed in ``dtype``.

        Direction has the shape of the output; a function computes in its own dtype.

        Returns:
            The gradients of "x" and of "source" in the shapes of the inputs, and those of the
            weights, such as "wq", in canonical shapes where they are known.

        Raises:
            OptionError: what was recorded has no gradients.
        """
        raise OptionError(
            saw=f"gradients=True for {self.kind}",
            needed="two attentions that can be run with gradients",
            do="compare(a, b) without gradients",
        )


DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")  # attributes, the surest one first


class ModuleSubject(Subject):
    """An attention module; it runs as a copy in eval mode, and is never changed.

    A ``forward`` that was patched may hold the module itself, or code of one dtype. Where copies do
    not give the outputs of the module, it runs as it was given, and its outputs alone are known.

    Attributes:
        given: the module.
        module: the copy, in the dtype of its weights.
        dropout: of the weights as the module was given: 0 in eval mode, None where not known.
    """

    def __init__(self, module: nn.Module, kind: str = "") -> None:
        parameters = dict(module.named_parameters())
        require_unquantised(**parameters)
        if not parameters:
            raise DTypeError(
                saw=f"{type(module).__name__} has no parameters, as after quantize_dynamic",
                needed="weights of a floating-point dtype",
                do="compare(lambda x: layer(x), original), which compares the outputs alone",
            )
        self.kind = kind
        self.dropout = read_dropout(module)
        self.given, self.module = module, copy.deepcopy(module).eval()
        self.dtype = next(iter(parameters.values())).dtype
        self._runs_as_given: bool | None = None  # None before its first run

    @abstractmethod
    def run_module(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Return the output of the module, or of a copy in another dtype."""

    @cached_property
    def float64_layer(self) -> nn.Module:
        """The module in float64."""
        return copy.deepcopy(self.module).double()

    @property
    def has_run(self) -> bool:
        """True if it had an output; a patched forward may take less than its model gives."""
        return self._runs_as_given is not None

    @property
    def limits(self) -> tuple[str, ...]:
        """A sentence on a module that no copy stands for."""
        return (describe_run_as_given(self.kind, self.dtype),) if self._runs_as_given else ()

    @cached_property
    def runs(self) -> Runs:
        """Further runs, in float64 where a copy computes so."""
        return Runs(lambda inputs: self._run(inputs, inputs.x.dtype), lambda: self.dtype)

    def output(self, inputs: Inputs) -> Tensor:
        """Return the output of the module in its dtype."""
        return self._run(inputs, self.dtype)

    def record_calls(self, inputs: Inputs) -> list[RecordedCall]:
        """Return the stages of each call; the outputs alone of a module that no copy stands for."""
        output = self.output(inputs)
        if not self._runs_as_given:
            calls = self.record_in_steps(inputs) if inputs.steps else [self.record(inputs)]
            if calls and {*calls[0].stages} != {"output"}:
                return calls
        return list_calls(inputs, output, self.dtype, self.runs)

    def record_in_steps(self, inputs: Inputs) -> list[RecordedCall]:
        """Return the stages of calls with one cache; none where they are not seen."""
        return super().record_calls(inputs)

    @torch.no_grad()
    def _run(self, inputs: Inputs, dtype: torch.dtype) -> Tensor:
        if self._runs_as_given is None:
            self._runs_as_given = not self._do_copies_agree(inputs)
        copied = self.float64_layer if dtype == torch.float64 else self.module
        module = self.given if self._runs_as_given else copied
        with evaluation_mode(module):
            return self.run_module(module, inputs)

    def _do_copies_agree(self, inputs: Inputs) -> bool:
        with evaluation_mode(self.given):
            given = self.run_module(self.given, inputs).nan_to_num()
        with suppress(*FAILURES):
            same, single, wide = (
                self.run_module(copied, inputs).nan_to_num()
                for copied in (self.module, copy.deepcopy(self.module).float(), self.float64_layer)
            )
            are_same = is_near(same, given, default_tolerance(self.dtype))
            return are_same and is_near(single, wide, CLOSE)
        return False

    def gradients(self, inputs: Inputs, direction: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the gradients of the inputs, and of the weights where the module is known."""
        module = copy.deepcopy(self.module).to(dtype).requires_grad_()
        gradients = differentiate(partial(self.run_module, module), inputs, direction, dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(_gradient_or_zeros(parameter))
        # Gradients have the shapes of the weights, and are read in the same layout.
        model = type(self)(module).model
        return gradients | ({} if model is None else dict(model.weights))


def list_calls(
    inputs: Inputs, output: Tensor, dtype: torch.dtype, runs: Runs | None
) -> list[RecordedCall]:
    """Return the calls of which the outputs alone are known; each knows those before it."""
    calls: list[RecordedCall] = []
    parts = output.double().split(inputs.steps or output.shape[1], 1)
    for given, part in zip(inputs.per_call, parts, strict=True):
        calls.append(RecordedCall(given, {"output": part}, dtype, tuple(calls), runs=runs))
    return calls


def read_dropout(module: nn.Module) -> float | None:
    """Return the dropout of a module's weights: 0 in eval mode, None where it is not known."""
    if not module.training:
        return 0.0
    for name in DROPOUTS:
        value = getattr(module, name, None)
        value = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(value, int | float):
            return float(value)
    return None


def describe_dropout_difference(first: float | None, second: float | None) -> str:
    """Return the sentence on two dropouts that differ, which no run in eval mode shows."""
    if first is None or second is None or first == second:
        return ""
    return (
        f"dropout is {first:g} in the first and {second:g} in the second, which shows in training "
        "alone: call eval() on both if only inference counts"
    )


def differentiate(
    run: Callable[[Inputs], Tensor], inputs: Inputs, direction: Tensor, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return the gradients of the inputs, in a dtype or their own; weights keep theirs."""
    given = {"x": inputs.x, "source": inputs.source}
    leaves = {
        n: t.detach().to(dtype or t.dtype, copy=True).requires_grad_()
        for n, t in given.items()
        if t is not None
    }
    with torch.enable_grad():
        output = run(replace(inputs, x=leaves["x"], source=leaves.get("source")))
        if output.requires_grad:
            (output * direction.to(output.dtype)).sum().backward()
    return {name: _gradient_or_zeros(leaf) for name, leaf in leaves.items()}


def _gradient_or_zeros(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def require_finite_weights(name: str, subject: Subject) -> None:
    """Check the weights of a side of a comparison, where they are known.

    Raises:
        OptionError: weights that are NaN or infinite, or that are on the meta device.
    """
    weights = {} if subject.model is None else subject.model.weights
    if meta := [PARTS.get(key, key) for key, weight in weights.items() if weight.is_meta]:
        raise OptionError(
            saw=f"{name} on the meta device, where {', '.join(meta)} have no numbers",
            needed="weights with numbers",
            do="load the weights into the layer, on a real device",
        )
    for key, weight in weights.items():
        if bad := weight.numel() - int(weight.isfinite().sum()):
            raise OptionError(
                saw=f"{name} with {bad} of {weight.numel()} entries of its {PARTS.get(key, key)} "
                "that are NaN or infinite",
                needed="finite weights: every output would be NaN, whatever the attention does",
                do="load the weights again, or look for an overflow of float16",
            )
