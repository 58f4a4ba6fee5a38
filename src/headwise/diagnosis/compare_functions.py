"""Comparison of two functions of which nothing but the outputs is known.

Both run on the same input in float32 and in float64. The noise floor of a function is the change of
its output when the input moves by as much as the results of an attention are rounded.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from headwise.diagnosis.attention_comparison_result import FunctionComparison
from headwise.diagnosis.diagnosis_result import Diagnosis, Verdict
from headwise.diagnosis.probe_inputs import SEED, NamedInputs
from headwise.diagnosis.simulation.gaps import absolute_difference
from headwise.diagnosis.simulation.stage_rounding import DRAWS, PERTURBED, Units, function_share
from headwise.diagnosis.simulation.stages import Inputs
from headwise.diagnosis.subjects.black_box import BlackBox
from headwise.diagnosis.subjects.model_run_result import relative_difference_norm
from headwise.errors import OptionError, ShapeError

STEP = 0.15  # of the input, by which scores become a quarter smaller
IN_FLOAT64_ALONE = (
    "in float64 alone they differ by more than rounding: a part computes in float32, or the "
    "difference is too small for float32"
)
MOST = 0.5  # of the queries
KNOWN_SIDE = (
    "a layer on one side (headwise.Attention, torch.nn.MultiheadAttention) would add the stage, "
    "the heads and the cause"
)


def compare_functions(first: BlackBox, second: BlackBox, probe: NamedInputs) -> Diagnosis:
    """Compare the outputs of two functions on the caller's inputs.

    Raises:
        OptionError: a function fails on them, in float32 and in float64.
        ShapeError: their outputs have other shapes.
    """
    runs = []
    for dtype in (torch.float32, torch.float64):
        pair = _FunctionPair(_in_dtype(first, dtype), _in_dtype(second, dtype), probe.inputs, dtype)
        with suppress(OptionError):
            runs += [pair] if pair.outputs else []
    if not runs:
        runs = [_FunctionPair(first, second, probe.inputs, probe.inputs.x.dtype)]
    finer = runs[-1]
    blind = ""
    if runs[0].differs:
        verdict = Verdict.DIFFERENT
    elif finer.differs:
        verdict, blind = Verdict.INCONCLUSIVE, IN_FLOAT64_ALONE
    elif blind := _describe_insensitivity(finer):
        verdict = Verdict.INCONCLUSIVE
    else:
        is_bitwise = all(torch.equal(*run.outputs) for run in runs)
        verdict = Verdict.SAME if is_bitwise else Verdict.TO_ROUNDING
    comparison = FunctionComparison(
        kinds=(first.kind, second.kind),
        probes=(probe.name,),
        seed=SEED,
        output_gap=finer.gap,
        stages=("output",),
        blind=blind,
        isolated=(*map(str, runs), KNOWN_SIDE),
    )
    return Diagnosis(verdict=verdict, function=comparison)


def _in_dtype(function: BlackBox, dtype: torch.dtype) -> BlackBox:
    """Return a function to run in a dtype: a module as a copy with weights of that dtype."""
    called = function.function
    called = copy.deepcopy(called).to(dtype) if isinstance(called, nn.Module) else called
    return BlackBox(called, function.kind)


@dataclass(frozen=True)
class _FunctionPair:
    """Two functions on the same input in a dtype."""

    first: BlackBox
    second: BlackBox
    given: Inputs
    dtype: torch.dtype

    @property
    def inputs(self) -> Inputs:
        source = self.given.source
        source = None if source is None else source.to(self.dtype)
        return replace(self.given, x=self.given.x.to(self.dtype), source=source)

    @cached_property
    def outputs(self) -> tuple[Tensor, Tensor]:
        """The two outputs in float64."""
        a, b = (each.output(self.inputs).double() for each in (self.first, self.second))
        for function in (self.first, self.second):
            function.require_stateless()
        if a.shape != b.shape:
            raise ShapeError(
                saw=f"outputs of shape {tuple(a.shape)} in a and {tuple(b.shape)} in b",
                needed="two functions whose outputs have the same shape",
                do="compare(lambda x: a(x)[0], b, x) selects one output of several",
            )
        return a, b

    @property
    def gap(self) -> float:
        """The relative difference of the outputs."""
        return relative_difference_norm(*self.outputs)

    @cached_property
    def floors(self) -> tuple[float, float]:
        """The noise floor of each: the largest absolute change of its output by rounding."""
        first, second = self.outputs
        return self._noise_floor(self.first, first), self._noise_floor(self.second, second)

    def _noise_floor(self, function: BlackBox, output: Tensor) -> float:
        terms, x = sum(self.inputs.x.shape[-2:]), self.inputs.x
        share = function_share(terms, function.dtype)
        changes = [
            (self.run_at(function, PERTURBED.perturb(x, "x", draw, share)) - output).abs().amax()
            for draw in range(DRAWS)
        ]
        last = terms * Units.of(function.dtype).u * output.abs().amax()
        return float(torch.stack(changes).amax() + last)

    def run_at(self, function: BlackBox, x: Tensor) -> Tensor:
        """Return the output of a function at other tokens, in float64."""
        return function.output(replace(self.inputs, x=x.to(self.dtype))).double()

    @property
    def differs(self) -> bool:
        """True if the outputs are apart by more than both noise floors explain."""
        return bool((absolute_difference(*self.outputs) > sum(self.floors)).any())

    def __str__(self) -> str:
        apart = float(absolute_difference(*self.outputs).amax())
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"in {dtype} the outputs differ by {self.gap:.2g} of their size, by {apart:.2g} at "
            f"most; rounding explains {sum(self.floors):.2g}"
        )


def _describe_insensitivity(pair: _FunctionPair) -> str:
    """Return the reason why other scores would not change the outputs; "" if they would.

    Along a line of inputs the output of an attention bends where its weights change. Where each
    query gives all its weight to one key, or all values are equal, it is straight.
    """
    x, keys = pair.inputs.x, pair.inputs.key_source
    # Smaller tokens keep the largest score of a query. A norm may undo that; tokens that are mixed
    # with those before them pass it, but may have another largest score. Their step is as far above
    # rounding as its square, by which the output bends.
    step = function_share(sum(x.shape[-2:]), pair.second.dtype) ** 0.25
    steps = -STEP * x, step * x.roll(1, 1)
    if any(float(_bends(pair, each).double().mean()) > MOST for each in steps):
        return ""
    if keys.shape[1] == 1:
        return "one key: its weight is 1 whatever the scores are"
    if torch.equal(keys, keys[:, :1].expand_as(keys)):
        return "equal tokens: all values are equal, so weights change nothing"
    return "saturated: other scores do not change the outputs, as if each query had one key"


def _bends(pair: _FunctionPair, step: Tensor) -> Tensor:
    """Return True for each query whose output bends along two steps from the input."""
    start, floor = pair.outputs[1], pair.floors[1]
    near, far = (pair.run_at(pair.second, pair.inputs.x + n * step) for n in (1, 2))
    return ((start - 2 * near + far).abs() > 4 * floor).any(-1)
