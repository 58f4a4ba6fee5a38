"""Numbers of heads as rows, and the largest of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from headwise.errors import OptionError
from headwise.support.axes import describe_value
from headwise.support.integers import as_count

Row = dict[str, str | int | float]


class HeadValue(NamedTuple):
    """One head's number."""

    layer: str
    layer_index: int
    head: int
    value: float


def top_of(layers: tuple[str, ...], values: Tensor, n: int, *, lowest: bool) -> list[HeadValue]:
    """The ``n`` largest of (layers, heads), or the smallest; NaN is left out."""
    count = as_count(n)
    if count is None or count < 0:
        raise OptionError(
            saw=f"top(n={describe_value(n)})",
            needed="how many heads, from 0",
            do="e.g. n=5",
        )
    flat = values.flatten()
    order = flat.argsort(descending=not lowest, stable=True).tolist()
    real = [place for place in order if not flat[place].isnan()][:count]
    found = []
    for place in real:
        index, head = divmod(place, values.shape[1])
        found.append(HeadValue(layers[index], index, head, float(flat[place])))
    return found


def table_of(heads: Iterable[tuple[str, int, int]], columns: Mapping[str, Tensor]) -> list[Row]:
    """A row for each head (layer, its index, head), with its entry of each (layers, heads)."""
    lists = {name: column.tolist() for name, column in columns.items()}
    return [
        {
            "layer": layer,
            "layer_index": index,
            "head": head,
            **{name: rows[index][head] for name, rows in lists.items()},
        }
        for layer, index, head in heads
    ]
