"""Comparison of two attentions that run on the same inputs.

One of them is known as data: its weights and settings predict each stage of the other one from the
stages before it. So a cause explains the stages that part by their own doing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import torch

from headwise.diagnosis import functions, probes, unseen, watch
from headwise.diagnosis.causes import scores
from headwise.diagnosis.causes.evidence import Evidence
from headwise.diagnosis.explained import ExplainedCalls, explain_other_way, search_causes
from headwise.diagnosis.probes import NamedInputs
from headwise.diagnosis.simulation.gaps import measure_gaps
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    Inputs,
    RecordedCall,
    has_masks_of_heads,
)
from headwise.diagnosis.subjects import recording, subject
from headwise.diagnosis.subjects.forms import name_arguments
from headwise.diagnosis.subjects.function import SLOW, BlackBox
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.diagnosis.subjects.parts import holds_modules
from headwise.diagnosis.subjects.subject import ModuleSubject, Subject
from headwise.errors import OptionError
from headwise.function.rounding import (
    BACKWARD,
    coarsest,
    default_tolerance,
    is_coarser,
    relative_difference_norm,
)
from headwise.identify import catalogue
from headwise.identify.comparison import SEED, GradientGap
from headwise.identify.results import Diagnosis, Verdict

RECORD_PARTS = (
    "next, record q, k and v too: compare(port, layer, parts={'q': port.q_proj, 'k': port.k_proj, "
    "'v': port.v_proj}), with the modules that compute them"
)
OF_INPUTS = 0.5  # of the budget, that runs of the inputs may take
UNSTATED = "the layer runs otherwise than its weights and settings state, such as by a hook"
# Causes that inputs of usual length and size may not show.
IN_FURTHER_CALLS = (
    catalogue.WINDOW_MISSING,
    catalogue.WINDOW_OFF_BY_ONE,
    catalogue.SOFTCAP,
    catalogue.ONE_HEAD_FOR_ALL,
)


IGNORES_MASKS = "the {} gives the same outputs whatever mask it is given, of padding too"


class Comparison:
    """Two subjects run on the same inputs.

    The causes are those in ``doubtful``. It is the first subject, or the second where the first
    alone is known as data. Only ``candidates`` are named.
    """

    def __init__(
        self,
        first: Subject,
        second: Subject,
        probes: Sequence[NamedInputs],
        candidates: Sequence[catalogue.Cause] = catalogue.CAUSES,
    ) -> None:
        self.first, self.second, self.probes = first, second, probes
        self.candidates = candidates
        self.further: Sequence[NamedInputs] = ()  # to be run where a function agrees on all others
        self.ran: list[NamedInputs] = []
        self.doubtful, self.known = (first, second) if second.model else (second, first)
        self.failed: list[str] = []  # inputs on which the doubtful one failed, in words
        # The model of one without a cache computes calls with a cache.
        takes_steps = self.known.step_arguments is not None
        taken = (each for each in probes if takes_steps or not each.inputs.steps)
        self.known_calls, self.known_names = _record(self.known, taken)
        if isinstance(self.doubtful, recording.Recording):
            self.doubtful.require_shapes_of(self.known_calls[0])
        # A layer's own calls may have causes too, such as hooks of its modules.
        assert self.known.model is not None
        self.model: AttentionModel = self.known.model
        named = search_causes(Evidence.of(self.model, self.known_calls), catalogue.CAUSES)
        self.runs_as_stated = not named.left.cells_beyond_rounding
        if named.causes and self.runs_as_stated:
            self.model = replace(named.causes[-1].model, of_weights=self.model)

    def diagnosis(self) -> Diagnosis:
        """Return the verdict and its evidence."""
        try:
            calls, names = self._record_doubtful(self.probes)
        except OptionError as error:
            return self._diagnose_randomness(error)
        time = watch.current()
        if isinstance(self.doubtful, BlackBox) and not time.stopped:
            self.doubtful.require_stateless()
        side = "first" if self.doubtful is self.first else "second"
        everything = ExplainedCalls(
            self.model, calls, names, self.dtype, self.candidates, side, self._language
        )
        if len({{*call.stages} == {"output"} for call in calls}) > 1:  # a cause shows in all calls
            everything = everything.with_outputs_alone(self.doubtful.runs)
            calls = [*everything.calls]
        explained = self._look_further(self._explain_by_few_calls(everything))
        if not explained.outputs_agree:
            explained = self._explain_otherwise(calls, explained)
        verdict, blind, hidden = self._judge(explained, calls)
        if self._condition and verdict in (Verdict.SAME, Verdict.TO_ROUNDING):
            verdict = Verdict.UNDER_MASK
        comparison = explained.report(
            kinds=(self.first.kind, self.second.kind),
            probes=tuple(dict.fromkeys(probe.name for probe in self.ran)),
            seed=SEED,
            blind=blind,
            isolated=(
                *functions.describe_not_finite(calls, names, side),
                *self._describe_function(side, verdict),
                *explained.describe_projections(self.doubtful.model),
            ),
            tried=0 if explained.has_other_rows else len(self.candidates),
            unseen=unseen.find_changes(self.model, calls, self.dtype) if hidden else (),
            unprobed=(*(self._list_unprobed_arguments() if hidden else ()), *self.failed),
            ways=tuple(_describe_ways(everything, self.probes, self.doubtful)),
            stopped=time.stopped,
            untried=tuple(time.untried),
            condition=self._condition if verdict.is_same else "",
        )
        return Diagnosis(verdict=verdict, function=comparison)

    @property
    def _condition(self) -> str:
        """The mask that one side needs to be the other, in a sentence; "" for none."""
        sides = [(self.first, "first"), (self.second, "second")]
        (causal, name), (other, needy) = sides[::-1] if self.second.is_causal else sides
        settings = None if other.model is None else other.model.settings
        has_mask = settings and (settings.causal or (settings.sides or (0, 1))[1] == 0)
        is_added = any(probe.is_made_causal for probe in self.probes)
        if has_mask or other.is_causal or not (causal.is_causal and is_added):
            return ""
        mask = "`Mask.causal()`" if isinstance(other, NativeSubject) else "a causal mask"
        return f"The {name} is causal by itself; pass {mask} to the {needy}."

    def _judge(
        self, explained: ExplainedCalls, calls: Sequence[RecordedCall]
    ) -> tuple[Verdict, str, bool]:
        """Return the verdict, why inputs could not show a difference, and if equality hides others.

        The last is True for the same outputs of other numbers or settings.
        """
        verdict, stopped = explained.verdict, watch.current().stopped
        if stopped and verdict.is_same:
            return Verdict.INCONCLUSIVE, stopped, False
        if (verdict is Verdict.TO_ROUNDING or not self.runs_as_stated) and self._is_bitwise():
            verdict = Verdict.SAME
        if not verdict.is_same:
            return verdict, "", False
        if verdict is not Verdict.SAME and not self.runs_as_stated:
            return Verdict.INCONCLUSIVE, UNSTATED, False
        hidden = not self._are_equal_as_data()
        blind = self._blind_spot(verdict, calls) if hidden else ""
        blind = (
            blind
            or self._describe_overflow()
            or subject.describe_dropout_difference(self.first.dropout, self.second.dropout)
        )
        return (Verdict.INCONCLUSIVE, blind, False) if blind else (verdict, "", hidden)

    def _diagnose_randomness(self, error: OptionError) -> Diagnosis:
        sizes, most = self.known.input_widths, scores.count_readable_tokens(self.model)
        is_random = isinstance(self.doubtful, BlackBox) and self.doubtful.is_random
        if not is_random or sizes is None or not most or self.candidates != catalogue.CAUSES:
            raise error
        few = probes.make_few_tokens(sizes, most, crosses=sizes[0] != sizes[1])
        left_on = (catalogue.DROPOUT_LEFT_ON,)
        comparison = Comparison(self.first, self.second, few, left_on)
        comparison.failed.append("longer inputs: compare again without dropout")
        try:
            diagnosis = comparison.diagnosis()
        except OptionError:  # by what the function keeps between calls
            raise error from None
        function = diagnosis.function
        if function is None or not function.causes or function.unexplained_places:
            raise error
        return diagnosis

    @property
    def dtype(self) -> torch.dtype:
        """The dtype whose rounding is allowed: of the doubtful one; the coarser for a function.

        A function may compute in the dtype of the layer that it copies, whatever it returns.
        """
        if isinstance(self.doubtful, BlackBox):
            return coarsest((self.doubtful.dtype, self.known.dtype))
        return self.doubtful.dtype

    def _record_doubtful(
        self, probes: Sequence[NamedInputs]
    ) -> tuple[list[RecordedCall], list[str]]:
        calls: list[RecordedCall] = []
        names: list[str] = []
        time = watch.current()
        for number, probe in enumerate(probes):
            left = f"{len(probes) - number} of {len(probes)} inputs"
            try:
                stage = f"running {probe.name}{self._pace(len(probes))}"
                time.progress(stage, number, len(probes))
                if number and time.is_spent(OF_INPUTS):
                    raise watch.OutOfTimeError
                more, each = _record(self.doubtful, [probe], self.failed)
            except watch.STOPS as error:
                if not calls:
                    raise
                time.stop(error, left)
                break
            calls += more
            names += each
            self.ran += [probe] if each else []
        if isinstance(self.doubtful, BlackBox):  # whose dtype is known after all calls
            calls = [replace(call, dtype=self.dtype) for call in calls]
        return calls, names

    def _pace(self, probes: int) -> str:
        if not isinstance(self.doubtful, BlackBox) or self.doubtful.seconds < SLOW:
            return ""
        seconds = self.doubtful.seconds
        return f" ({seconds:.2g} s a call, {probes + 2} calls are planned)"

    def _list_unprobed_arguments(self) -> Iterator[str]:
        inputs = [probe.inputs for probe in self.ran]
        for name in ("mask", "source"):
            takes = [getattr(each, f"takes_{name}") for each in (self.first, self.second)]
            if any(takes) and all(getattr(each, name) is None for each in inputs):
                side = "second" if takes[0] else "first"
                lacks = (
                    ""
                    if all(takes)
                    else f" (the {side} has no argument {name}{self._others(name)})"
                )
                yield f"a {name}{lacks}"

    def _others(self, name: str) -> str:
        """Return what a function with arguments such as attn_mask is to be called by, in words."""
        function = self.doubtful
        if not isinstance(function, BlackBox) or name != "mask":
            return ""
        others = sorted(each for each in name_arguments(function.function) if name in each)
        if not others or name in others:
            return ""
        return f": compare(lambda x, mask=None: port(x, {others[0]}=mask), ...), True attends"

    def _describe_function(self, side: str, verdict: Verdict) -> tuple[str, ...]:
        function, sizes = self.doubtful, self.known.input_widths
        if not isinstance(function, BlackBox) or sizes is None:
            ignored = self._ignores_masks and not verdict.is_same
            limits = (IGNORES_MASKS.format(side),) if ignored else ()
            return (*limits, *self.first.limits, *self.second.limits)
        if verdict.is_same:
            reach = unseen.describe_reach(self.model, [probe.inputs for probe in self.ran])
            return (*function.limits, reach)
        if verdict is not Verdict.UNKNOWN or watch.current().stopped:
            return function.limits
        parts = functions.BlackBoxComparison(function, self.model, sizes, side, self.dtype)
        can_record = function.parts is None and holds_modules(function.function)
        return (*function.limits, *parts.sentences, *((RECORD_PARTS,) if can_record else ()))

    @property
    def _language(self) -> str:
        if not isinstance(self.doubtful, BlackBox):
            return ""
        return "numpy" if self.doubtful.takes_arrays else "torch"

    def _look_further(self, explained: ExplainedCalls) -> ExplainedCalls:
        """Return what explains one call more, if a function agrees on all but that one.

        A window that is missing in shorter inputs may also be a longer one.
        """
        function = self.doubtful
        if not isinstance(function, BlackBox) or function.seconds > SLOW or watch.current().stopped:
            return explained
        model: AttentionModel = self.model
        candidates: Sequence[catalogue.Cause] = IN_FURTHER_CALLS
        if not explained.outputs_agree:
            causes = explained.search.causes
            if [each.cause for each in causes] != [catalogue.WINDOW_MISSING]:
                return explained
            model, candidates = causes[-1].model, self.candidates
        for probe in self.further:
            if has_masks_of_heads(probe.inputs) and not function.takes_heads(probe.inputs):
                continue
            with suppress(OptionError):  # of a function that takes fewer tokens, or smaller ones
                # In float64 if it can: biases by position round more, the longer an input is.
                call = replace(function.runs.record(probe.inputs), dtype=self.dtype)
                self.ran.append(probe)
                if measure_gaps(model, [call]).cells_beyond_rounding:
                    calls, names = [*explained.calls, call], [*explained.names, probe.name]
                    options = (self.dtype, candidates, explained.side, self._language)
                    return ExplainedCalls(self.model, calls, names, *options)
        return explained

    def _explain_by_few_calls(self, everything: ExplainedCalls) -> ExplainedCalls:
        """Return what explains the calls, found without those of one token each if that is enough.

        Many short calls take long, and mostly show what a few longer ones show. Masks show another
        fault only where they are not ignored.
        """
        short = {probe.name for probe in self.probes if probe.has_short_calls}
        masked = {probe.name for probe in self.probes if probe.inputs.mask is not None}
        masked = masked if self._ignores_masks else set()
        pairs = list(zip(everything.calls, everything.names, strict=True))
        few = [pair for pair in pairs if pair[1] not in short | masked]
        if everything.outputs_agree or not few or len(few) == len(pairs):
            return everything
        explained = replace(everything, calls=[call for call, _ in few], names=[n for _, n in few])
        if explained.outputs_agree:
            return everything
        causes = explained.search.causes
        if not explained.explains_all or not causes:
            return explained
        rest = [call for call, name in pairs if name in short - masked]
        is_wrong = measure_gaps(causes[-1].model, rest).cells_beyond_rounding
        return everything if is_wrong else explained

    @cached_property
    def _ignores_masks(self) -> bool:
        """True if a module gives the same outputs without the masks of its inputs."""
        given = (x.inputs for x in self.ran if x.inputs.mask is not None and not x.inputs.steps)
        if not isinstance(self.doubtful, ModuleSubject) or (masked := next(given, None)) is None:
            return False
        outputs = [self.doubtful.output(x) for x in (masked, replace(masked, mask=None))]
        return torch.equal(*outputs)

    def _explain_otherwise(
        self, calls: Sequence[RecordedCall], explained: ExplainedCalls
    ) -> ExplainedCalls:
        """Return what says more: the other way round, or by fewer stages or calls."""
        count = len(explained.search.causes)
        if explained.explains_all and count < 2:
            return explained
        model = self.doubtful.model if self.runs_as_stated else None
        given = (self.known_calls, self.known_names, self.known.dtype, self.candidates)
        side = "second" if explained.side == "first" else "first"
        swapped = explain_other_way(model, calls, *given, side)
        if swapped and (len(swapped.search.causes) < count or not explained.explains_all):
            return swapped
        return (
            self._explain_by_outputs(explained) or self._explain_later_calls(explained) or explained
        )

    def _explain_by_outputs(self, explained: ExplainedCalls) -> ExplainedCalls | None:
        runs = self.doubtful.runs
        shows_more = any({*call.stages} != {"output"} for call in explained.calls)
        if runs is None or not shows_more or explained.has_other_rows:
            return None
        if explained.explains_all:
            return None
        # Of stages that were recorded, pairs have been tried.
        other = replace(explained.with_outputs_alone(runs), in_pairs=False)
        return other if other.explains_all else None

    def _explain_later_calls(self, explained: ExplainedCalls) -> ExplainedCalls | None:
        """Return what explains calls with a cache alone, where all others agree."""
        parted = [
            pair
            for pair in zip(explained.calls, explained.names, strict=True)
            if measure_gaps(self.model, [pair[0]]).cells_beyond_rounding
        ]
        if explained.explains_all or not parted or not all(call.earlier for call, _ in parted):
            return None
        other = replace(explained, calls=[call for call, _ in parted], names=[n for _, n in parted])
        return other if other.explains_all else None

    def diagnosis_with_gradients(self) -> Diagnosis:
        """Return the diagnosis; where outputs agree, gradients must agree as well.

        Those of the weights are compared where the weights are the same.
        """
        diagnosis = self.diagnosis()
        if not diagnosis.verdict.is_same:
            return diagnosis
        with_weights = diagnosis.verdict is not Verdict.OTHER_WEIGHTS
        inputs = self._single_calls
        gaps = compare_gradients(self.first, self.second, inputs, with_weights=with_weights)
        assert diagnosis.function is not None
        agree = all(gap.is_rounding for gap in gaps)
        verdict = diagnosis.verdict if agree else Verdict.UNKNOWN
        function = replace(diagnosis.function, gradients=gaps)
        return replace(diagnosis, verdict=verdict, function=function)

    def _blind_spot(self, verdict: Verdict, calls: Sequence[RecordedCall]) -> str:
        if blind := unseen.explain_scores(self.model, calls, self.dtype):
            return blind
        reason = unseen.describe_setting(self.first.model, self.second.model, calls, self.dtype)
        are_data = self.first.model is not None and self.second.model is not None
        differ = verdict is Verdict.OTHER_WEIGHTS or (
            are_data and not self._are_equal_as_data(bare=True)
        )
        if differ and not self._outputs_agree_on_probes():
            elsewhere = "outputs agree on these inputs and differ on those that headwise makes"
            reason = reason or unseen.describe_degenerate_attention(self.model, calls)
            return "; ".join(filter(None, [reason, elsewhere]))
        return reason

    def _outputs_agree_on_probes(self) -> bool:
        """True if outputs agree on headwise's own inputs, or cannot be had."""
        sizes = self.known.input_widths
        if isinstance(self.doubtful, recording.Recording) or sizes is None:
            return True
        made = probes.make_probes([self.first, self.second], sizes)
        calls, names = self._record_doubtful(made)
        return ExplainedCalls(self.model, calls, names, self.dtype).outputs_agree

    def _describe_overflow(self) -> str:
        sentences = list[str]()
        for side, each in (("first", self.first), ("second", self.second)):
            if each.model is None or not is_coarser(each.dtype, torch.float64):
                continue
            given = [probe for probe in self.probes if not probe.inputs.steps]
            calls = [RecordedCall(x.inputs, {"output": each.output(x.inputs)}) for x in given]
            names, dtype = [x.name for x in given], str(each.dtype).removeprefix("torch.")
            bad = functions.describe_not_finite(calls, names, side)
            sentences += [f"in {dtype}, its own dtype, {sentence}" for sentence in bad]
        return sentences[0] if len(sentences) == 1 else ""

    @property
    def _single_calls(self) -> list[Inputs]:
        return [probe.inputs for probe in self.probes if not probe.inputs.steps]

    def _is_bitwise(self) -> bool:
        pairs = ((self.first.output(x), self.second.output(x)) for x in self._single_calls)
        return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)

    def _are_equal_as_data(self, *, bare: bool = False) -> bool:
        first, second = self.first.model, self.second.model
        if first is None or second is None:
            return False
        if bare:
            first, second = replace(first, weights={}), replace(second, weights={})
        return first.is_equal(second)


def _record(
    recorded: Subject, probes: Iterable[NamedInputs], failed: list[str] | None = None
) -> tuple[list[RecordedCall], list[str]]:
    """Return the calls of a subject on some inputs, and the name of each input.

    Optional inputs, and those on which a function fails that ran on others, are left out;
    ``failed`` gets the reason.
    """
    calls: list[RecordedCall] = []
    names: list[str] = []
    for probe in probes:
        try:
            more = recorded.record_calls(probe.inputs)
        except OptionError as error:
            # An error of the function itself has its cause.
            ran = recorded.has_run and error.__cause__
            if not (probe.is_optional or ran) or failed is None:
                raise
            failed.append(f"{probe.name} ({error.saw})")
            continue
        calls += more
        names += [probe.name] * len(more)
    return calls, names


def _describe_ways(
    explained: ExplainedCalls, probes: Sequence[NamedInputs], doubtful: Subject
) -> Iterator[str]:
    """Yield which ways of calling agree, where some of the inputs come in several calls."""
    names = {*explained.names}
    given = {probe.name: probe.inputs for probe in probes if probe.name in names}
    if steps := [inputs for inputs in given.values() if inputs.steps]:
        yield _state_agreement(explained, given)
        yield from _compare_with_one_call(explained, steps, doubtful)


def _state_agreement(explained: ExplainedCalls, given: Mapping[str, Inputs]) -> str:
    agreement: dict[str, list[bool]] = {}
    for name, is_equal in zip(explained.names, explained.agreement, strict=True):
        agreement.setdefault(name, []).append(is_equal)
    words: dict[str, str] = {}
    for name, agrees in agreement.items():
        way = given[name].way
        if False in agrees:
            start = sum(given[name].steps[: agrees.index(False)])
            words[way] = "different" + (f" from token {start} on" if start else "")
        words.setdefault(way, "equal")
    return "; ".join(f"{way}: {each}" for way, each in words.items())


def _compare_with_one_call(
    explained: ExplainedCalls, steps: Sequence[Inputs], doubtful: Subject
) -> Iterator[str]:
    settings = explained.model.settings
    is_causal = settings.causal or (settings.sides or (None, None))[1] == 0
    if explained.outputs_agree or not is_causal:
        return
    inputs = min(steps, key=lambda each: len(each.steps))
    with suppress(OptionError):
        whole = doubtful.output(replace(inputs, steps=()))
        gap = relative_difference_norm(doubtful.output(inputs), whole)
        words = f"apart by {gap:.2g} of their size"
        if gap <= default_tolerance(explained.stored):
            words = "the same to rounding"
        yield f"the {explained.side} beside itself, {inputs.way} and in one call: {words}"


def compare_gradients(
    first: Subject, second: Subject, probes: Sequence[Inputs], *, with_weights: bool
) -> tuple[GradientGap, ...]:
    """Compare the gradients of inputs and, ``with_weights``, of the weights that both have.

    Each gradient is that of the sum of output * direction, where the direction is random. The
    worst of all probes is reported.

    Raises:
        OptionError: the gradients of one cannot be had.
    """
    worst: dict[str, GradientGap] = {}
    for inputs in probes:
        generator = torch.Generator().manual_seed(SEED)
        shape = second.output(inputs).shape
        direction = torch.randn(shape, generator=generator, dtype=torch.float64)
        wide, narrow = (
            [subject.gradients(inputs, direction, dtype) for subject in (first, second)]
            for dtype in (torch.float64, torch.float32)
        )
        for name in wide[0]:  # in this order in every run, which a set has not
            if name in wide[1] and (with_weights or name in ("x", "source")):
                pairs = zip(narrow, wide, strict=True)
                allowed = BACKWARD * max(
                    relative_difference_norm(n[name], w[name]) for n, w in pairs
                )
                size = relative_difference_norm(wide[0][name], wide[1][name])
                known = worst.get(name)
                if known is None or size * known.allowed > known.size * allowed:
                    worst[name] = GradientGap(name=name, size=size, allowed=allowed)
    return tuple(worst.values())
