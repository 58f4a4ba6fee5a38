"""Values in nested containers."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass

from headwise.support.tensors import iterate_leaves, map_leaves


@dataclass
class Output:
    first: object
    second: object


def test_leaves_come_in_order() -> None:
    pair = namedtuple("pair", "left right")(3, [4])
    value = [1, (2, pair), OrderedDict(b=5, a=[6]), Output(7, {"x": None}), deque([8])]
    assert list(iterate_leaves(value)) == [1, 2, 3, 4, 5, 6, 7, None, 8]
    assert list(iterate_leaves("text")) == ["text"]
    assert list(iterate_leaves(Output)) == [Output]


def test_mapped_keeps_the_form() -> None:
    assert map_leaves(str, (1, [2, (None,)], {"a": 3})) == ("1", ["2", ("None",)], {"a": "3"})
    assert map_leaves(str, 1) == "1"
