"""Drawing of a layout: the head that each row or column of a stored tensor belongs to.

The layout itself stores labelled entries, and the drawing looks the labels up. A drawing therefore
shows what a conversion does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import itemgetter
from textwrap import wrap

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.function.weights import AXES, WIDER
from headwise.layouts._layout import CALLING, Layout
from headwise.layouts.pattern import Sizes, names_by_canonical_axis

EXAMPLE: Sizes = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "key_dim": 4,
    "value_dim": 4,
    "embed_dim": 12,
    "query_dim": 12,
    "source_dim": 12,
    "out_dim": 12,
    "buckets": 5,
    "gate_width": 4,
    "shared_width": 2,
    "rank": 6,
    "lambda_dim": 4,
}
WIDTH = 76  # of the text
MOST_LINES = 12  # for one axis
MOST_ROWS = 2**16  # of a tensor
_WORDS = {
    "rotary_width": "rotary width",
    "score_bias": "score bias",
    "qk_norm": "norm of q and k",
    "output_gate": "output gate",
    "temperature": "temperature of queries",
    "output_norm": "norm of head outputs",
    "mask": "its own mask",
}
_PER_HEAD = {"heads", "kv_heads"}
_WITHIN = {"head_dim", "key_dim", "value_dim", "gate_width", "shared_width"}
_MOST = 1 << 20  # heads of a tensor, and channels of a head

Owners = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class DrawnCell:
    """Adjacent rows or columns that belong to the same heads."""

    owners: Owners  # each canonical tensor that stands in them, with its heads
    start: int  # the first
    length: int  # how many
    channel: int | None = None  # which channel of the head, where the channels of a head lie apart

    @property
    def name(self) -> str:
        """Label such as "q0", "k0-3", or "q0.7" for a channel."""
        channel = "" if self.channel is None else f".{self.channel}"
        names = (f"{short_name(tensor)}{_format_ranges(heads)}" for tensor, heads in self.owners)
        return " ".join(names) + channel


@dataclass(frozen=True)
class DrawnStrip:
    """Drawn axis of a stored tensor; no cells where the axis is the same for all heads."""

    axis: int
    length: int
    cells: tuple[DrawnCell, ...]


def short_name(tensor: str) -> str:
    is_short = tensor in ("wq", "wk", "wv", "wo", "wg", "bq", "bk", "bv", "bg")
    return tensor[1] if is_short else tensor


def equalise_indistinct_axes(layout: Layout, sizes: Mapping[str, int]) -> Sizes:
    """Return ``sizes`` with equal sizes for axes that the layout does not distinguish."""
    fitting = {**sizes, **layout.fixed}
    for pattern in layout.patterns.values():
        for tensor in pattern.tensors:
            groups = names_by_canonical_axis(
                tensor, pattern.names_of(tensor), layout.axis_splits_with_defaults
            )
            for axis, group in zip(AXES[tensor], groups, strict=True):
                wider = axis
                while wider := WIDER.get(wider, ""):
                    if group in ((wider,), layout.splits.get(wider)):
                        fitting[axis] = fitting[wider]
                if not group:
                    fitting[axis] = 1
    return fitting


def drawing_sizes(layout: Layout, given: Mapping[str, int]) -> Sizes:
    """Return the given sizes, else those of `EXAMPLE`; raise ShapeError if they do not fit."""
    base = dict(EXAMPLE)
    if "heads" in layout.splits:  # two in each of its parts
        base["heads"] = 2 * prod(layout.fixed.values())
    if "wr" in layout.rotated:  # a key of a head begins with the shared one
        base["key_dim"] = base["head_dim"] - base["shared_width"]
    # A width that is not given follows from those that are.
    requested = dict(given)
    if "embed_dim" not in given and {"heads", "head_dim"} & given.keys():
        requested["embed_dim"] = requested.get("heads", base["heads"]) * requested.get(
            "head_dim", base["head_dim"]
        )
    base |= {axis: requested[wider] for axis, wider in WIDER.items() if wider in requested}
    base |= requested
    fitting = equalise_indistinct_axes(layout, base)
    for name, size in given.items():
        if fitting.get(name, size) != size:
            raise ShapeError(
                saw=f"{name} {size}",
                needed=f"{name} {fitting[name]}, with {layout.name} and what else was given",
                do=f"leave {{{name}}} out, or choose another layout: headwise layouts lists them",
                parameter=name,
            )
    rows = fitting["heads"] * max(fitting["head_dim"], fitting["value_dim"])
    if rows > MOST_ROWS:
        raise ShapeError(
            saw=f"heads {fitting['heads']} and head_dim {fitting['head_dim']}: {rows:,} rows",
            needed=f"at most {MOST_ROWS:,} rows in a drawing",
            do="give fewer {heads}: those of a larger layer follow in the same order",
            parameter="heads",
        )
    return _canonical_sizes(layout, fitting, fitting)


def draw_axis_strips(layout: Layout, sizes: Sizes) -> dict[str, tuple[DrawnStrip, ...]]:
    patterns = layout.patterns
    shapes = {name: pattern.shape(sizes) for name, pattern in patterns.items()}
    names = layout.canonical_tensor_names
    # Those of latents stand in one axis with others.
    latents = {"rank", "source_dim"} if "wc" in names and "wr" in names else set[str]()
    whole = _PER_HEAD | _WITHIN | latents | ({"query_dim"} if latents and "wa" in names else set())
    # Axes outside of heads are drawn whole, so two entries are enough.
    narrow = {name: n if name in whole else 2 for name, n in sizes.items() if name in EXAMPLE}
    stored = layout.write(
        {tensor: _labelled_tensor(tensor, narrow) for tensor in layout.canonical_tensor_names},
        sizes=_canonical_sizes(layout, narrow, sizes),
    )
    return {
        name: tuple(_draw_strip(stored[name], axis, length) for axis, length in enumerate(shape))
        for name, shape in shapes.items()
    }


def draw(layout: Layout, **given: int) -> str:
    """Every stored tensor with its pattern and its shape, and whose its rows or columns are.

    Args:
        layout: which.
        given: heads, kv_heads, head_dim, embed_dim and so on; small ones where nothing is said.

    Raises:
        ShapeError, OptionError: the layout cannot have these sizes.
    """
    sizes = drawing_sizes(layout, given)
    strips_by_name = draw_axis_strips(layout, sizes)
    lines: list[str] = []
    required = layout.required
    for name, pattern in layout.patterns.items():
        lines += ["", f"{name}  {pattern.shape(sizes)}{'' if name in required else ', if any'}"]
        lines += wrap(layout.tensors[name], WIDTH, initial_indent="  ", subsequent_indent="    ")
        lines += [
            f"  {line}"
            for strip in strips_by_name[name]
            for line in _strip_lines(strip, len(strips_by_name[name]))
        ]
    return "\n".join(lines[1:])


def attention_spec_lines(layout: Layout, sizes: Sizes) -> list[str]:
    """Return a line for each setting that no tensor stores, and one for those of the config."""
    values, rotates = layout.settings(), layout.function.rotation is not None
    if not layout.function.is_rotary_width_open:
        del values["rotary_width"]  # heads turn whole, or not at all
    lines = [
        f"{_WORDS.get(name, name)}: {value}"
        for name, value in values.items()
        if value not in (None, "none")
    ]
    if rotates:
        width = sizes.get("rotary_width", sizes["head_dim"])
        shown = rotary_pairs(layout.rows, width)
        listed = ", ".join(f"{a} and {b}" for a, b in shown[:3]) + ", ..." * (len(shown) > 3)
        lines.append(f"rotated together in q and k: channels {listed}")
        if layout.rotated_last:
            lines.append("counted in the last channels of each q, and in the shared key")
    left = [_WORDS.get(n, n) for n, value in values.items() if value is None and n not in CALLING]
    return lines + ([f"left to the model's config: {', '.join(left)}"] if left else [])


def rotary_pairs(rotary: str, width: int) -> list[tuple[int, int]]:
    half = width // 2
    return [(2 * i, 2 * i + 1) if rotary == "interleaved" else (i, i + half) for i in range(half)]


def _canonical_sizes(layout: Layout, sizes: Mapping[str, int], rotated: Mapping[str, int]) -> Sizes:
    """Return all sizes of a layout; heads turn whole where ``rotated`` has no rotary_width."""
    shapes = {
        tensor: tuple(sizes[axis] for axis in AXES[tensor])
        for tensor in layout.canonical_tensor_names
    }
    whole = rotated["shared_width" if "wr" in layout.rotated else "head_dim"]
    width = {"rotary_width": rotated.get("rotary_width", whole)}
    return layout.canonical_sizes(shapes, width)


_NAMES = tuple(AXES)


def _labelled_tensor(tensor: str, sizes: Mapping[str, int]) -> Tensor:
    axes = AXES[tensor]
    entries = torch.full([sizes[axis] for axis in axes], _NAMES.index(tensor))
    for names in (_PER_HEAD, _WITHIN):
        entries = entries * _MOST
        for at, axis in enumerate(axes):
            if axis in names:
                shape = [-1 if n == at else 1 for n in range(len(axes))]
                entries = entries + torch.arange(sizes[axis]).view(shape)
    return entries


def _draw_strip(stored: Tensor, axis: int, length: int) -> DrawnStrip:
    rows = stored.movedim(axis, 0).flatten(1) if stored.dim() > 1 else stored[:, None]
    labels = rows // _MOST
    changes = (labels[1:] != labels[:-1]).any(1).nonzero().flatten() + 1
    starts = [0, *changes.tolist()]
    owners = [_owners_of_labels(row) for row in labels[starts].tolist()]
    runs = [  # adjacent rows with the same owners
        (whose, next(run)[1])
        for whose, run in groupby(zip(owners, starts, strict=True), key=itemgetter(0))
    ]
    if len(runs) == 1:
        return DrawnStrip(axis, length, ())
    ends = [*(start for _, start in runs[1:]), len(rows)]
    spans = [(*run, end) for run, end in zip(runs, ends, strict=True)]
    if len({whose for whose, _ in runs}) == len(runs):
        return DrawnStrip(
            axis, length, tuple(DrawnCell(whose, at, end - at) for whose, at, end in spans)
        )
    channels = (rows[:, 0] % _MOST).tolist()  # those of a head are not side by side
    cells = [
        DrawnCell(whose, at, 1, channels[at])
        for whose, start, end in spans
        for at in range(start, end)
    ]
    return DrawnStrip(axis, length, tuple(cells))


def _owners_of_labels(labels: Iterable[int]) -> Owners:
    owners = [divmod(label, _MOST) for label in sorted(set(labels))]
    return tuple(
        (_NAMES[tensor], tuple(head for _, head in heads))
        for tensor, heads in groupby(owners, key=itemgetter(0))
    )


def _format_ranges(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and [*numbers] == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def _strip_lines(strip: DrawnStrip, axes: int) -> Iterator[str]:
    if not strip.cells:
        return
    words = {1: ("entries",), 2: ("rows", "columns")}
    word = words[axes][strip.axis] if axes in words else f"axis {strip.axis}"
    yield f"{word}: {_describe_cell_lengths(strip.cells)}"
    rows = list(_wrap_cells_into_lines(strip.cells))
    left = len(str(rows[-1][0]))
    lines = [f"  {start:>{left}}  {'  '.join(names)}" for start, names in rows]
    if len(lines) > MOST_LINES:
        cut = len(lines) - MOST_LINES + 1
        lines[MOST_LINES - 3 : -2] = [f"  {'':>{left}}  ... {cut} lines of the same kind"]
    yield from lines


def _describe_cell_lengths(cells: Sequence[DrawnCell]) -> str:
    by_length: dict[int, list[str]] = {}
    for cell in cells:
        names = by_length.setdefault(cell.length, [])
        names += [n for n in (short_name(tensor) for tensor, _ in cell.owners) if n not in names]
    if len(by_length) == 1:
        return f"{cells[0].length} for each name"
    return ", ".join(f"{n} for each {' and '.join(names)}" for n, names in by_length.items())


def _wrap_cells_into_lines(cells: Sequence[DrawnCell]) -> Iterator[tuple[int, list[str]]]:
    kinds = [cell.owners[0][0] for cell in cells]
    runs = [kind for kind, _ in groupby(kinds)]
    comes_again = len(set(runs)) < len(runs)
    start, names, width = 0, list[str](), 0
    for at, cell in enumerate(cells):
        name = cell.name
        changes = at > 0 and kinds[at] != kinds[at - 1]
        begins = changes and (not comes_again or kinds[at] == kinds[0])
        if names and (begins or width + len(name) > WIDTH - 12):
            yield start, names
            start, names, width = cell.start, [], 0
        names.append(name)
        width += len(name) + 2
    yield start, names
