"""`detect`: which layouts a file may be in, by names, shapes, config, and a reference.

An answer is one layout, or the list of those that cannot be told apart by what was given. It is
never a guess: names and shapes of two layouts often coincide, and so do the first rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwise.checkpoints.config import Config, layout_name, text_config
from headwise.checkpoints.config_check import config_contradiction
from headwise.diagnosis.candidate_layouts import CandidateLayout, candidates, grouped
from headwise.diagnosis.diagnosis_result import shortened
from headwise.errors import CheckpointError, OptionError, UndecidedError
from headwise.layouts.attention_spec import AttentionSpec
from headwise.layouts.conversion_steps import TensorHeader
from headwise.layouts.layout import Layout
from headwise.layouts.registry import layout

NAMED = 3  # of the sizes that fit
SHOWN = 8  # tensors at fault, before the rest is counted


@dataclass(frozen=True)
class Detection:
    """What a file may be.

    Attributes:
        candidates: the layouts that it may be in, with the reasons for each; those that are the
            same map for these sizes and the same function stand in one group.
        refuted: name -> why, of layouts that were candidates by names and shapes.
        unknown: a model_type in the config that the catalogue does not know: others use the names
            of known ones for other functions, so that names and shapes decide nothing.
        contradiction: what the config says against every candidate, in a sentence: it names a type
            of another layout. Names and shapes decide nothing then, either.
        damaged: where there is none, the layouts in which some modules are whole and others are
            not: which tensors are at fault is in each.
        compared: the evidence: "names", "shapes", then "metadata", "config", "values" or
            "behaviour".
    """

    candidates: tuple[tuple[CandidateLayout, ...], ...]
    refuted: Mapping[str, str]
    unknown: str | None = None
    contradiction: str | None = None
    compared: tuple[str, ...] = ("names", "shapes")
    damaged: tuple[tuple[CandidateLayout, ...], ...] = ()

    @property
    def layout(self) -> Layout | None:
        """The one layout; None where there is none, several that differ, or a contradiction."""
        is_one = len(self.candidates) == 1 and self.unknown is None
        if self.contradiction is not None and not self.has_seen_values:
            return None
        return self.candidates[0][0].layout if is_one else None

    @property
    def has_seen_values(self) -> bool:
        """Whether the numbers in the tensors were compared with anything."""
        return not {"values", "behaviour"}.isdisjoint(self.compared)

    def __str__(self) -> str:
        return "\n".join(lines_of(self, title="the checkpoint"))

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON holds it: layouts by their names, and sizes by theirs."""
        return {
            "layout": self.layout.name if self.layout else None,
            "candidates": [
                [
                    {"layout": one.layout.name, "sizes": one.sizes, "reasons": one.reasons}
                    for one in group
                ]
                for group in self.candidates
            ],
            "refuted": dict(self.refuted),
            "unknown": self.unknown,
            "contradiction": self.contradiction,
            "compared": self.compared,
            "damaged": [
                {"layouts": [one.layout.name for one in group], "faults": group[0].faults}
                for group in self.damaged
            ],
        }

    def require(self, *, file: str = "the file", parameter: str = "layout") -> Layout:
        """The one layout.

        Args:
            file: what it is called in an error.
            parameter: the argument by which a caller names a layout.

        Raises:
            CheckpointError: some modules are whole, and others are not.
            UndecidedError: there are none, or several, or the config contradicts the one.
        """
        if self.layout is not None:
            return self.layout
        if self.damaged:
            faults = self.damaged[0][0].faults
            more = f", and {len(faults) - 1} more are at fault" if len(faults) > 1 else ""
            raise CheckpointError(
                saw=f"{file}, which would be in the layout "
                f"{' or '.join(_names(self.damaged))}, but {faults[0]}{more}",
                needed="every tensor of attention in every layer, in the shape that fits",
                do="get the whole file again; headwise verify says what differs from another copy",
            )
        names = ", ".join(_names(self.candidates))
        do = f"name the layout ({{{parameter}}}), or headwise detect with --against"
        if not self.candidates:
            saw = "which holds no attention that the catalogue knows"
            needed = "names and shapes of a layout that headwise layouts lists"
            do = f"look for them there, and name the layout ({{{parameter}}}); or register your own"
        elif self.contradiction is not None:
            saw = f"with the names and shapes of {names}, where {self.contradiction}"
            needed = "a config and tensors of one model: one of them is another model's"
        elif self.unknown is not None:
            saw = f"of a {self.unknown} model, with the names and shapes of {names}"
            needed = "a model_type that the catalogue knows: others use the same names for another "
            needed += "function"
        else:
            saw = f"which may be in {len(self.candidates)} layouts: {names}"
            needed = "one: they are undecidable without a reference or a forward check"
            do = f"name it ({{{parameter}}}), or headwise detect with --reference or --against"
        raise UndecidedError(saw=f"{file}, {saw}", needed=needed, do=do, parameter=parameter)


def detect(
    headers: Mapping[str, TensorHeader],
    *,
    described: str | Layout | None = None,
    config: Config | None = None,
    **known: int,
) -> Detection:
    """Which layouts tensors of these names and shapes may be in.

    Args:
        headers: name -> shape and dtype.
        described: the layout that the files describe, or its name; it decides among those that
            fit, and the config where it is None.
        config: of the model; a layout that it says another function than is none.
        known: heads, kv_heads and what else the config or the caller knows.

    Raises:
        OptionError: a rotary_width that no head can have.
    """
    described = None if described is None else layout(described)
    found = candidates(headers, known, described)
    width = known.get("rotary_width")
    head_dims = sorted({fit["head_dim"] for one in found for fit in one.fits})
    if width is not None and head_dims and (width % 2 or width > head_dims[-1]):
        shown = " or ".join(map(str, head_dims[-NAMED:]))
        raise OptionError(
            saw=f"rotary_width {width}, in a head_dim of {shown}",
            needed="an even number of channels, at most all: two of them turn together",
            do="give {rotary_width} as the model has it, or leave it out",
            parameter="rotary_width",
        )
    answer = _among(found, described, config or {})
    if any(one.faults for one in found):
        return replace(answer, candidates=(), damaged=answer.candidates)
    return answer


def _among(found: list[CandidateLayout], described: Layout | None, config: Config) -> Detection:
    """The answer, once the metadata of the files and the config are heard."""
    meant = None if described else layout_name(config)
    said, by = (described.name, "metadata") if described else (meant, "config")
    refuted = {one.layout.name: why for one in found if (why := _objection(one, found, config))}
    groups = grouped(
        ((one,) for one in found if one.layout.name not in refuted), AttentionSpec.is_same
    )
    named = [g for g in groups if any(one.layout.name == said for one in g)]
    more = {"metadata": described is not None, "config": bool(config)}
    compared = ("names", "shapes", *(name for name, is_there in more.items() if is_there))
    if not named:
        unknown = config.get("model_type") if said is None else None
        against = None
        if meant and groups:
            kind = text_config(config).get("model_type", config.get("model_type"))
            why = refuted.get(meant, f"the names or shapes are not those of {meant}")
            against = f"the config says model_type {kind}, whose layout is {meant}, but {why}"
        return Detection(groups, refuted, unknown, against, compared)
    refuted |= {
        one.layout.name: f"the {by} says {said}" for g in groups if g not in named for one in g
    }
    chosen = sorted(named[0], key=lambda one: one.layout.name != said)
    return Detection((tuple(chosen),), refuted, compared=compared)


def decided(
    before: Detection,
    kept: Iterable[tuple[CandidateLayout, ...]],
    refuted: Mapping[str, str],
    *,
    by: str,
) -> Detection:
    """Return the answer that more evidence leaves.

    Layouts that agree with the evidence are one answer where they are the same map, unless two say
    differently how it is used; what one leaves open is no difference.

    ``kept`` are the groups that agree with the evidence, which is ``by`` "values" or "behaviour".
    """
    groups = grouped(kept, lambda one, two: not one.conflicts(two))
    compared = (*before.compared, by)
    return Detection(groups, refuted, None, before.contradiction, compared)


def _objection(
    one: CandidateLayout, found: Iterable[CandidateLayout], config: Config
) -> str | None:
    """Why a candidate is none: the config says otherwise, or another one knows more modules."""
    mine = {module.prefix for module in one.modules}
    for other in found:
        theirs = {module.prefix for module in other.modules}
        if mine < theirs:
            return f"{other.layout.name} has {len(theirs)} modules here, and it {len(mine)} of them"
    reasons = [config_contradiction(config, one.layout.function, sizes) for sizes in one.fits]
    return reasons[0] if all(reasons) else None


def lines_of(found: Detection, *, title: str) -> list[str]:
    """An answer in words; ``title`` is what the tensors are called."""
    lines: list[str] = []
    names = _names(found.candidates or found.damaged)
    if found.layout is not None:
        same = " (the same map and function here)" if len(found.candidates[0]) > 1 else ""
        lines.append(f"{title} is in the layout {names[0]}{same}")
        lines += [f"  {reason}" for reason in found.candidates[0][0].reasons]
    elif found.damaged:
        which = f"the layout {names[0]}" if len(names) == 1 else f"one of {len(names)} layouts"
        lines.append(f"{title} would be in {which}, if every layer were whole:")
        for group, name in zip(found.damaged, names, strict=True):
            indent = "  " if len(names) == 1 else "    "
            lines += [f"  {name}"] if len(names) > 1 else []
            lines += [f"{indent}{line}" for line in shortened(group[0].faults, SHOWN)]
    elif found.candidates:
        lines.append(_doubt(found, title))
        for group, name in zip(found.candidates, names, strict=True):
            lines += [f"  {name}", *(f"    {reason}" for reason in group[0].reasons)]
    elif found.refuted:
        lines.append(f"{title} is in none of the {len(found.refuted)} layouts that it looks like:")
    else:
        lines.append(f"{title} holds no attention that the catalogue knows")
    lines += [f"  not {name}: {why}" for name, why in found.refuted.items()]
    return lines + _evidence(found)


def _names(groups: Iterable[tuple[CandidateLayout, ...]]) -> list[str]:
    return [" = ".join(one.layout.name for one in group) for group in groups]


def _doubt(found: Detection, title: str) -> str:
    """Why names and shapes do not decide."""
    if found.contradiction is not None and not found.has_seen_values:
        return f"{title} contradicts its config: {found.contradiction}. Its names and shapes fit:"
    if found.unknown is not None:
        return (
            f"{title} may be in the layout of a {found.unknown} model, which is not known; its "
            "names fit:"
        )
    by = "values" if found.has_seen_values else "names and shapes"
    return f"{title} may be in {len(found.candidates)} layouts, which {by} cannot tell apart:"


def _evidence(found: Detection) -> list[str]:
    """What was compared, and what was not."""
    if not found.candidates:
        return []
    if found.has_seen_values:
        against = found.contradiction
        return [f"The config contradicts this: {against}."] if against is not None else []
    *most, last = found.compared
    by = f"{', '.join(most)} and {last}"
    asks = (
        "a reference (--reference, the same weights elsewhere) or a forward check (--against, a "
        "model that runs)"
    )
    if found.layout is not None:
        return [f"Only {by} were compared, values were not checked: for that, give {asks}."]
    return [f"Only {by} were compared. It is undecidable without {asks}."]
