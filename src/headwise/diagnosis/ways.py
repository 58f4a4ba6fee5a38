"""Ways of calling an attention: in one call, and in several with a cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from headwise.diagnosis.probes import NamedInputs
from headwise.diagnosis.search import ExplainedCalls
from headwise.diagnosis.simulation.model import Inputs
from headwise.diagnosis.subjects.subject import Subject
from headwise.errors import OptionError
from headwise.function.rounding import default_tolerance, relative_difference_norm


def describe(
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
