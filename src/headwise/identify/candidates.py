"""Candidate layouts: those that fit the names and shapes of a file, with the faults of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd

from headwise.errors import OptionError, ShapeError
from headwise.function.spec import AttentionSpec
from headwise.layouts import modules as places
from headwise.layouts._layout import Layout
from headwise.layouts.equality import LayoutReading, is_same_reading
from headwise.layouts.modules import NamedModule, find_modules, replace_numbers_with_layer_slots
from headwise.layouts.pattern import Sizes
from headwise.layouts.plan import TensorHeader
from headwise.layouts.registry import describe_score_form, find_score_form, layouts_by_name
from headwise.support.text import list_some

NAMED = 3  # tensors, as an example
LISTED = 6  # numbers of heads that fit
MOST_HEADS = 256  # tried where neither the config nor the caller states the number


@dataclass(frozen=True)
class CandidateLayout:
    """A layout that fits the names and shapes of a file."""

    layout: Layout
    modules: tuple[NamedModule, ...]  # of attention, whole, in the file's order
    fits: tuple[Sizes, ...]  # of the first module; several where the number of heads is open
    reasons: tuple[str, ...]  # evidence for the layout, in sentences
    around: int  # number of tensors outside of attention with names of this layout
    faults: tuple[str, ...] = ()  # of modules that are not whole, in sentences

    @property
    def sizes(self) -> dict[str, int | list[int]]:
        """Each size by its name: a number, or a list of all that fit."""
        by_name = _group_values_by_name(self.fits)
        return {name: n[0] if len(n) == 1 else n for name, n in by_name.items()}

    @property
    def misplacement(self) -> str | None:
        """The place of the modules and of the layout's, if they differ; None for a layer alone."""
        if not self.layout.where or any(module.place.role for module in self.modules):
            return None
        place = replace_numbers_with_layer_slots(self.modules[0].prefix)
        if "{layer}" not in place:
            return None
        known = " or ".join(f"`{template}`" for template in self.layout.where.values())
        return f"its modules are at {known}, those here at `{place}`"

    def with_sizes(self, sizes: Sizes) -> CandidateLayout:
        """Return the candidate with these head counts and, if stated, this rotary_width."""
        width = {name: n for name, n in sizes.items() if name == "rotary_width"}
        counts = query_and_kv_head_counts(sizes)
        fitting = (fit for fit in self.fits if query_and_kv_head_counts(fit) == counts)
        return replace(self, fits=tuple(fit | width for fit in fitting))

    def layout_reading(self, sizes: Sizes, *, module: int = 0) -> LayoutReading:
        """Return the reading of one module with these sizes."""
        return LayoutReading(self.layout, self.modules[module].tensors, sizes)

    def is_same_map(self, other: CandidateLayout) -> bool:
        """True if both give the same matrices for every number of heads that fits."""
        mine, theirs = (
            {query_and_kv_head_counts(fit): fit for fit in c.fits} for c in (self, other)
        )
        return mine.keys() == theirs.keys() and all(
            is_same_reading(self.layout_reading(fit), other.layout_reading(theirs[heads]))
            for heads, fit in mine.items()
        )


LayoutGroup = tuple[CandidateLayout, ...]  # of the same map and function
Headers = Mapping[str, TensorHeader]
Shapes = Mapping[str, tuple[int, ...]]
ModuleFit = tuple[NamedModule, tuple[Sizes, ...]]  # no sizes for an incomplete or unfit module


def find_candidates(
    headers: Headers, counts: Mapping[str, int], described: Layout | None = None
) -> list[CandidateLayout]:
    """Return the layouts that fit the names and shapes of all modules.

    If no layout does, return those with the fewest faults among the layouts in which some modules
    are whole. ``described`` replaces the registered layout of its name: its function may differ.
    """
    registered = layouts_by_name() | ({} if described is None else {described.name: described})
    matches = [_match_layout(layout, headers, counts) for layout in registered.values()]
    candidates = sorted(filter(None, matches), key=lambda candidate: -candidate.around)
    fewest = min((len(candidate.faults) for candidate in candidates), default=0)
    return [candidate for candidate in candidates if len(candidate.faults) == fewest]


def _match_layout(
    layout: Layout, headers: Headers, counts: Mapping[str, int]
) -> CandidateLayout | None:
    modules = find_modules(layout, headers)
    if not modules or not all(places.may_be_of_layout(module, layout) for module in modules):
        return None
    module_fits = list(_list_module_sizes(modules, layout, headers, counts))
    fitting = [(module, fits) for module, fits in module_fits if fits]
    if not fitting:
        return None
    # The sound module to compare with holds floating-point weights, if any module does.
    first, fits = next(
        (x for x in fitting if all(headers[n].dtype.is_floating_point for n in x[0].tensors)),
        fitting[0],
    )
    checked = [(fit[0], _find_module_faults(fit, first, layout, headers)) for fit in module_fits]
    sound = tuple(module for module, faults in checked if not faults)
    # Among layouts that are the same map, names outside of attention identify the model.
    roots = {module.place.root for module in modules}
    outside = (places.locate_weight_outside_attention(layout, name, roots) for name in headers)
    around = sum(place is not None for place in outside)
    sentences = tuple(fault for _, faults in checked for fault in faults)
    heads = [sizes[0]["heads"] for module, sizes in fitting if module.stack == first.stack]
    is_even = len({*heads}) == 1 or len(fits) > 1
    reasons = _describe_match_reasons(sound, fits, [] if is_even else heads)
    if form := find_score_form(
        name for module in sound for name in (*module.tensors, *module.beside)
    ):
        reasons = (*reasons, f"scores: {describe_score_form(*form)}")
    return CandidateLayout(layout, sound, fits, reasons, around, sentences)


def _list_module_sizes(
    modules: list[NamedModule], layout: Layout, headers: Headers, counts: Mapping[str, int]
) -> Iterator[ModuleFit]:
    """Yield each module with its possible sizes; ``counts`` are of the first module's kind."""
    sizes_by_shapes: dict[object, tuple[Sizes, ...]] = {}
    kind = replace_numbers_with_layer_slots(modules[0].prefix)
    for module in modules:
        if not layout.required <= {*module.tensors.values()}:
            yield module, ()
            continue
        is_like = replace_numbers_with_layer_slots(module.prefix) == kind
        shapes = {local: tuple(headers[name].shape) for name, local in module.tensors.items()}
        key = is_like, tuple(sorted(shapes.items()))
        if key not in sizes_by_shapes:
            fits = tuple(_possible_sizes(layout, shapes, counts))
            # Another tower may have other head counts; it is at fault if no count fits.
            others = () if fits or is_like else _possible_sizes(layout, shapes, {})
            sizes_by_shapes[key] = fits or tuple(others)
        yield module, sizes_by_shapes[key]


def _find_module_faults(
    module_fit: ModuleFit, whole: NamedModule, layout: Layout, headers: Headers
) -> list[str]:
    module, fits = module_fit
    mine, like = ({v: k for k, v in each.tensors.items()} for each in (module, whole))
    if missing := sorted(layout.required - mine.keys()):
        return [f"`{module.prefix}{local}` is missing" for local in missing]
    differences = []
    for local in mine.keys() & like.keys():
        header, other = headers[mine[local]], headers[like[local]]
        if header.dtype.is_floating_point != other.dtype.is_floating_point:
            differences.append((mine[local], str(header.dtype), like[local], str(other.dtype)))
        elif not fits and tuple(header.shape) != tuple(other.shape):
            shapes = [f"of shape {tuple(each.shape)}" for each in (header, other)]
            differences.append((mine[local], shapes[0], like[local], shapes[1]))
    if differences or fits:
        return [f"`{a}` is {x}, and `{b}` {y}" for a, x, b, y in sorted(differences)]
    return [f"`{module.prefix}` has shapes that do not fit each other and the counts"]


def _possible_sizes(layout: Layout, shapes: Shapes, counts: Mapping[str, int]) -> Iterator[Sizes]:
    axes = {name for pattern in layout.patterns.values() for name in pattern.axis_names()}
    if (sizes := _solve_sizes(layout, shapes, counts)) is not None:
        yield sizes
        return
    for heads in [counts["heads"]] if "heads" in counts else _possible_heads(layout, shapes):
        with_heads = {**counts, "heads": heads}
        if (sizes := _solve_sizes(layout, shapes, with_heads)) is not None:
            yield sizes
        elif "kv_heads" in axes and "kv_heads" not in counts:
            divisors = (n for n in range(1, heads + 1) if heads % n == 0)
            tried = (_solve_sizes(layout, shapes, {**with_heads, "kv_heads": n}) for n in divisors)
            yield from (sizes for sizes in tried if sizes is not None)


def _possible_heads(layout: Layout, shapes: Shapes) -> list[int]:
    common = 0  # which every number divides
    for name, shape in shapes.items():
        for axis, length in zip(layout.patterns[name].axes, shape, strict=False):
            parts = [block.names for block in axis.blocks] or [()]
            names = [{*axis.before, *part, *axis.after} for part in parts]
            if all("heads" in part or {"kv_heads", "group"} <= part for part in names):
                common = gcd(common, length)
    return [heads for heads in range(2, MOST_HEADS + 1) if common % heads == 0]


def _solve_sizes(layout: Layout, shapes: Shapes, counts: Mapping[str, int]) -> Sizes | None:
    with suppress(OptionError, ShapeError):
        sizes = layout.sizes(shapes, counts)
        if layout.rows == "interleaved" and not layout.function.is_rotary_width_open:
            layout.rotary_width(sizes)  # raises for an odd head_dim: channels turn in pairs
        return sizes
    return None


def query_and_kv_head_counts(sizes: Sizes) -> tuple[int, int]:
    """Return the numbers of query heads and of kv heads."""
    heads = sizes["heads"]
    return heads, sizes.get("kv_heads", heads)


def _group_values_by_name(fits: tuple[Sizes, ...]) -> dict[str, list[int]]:
    names = dict.fromkeys(name for fit in fits for name in fit)
    return {name: sorted({fit[name] for fit in fits if name in fit}) for name in names}


def _describe_match_reasons(
    modules: tuple[NamedModule, ...], fits: tuple[Sizes, ...], heads: list[int]
) -> tuple[str, ...]:
    names = ", ".join(list(modules[0].tensors)[:NAMED])
    more = " ..." if len(modules[0].tensors) > NAMED else ""
    shown = ("heads", "kv_heads", "head_dim", "value_dim", "embed_dim")
    by_name = _group_values_by_name(fits)
    values = {name: by_name[name] for name in shown if name in by_name}
    fixed = ", ".join(f"{name} {sizes[0]}" for name, sizes in values.items() if len(sizes) == 1)
    words = [f"they fit with {fixed}"] if fixed else []
    words += [f"heads by layer: {list_some([*map(str, heads)], LISTED)}"] if heads else []
    if name := next((name for name, sizes in values.items() if len(sizes) > 1), ""):
        words.append(f"{name} may be {list_some([*map(str, values[name])], LISTED)}")
    return f"names: {len(modules)} modules with {names}{more}", f"shapes: {'; '.join(words)}"


def group_equal_layouts(
    groups: Iterable[LayoutGroup], is_same_use: Callable[[AttentionSpec, AttentionSpec], bool]
) -> tuple[LayoutGroup, ...]:
    """Join groups whose first candidates are the same map and are used in the same way."""
    joined: list[LayoutGroup] = []
    for group in groups:
        second = group[0]
        for number, (first, *_) in enumerate(joined):
            specs = first.layout.function, second.layout.function
            if is_same_use(*specs) and first.is_same_map(second):
                joined[number] += group
                break
        else:
            joined.append(group)
    return tuple(joined)
