"""Names for what happened to the weights of attention modules that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from headwise.diagnosis.causes.catalogue import CAUSES
from headwise.diagnosis.causes.cause import cause_page_path, describe_undoing
from headwise.diagnosis.causes.moved import MissingBiasesCause
from headwise.diagnosis.causes.weights import LayersExchangedCause, LayersOffByOneCause
from headwise.diagnosis.moves.move import Move, MoveReport
from headwise.diagnosis.moves.state import find_state_moves
from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.function.weights import State
from headwise.layouts._layout import Layout
from headwise.layouts.equality import list_differing_tensors
from headwise.layouts.modules import NamedModule, find_modules

# Biases that are zero are described with those that are missing.
_CAUSES_OF_MOVES = {cause.name: cause for cause in CAUSES} | {"bias zero": MissingBiasesCause()}


def describe_repair(move: Move) -> str:
    """Return what makes the moved weights right again."""
    cause = _CAUSES_OF_MOVES.get(move.cause)
    return describe_undoing(move.name) if cause is None else cause.remedy(move.name)


def page_of_cause(name: str) -> str:
    """Return the path of the page about a cause; "" for a move that has none."""
    cause = _CAUSES_OF_MOVES.get(name)
    return "" if cause is None else cause_page_path(cause.name)


LOAD_BY_NUMBER = "load each layer by its number"


def cause_of_layer_shifts(shifts: AbstractSet[int]) -> str:
    """Return the cause of layers that moved by these numbers of places."""
    is_off_by_one = shifts in ({1}, {-1})
    return LayersOffByOneCause.name if is_off_by_one else LayersExchangedCause.name


UNREADABLE = (OptionError, ShapeError, DTypeError)
Stored = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ModuleMoves:
    """Moves that make the weights of a module in the first from those in the second.

    Attributes:
        name: the module in the first; "" if its tensors have no prefix.
        layer: its layer in the model.
        moves: causes in the order in which they happened, each with its projections.
        causes: their names.
        repairs: what undoes each cause; the last is the first to be undone.
        pages: the path of the page about each cause, in the installed package; "" for none.
        unexplained: projections that nothing explains.
        is_other_module: the module of the second whose weights these are; "" for its own.
    """

    name: str
    layer: int
    moves: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()
    is_other_module: str = ""

    def __str__(self) -> str:
        name = f"`{self.name}`" if self.name else "the layer"
        if self.is_other_module:
            return f"{name} has the weights of `{self.is_other_module}`: {self.causes[0]}"
        left = (
            [f"no known change explains {', '.join(self.unexplained)}"] if self.unexplained else []
        )
        return f"{name}: {'; then '.join([*self.moves, *left])}"

    @property
    def repair(self) -> str:
        """The repairs, in the order in which they are done; "" where nothing is named."""
        return "; then ".join(reversed(self.repairs))

    @property
    def repair_lines(self) -> list[str]:
        """Sentences: the repair, and the pages about the causes."""
        pages = ", ".join(dict.fromkeys(filter(None, self.pages)))
        lines = [f"  repair: {self.repair}"] if self.repairs else []
        return lines + ([f"  more: {pages}"] if pages else [])


def describe_module_moves(modules: Sequence[ModuleMoves], *, most: int) -> list[str]:
    """Return sentences on the first modules, and the number of the others.

    A repair stands below the first module that needs it.
    """
    lines, repaired = [], set()
    for module in modules[:most]:
        lines.append(str(module))
        if module.repair not in repaired:
            lines += module.repair_lines
            repaired.add(module.repair)
    return lines + ([f"and {len(modules) - most} more"] if len(modules) > most else [])


def find_module_moves(
    first: Stored,
    second: Stored,
    layouts: tuple[Layout, Layout],
    differing: Sequence[str],
    counts: Mapping[str, int],
) -> list[ModuleMoves]:
    """Name the moves in every module that has one of the tensors ``differing`` of the second.

    Modules are paired in their order. Those that cannot be read are left out.
    """
    mine, theirs = find_modules(layouts[0], first), find_modules(layouts[1], second)
    if len(mine) != len(theirs):
        return []
    concerned = [
        (a, b) for a, b in zip(mine, theirs, strict=True) if not {*b.tensors}.isdisjoint(differing)
    ]
    named, shifts = [], set()
    places = _list_candidate_places([theirs.index(b) for _, b in concerned], len(theirs))
    candidates = [theirs[place] for place in places]
    for a, b in concerned:
        with suppress(*UNREADABLE):
            state = _unpack_module(first, a, layouts[0], counts)
            other = _find_module_with_weights(state, second, layouts[1], candidates, b, counts)
            if other is not None:
                shifts.add(other.layer - a.layer)
                named.append(_report_exchanged_module(a, other))
            else:
                right = _unpack_module(second, b, layouts[1], counts)
                report = find_state_moves(
                    state,
                    right,
                    rotary_width=counts.get("rotary_width"),
                    was_interleaved=layouts[0].rows == "interleaved",
                )
                if report.moves or report.unexplained:  # signs of zeros alone move nothing
                    named.append(_describe_moves_of_module(a, report))
    exchange = cause_of_layer_shifts(shifts)
    page = page_of_cause(exchange)
    return [
        replace(each, causes=(exchange,), repairs=(LOAD_BY_NUMBER,), pages=(page,))
        if each.is_other_module
        else each
        for each in named
    ]


def _list_candidate_places(differing: Sequence[int], count: int) -> list[int]:
    """Return the places of differing modules and of their neighbours, which may be equal.

    If layers are off by one, the last has the weights of none, or its own.
    """
    near = {place + shift for place in differing for shift in (-1, 0, 1)}
    return sorted(near & {*range(count)})


def _unpack_module(
    stored: Stored, module: NamedModule, layout: Layout, counts: Mapping[str, int]
) -> State:
    tensors = {local: stored[name] for name, local in module.tensors.items()}
    known = {name: counts[name] for name in ("heads", "kv_heads", "rotary_width") if name in counts}
    return layout.unpack(tensors, **known)


def _find_module_with_weights(
    state: State,
    second: Stored,
    layout: Layout,
    modules: Sequence[NamedModule],
    right: NamedModule,
    counts: Mapping[str, int],
) -> NamedModule | None:
    """Return the other module of the second that has exactly these weights."""
    for module in modules:
        if module.prefix != right.prefix:
            with suppress(*UNREADABLE):
                if not list_differing_tensors(
                    state, _unpack_module(second, module, layout, counts)
                ):
                    return module
    return None


def _report_exchanged_module(module: NamedModule, other: NamedModule) -> ModuleMoves:
    name, other_name = (each.prefix.rstrip(".") for each in (module, other))
    return ModuleMoves(name=name, layer=module.layer, is_other_module=other_name)


def _describe_moves_of_module(module: NamedModule, report: MoveReport) -> ModuleMoves:
    return ModuleMoves(
        name=module.prefix.rstrip("."),
        layer=module.layer,
        moves=tuple(map(str, report.moves)),
        causes=tuple(move.cause for move in report.moves),
        repairs=tuple(map(describe_repair, report.moves)),
        pages=tuple(page_of_cause(move.cause) for move in report.moves),
        unexplained=report.unexplained,
    )
