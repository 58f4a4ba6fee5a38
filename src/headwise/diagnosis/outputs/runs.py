"""Runs of a function on inputs that show its parts: one token, two tokens, and a few.

With one token all weight is on it, so that the output holds the values and the output projection
alone. With two tokens the last query sees both, whether the function is causal or not, so that the
output holds one weight for each head.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.diagnosis import watch
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from headwise.errors import OptionError
from headwise.function.rounding import default_tolerance, is_coarser
from headwise.identify.catalogue import ROTATED

SEED = 7
AT_ONCE = 4096  # sequences of one run
FEW = 8  # sequences on which a candidate is tried first
CHANGED_AT_ONCE = 64  # models of one run
SHARE = 0.01  # of what an entry may be off by, since a norm is off by less
CLOSE = 1e-3  # two runs in dtypes of which one is float32


@dataclass(eq=False)
class Runs:
    """Outputs of a function on further inputs, in float64 where it computes so.

    ``run`` takes inputs of float32 and may take those of float64. ``read_dtype`` returns the dtype
    that its outputs had so far.
    """

    run: Callable[[Inputs], Tensor]
    read_dtype: Callable[[], torch.dtype]
    unnamed: list[tuple[Any, Any]] = field(default_factory=list, repr=False)  # models and reads
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what is made once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the outputs, whose rounding is allowed."""
        return self.read_dtype()

    @property
    def is_narrow(self) -> bool:
        """True if the outputs are rounded so much that no weights can be read."""
        return is_coarser(self.dtype, torch.float32)

    @property
    def tolerance(self) -> float:
        """The relative norm of a difference that rounding explains."""
        return SHARE * default_tolerance(self.dtype)

    def record(self, inputs: Inputs) -> RecordedCall:
        """Return the call on these inputs, with its output in float64.

        Raises:
            OptionError: the function fails, or returns numbers that are not finite.
        """
        is_fine = self.remember("is fine", lambda: self._computes_in_float64(inputs))
        given = inputs.map_tokens(Tensor.double if is_fine else Tensor.float)
        starts = range(0, len(inputs.x), AT_ONCE)
        output = torch.cat([self.run(_take(given, n, AT_ONCE)).double() for n in starts])
        if not bool(output.isfinite().all()):
            raise OptionError(
                saw="outputs that are not finite on random tokens",
                needed="finite outputs",
                do="look for rows whose keys are all hidden",
            )
        return RecordedCall(given.map_tokens(Tensor.double), {"output": output}, self.dtype)

    @property
    def is_fine(self) -> bool:
        """True if the function computes in float64, as its calls so far have shown."""
        return bool(self._kept.get("is fine", False))

    def _computes_in_float64(self, inputs: Inputs) -> bool:
        """True if a run in float64 gives numbers of float64, near to those of float32."""
        few = _take(inputs, 0, FEW)
        coarse = self.run(few.map_tokens(Tensor.float)).double()
        try:
            fine = self.run(few.map_tokens(Tensor.double))
        except OptionError:  # weights of float32 take no tokens of float64
            return False
        if fine.dtype != torch.float64 or torch.equal(fine, fine.float().double()):
            return False
        return bool((fine - coarse).norm() <= CLOSE * coarse.norm())

    def random_call(
        self, model: AttentionModel, batch: int, tokens: int, *, crosses: bool
    ) -> RecordedCall:
        """Return a call of random tokens; where it crosses, of one query and that many keys."""
        queries, keys = model.token_widths

        def make() -> RecordedCall:
            x = draw_tokens((batch, 1 if crosses else tokens, queries), SEED)
            source = draw_tokens((batch, tokens, keys), SEED + 1) if crosses else None
            return self.record(Inputs(x, source))

        call: RecordedCall = self.remember((batch, tokens, crosses), make)
        return call

    def single_call(self, model: AttentionModel, *, crosses: bool) -> RecordedCall:
        """Return a call of sequences of one token, twice as many as it has channels."""
        return self.random_call(model, 2 * max(model.token_widths) + 10, 1, crosses=crosses)


def draw_tokens(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normal numbers of float32, as float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).double()


def agrees(model: AttentionModel, call: RecordedCall, tolerance: float) -> bool:
    """True if a model predicts the output at the last query of a call, by the norm."""
    sides = (_take_few(call), call) if len(call.inputs.x) > FEW else (call,)
    return all(relative_gap(model, each) <= tolerance for each in sides)


def predict_each(
    model: AttentionModel, changed: Sequence[AttentionModel], stage: str, call: RecordedCall
) -> Iterator[Tensor]:
    """Yield a stage at the last query of a call by each of some models.

    They have other projections q, k and v than ``model``, or other norms, and are one run of many
    sequences.
    """
    bare = RecordedCall(call.inputs, {})
    for start in range(0, len(changed), CHANGED_AT_ONCE):
        watch.look()
        some = changed[start : start + CHANGED_AT_ONCE]
        inputs = call.inputs.map_tokens(lambda x: x.repeat(len(some), 1, 1))  # noqa: B023
        names = (*ROTATED, "v")
        made = {name: torch.cat([m.predict_stage(name, bare) for m in some]) for name in names}
        predicted = model.predict_stage(stage, RecordedCall(inputs, made))
        last = predicted[:, -1] if stage == "output" else predicted[:, :, -1]
        yield from last.unflatten(0, (len(some), -1))


def agree_on_few(
    model: AttentionModel, changed: Sequence[AttentionModel], call: RecordedCall, tolerance: float
) -> list[bool]:
    """True for each model of other projections that predicts the first sequences of a call."""
    few = _take_few(call)
    output = few.stages["output"][:, -1]
    each = predict_each(model, changed, "output", few)
    return [bool((x - output).norm() <= tolerance * output.norm()) for x in each]


def _take_few(call: RecordedCall) -> RecordedCall:
    return RecordedCall(_take(call.inputs, 0, FEW), {"output": call.stages["output"][:FEW]})


def relative_gap(model: AttentionModel, call: RecordedCall) -> float:
    """Return how far a model is from the output at the last query, relative to its norm."""
    predicted = model.predict_stage("output", RecordedCall(call.inputs, {}))
    output = call.stages["output"]
    if predicted.shape != output.shape:
        return math.inf
    return float((predicted[:, -1] - output[:, -1]).norm() / output[:, -1].norm())


def _take(inputs: Inputs, start: int, count: int) -> Inputs:
    return inputs.map_tokens(lambda x: x[start : start + count])
