"""Result of `headwise.detect`: the layouts that a file may be in, and the evidence for them.

A detection is one layout, or the list of those that the evidence cannot distinguish. The result is
never a guess: names and shapes of two layouts often coincide, and so do the first rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwise.checkpoints.config import (
    Config,
    find_config_contradiction,
    find_missing_layers,
    layout_name,
    text_config,
)
from headwise.diagnosis.candidates import (
    CandidateLayout,
    LayoutGroup,
    find_candidates,
    group_equal_layouts,
)
from headwise.diagnosis.results import shorten_lines
from headwise.errors import CheckpointError, OptionError, UndecidedError
from headwise.layouts._layout import Layout
from headwise.layouts.plan import TensorHeader
from headwise.layouts.registry import Obstacle, find_obstacle, layout

NAMED = 3  # of the sizes that fit
SHOWN = 8  # tensors at fault, before the rest is counted


@dataclass(frozen=True)
class Detection:
    """Layouts that the weights of a file may be in.

    Attributes:
        candidates: the possible layouts, with reasons. Layouts that are the same map for these
            sizes and the same function form one group.
        refuted: layouts that fit the names and shapes, each with the reason why it is ruled out.
        unknown: a model_type in the config that is not in the catalogue: such a model may use known
            names for another function, so names and shapes decide nothing.
        contradiction: a sentence: the config names a model type whose layout is no candidate. Names
            and shapes then decide nothing either.
        damaged: if there are no candidates, the layouts in which only some modules are whole; each
            lists the tensors at fault.
        obstacle: if no layout fits, the reason and what to do; None where the reason is not known.
        misplaced: layouts that fit the names and shapes, but whose modules are at another place in
            their models. Only the metadata, the config, values or a run decide for one of them.
        compared: the evidence: "names", "shapes", then "metadata", "config", "values" or
            "behaviour".
    """

    candidates: tuple[tuple[CandidateLayout, ...], ...]
    refuted: Mapping[str, str]
    unknown: str | None = None
    contradiction: str | None = None
    compared: tuple[str, ...] = ("names", "shapes")
    damaged: tuple[tuple[CandidateLayout, ...], ...] = ()
    obstacle: Obstacle | None = None
    misplaced: tuple[LayoutGroup, ...] = ()

    @property
    def fitting(self) -> tuple[LayoutGroup, ...]:
        """The groups of candidates; the misplaced ones where there is no other."""
        return self.candidates or self.misplaced

    @property
    def layout(self) -> Layout | None:
        """The only layout; None for no layout, for several that differ or for a contradiction."""
        is_single = len(self.candidates) == 1 and self.unknown is None
        if self.contradiction is not None and not self.has_seen_values:
            return None
        return self.candidates[0][0].layout if is_single else None

    @property
    def has_seen_values(self) -> bool:
        """True if the values of the tensors, or outputs computed from them, were compared."""
        return not {"values", "behaviour"}.isdisjoint(self.compared)

    def __str__(self) -> str:
        return "\n".join(describe_detection(self, title="the checkpoint"))

    def to_json(self) -> dict[str, Any]:
        """Return the detection for JSON; layouts and sizes are given by name."""
        return {
            "layout": self.layout.name if self.layout else None,
            "candidates": _groups_to_json(self.candidates),
            "misplaced": _groups_to_json(self.misplaced),
            "refuted": dict(self.refuted),
            "unknown": self.unknown,
            "contradiction": self.contradiction,
            "compared": self.compared,
            "damaged": [
                {"layouts": [each.layout.name for each in group], "faults": group[0].faults}
                for group in self.damaged
            ],
        }

    def require_only_layout(self, *, file: str = "the file", parameter: str = "layout") -> Layout:
        """Return the only layout, or raise.

        Args:
            file: the name of the weights in an error message.
            parameter: the argument by which a caller names a layout.

        Raises:
            CheckpointError: only some modules are whole.
            UndecidedError: no layout fits, several fit, or the config contradicts the only one.
        """
        if self.layout is not None:
            return self.layout
        if self.damaged:
            faults = self.damaged[0][0].faults
            more = f", and {len(faults) - 1} more are at fault" if len(faults) > 1 else ""
            raise CheckpointError(
                saw=f"{file}, which would be in the layout "
                f"{' or '.join(_join_names_of_equal_layouts(self.damaged))}, but {faults[0]}{more}",
                needed="every attention tensor of every layer, in the shape of the layout",
                do="download the file again; headwise verify lists differences from another copy",
            )
        names = ", ".join(_join_names_of_equal_layouts(self.fitting))
        do = f"name the layout ({{{parameter}}}), or headwise detect with --against"
        if not self.fitting:
            saw = "which contains no attention layer of a known layout"
            needed = "the names and shapes of a layout that headwise layouts lists"
            do = f"name one of those layouts ({{{parameter}}}), or register your own"
            if self.obstacle is not None:
                saw, do = f"{saw}: {self.obstacle.reason}", self.obstacle.do
        elif self.contradiction is not None:
            saw = f"with the names and shapes of {names}, where {self.contradiction}"
            needed = "a config and tensors of the same model"
        elif self.unknown is not None:
            saw = f"of a {self.unknown} model, with the names and shapes of {names}"
            needed = "a known model_type: others may use the same names for another function"
        elif not self.candidates:
            saw = f"with the names and shapes of {names}, but at another place in the model"
            needed = "a place that a layout has: others may use the same names for other rows"
        else:
            saw = f"which may be in {len(self.candidates)} layouts: {names}"
            needed = "one layout: they are undecidable without a reference or a forward check"
            do = f"name it ({{{parameter}}}), or headwise detect with --reference or --against"
        raise UndecidedError(saw=f"{file}, {saw}", needed=needed, do=do, parameter=parameter)


def detect_by_names_and_shapes(
    headers: Mapping[str, TensorHeader],
    *,
    described: str | Layout | None = None,
    config: Config | None = None,
    **counts: int,
) -> Detection:
    """Detect the layouts that fit the names and shapes of tensors.

    Args:
        headers: name -> shape and dtype.
        described: the layout that the files describe, or its name. It decides among the layouts
            that fit; if None, the config does.
        config: of the model; it rules out layouts of another function.
        **counts: heads, kv_heads and others that the config or the caller states.

    Raises:
        OptionError: a rotary_width that no head can have.
    """
    described = None if described is None else layout(described)
    candidates = find_candidates(headers, counts, described)
    width = counts.get("rotary_width")
    head_dims = sorted({fit["head_dim"] for each in candidates for fit in each.fits})
    if width is not None and head_dims and (width % 2 or width > head_dims[-1]):
        shown = " or ".join(map(str, head_dims[-NAMED:]))
        raise OptionError(
            saw=f"rotary_width {width}, in a head_dim of {shown}",
            needed="an even number of channels, at most head_dim: they rotate in pairs",
            do="give {rotary_width} as the model has it, or leave it out",
            parameter="rotary_width",
        )
    detection = _narrow_by_metadata_and_config(candidates, described, config or {})
    if not candidates:
        return replace(detection, obstacle=find_obstacle(headers))
    groups = tuple(
        tuple(
            replace(
                each,
                faults=(*each.faults, *find_missing_layers(config or {}, each.modules, headers)),
            )
            for each in group
        )
        for group in detection.fitting
    )
    if any(each.faults for group in groups for each in group):
        return replace(detection, candidates=(), misplaced=(), damaged=groups)
    return detection


def _narrow_by_metadata_and_config(
    candidates: list[CandidateLayout], described: Layout | None, config: Config
) -> Detection:
    """Return the detection that the metadata of the files and the config leave."""
    by_config = None if described else layout_name(config)
    stated, by = (described.name, "metadata") if described else (by_config, "config")
    reasons = {each.layout.name: _find_refutation(each, candidates, config) for each in candidates}
    refuted = {name: reason for name, reason in reasons.items() if reason}
    groups = group_equal_layouts(
        ((each,) for each in candidates if each.layout.name not in refuted), operator.eq
    )
    chosen = [g for g in groups if any(each.layout.name == stated for each in g)]
    more = {"metadata": described is not None, "config": bool(config)}
    compared = ("names", "shapes", *(name for name, is_there in more.items() if is_there))
    if not chosen:
        unknown = config.get("model_type") if stated is None else None
        against = None
        if by_config and groups:
            kind = text_config(config).get("model_type", config.get("model_type"))
            why = refuted.get(by_config, f"the names or shapes are not those of {by_config}")
            against = f"the config says model_type {kind}, whose layout is {by_config}, but {why}"
        placed = tuple(g for g in groups if any(each.misplacement is None for each in g))
        misplaced = tuple(
            tuple(
                replace(each, reasons=(*each.reasons, f"place: {each.misplacement}"))
                for each in group
            )
            for group in groups
            if group not in placed
        )
        return Detection(placed, refuted, unknown, against, compared, misplaced=misplaced)
    others = (each for group in groups if group not in chosen for each in group)
    refuted |= {each.layout.name: f"the {by} says {stated}" for each in others}
    group = sorted(chosen[0], key=lambda each: each.layout.name != stated)
    return Detection((tuple(group),), refuted, compared=compared)


def _groups_to_json(groups: Iterable[LayoutGroup]) -> list[list[dict[str, Any]]]:
    return [
        [
            {"layout": each.layout.name, "sizes": each.sizes, "reasons": each.reasons}
            for each in group
        ]
        for group in groups
    ]


def narrow_detection(
    detection: Detection, groups: Iterable[LayoutGroup], refuted: Mapping[str, str], *, by: str
) -> Detection:
    """Return the detection with only the groups that agree with more evidence.

    ``by`` is the evidence: "values" or "behaviour". Groups of the same map are joined, unless their
    functions conflict; what a function leaves open is no conflict.
    """
    joined = group_equal_layouts(groups, lambda a, b: not a.conflicts(b))
    compared = (*detection.compared, by)
    return Detection(
        joined,
        refuted,
        contradiction=detection.contradiction,
        compared=compared,
        obstacle=detection.obstacle,
    )


def _find_refutation(
    candidate: CandidateLayout, candidates: Iterable[CandidateLayout], config: Config
) -> str | None:
    """Return the contradiction in the config, or the candidate that covers more modules."""
    mine = {module.prefix for module in candidate.modules}
    for other in candidates:
        theirs = {module.prefix for module in other.modules}
        if mine < theirs:
            return f"{other.layout.name} has {len(theirs)} modules here, and it {len(mine)} of them"
    reasons = [
        find_config_contradiction(config, candidate.layout.function, sizes)
        for sizes in candidate.fits
    ]
    return reasons[0] if all(reasons) else None


def describe_detection(detection: Detection, *, title: str) -> list[str]:
    """Return the detection as sentences; ``title`` is the name of the weights."""
    lines: list[str] = []
    names = _join_names_of_equal_layouts(detection.fitting or detection.damaged)
    if detection.layout is not None:
        same = " (the same map and function here)" if len(detection.candidates[0]) > 1 else ""
        lines.append(f"{title} is in the layout {names[0]}{same}")
        lines += [f"  {reason}" for reason in detection.candidates[0][0].reasons]
    elif detection.damaged:
        which = f"the layout {names[0]}" if len(names) == 1 else f"one of {len(names)} layouts"
        lines.append(f"{title} would be in {which}, if every layer were whole:")
        for group, name in zip(detection.damaged, names, strict=True):
            indent = "  " if len(names) == 1 else "    "
            lines += [f"  {name}"] if len(names) > 1 else []
            lines += [f"{indent}{line}" for line in shorten_lines(group[0].faults, SHOWN)]
    elif detection.fitting:
        lines.append(_explain_why_undecided(detection, title))
        for group, name in zip(detection.fitting, names, strict=True):
            lines += [f"  {name}", *(f"    {reason}" for reason in group[0].reasons)]
    elif detection.refuted:
        lines.append(f"{title} is in none of the {len(detection.refuted)} layouts that fit it:")
    else:
        lines.append(f"{title} contains no attention layer of a known layout")
        if detection.obstacle is not None:
            lines += [f"  {line}" for line in detection.obstacle]
    if detection.candidates:
        others = (each for group in detection.misplaced for each in group)
        lines += [f"  not {each.layout.name}: {each.misplacement}" for each in others]
    lines += [f"  not {name}: {why}" for name, why in detection.refuted.items()]
    return lines + _describe_evidence(detection)


def _join_names_of_equal_layouts(groups: Iterable[LayoutGroup]) -> list[str]:
    return [" = ".join(each.layout.name for each in group) for group in groups]


def _explain_why_undecided(detection: Detection, title: str) -> str:
    if (against := detection.contradiction) is not None and not detection.has_seen_values:
        return f"{title} contradicts its config: {against}. Its names and shapes fit:"
    if (kind := detection.unknown) is not None:
        return f"{title} may be in the layout of a {kind} model, which is unknown; its names fit:"
    if not detection.candidates:
        return f"{title} has names and shapes of known layouts, at another place in the model:"
    by = "values" if detection.has_seen_values else "names and shapes"
    return f"{title} may be in {len(detection.candidates)} layouts, which {by} cannot tell apart:"


def _describe_evidence(detection: Detection) -> list[str]:
    """Return sentences on the evidence that was compared, and the evidence that is left."""
    if not detection.fitting:
        return []
    if detection.has_seen_values:
        against = detection.contradiction
        return [f"The config contradicts this: {against}."] if against is not None else []
    *most, last = detection.compared
    by = f"{', '.join(most)} and {last}"
    needed = (
        "a reference (--reference, the same weights elsewhere) or a forward check (--against, a "
        "model that runs)"
    )
    if detection.layout is not None:
        return [f"Only {by} were compared, values were not checked: for that, give {needed}."]
    return [f"Only {by} were compared. The layout is undecidable without {needed}."]
