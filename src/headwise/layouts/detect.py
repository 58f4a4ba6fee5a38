"""`detect`: which layouts a file may be in, by names, shapes, config, and a reference.

An answer is one layout, or the list of those that cannot be told apart by what was given. It is
never a guess: names and shapes of two layouts often coincide, and so do the first rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from headwise.errors import OptionError, ShapeError
from headwise.layouts.layout import Layout
from headwise.layouts.places import Module, modules_of
from headwise.layouts.plan import Header, strays
from headwise.layouts.registry import layouts
from headwise.layouts.sameness import Reading, is_same, is_same_map
from headwise.layouts.sizes import Sizes

NAMED = 3  # tensors, as an example
MOST_HEADS = 256  # tried where nothing says how many there are


@dataclass(frozen=True)
class Candidate:
    """A layout that the names and shapes allow.

    Attributes:
        layout: which.
        modules: of attention, in the file's order.
        sizes: of the first module; with any heads that fit where nobody said how many.
        reasons: for it, in words.
    """

    layout: Layout
    modules: tuple[Module, ...]
    sizes: Sizes
    reasons: tuple[str, ...]

    def reading(self, module: int = 0) -> Reading:
        """How one of the modules is read."""
        return Reading(self.layout, self.modules[module].tensors, self.sizes)


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
            one, two = other[0].reading(), group[0].reading()
            if not one.layout.function.conflicts(two.layout.function) and is_same_map(one, two):
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
        sizes = _sizes(layout, modules[0], headers, known)
        if sizes is not None:
            found.append(Candidate(layout, tuple(modules), sizes, _reasons(modules, sizes, known)))
    return found


def _is_other(module: Module, layout: Layout) -> bool:
    """Whether a module is not whole in this layout, or holds what the layout does not know."""
    try:
        layout.require_whole(dict.fromkeys(module.tensors.values()))
    except OptionError:
        return True
    return bool(strays(module, layout))


def _sizes(
    layout: Layout, module: Module, headers: Mapping[str, Header], known: Mapping[str, int]
) -> Sizes | None:
    """The sizes of a module; with the first heads that fit where they are not known."""
    shapes = {local: tuple(headers[name].shape) for name, local in module.tensors.items()}
    for counts in _counts(known):
        try:
            return layout.sizes(shapes, counts)
        except (OptionError, ShapeError):
            continue
    return None


def _counts(known: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """What is known, and where that is not enough, every number of heads and of kv_heads."""
    yield known
    for heads in [known["heads"]] if "heads" in known else range(2, MOST_HEADS + 1):
        with_heads = {**known, "heads": heads}
        yield with_heads
        if "kv_heads" not in known:
            divisors = (n for n in range(heads, 0, -1) if heads % n == 0)
            yield from ({**with_heads, "kv_heads": kv_heads} for kv_heads in divisors)


def _reasons(modules: Iterable[Module], sizes: Sizes, known: Mapping[str, int]) -> tuple[str, ...]:
    modules = list(modules)
    shown = ("heads", "kv_heads", "head_dim", "value_dim", "embed_dim")
    fitting = ", ".join(f"{name} {sizes[name]}" for name in shown if name in sizes)
    names = ", ".join(list(modules[0].tensors)[:NAMED])
    more = " ..." if len(modules[0].tensors) > NAMED else ""
    doubt = "" if "heads" in known else " (the heads are not known; other numbers fit too)"
    return (
        f"names: {len(modules)} modules with {names}{more}",
        f"shapes: they fit with {fitting}{doubt}",
    )


def _grouped(found: Iterable[Candidate]) -> list[tuple[Candidate, ...]]:
    """Candidates that mean the same side by side."""
    groups: list[list[Candidate]] = []
    for one in found:
        for group in groups:
            if is_same(group[0].reading(), one.reading()):
                group.append(one)
                break
        else:
            groups.append([one])
    return [tuple(group) for group in groups]
