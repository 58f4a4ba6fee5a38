"""`compare`: whether two attentions are the same function, and if not, why."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from headwise.diagnosis.causes.all_causes import CAUSES
from headwise.diagnosis.diagnosis_result import Diagnosis, Verdict
from headwise.diagnosis.function_comparison import (
    FoundCause,
    FunctionComparison,
    PartedStage,
    page_of,
)
from headwise.diagnosis.power import blind_spot
from headwise.diagnosis.probes import SEED, NamedInputs, own_probes
from headwise.diagnosis.search import NamedCause, Search, search
from headwise.diagnosis.simulation.attention_model import AttentionModel
from headwise.diagnosis.simulation.gaps import WHOLE, difference
from headwise.diagnosis.simulation.stage_rounding import allowed
from headwise.diagnosis.simulation.stages import STAGES, Inputs, RecordedCall
from headwise.diagnosis.subjects.black_box import BlackBox
from headwise.diagnosis.subjects.native_subject import NativeSubject
from headwise.diagnosis.subjects.recording import Recording, is_recording
from headwise.diagnosis.subjects.subject import Subject
from headwise.diagnosis.subjects.torch_subject import TorchSubject
from headwise.diagnosis.verify import verify
from headwise.errors import OptionError, ShapeError
from headwise.layers.native.attention import Attention

Comparable = (
    Attention | nn.MultiheadAttention | Callable[..., Any] | str | Path | Mapping[str, Tensor]
)
WEIGHTS = (str, os.PathLike, Mapping)


def compare(a: Comparable, b: Comparable, inputs: Tensor | Inputs | None = None) -> Diagnosis:
    """Say whether two attentions are the same function, and if not, why.

    Both run on the same inputs. Where their outputs differ, each stage of ``b`` is computed from
    the stages of ``a`` before it, which shows the stages that part by their own doing. A cause is
    named only where it makes a stage equal to rounding, in every entry.

    Args:
        a: the attention in doubt: a layer of headwise or torch, a function of (batch, tokens,
            width) tensors, or a file of activations that were recorded elsewhere (see
            `headwise.diagnosis.subjects.recording`); weights as a file, folder or state dict are
            compared with weights.
        b: the attention that it should equal. One of the two must be a layer.
        inputs: (batch, tokens, width), or `Inputs`; None for inputs that headwise makes.

    Returns:
        The verdict, the causes with their repair, and the evidence. It is true if both are the
        same function.

    Raises:
        OptionError: neither is a layer, or a function fails, has state, or returns NaN.
        ShapeError: the two take tokens of other widths.
    """
    if _is_stored(a) and _is_stored(b):
        return verify(a, b)
    first, second = _subject("a", a), _subject("b", b)
    probes = _probes(first, second, inputs)
    return Comparison(first, second, probes).diagnosis()


def _is_stored(value: object) -> TypeGuard[str | Path | Mapping[str, Tensor]]:
    """True for weights: a file, a folder or a state dict."""
    return isinstance(value, WEIGHTS) and not is_recording(value)


def _subject(name: str, value: object) -> Subject:
    if isinstance(value, Attention):
        return NativeSubject(value)
    if isinstance(value, nn.MultiheadAttention):
        return TorchSubject(value)
    if isinstance(value, str | Path) and is_recording(value):
        return Recording(Path(value))
    if isinstance(value, WEIGHTS):
        raise OptionError(
            saw=f"{name} as weights and the other as a layer",
            needed="weights on both sides, or what runs on both",
            do=f"load the layer: {name}=headwise.checkpoints.attention_loading.load_attention(...)",
        )
    if callable(value):
        return BlackBox(value, kind=type(value).__name__)
    raise OptionError(
        saw=f"{name} of type {type(value).__name__}",
        needed="an attention layer, a function of tensors, or weights",
        do="headwise.compare(ported_layer, original_layer)",
    )


def _probes(first: Subject, second: Subject, inputs: Tensor | Inputs | None) -> list[NamedInputs]:
    for each in (first, second):
        if isinstance(each, Recording):
            if inputs is not None:
                raise OptionError(
                    saw=f"inputs beside {each.kind}",
                    needed="the input that the recording was made with",
                    do="leave inputs out",
                )
            return [NamedInputs(f"the input of {each.kind}", each.inputs)]
    sizes = [each.sizes for each in (first, second) if each.sizes is not None]
    if not sizes:
        raise OptionError(
            saw="two functions of which nothing else is known",
            needed="one layer at least, whose weights and settings can be read",
            do="build the layer that one of them should be: headwise.Attention(...)",
        )
    if len({*sizes}) > 1:
        raise ShapeError(
            saw=f"a takes tokens of width {sizes[0][0]}, b of width {sizes[1][0]}",
            needed="two attentions of the same input",
            do="compare layers of the same model",
        )
    if inputs is None:
        return own_probes(sizes[0], crosses=sizes[0][0] != sizes[0][1])
    given = inputs if isinstance(inputs, Inputs) else Inputs(inputs)
    return [NamedInputs(f"your input of {given.x.shape[1]} tokens", given)]


class Comparison:
    """Two subjects run on the same inputs.

    The causes are those in ``doubtful``. It is the first subject, or the second where the first
    alone is known as data.
    """

    def __init__(self, first: Subject, second: Subject, probes: Sequence[NamedInputs]) -> None:
        self.first, self.second, self.probes = first, second, probes
        self.names: list[str] = []  # of the probe of each call
        self.doubtful, self.known = (first, second) if second.model else (second, first)
        assert self.known.model is not None
        self.model: AttentionModel = self.known.model

    def diagnosis(self) -> Diagnosis:
        """Return the verdict and its evidence."""
        calls: list[RecordedCall] = []
        for probe in self.probes:
            recorded = self.doubtful.calls(probe.inputs)
            calls += recorded
            self.names += [probe.name] * len(recorded)
        named = search(self.model, calls, CAUSES)
        if self._outputs_agree(calls):
            is_same = not named.gaps.parted and self._is_bitwise()
            verdict = Verdict.SAME if is_same else Verdict.TO_ROUNDING
            verdict = Verdict.OTHER_WEIGHTS if named.gaps.parted else verdict
        else:
            verdict = Verdict.DIFFERENT if named.causes else Verdict.UNKNOWN
        return self._diagnosis(verdict, named, calls)

    def _agree_elsewhere(self) -> bool:
        """True if outputs agree on headwise's own inputs, or cannot be had."""
        sizes = self.known.sizes
        if isinstance(self.doubtful, Recording) or sizes is None:
            return True
        probes = own_probes(sizes, crosses=sizes[0] != sizes[1])
        return self._outputs_agree([self.doubtful.record(probe.inputs) for probe in probes])

    def _is_bitwise(self) -> bool:
        single = [probe.inputs for probe in self.probes if not probe.inputs.steps]
        pairs = ((self.first.output(inputs), self.second.output(inputs)) for inputs in single)
        return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)

    def _outputs_agree(self, calls: Sequence[RecordedCall]) -> bool:
        return all(self._gap(call)[1] for call in calls)

    def _gap(self, call: RecordedCall) -> tuple[float, bool]:
        """Return the relative difference of the outputs, and whether rounding explains it."""
        bare = replace(call, stages={})
        mine, theirs = call.stages["output"], self.model.predict("output", bare)
        if mine.shape != theirs.shape:
            return torch.inf, False
        apart = difference(theirs, mine)
        is_rounding = bool((apart <= allowed(self.model, bare, "output")).all())
        return float(
            apart.norm() / mine.norm().clamp_min(torch.finfo(torch.float64).tiny)
        ), is_rounding

    def _diagnosis(
        self, verdict: Verdict, named: Search, calls: Sequence[RecordedCall]
    ) -> Diagnosis:
        blind = ""
        if verdict.is_same and not _is_one_model(self.first.model, self.second.model):
            blind = blind_spot(self.model, calls, self.doubtful.dtype)
            if verdict is Verdict.OTHER_WEIGHTS and not blind and not self._agree_elsewhere():
                blind = "outputs agree on these inputs and differ on those that headwise makes"
            verdict = Verdict.INCONCLUSIVE if blind else verdict
        recorded = [stage for stage in STAGES if any(stage in call.stages for call in calls)]
        comparison = FunctionComparison(
            kinds=(self.first.kind, self.second.kind),
            probes=tuple(probe.name for probe in self.probes),
            seed=SEED,
            output_gap=max(self._gap(call)[0] for call in calls),
            stages=tuple(recorded),
            parted=self._parted(named),
            causes=tuple(map(_reported, named.causes)),
            blind=blind,
            notes=(blind,) if blind else (),
        )
        return Diagnosis(verdict=verdict, function=comparison)

    def _parted(self, named: Search) -> tuple[PartedStage, ...]:
        left = {*named.left.parted}
        parted = []
        for stage in named.gaps.stages:
            cells = [cell for cell in named.gaps.parted if cell[0] == stage]
            heads = tuple(sorted({head for _, _, head in cells}))
            parted.append(
                PartedStage(
                    stage=stage,
                    size=max(named.gaps.cells[cell].size for cell in cells),
                    heads=None if WHOLE in heads else heads,
                    probes=tuple(dict.fromkeys(self.names[n] for _, n, _ in cells)),
                    is_explained=left.isdisjoint(cells),
                )
            )
        return tuple(parted)


def _is_one_model(first: AttentionModel | None, second: AttentionModel | None) -> bool:
    """True if two attentions have the same settings and the same numbers."""
    if first is None or second is None or first.weights.keys() != second.weights.keys():
        return False
    slopes = [model.settings.slopes for model in (first, second)]
    if (slopes[0] is None) != (slopes[1] is None):
        return False
    if slopes[0] is not None and slopes[1] is not None and not torch.equal(slopes[0], slopes[1]):
        return False
    mine, theirs = (replace(model.settings, slopes=None) for model in (first, second))
    pairs = ((first.weights[name], second.weights[name]) for name in first.weights)
    return mine == theirs and all(torch.equal(x, y) for x, y in pairs)


def _reported(named: NamedCause) -> FoundCause:
    return FoundCause(
        name=named.cause.name,
        parameters=named.variant.parameters,
        stages=tuple(named.stages),
        heads=None if named.heads is None else tuple(named.heads),
        repair=named.variant.repair,
        equals=named.equals,
        page=page_of(named.cause.name),
    )
