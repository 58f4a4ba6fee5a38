"""A mask without memory in the place of a bool tensor."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.huggingface.masks import LazyMask
from headwise.masks.clauses.lengths import Lengths
from headwise.masks.mask import Mask
from tests.memory import LargestTensor

BATCH, QUERIES, KEYS = 3, 24, 29
MASK = Mask.causal(align="bottom-right") & Mask.lengths(keys=torch.tensor([29, 3, 0]))


def lazy(mask: Mask = MASK, **sizes: int) -> LazyMask:
    sizes = {"batch": BATCH, "queries": QUERIES, "keys": KEYS, **sizes}
    return LazyMask(mask, **sizes, device=torch.device("cpu"))


def written() -> Tensor:
    position = torch.arange(KEYS)
    causal = position <= torch.arange(QUERIES)[:, None] + KEYS - QUERIES
    real = position < torch.tensor([29, 3, 0])[:, None]
    return (causal & real[:, None])[:, None]


def test_it_passes_for_a_tensor_and_stays_lazy() -> None:
    mask = lazy()
    assert isinstance(mask, Tensor)
    assert (mask.shape, mask.dtype, mask.dim()) == ((BATCH, 1, QUERIES, KEYS), torch.bool, 4)
    assert mask.contiguous() is mask
    assert mask.to("cpu") is mask
    assert mask.to(torch.bool) is mask
    assert isinstance(mask.detach(), LazyMask)
    assert mask.mask is MASK
    assert mask.written is None
    assert repr(mask) == f"LazyMask(batch=3, queries=24, keys=29, {MASK})"
    assert mask.written is None


def test_it_costs_nothing_however_long() -> None:
    with LargestTensor() as made:
        lazy(Mask.causal(), queries=2**20, keys=2**20)
    assert made.bytes == 0


READ: dict[str, Callable[[Any], Any]] = {
    "sliced": lambda m: m[:, :, 3:, :7],
    "inverted": operator.invert,
    "and": lambda m: m & (torch.arange(KEYS) < 5),
    "where": lambda m: torch.where(m, 0.0, -1.0),
    "masked_fill": lambda m: torch.zeros(BATCH, 1, QUERIES, KEYS).masked_fill(m, 1.0),
    "all": lambda m: m.all(-1),
    "as numbers": lambda m: 1.0 - m.float(),
    "joined": lambda m: torch.cat([m, m], dim=-1),
    "expanded": lambda m: m.expand(BATCH, 6, QUERIES, KEYS),
    "expanded from the batch": lambda m: m[:, 0],
}


@pytest.mark.parametrize("name", READ)
def test_what_reads_it_sees_the_mask(name: str) -> None:
    found = READ[name](lazy())
    assert type(found) is Tensor
    assert torch.equal(found, READ[name](written()))


def test_what_changes_it_changes_its_meaning() -> None:
    expected = written()
    expected[:, :, 5] = False
    mask = lazy()
    mask[:, :, 5] = False
    assert torch.equal(mask.materialise(), expected)
    view = mask[1, 0]
    view |= True
    expected[1] = True
    assert mask.written is not None
    assert torch.equal(mask.written, expected)
    assert repr(mask) == "LazyMask(batch=3, queries=24, keys=29, written)"


@pytest.mark.parametrize("name", READ)
def test_what_only_reads_it_edits_nothing(name: str) -> None:
    mask = lazy()
    READ[name](mask)
    assert not mask.is_edited()
    mask[2, 0, 3, 4] = not bool(mask[2, 0, 3, 4])
    assert mask.is_edited()
    assert mask.to("meta").is_edited()  # without values, it may be


def test_moved_it_stays_lazy() -> None:
    mask = lazy()
    moved = mask.to("meta", non_blocking=True)
    assert isinstance(moved, LazyMask)
    assert moved.device.type == "meta"
    assert [lengths.numbers.is_meta for lengths in moved.mask.clauses_of_kind(Lengths)] == [True]
    assert mask.written is None
    mask[:] = True
    moved = mask.to("meta")
    assert isinstance(moved, LazyMask)
    assert moved.written is not None
    assert moved.written.is_meta


@pytest.mark.parametrize("add", [operator.add, operator.iadd, lambda s, m: m + s])
def test_added_to_scores_it_raises(add: Callable[[Tensor, Tensor], Tensor]) -> None:
    scores = torch.zeros(BATCH, 6, QUERIES, KEYS)
    with pytest.raises(MaskError, match="added to scores by a model's own code"):
        add(scores, lazy())
    assert torch.equal(lazy() + lazy(), written() + written())


def added() -> LazyMask:
    """The form of models whose masks are made to be added."""
    sizes = {"batch": BATCH, "queries": QUERIES, "keys": KEYS}
    return LazyMask(MASK, **sizes, device=torch.device("cpu"), dtype=torch.float64)


SMALLEST = torch.finfo(torch.float64).min


def test_the_float_form_is_zeros_and_the_smallest_number() -> None:
    expected = torch.zeros(BATCH, 1, QUERIES, KEYS).double().masked_fill(~written(), SMALLEST)
    mask = added()
    assert mask.dtype == torch.float64
    assert isinstance(mask.to(torch.float64), LazyMask)
    assert mask.written is None
    scores = torch.randn(BATCH, 6, QUERIES, KEYS).double()
    assert torch.equal(scores + mask, scores + expected)
    padded = torch.nn.functional.pad(added(), (0, 3), value=0.0)
    assert torch.equal(padded, torch.nn.functional.pad(expected, (0, 3), value=0.0))
    assert torch.equal(added().to(torch.float32), expected.float())


def test_a_compiled_layer_reads_it() -> None:
    def layer(x: Tensor, mask: Tensor) -> Tensor:
        if isinstance(mask, LazyMask):
            for clause in mask.mask.clauses:
                if isinstance(clause, Lengths):
                    return x * clause.numbers[:, None]
        return x

    x = torch.ones(BATCH, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, lazy()), layer(x, lazy()))
    assert torch.equal(compiled(x, lazy(Mask.causal(), keys=24)), x)
