"""The layouts that the names and shapes of a file allow, and those that it is damaged in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd

from headwise.errors import OptionError, ShapeError
from headwise.layouts.attention_spec import AttentionSpec
from headwise.layouts.axis_sizes import Sizes
from headwise.layouts.conversion_steps import TensorHeader
from headwise.layouts.equality import LayoutReading, is_same_map
from headwise.layouts.layout import Layout
from headwise.layouts.module_names import NamedModule, kind_of, modules_of, outside, strays
from headwise.layouts.pattern import PatternAxis
from headwise.layouts.registry import layouts

NAMED = 3  # tensors, as an example
LISTED = 6  # numbers of heads that fit
MOST_HEADS = 256  # tried where nothing says how many there are


@dataclass(frozen=True)
class CandidateLayout:
    """A layout that the names and shapes allow.

    Attributes:
        layout: which.
        modules: of attention, in the file's order.
        fits: the sizes of the first module; several where nobody said how many heads there are.
        reasons: for it, in words.
        around: how many tensors outside of attention have names that it knows.
        faults: what keeps other modules from being whole, in words; ``modules`` are without them.
    """

    layout: Layout
    modules: tuple[NamedModule, ...]
    fits: tuple[Sizes, ...]
    reasons: tuple[str, ...]
    around: int
    faults: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int | list[int]]:
        """Each size by its name: a number, or a list of all that fit."""
        names = dict.fromkeys(name for fit in self.fits for name in fit)
        values = {name: sorted({fit[name] for fit in self.fits if name in fit}) for name in names}
        return {name: some[0] if len(some) == 1 else some for name, some in values.items()}

    def narrowed(self, sizes: Sizes) -> CandidateLayout:
        """The same, once it is known which sizes it has: those of a layout of the same map."""
        width = {name: n for name, n in sizes.items() if name == "rotary_width"}
        fitting = (fit | width for fit in self.fits if heads_of(fit) == heads_of(sizes))
        return replace(self, fits=tuple(fitting))

    def reading(self, sizes: Sizes, *, module: int = 0) -> LayoutReading:
        """How one of the modules is read, if it has these sizes."""
        return LayoutReading(self.layout, self.modules[module].tensors, sizes)

    def is_same_map(self, other: CandidateLayout) -> bool:
        """Whether both give the same matrices, whatever the number of heads turns out to be."""
        mine, theirs = ({heads_of(fit): fit for fit in one.fits} for one in (self, other))
        return mine.keys() == theirs.keys() and all(
            is_same_map(self.reading(fit), other.reading(theirs[heads]))
            for heads, fit in mine.items()
        )


_Looked = tuple[NamedModule, tuple[Sizes, ...]]  # no sizes where it is not whole or does not fit


def candidates(
    headers: Mapping[str, TensorHeader], known: Mapping[str, int], described: Layout | None = None
) -> list[CandidateLayout]:
    """The layouts that the names and shapes of all modules allow.

    ``described`` stands in the place of the layout of its name: its function may be another.

    Where there are none, those in which some modules are whole; of them, those with the fewest
    faults.
    """
    tried = layouts() | ({} if described is None else {described.name: described})
    found = [one for layout in tried.values() if (one := _candidate(layout, headers, known))]
    fewest = min((len(one.faults) for one in found), default=0)
    return sorted((one for one in found if len(one.faults) == fewest), key=lambda one: -one.around)


def _candidate(
    layout: Layout, headers: Mapping[str, TensorHeader], known: Mapping[str, int]
) -> CandidateLayout | None:
    modules = modules_of(layout, headers)
    if not modules or any(strays(module, layout) for module in modules):
        return None
    looked = list(_looked_at(modules, layout, headers, known))
    fitting = [(module, fits) for module, fits in looked if fits]
    if not fitting:
        return None
    # Others than the usual ones are blamed: of two dtypes, the one that holds numbers of weights.
    first, fits = next(
        (x for x in fitting if all(headers[n].dtype.is_floating_point for n in x[0].tensors)),
        fitting[0],
    )
    found = [(one[0], _faults(one, first, layout, headers)) for one in looked]
    sound = tuple(module for module, faults in found if not faults)
    # Of layouts that are one map, the one that knows the names around attention is meant.
    roots = {module.place.root for module in modules}
    around = sum(outside(layout, name, roots) is not None for name in headers)
    words = tuple(fault for _, faults in found for fault in faults)
    return CandidateLayout(layout, sound, fits, _reasons(sound, fits), around, words)


def _looked_at(
    modules: list[NamedModule],
    layout: Layout,
    headers: Mapping[str, TensorHeader],
    known: Mapping[str, int],
) -> Iterator[_Looked]:
    """All modules; the counts are those of the first, and of its like in other layers."""
    seen: dict[object, tuple[Sizes, ...]] = {}
    kind = kind_of(modules[0].prefix)
    for module in modules:
        if not layout.required <= {*module.tensors.values()}:
            yield module, ()
            continue
        is_like = kind_of(module.prefix) == kind
        shapes = {local: tuple(headers[name].shape) for name, local in module.tensors.items()}
        key = is_like, tuple(sorted(shapes.items()))
        if key not in seen:
            fits = tuple(_fits(layout, shapes, known))
            # Another tower may have other heads; one that fits with none at all is at fault.
            seen[key] = fits if fits or is_like else tuple(_fits(layout, shapes, {}))
        yield module, seen[key]


def _faults(
    one: _Looked, whole: NamedModule, layout: Layout, headers: Mapping[str, TensorHeader]
) -> list[str]:
    """What is wrong with a module, beside one that is whole."""
    module, fits = one
    mine, like = ({v: k for k, v in each.tensors.items()} for each in (module, whole))
    if missing := sorted(layout.required - mine.keys()):
        return [f"`{module.prefix}{local}` is missing" for local in missing]
    apart = []
    for local in mine.keys() & like.keys():
        own, other = headers[mine[local]], headers[like[local]]
        if own.dtype.is_floating_point != other.dtype.is_floating_point:
            apart.append((mine[local], str(own.dtype), like[local], str(other.dtype)))
        elif not fits and tuple(own.shape) != tuple(other.shape):
            shapes = [f"of shape {tuple(each.shape)}" for each in (own, other)]
            apart.append((mine[local], shapes[0], like[local], shapes[1]))
    if apart or fits:
        return [f"`{a}` is {what}, and `{b}` {other}" for a, what, b, other in sorted(apart)]
    return [f"`{module.prefix}` has shapes that do not fit each other and the counts"]


def _fits(
    layout: Layout, shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, int]
) -> Iterator[Sizes]:
    """The sizes that a module may have: where not enough is known, with every number of heads."""
    own = {name for pattern in layout.patterns.values() for name in pattern.names()}
    if (sizes := _solved(layout, shapes, known)) is not None:
        yield sizes
        return
    for heads in [known["heads"]] if "heads" in known else _numbers_of_heads(layout, shapes):
        counts = {**known, "heads": heads}
        if (sizes := _solved(layout, shapes, counts)) is not None:
            yield sizes
        elif "kv_heads" in own and "kv_heads" not in known:
            divisors = (n for n in range(1, heads + 1) if heads % n == 0)
            tried = (_solved(layout, shapes, {**counts, "kv_heads": n}) for n in divisors)
            yield from (sizes for sizes in tried if sizes is not None)


def _numbers_of_heads(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The numbers of heads that divide the length of every axis which holds whole heads."""
    lengths = [
        length
        for name, shape in shapes.items()
        for axis, length in zip(layout.patterns[name].axes, shape, strict=False)
        if _holds_heads(axis)
    ]
    common = gcd(*lengths)  # 0 of none, which every number divides
    return [heads for heads in range(2, MOST_HEADS + 1) if common % heads == 0]


def _holds_heads(axis: PatternAxis) -> bool:
    parts = [block.names for block in axis.blocks] or [()]
    names = [{*axis.before, *part, *axis.after} for part in parts]
    return all("heads" in part or {"kv_heads", "group"} <= part for part in names)


def _solved(
    layout: Layout, shapes: Mapping[str, tuple[int, ...]], counts: Mapping[str, int]
) -> Sizes | None:
    with suppress(OptionError, ShapeError):
        return layout.sizes(shapes, counts)
    return None


def heads_of(sizes: Sizes) -> tuple[int, int]:
    """Query heads, and those of keys and values."""
    heads = sizes["heads"]
    return heads, sizes.get("kv_heads", heads)


def _reasons(modules: tuple[NamedModule, ...], fits: tuple[Sizes, ...]) -> tuple[str, ...]:
    names = ", ".join(list(modules[0].tensors)[:NAMED])
    more = " ..." if len(modules[0].tensors) > NAMED else ""
    shown = ("heads", "kv_heads", "head_dim", "value_dim", "embed_dim")
    found = {name: sorted({fit[name] for fit in fits if name in fit}) for name in shown}
    fitting = ", ".join(f"{name} {sizes[0]}" for name, sizes in found.items() if len(sizes) == 1)
    words = [f"they fit with {fitting}"] if fitting else []
    for name, sizes in [(name, sizes) for name, sizes in found.items() if len(sizes) > 1][:1]:
        left = f" and {len(sizes) - LISTED} more" if len(sizes) > LISTED else ""
        words.append(
            f"{name}: no tensor tells, and {', '.join(map(str, sizes[:LISTED]))}{left} fit"
        )
    return f"names: {len(modules)} modules with {names}{more}", f"shapes: {'; '.join(words)}"


def grouped(
    found: Iterable[tuple[CandidateLayout, ...]],
    is_same_use: Callable[[AttentionSpec, AttentionSpec], bool],
) -> tuple[tuple[CandidateLayout, ...], ...]:
    """Groups joined where their first ones are the same map, and used in the same way."""
    groups: list[tuple[CandidateLayout, ...]] = []
    for group in found:
        for number, (one, *_) in enumerate(groups):
            two = group[0]
            if is_same_use(one.layout.function, two.layout.function) and one.is_same_map(two):
                groups[number] += group
                break
        else:
            groups.append(group)
    return tuple(groups)
