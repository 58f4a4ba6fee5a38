"""`detect`: which layouts a file may be in, by names, shapes, config, and a reference.

An answer is one layout, or the list of those that cannot be told apart by what was given. It is
never a guess: names and shapes of two layouts often coincide, and so do the first rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from headwise.checkpoints.against_config import objection
from headwise.checkpoints.config import Config, layout_of, text_of
from headwise.errors import OptionError, ShapeError, UndecidedError
from headwise.layouts.layout import Layout
from headwise.layouts.places import Module, modules_of, outside, strays
from headwise.layouts.registry import layouts
from headwise.layouts.sameness import Reading, is_same_map
from headwise.layouts.sizes import Sizes
from headwise.layouts.steps import Header

NAMED = 3  # tensors, as an example
LISTED = 6  # numbers of heads that fit
MOST_HEADS = 256  # tried where nothing says how many there are


@dataclass(frozen=True)
class Candidate:
    """A layout that the names and shapes allow.

    Attributes:
        layout: which.
        modules: of attention, in the file's order.
        fits: the sizes of the first module; several where nobody said how many heads there are.
        reasons: for it, in words.
        around: how many tensors outside of attention have names that it knows.
    """

    layout: Layout
    modules: tuple[Module, ...]
    fits: tuple[Sizes, ...]
    reasons: tuple[str, ...]
    around: int

    def narrowed(self, sizes: Sizes) -> Candidate:
        """The same, once it is known which sizes it has: those of a layout of the same map."""
        width = {name: n for name, n in sizes.items() if name == "rotary_width"}
        fitting = (fit | width for fit in self.fits if heads_of(fit) == heads_of(sizes))
        return replace(self, fits=tuple(fitting))

    def reading(self, sizes: Sizes, *, module: int = 0) -> Reading:
        """How one of the modules is read, if it has these sizes."""
        return Reading(self.layout, self.modules[module].tensors, sizes)

    def is_same_map(self, other: Candidate) -> bool:
        """Whether both give the same matrices, whatever the number of heads turns out to be."""
        mine, theirs = ({heads_of(fit): fit for fit in one.fits} for one in (self, other))
        return mine.keys() == theirs.keys() and all(
            is_same_map(self.reading(fit), other.reading(theirs[heads]))
            for heads, fit in mine.items()
        )


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
        compared: the evidence: "names", "shapes", then "config", "values" or "behaviour".
    """

    candidates: tuple[tuple[Candidate, ...], ...]
    refuted: Mapping[str, str]
    unknown: str | None = None
    contradiction: str | None = None
    compared: tuple[str, ...] = ("names", "shapes")

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

    def require(self, *, file: str = "the file", option: str = "--from") -> Layout:
        """The one layout.

        Args:
            file: what it is called in an error.
            option: by which a caller names a layout.

        Raises:
            UndecidedError: there are none, or several, or the config contradicts the one.
        """
        if self.layout is not None:
            return self.layout
        if not self.candidates:
            raise UndecidedError(
                saw=f"{file}, which holds no attention that the catalogue knows",
                needed="names and shapes of a layout that headwise layouts lists",
                do=f"look for them there, and name the layout ({option}); or register your own",
            )
        names = [" = ".join(one.layout.name for one in group) for group in self.candidates]
        if self.contradiction is not None:
            raise UndecidedError(
                saw=f"{file}, with the names and shapes of {', '.join(names)}, where "
                f"{self.contradiction}",
                needed="a config and tensors of one model: one of them is another model's",
                do=f"name the layout ({option}), or headwise detect with --against",
            )
        if self.unknown is not None:
            raise UndecidedError(
                saw=f"{file}, of a {self.unknown} model, with the names and shapes of "
                f"{', '.join(names)}",
                needed="a model_type that the catalogue knows: others use the same names for "
                "another function",
                do=f"name the layout ({option}), or headwise detect with --against",
            )
        raise UndecidedError(
            saw=f"{file}, which may be in {len(names)} layouts: {', '.join(names)}",
            needed="one: they are undecidable without a reference or a forward check",
            do=f"name it ({option}), or headwise detect with --reference or --against",
        )


def detect(
    headers: Mapping[str, Header],
    *,
    said: str | None = None,
    config: Config | None = None,
    **known: int,
) -> Detection:
    """Which layouts tensors of these names and shapes may be in.

    Args:
        headers: name -> shape and dtype.
        said: the layout that somebody names, or else the config; it decides among those that fit.
        config: of the model; a layout that it says another function than is none.
        known: heads, kv_heads and what else the config or the caller knows.
    """
    config = config or {}
    meant = None if said else layout_of(config)
    said = said or meant
    found = _candidates(headers, known)
    refuted = {one.layout.name: why for one in found if (why := _objection(one, found, config))}
    groups = _grouped(one for one in found if one.layout.name not in refuted)
    named = [g for g in groups if any(one.layout.name == said for one in g)]
    compared = ("names", "shapes", *(["config"] if config else []))
    if not named:
        unknown = config.get("model_type") if said is None else None
        against = _contradiction(config, meant, refuted) if meant and groups else None
        return Detection(tuple(groups), refuted, unknown, against, compared)
    refuted |= {
        one.layout.name: f"the config says {said}" for g in groups if g not in named for one in g
    }
    chosen = sorted(named[0], key=lambda one: one.layout.name != said)
    return Detection((tuple(chosen),), refuted, compared=compared)


def _contradiction(config: Config, meant: str, refuted: Mapping[str, str]) -> str:
    """Why the layout that the config means is none of those that are left."""
    kind = text_of(config).get("model_type", config.get("model_type"))
    why = refuted.get(meant, f"the names or shapes are not those of {meant}")
    return f"the config says model_type {kind}, whose layout is {meant}, but {why}"


def decided(
    before: Detection,
    kept: Iterable[tuple[Candidate, ...]],
    refuted: Mapping[str, str],
    *,
    by: str,
) -> Detection:
    """Return the answer that more evidence leaves.

    Layouts that agree with the evidence are one answer where they are the same map, unless two say
    differently how it is used; what one leaves open is no difference.

    Args:
        before: the answer without that evidence.
        kept: the groups that agree with the evidence.
        refuted: name -> why, of all that do not.
        by: "values" or "behaviour".
    """
    groups: list[tuple[Candidate, ...]] = []
    for group in kept:
        for number, other in enumerate(groups):
            one, two = other[0], group[0]
            if not one.layout.function.conflicts(two.layout.function) and one.is_same_map(two):
                groups[number] = (*other, *group)
                break
        else:
            groups.append(group)
    compared = (*before.compared, by)
    return Detection(tuple(groups), refuted, None, before.contradiction, compared)


def _candidates(headers: Mapping[str, Header], known: Mapping[str, int]) -> list[Candidate]:
    found = []
    for layout in layouts().values():
        modules = modules_of(layout, headers)
        if not modules or any(_is_other(module, layout) for module in modules):
            continue
        fits = tuple(_fits(layout, modules[0], headers, known))
        if fits:
            around = _around(layout, modules, headers)
            reasons = _reasons(modules, fits)
            found.append(Candidate(layout, tuple(modules), fits, reasons, around))
    return sorted(found, key=lambda one: -one.around)


def _around(layout: Layout, modules: Iterable[Module], names: Iterable[str]) -> int:
    """Of layouts that are one map, the one that knows the names around attention is meant."""
    roots = {module.place.root for module in modules}
    return sum(outside(layout, name, roots) is not None for name in names)


def _objection(one: Candidate, found: Iterable[Candidate], config: Config) -> str | None:
    """Why a candidate is none: the config says otherwise, or another one knows more modules."""
    mine = {module.prefix for module in one.modules}
    for other in found:
        theirs = {module.prefix for module in other.modules}
        if mine < theirs:
            return f"{other.layout.name} has {len(theirs)} modules here, and it {len(mine)} of them"
    reasons = [objection(config, one.layout.function, sizes) for sizes in one.fits]
    return reasons[0] if all(reasons) else None


def _is_other(module: Module, layout: Layout) -> bool:
    """Whether a module is not whole in this layout, or holds what the layout does not know."""
    try:
        layout.require_whole(dict.fromkeys(module.tensors.values()))
    except OptionError:
        return True
    return bool(strays(module, layout))


def _fits(
    layout: Layout, module: Module, headers: Mapping[str, Header], known: Mapping[str, int]
) -> Iterator[Sizes]:
    """The sizes that a module may have: where not enough is known, with every number of heads."""
    shapes = {local: tuple(headers[name].shape) for name, local in module.tensors.items()}
    own = {name for pattern in layout.patterns.values() for name in pattern.names()}
    if (sizes := _solved(layout, shapes, known)) is not None:
        yield sizes
        return
    for heads in [known["heads"]] if "heads" in known else range(2, MOST_HEADS + 1):
        counts = {**known, "heads": heads}
        if (sizes := _solved(layout, shapes, counts)) is not None:
            yield sizes
        elif "kv_heads" in own and "kv_heads" not in known:
            divisors = (n for n in range(1, heads + 1) if heads % n == 0)
            tried = (_solved(layout, shapes, {**counts, "kv_heads": n}) for n in divisors)
            yield from (sizes for sizes in tried if sizes is not None)


def _solved(
    layout: Layout, shapes: Mapping[str, tuple[int, ...]], counts: Mapping[str, int]
) -> Sizes | None:
    try:
        return layout.sizes(shapes, counts)
    except (OptionError, ShapeError):
        return None


def heads_of(sizes: Sizes) -> tuple[int, int]:
    """Query heads, and those of keys and values."""
    heads = sizes["heads"]
    return heads, sizes.get("kv_heads", heads)


def _reasons(modules: Iterable[Module], fits: tuple[Sizes, ...]) -> tuple[str, ...]:
    modules = list(modules)
    names = ", ".join(list(modules[0].tensors)[:NAMED])
    more = " ..." if len(modules[0].tensors) > NAMED else ""
    shown = ("heads", "kv_heads", "head_dim", "value_dim", "embed_dim")
    found = {name: sorted({fit[name] for fit in fits if name in fit}) for name in shown}
    fitting = ", ".join(f"{name} {sizes[0]}" for name, sizes in found.items() if len(sizes) == 1)
    words = [f"they fit with {fitting}"] if fitting else []
    if several := [name for name, sizes in found.items() if len(sizes) > 1]:
        name, sizes = several[0], found[several[0]]
        left = f" and {len(sizes) - LISTED} more" if len(sizes) > LISTED else ""
        listed = ", ".join(map(str, sizes[:LISTED])) + left
        words.append(f"{name}: no tensor tells, and {listed} fit")
    return f"names: {len(modules)} modules with {names}{more}", f"shapes: {'; '.join(words)}"


def _grouped(found: Iterable[Candidate]) -> list[tuple[Candidate, ...]]:
    """Candidates that mean the same side by side."""
    groups: list[list[Candidate]] = []
    for one in found:
        for group in groups:
            first = group[0]
            if first.layout.function.is_same(one.layout.function) and first.is_same_map(one):
                group.append(one)
                break
        else:
            groups.append([one])
    return [tuple(group) for group in groups]


def lines_of(found: Detection, *, title: str) -> list[str]:
    """An answer in words; ``title`` is what the tensors are called."""
    lines: list[str] = []
    names = [" = ".join(one.layout.name for one in group) for group in found.candidates]
    if found.layout is not None:
        same = " (the same map and function here)" if len(found.candidates[0]) > 1 else ""
        lines.append(f"{title} is in the layout {names[0]}{same}")
        lines += [f"  {reason}" for reason in found.candidates[0][0].reasons]
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
