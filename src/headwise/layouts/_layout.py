"""Layout: a description of how an implementation stores the weights of attention."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.function.spec import FROM_CONFIG, AttentionSpec, Pairing, RotaryRule
from headwise.function.weights import (
    AXES,
    BIASES,
    NORMS,
    OPTIONAL,
    ROTATED,
    ROTATED_WITH_LATENT,
    SHARED,
    State,
    add_wider,
)
from headwise.layouts import pattern as notation
from headwise.layouts.pattern import Pattern, Sizes, Splits, parse_pattern, solve_axis_sizes
from headwise.support.lazy import ShownInNotebook
from headwise.support.text import describe_value

if TYPE_CHECKING:
    from torch import Tensor

MATRICES = ("wq", "wk", "wv", "wo")
ROLES = ("self", "encoder", "decoder", "cross")
NUMBERED = ("layer", "stage", "block", "half")
NAMED = 4  # in an error
# Conventions of the call: they do not change the result, and a caller can follow either.
CALLING = ("mask", "axes")
_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "rows": get_args(Pairing),
    "mask": (None, "True attends", "True hides", "added"),
    "axes": (None, "batch length width", "length batch width", "length width"),
}
SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class Layout(ShownInNotebook):
    """One layout. Both directions follow from it; "Weight layouts" in the docs shows an example.

    Attributes:
        name: in kebab case.
        tensors: stored name within the module -> pattern (`headwise.layouts.pattern`).
        source: the paper, or the file of which project, that it was read from.
        where: role -> the module's place in a checkpoint, with {layer} for its number; the roles
            are "self", "encoder", "decoder" and "cross".
        root: what stands before all names of a model, "" for nothing; None for that of the source.
        outside: stored name -> pattern of tensors outside of attention, for layouts that hold
            whole models; {layer} as in ``where``.
        beside: names within the module, or patterns such as `"*.inv_freq"`, of tensors that hold no
            weights of attention: a mask, a table of angles, a norm after it. They are passed on.
        marks: those of ``beside`` without one of which a module is of another layout.
        optional: canonical tensors that a module may lack, beside biases and distances, and norms
            where the function does not say that there are any.
        splits: canonical axes that patterns write by several names, beside heads by
            kv_heads and group.
        fixed: sizes that the layout itself sets.
        sharded: names of the axes that tensor-parallel processes divide among themselves; a tensor
            without any is the same on each of them. () where files are of one process.
        sharded_also: stored name in ``outside`` -> another axis that some code divides instead.
        function: what is in no tensor; a rotation turns the channels that are pairs in ``rows``.
        rows: the order of the rotated channels of a head: "half-split", those that turn together
            half of the rotated width apart, or "interleaved", side by side.
        rotated_last: True if the channels of a query that meet a shared key stand last in its head;
            they are the first in the canonical form.
        mask: what a layer's own mask means: "True attends", "True hides" or "added".
        axes: of its input: "batch length width", "length batch width" or "length width"; the two
            are conventions of a call, which any caller can follow.
        unchecked: why no test runs the real implementation; "" where one does.
        note: what else a reader must know.
    """

    name: str
    tensors: Mapping[str, str]
    source: str
    where: Mapping[str, str] = field(default_factory=dict)
    root: str | None = None
    outside: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    splits: Splits = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    sharded: tuple[str, ...] = ()
    sharded_also: Mapping[str, str] = field(default_factory=dict)
    function: AttentionSpec = field(default_factory=AttentionSpec)
    rows: Pairing = "half-split"
    rotated_last: bool = False
    mask: Literal["True attends", "True hides", "added"] | None = None
    axes: str | None = "batch length width"
    unchecked: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        """Raise OptionError for a pattern that cannot be read later."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise OptionError(
                    saw=f"{name}={describe_value(getattr(self, name))} of {self.name}",
                    needed=" or ".join(map(repr, choices)),
                    do="write it as the other layouts do: headwise layouts show NAME",
                )
        if self.function.rotation is not None:
            rotary = replace(self.function.rotation, pairing=self.rows)
            object.__setattr__(self, "function", replace(self.function, rotary=rotary))
        homes: dict[str, str] = {}
        for name, pattern in self.patterns.items():
            for tensor in pattern.tensors:
                if tensor not in AXES or tensor in homes:
                    twice = f", and in {homes[tensor]}" if tensor in homes else ""
                    raise OptionError(
                        saw=f"{tensor} in {name} of {self.name}{twice}",
                        needed=f"each tensor once, of {', '.join(AXES)}",
                        do="rewrite the pattern; Weight layouts in the docs lists the tensors",
                    )
                homes[tensor] = name
                notation.names_by_canonical_axis(
                    tensor, pattern.names_of(tensor), self.axis_splits_with_defaults
                )
        if missing := [name for name in MATRICES if name not in homes]:
            raise OptionError(
                saw=f"{self.name} without {', '.join(missing)}",
                needed=f"patterns for {', '.join(MATRICES)}, alone or fused",
                do="add these patterns; Weight layouts in the docs lists the tensors",
            )
        for role, template in self.where.items():
            unknown = [part for part in SLOT.findall(template) if part not in NUMBERED]
            if role not in ROLES or unknown:
                raise OptionError(
                    saw=f"{template}, the place of {role} attention in {self.name}",
                    needed=f"a role among {', '.join(ROLES)}; in the place, numbers called "
                    f"{', '.join(NUMBERED)}",
                    do='write it as where={"self": "layers.{layer}.attention."}',
                )
        for text in (*self.tensors.values(), *self.outside.values()):
            notation.find_axis_led_by(parse_pattern(text), self.sharded)

    def settings(self) -> dict[str, str | None]:
        """Return the function and the conventions of a call in words, for pages and files."""
        return {**self.function.words(), "mask": self.mask, "axes": self.axes}

    def with_settings(self, settings: Mapping[str, str | None]) -> Layout:
        """Return this layout with the `settings` that a file states; its rows keep their order.

        A setting that the file does not name is that of this layout.
        """
        call: dict[str, Any] = {name: settings[name] for name in CALLING}
        words = {name: settings.get(name, word) for name, word in self.function.words().items()}
        return replace(self, function=AttentionSpec.from_words(words), **call)

    def of_weights_from(self, source: Layout) -> Layout:
        """Return this layout with the function of weights that were converted from another one."""
        function = source.function
        if function.rotary is FROM_CONFIG and self.function.rotation is not None:
            function = replace(function, rotary=RotaryRule())
        return replace(self, function=function)

    @cached_property
    def patterns(self) -> dict[str, Pattern]:
        """The parsed patterns of the tensors of attention."""
        return {name: parse_pattern(text) for name, text in self.tensors.items()}

    def sizes(self, shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, int]) -> Sizes:
        """Solve the size of every axis from the shapes of stored tensors and the known counts.

        Raises:
            ShapeError, OptionError: see `layouts.pattern.solve_axis_sizes`; and where a known count
                has no name here, or contradicts what an axis is written by.
        """
        patterns = self.patterns
        stored = {name: (patterns[name], tuple(shape)) for name, shape in shapes.items()}
        sizes = self._solve_sizes(stored, known)
        for tensor, shape in self.canonical_shapes(shapes, sizes).items():
            for axis, size in zip(AXES[tensor], shape, strict=True):
                if known.get(axis, size) != size:
                    raise ShapeError(
                        saw=f"{axis} {known[axis]}",
                        needed=f"{axis} {size}: so {self.name} stores {tensor} here",
                        do="give the counts that the model has, or the layout that it is in",
                    )
        return sizes

    def unpack(self, stored: Mapping[str, Tensor], **known: int) -> State:
        """Return the canonical form of a module's tensors.

        Args:
            stored: by their names within the module.
            known: heads, and what else no shape tells: kv_heads, or the rotary_width of heads that
                are rotated in part.

        Raises:
            OptionError: tensors are missing, or are none of this layout's.
            ShapeError: shapes that do not fit.
        """
        self.require_whole(stored)
        sizes = self.sizes({name: tensor.shape for name, tensor in stored.items()}, known)
        return self.read(stored, sizes=sizes)

    def pack(self, canonical: Mapping[str, Tensor], **known: int) -> State:
        """Return the stored tensors of a module.

        A missing bias is stored as +0 where it is fused with others. A bias that the layout has no
        tensor for is left out only if every entry is +0.

        Args:
            canonical: see `headwise.function.weights`.
            known: the rotary_width of heads that are rotated in part.

        Raises:
            OptionError: a tensor that has no place here, or is missing.
            ShapeError: heads that this layout cannot hold.
        """
        held = {n: p for n, p in self.patterns.items() if canonical.keys() & {*p.tensors}}
        self.require_whole(held)
        shapes = {name: tuple(tensor.shape) for name, tensor in canonical.items()}
        return self.write(canonical, sizes=self.canonical_sizes(shapes, known))

    def read(self, stored: Mapping[str, Tensor], *, sizes: Sizes) -> State:
        """Return the canonical tensors of some stored ones."""
        require_unquantised(**stored)
        patterns, splits = self.patterns, self.axis_splits_with_defaults
        canonical: State = {}
        for name, tensor in stored.items():
            canonical |= notation.unpack_tensor(patterns[name], tensor, sizes, splits)
        if self.rotated_last:
            canonical = notation.roll_query_channels(canonical, by=self.rotary_width(sizes))
        if self.rows == "interleaved":
            options: Any = {"width": self.rotary_width(sizes), "rotated": self.rotated}
            return notation.to_half_split(canonical, **options)
        return canonical

    def write(self, canonical: Mapping[str, Tensor], *, sizes: Sizes) -> State:
        """Return the stored tensors of some canonical ones."""
        from headwise.support.tensors import is_positive_zero  # which needs torch

        state, splits = dict(canonical), self.axis_splits_with_defaults
        if self.rows == "interleaved":
            options: Any = {"width": self.rotary_width(sizes), "rotated": self.rotated}
            state = notation.to_interleaved(state, **options)
        if self.rotated_last:
            state = notation.roll_query_channels(state, by=-self.rotary_width(sizes))
        self._require_places_for_tensors(
            name
            for name in state.keys() - self.canonical_tensor_names
            if not (name in BIASES and is_positive_zero(state[name]))
        )
        stored: State = {}
        for name, pattern in self.patterns.items():
            absent = [tensor for tensor in pattern.tensors if tensor not in state]
            if len(absent) == len(pattern.tensors):
                continue
            if not {*BIASES}.issuperset(absent):
                raise OptionError(
                    saw=f"no {', '.join(absent)}",
                    needed=f"all that {name} of {self.name} is fused of: "
                    f"{', '.join(pattern.tensors)}",
                    do="give the whole module",
                )
            shapes = self.canonical_shapes([name], sizes) if absent else {}
            for tensor in absent:  # a missing bias, fused with others that are present
                like = next(state[other] for other in pattern.tensors if other in state)
                state[tensor] = like.new_zeros(shapes[tensor])
            stored[name] = notation.pack_tensors(pattern, state, sizes, splits)
        return stored

    def canonical_sizes(
        self, shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, int]
    ) -> Sizes:
        """Solve the size of every axis from the shapes of canonical tensors.

        Raises:
            ShapeError: tensors that contradict each other, or that this layout cannot hold.
        """
        tensors = {
            name: (parse_pattern(f"{name}: {' '.join(AXES[name])}"), shape)
            for name, shape in shapes.items()
        }
        return self._solve_sizes(tensors, known)

    def _solve_sizes(
        self, shapes: Mapping[str, tuple[Pattern, tuple[int, ...]]], known: Mapping[str, int]
    ) -> Sizes:
        if unnamed := known.keys() - self._allowed_count_names:
            raise OptionError(
                saw=f"a count of {', '.join(sorted(unnamed))}",
                needed=f"counts of {', '.join(sorted(self._allowed_count_names))}",
                do="give {heads}, and {kv_heads} where they are fewer",
                parameter={"heads": (), "kv_heads": ()},
            )
        for name, size in self.fixed.items():
            if known.get(name, size) != size:
                raise ShapeError(
                    saw=f"{name} {known[name]}",
                    needed=f"{name} {size}: {self.name} has no other",
                    do="give the counts that the model has, or the layout that it is in",
                )
        known, splits = {**known, **self.fixed}, self.axis_splits_with_defaults
        sizes = add_wider(solve_axis_sizes(shapes, known, splits))
        if self.rows == "interleaved" and "rotary_width" in sizes:
            self.rotary_width(sizes)  # raises before any tensor is converted
        return sizes

    @cached_property
    def _allowed_count_names(self) -> frozenset[str]:
        names = {name for pattern in self.patterns.values() for name in pattern.axis_names()}
        for whole, parts in self.axis_splits_with_defaults.items():
            names |= {whole, *parts}
        return frozenset(names.union({"rotary_width"}, *AXES.values()))

    def rotary_width(self, sizes: Sizes) -> int:
        """Return the number of rotated channels of a head.

        Raises:
            OptionError: the number of rotated channels is unknown.
            ShapeError: the number is odd, or larger than head_dim.
        """
        head_dim = sizes["head_dim"]
        if self.function.is_rotary_width_open and not {"rotary_width", "shared_width"} & {*sizes}:
            raise OptionError(
                saw=f"{self.name}, whose heads may be rotated in part, and no rotary_width",
                needed="a rotary_width: only rotated channels are reordered",
                do="give {rotary_width}: rotary_dim in the model's config, or "
                f"{head_dim} for all",
                parameter="rotary_width",
            )
        width = sizes.get("rotary_width", sizes.get("shared_width", head_dim))
        if width % 2 or width > head_dim:
            raise ShapeError(
                saw=f"a rotary_width of {width} in a head_dim of {head_dim}",
                needed="an even number of channels, at most all: two of them turn together",
                do="give {rotary_width} as the model's config says it",
                parameter="rotary_width",
            )
        return width

    def require_can_store(self, shapes: Mapping[str, tuple[int, ...]], sizes: Sizes) -> None:
        """Raise unless canonical tensors of these shapes can be written; a bias may be +0."""
        for name, pattern in self.patterns.items():
            if shapes.keys().isdisjoint(pattern.tensors):
                continue
            for tensor, fitting in self.canonical_shapes([name], sizes).items():
                if shapes.get(tensor, fitting) != fitting:
                    raise ShapeError(
                        saw=f"{tensor} of shape {shapes[tensor]}",
                        needed=f"{fitting} {AXES[tensor]}, for {name} of {self.name}",
                        do="choose a layout that has these axes apart: headwise layouts lists "
                        "them. Nothing is repeated: one kv head does not become several",
                    )
        self._require_places_for_tensors(shapes.keys() - {*BIASES})

    def canonical_shapes(self, stored: Iterable[str], sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """The shapes of the canonical tensors that the stored tensors of these names hold."""
        patterns, splits = self.patterns, self.axis_splits_with_defaults
        return {
            tensor: notation.canonical_shape(patterns[name], tensor, sizes, splits)
            for name in stored
            for tensor in patterns[name].tensors
        }

    @cached_property
    def axis_splits_with_defaults(self) -> Splits:
        """``splits``, with that of heads into kv_heads and group unless it says another."""
        return {**notation.GROUPED, **self.splits}

    def with_shared_tables(self, held: Iterable[str]) -> Layout:
        """Return the layout with those of its tables beside the modules that are held.

        ``held`` are names in ``outside``, or of canonical tensors.
        """
        held = {*held}
        canonical = {name: text.partition(":")[0] for name, text in self.outside.items()}
        named = (n for n, x in canonical.items() if x in SHARED and not held.isdisjoint((n, x)))
        tables = {name: self.outside[name] for name in named}
        return replace(self, tensors={**self.tensors, **tables}) if tables else self

    @property
    def canonical_tensor_names(self) -> set[str]:
        """The canonical tensors that have a place here."""
        return {tensor for pattern in self.patterns.values() for tensor in pattern.tensors}

    @cached_property
    def rotated(self) -> tuple[str, ...]:
        """The canonical tensors whose leading channels turn, where the function rotates."""
        held = {tensor for name in self.required for tensor in self.patterns[name].tensors}
        return ROTATED_WITH_LATENT if "wr" in held else ROTATED

    def is_ordered_as(self, other: Layout) -> bool:
        """True if the channels of a head have the same order in both layouts."""
        return (self.rows, self.rotated_last) == (other.rows, other.rotated_last)

    def _require_places_for_tensors(self, tensors: Iterable[str]) -> None:
        if placeless := sorted({*tensors} - self.canonical_tensor_names):
            raise OptionError(
                saw=f"{', '.join(placeless)}, which {self.name} has no tensor for",
                needed=f"tensors among {', '.join(sorted(self.canonical_tensor_names))}",
                do="choose a layout that holds it; headwise layouts lists them",
            )

    @property
    def required(self) -> set[str]:
        """The stored tensors that every module has."""
        norm = self.function.qk_norm
        is_learned = norm and getattr(norm, "has_weight", True)
        may_lack = {*OPTIONAL, *self.optional, *(() if is_learned else NORMS)}
        return {
            n for n, pattern in self.patterns.items() if not may_lack.issuperset(pattern.tensors)
        }

    def require_whole(self, stored: Mapping[str, object], *, prefix: str = "") -> None:
        """Raise OptionError unless these are the tensors of one module of this layout.

        ``prefix`` is what stands before their names in a checkpoint.
        """
        patterns = self.patterns
        unknown = sorted(stored.keys() - patterns.keys())
        missing = sorted(self.required - stored.keys())
        if unknown or missing:
            raise OptionError(
                saw=f"{len(stored)} tensors: unknown are {_join_some(unknown, prefix)}, "
                f"missing are {_join_some(missing, prefix)}",
                needed=f"those of {self.name}: {', '.join(patterns)}",
                do="give the tensors of one attention module, or name the layout they are in",
            )


def _join_some(names: list[str], prefix: str) -> str:
    more = f" ... ({len(names)})" if len(names) > NAMED else ""
    return ", ".join(prefix + name for name in names[:NAMED]) + more if names else "none"


def require_unquantised(**weights: Tensor) -> None:
    """Raise DTypeError for a weight of torchao or bitsandbytes; its name is the keyword."""
    for name, weight in weights.items():
        library = type(weight).__module__.partition(".")[0]
        if library in ("torchao", "bitsandbytes"):
            call = "weight.dequantize()"
            if library == "bitsandbytes":
                call = "bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state)"
            raise DTypeError(
                saw=f"{name} is quantised: its type is {type(weight).__name__} of {library}",
                needed="weights of a floating-point dtype",
                do=f"load the model without quantisation, or replace each weight by {call}",
            )
