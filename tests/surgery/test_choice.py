"""Heads that go, chosen from effects that are known."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention
from headwise.errors import OptionError
from headwise.surgery import ModelHeads
from headwise.surgery.choice import Heads, Search
from tests.scanning import models


class Layers(nn.Module):
    """Two layers with other numbers of heads."""

    def __init__(self, *heads: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Attention(24, count, num_kv_heads=kv, head_dim=4) for count, kv in heads
        )


class Known:
    """Effects of heads that are stated, and what was asked."""

    def __init__(
        self, *rows: list[float], again: dict[tuple[int, int], float] | None = None
    ) -> None:
        self.rows = {
            f"layers.{n}.": torch.tensor(row, dtype=torch.float64) for n, row in enumerate(rows)
        }
        self.again, self.asked = again or {}, []  # type: ignore[var-annotated]

    def __call__(self, gone: Heads, chosen: Heads) -> dict[str, Tensor]:
        self.asked.append((gone, {name: heads for name, heads in chosen.items() if heads}))
        effects = {}
        for number, (name, row) in enumerate(self.rows.items()):
            if chosen.get(name):
                effects[name] = torch.full_like(row, torch.nan)
                effects[name][chosen[name]] = row[chosen[name]]
                for (layer, head), value in self.again.items():
                    if gone and layer == number and head in chosen[name]:
                        effects[name][head] = value
        return effects


def search(known: Known, *heads: tuple[int, int], **options: Any) -> Search:
    given: dict[str, Any] = {"take": "groups", "even": False} | options
    return Search(ModelHeads(Layers(*heads)), known, tuple(known.rows), **given)


A, B = "layers.0.", "layers.1."


def test_the_least_effects_go_and_one_head_of_each_layer_stays() -> None:
    known = Known([1.0, 2.0, 3.0], [40.0, 10.0, 30.0, 20.0, 50.0])
    choice = search(known, (3, 3), (5, 5)).choose(0.5, 1)
    assert choice.gone() == {A: [0, 1], B: [1, 3]}
    assert choice.predicted == 1 + 2 + 10 + 20
    assert (choice.kept(), choice.total) == (4, 8)
    assert [unit.effect for [unit] in choice.steps] == [1, 2, 10, 20, 30, 40]
    assert choice.gone(len(choice.steps)) == {A: [0, 1], B: [0, 1, 2, 3]}
    assert choice.gone(0) == {A: [], B: []}


def test_even_takes_as_many_from_each_layer() -> None:
    known = Known([1.0, 2.0, 3.0, 4.0], [40.0, 10.0, 30.0, 20.0])
    choice = search(known, (4, 4), (4, 4), even=True).choose(0.5, 1)
    assert choice.gone() == {A: [0, 1], B: [1, 3]}
    # At least the share that keep names stays: no half of a step is done.
    assert search(known, (4, 4), (4, 4), even=True).choose(0.6, 1).gone() == {A: [0], B: [1]}


def test_whole_groups_go_or_as_many_heads_of_each() -> None:
    effects = [1.0, 9.0, 2.0, 3.0, 3.0, 3.0]  # kv heads of 3: sums 12 and 9
    choice = search(Known(effects), (6, 2)).choose(0.5, 1)
    assert choice.gone() == {A: [3, 4, 5]}
    choice = search(Known(effects), (6, 2), take="heads").choose(0.6, 1)
    assert choice.gone() == {A: [0, 3]}
    assert choice.gone(2) == {A: [0, 2, 3, 4]}
    assert [unit.effect for [unit] in choice.steps] == [4, 5]


def test_an_only_kv_head_stays_and_loses_query_heads() -> None:
    effects = [4.0, 1.0, 3.0, 2.0]
    for take in ("groups", "heads"):
        choice = search(Known(effects, [9.0]), (4, 1), (1, 1), take=take).choose(0.5, 1)
        assert choice.gone() == {A: [1, 3], B: []}
        assert choice.kept(len(choice.steps)) == 2


def test_take_makes_no_difference_without_groups() -> None:
    effects = [4.0, 1.0, 3.0, 2.0]
    chosen = [search(Known(effects), (4, 4), take=t).choose(0.5, 1) for t in ("groups", "heads")]
    assert chosen[0].gone() == chosen[1].gone() == {A: [1, 3]}


def test_measured_again_a_head_whose_twin_is_gone_stays() -> None:
    twins = Known([0.0, 5.0, 0.1, 6.0, 1.0, 7.0], again={(0, 2): 8.0})
    once = search(twins, (6, 6)).choose(4 / 6, 1)
    assert once.gone() == {A: [0, 2]}
    twice = search(twins, (6, 6)).choose(4 / 6, 2)
    assert twice.gone() == {A: [0, 4]}
    assert twice.predicted == 1.0
    # Twice as many as still have to go are measured again, without the one that is gone.
    assert twins.asked[-1] == ({A: [0]}, {A: [2, 4]})
    assert twice.effects[A].tolist() == [0, 5, 0.1, 6, 1, 7]
    assert [unit.heads for [unit] in twice.steps] == [(0,), (4,), (1,), (3,), (5,)]


def test_layers_with_one_table_of_distances_lose_the_same_heads() -> None:
    heads = ModelHeads(models.t5())
    layers = tuple(heads.specs)
    tables = [stack for stack in heads.stacks if len(stack) > 1]
    generator = torch.Generator().manual_seed(0)
    effects = {name: torch.rand(4, generator=generator).double() for name in layers}
    choice = Search(heads, lambda *_: dict(effects), layers, "groups", even=False).choose(0.5, 1)
    assert tables
    gone = choice.gone()
    for stack in tables:
        assert len({tuple(gone[name]) for name in stack}) == 1
        total = torch.stack([effects[name] for name in stack]).sum(0)
        assert set(gone[stack[0]]) == set(total.argsort()[: len(gone[stack[0]])].tolist())
    assert any(gone[stack[0]] for stack in tables)
    assert len(tables) == 3  # of the encoder, of the decoder, and the zeros of cross attention


def test_a_keep_at_which_nothing_goes_is_refused() -> None:
    with pytest.raises(OptionError, match="at most 1 head may go"):
        search(Known([1.0] * 6), (6, 2)).choose(0.8, 1)
    with pytest.raises(OptionError, match="a layer with several heads"):
        search(Known([1.0], [2.0]), (1, 1), (1, 1)).choose(0.5, 1)
