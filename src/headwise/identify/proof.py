"""Proof of the layouts that a stored model may be in: its class of transformers decides."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace

from headwise.checkpoints.description import Checkpoint
from headwise.checkpoints.loading import LoadTrial, ProvedReading
from headwise.checkpoints.readings import StoredReading
from headwise.checkpoints.skeleton import NotRunError
from headwise.errors import UndecidedError
from headwise.identify.candidates import CandidateLayout, LayoutGroup
from headwise.layouts.modules import replace_numbers_with_layer_slots
from headwise.support.text import list_some

MAX_REASONS = 3


def prove_layouts(
    opened: Checkpoint, groups: Iterable[LayoutGroup]
) -> tuple[list[CandidateLayout], dict[str, str]]:
    """Return the candidates that give the numbers of the class, and why others do not.

    Each kind of module is run once. Modules that cannot be run rule out no layout.

    Raises:
        MissingExtraError: transformers is not installed.
        OptionError: the class is code that may not run.
        UndecidedError: no candidate is proved, and at least one could not be compared.
    """
    proved: list[CandidateLayout] = []
    refuted: dict[str, str] = {}
    uncompared: dict[str, list[str]] = {}  # reason -> layouts
    trials: dict[tuple[str, ...], LoadTrial] = {}
    for group in groups:
        try:
            verdict = _prove_candidate(opened, group[0], trials)
        except NotRunError as error:
            uncompared.setdefault(str(error), []).append(group[0].layout.name)
            continue
        if isinstance(verdict, str):
            refuted |= {each.layout.name: verdict for each in group}
        else:
            proved.append(replace(group[0], reasons=tuple(verdict)))
    if uncompared and not proved:
        whys = [f"as {' or '.join(names)}, {why}" for why, names in uncompared.items()]
        raise UndecidedError(
            saw=f"{opened.source.path}, which could not be compared: "
            f"{list_some(whys, MAX_REASONS)}",
            needed="a model whose class of transformers runs here on tokens, images or frames",
            do="compare values instead: --reference, the same weights in a known layout",
        )
    return proved, refuted


def _prove_candidate(
    opened: Checkpoint, candidate: CandidateLayout, trials: dict[tuple[str, ...], LoadTrial]
) -> str | list[str]:
    """Return the proofs of a candidate's modules, in words; or the reason why one is refuted."""
    proved: list[ProvedReading] = []
    not_run: dict[str, NotRunError] = {}  # by the stack of the module
    for module in candidate.modules:
        stack = replace_numbers_with_layer_slots(module.prefix)
        if stack in not_run or any(each.of_module_like(module) for each in proved):
            continue
        reading = StoredReading(opened, candidate.layout, module, candidate.modules)
        try:
            if reading.key not in trials:
                trials[reading.key] = LoadTrial.of(reading, {})
            verdict = _find_proof(reading, trials[reading.key])
        except NotRunError as error:
            not_run[stack] = error
            continue
        if isinstance(verdict, str):
            return verdict
        proved.append(verdict)
    if not proved:
        raise next(iter(not_run.values()))
    return [f"behaviour: {proof}" for proof in dict.fromkeys(each.proof for each in proved)]


def _find_proof(reading: StoredReading, trial: LoadTrial) -> ProvedReading | str:
    """Return the reading that is proved, or the stage that parts.

    Raises:
        NotRunError: there is no layer of the layout, or the function of one is open.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proved = trial.find_proved(reading)
    if proved is not None:
        return proved
    _, _, reason = trial.outcomes[reading.stored.name]
    if " differ from " not in reason:
        raise NotRunError(reason)
    if unstated := reading.list_open_fields(trial.probes[0].config):
        raise NotRunError(f"neither the layout nor the config states {' and '.join(unstated)}")
    return f"{reading.module.prefix}: {reason}"
