"""`detect`: which layouts a file may be in, by names, shapes, config, and a reference.

An answer is one layout, or the list of those that cannot be told apart by what was given. It is
never a guess: names and shapes of two layouts often coincide, and so do the first rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from headwise.errors import OptionError, ShapeError
from headwise.layouts.layout import Layout
from headwise.layouts.places import Module, modules_of
from headwise.layouts.plan import Header, strays
from headwise.layouts.registry import layouts
from headwise.layouts.sameness import Reading, is_same_map
from headwise.layouts.sizes import Sizes

NAMED = 3  # tensors, as an example
MOST_HEADS = 256  # tried where nothing says how many there are


@dataclass(frozen=True)
class Candidate:
    """A layout that the names and shapes allow.

    Attributes:
        layout: which.
        modules: of attention, in the file's order.
        fits: the sizes of the first module; several where nobody said how many heads there are.
        reasons: for it, in words.
    """

    layout: Layout
    modules: tuple[Module, ...]
    fits: tuple[Sizes, ...]
    reasons: tuple[str, ...]

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
    """

    candidates: tuple[tuple[Candidate, ...], ...]
    refuted: Mapping[str, str]

    @property
    def layout(self) -> Layout | None:
        """The one layout; None where there is none, or several that differ."""
        return self.candidates[0][0].layout if len(self.candidates) == 1 else None

    def require(self) -> Layout:
        """The one layout.

        Raises:
            OptionError: there are none, or several.
        """
        if self.layout is not None:
            return self.layout
        names = [" = ".join(one.layout.name for one in group) for group in self.candidates]
        raise OptionError(
            saw="no attention that the catalogue knows"
            if not names
            else f"a file that may be in {len(names)} layouts: {', '.join(names)}",
            needed="one: they are undecidable without a reference or a forward check",
            do="name it (--from), or headwise detect with --reference or --against",
        )


def detect(headers: Mapping[str, Header], *, said: str | None = None, **known: int) -> Detection:
    """Which layouts tensors of these names and shapes may be in.

    Args:
        headers: name -> shape and dtype.
        said: the layout that the model's config names; it decides among those that fit.
        known: heads, kv_heads and what else the config or the caller knows.
    """
    found = _candidates(headers, known)
    groups = _grouped(found)
    named = [g for g in groups if any(one.layout.name == said for one in g)]
    if not named:
        return Detection(tuple(groups), {})
    refuted = {
        one.layout.name: f"the config says {said}" for g in groups if g not in named for one in g
    }
    chosen = sorted(named[0], key=lambda one: one.layout.name != said)
    return Detection((tuple(chosen),), refuted)


def decided(kept: Iterable[tuple[Candidate, ...]], refuted: Mapping[str, str]) -> Detection:
    """What is left by evidence. Of those that agree with it, the same map is one answer.

    Unless two say differently how it is used; what one leaves open is no difference.
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
    return Detection(tuple(groups), refuted)


def _candidates(headers: Mapping[str, Header], known: Mapping[str, int]) -> list[Candidate]:
    found = []
    for layout in layouts().values():
        modules = modules_of(layout, headers)
        if not modules or any(_is_other(module, layout) for module in modules):
            continue
        fits = tuple(_fits(layout, modules[0], headers, known))
        if fits:
            found.append(Candidate(layout, tuple(modules), fits, _reasons(modules, fits)))
    return found


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
    modules, sizes = list(modules), fits[0]
    shown = ("heads", "kv_heads", "head_dim", "value_dim", "embed_dim")
    fitting = ", ".join(f"{name} {sizes[name]}" for name in shown if name in sizes)
    names = ", ".join(list(modules[0].tensors)[:NAMED])
    more = " ..." if len(modules[0].tensors) > NAMED else ""
    doubt = f" (and {len(fits) - 1} more: the heads are not known)" if len(fits) > 1 else ""
    return (
        f"names: {len(modules)} modules with {names}{more}",
        f"shapes: they fit with {fitting}{doubt}",
    )


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
