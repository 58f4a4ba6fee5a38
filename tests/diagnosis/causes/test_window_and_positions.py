"""Causes that move the bounds of a window, the causal mask and the positions."""

from dataclasses import replace

import pytest
import torch

from headwise.diagnosis.simulation.model import AttentionModel, Inputs
from headwise.function.spec import NormRule
from tests.diagnosis.causes.faulty_models import (
    HEADS,
    KV_HEADS,
    WIDTH,
    inputs_of,
    model_of,
    recorded,
    searched,
)

MASKS = (
    "window off by one",
    "window missing",
    "causal mask missing",
    "causal alignment",
    "scale",
    "padding side",
)
POSITIONS = ("rotary position offset", "rotary axis", "rotary theta", "scale")
Window = tuple[int | None, int | None]


def explained(
    model: AttentionModel, other: AttentionModel, inputs: Inputs, *names: str
) -> list[tuple[str, object]]:
    result = searched(model, recorded(other, inputs), *names)
    assert not result.left.cells_beyond_rounding
    return [(each.cause.name, each.variant.parameters) for each in result.causes]


@pytest.mark.parametrize(
    ("right", "wrong", "parameters"),
    [
        ((4, 2), (4, 3), {"window after": 4}),
        ((4, 2), (6, 2), {"window": 7}),
        ((4, 4), (5, 5), {"window": 6}),
        ((4, 2), (4, None), {"side": "after"}),
        ((4, 2), (None, 2), {"side": "before"}),
        ((4, 2), (None, None), {}),
    ],
)
def test_the_side_of_a_window_that_differs(
    right: Window, wrong: Window, parameters: dict[str, object]
) -> None:
    model = model_of(window=right)
    other = model.with_settings(window=wrong, scale=0.2)
    names = dict(explained(model, other, inputs_of(), *MASKS))
    name = "window missing" if None in wrong else "window off by one"
    assert names.keys() == {name, "scale"}
    assert names[name] == parameters


def test_a_window_of_more_than_forty_keys() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = Inputs(torch.randn(1, 90, WIDTH, generator=generator, dtype=torch.float64))
    model = model_of(causal=True, window=(63, 0))
    other = model.with_settings(window=(64, 0))
    assert explained(model, other, tokens, *MASKS) == [("window off by one", {"window": 65})]


def test_a_window_that_is_not_causal_any_more() -> None:
    model = model_of(window=(5, 0))
    other = model.with_settings(window=(5, None))
    assert explained(model, other, inputs_of(), *MASKS) == [("causal mask missing", {})]


@pytest.mark.parametrize(("role", "offset"), [("q", 2), ("k", -1)])
def test_an_offset_of_queries_or_keys_alone(role: str, offset: int) -> None:
    model = model_of()
    other = model.with_rotary(**{f"{role}_offset": offset})
    [(name, parameters)] = explained(model, other, inputs_of(), *POSITIONS)
    assert (name, parameters) == ("rotary position offset", {"role": role, "offset": offset})


@pytest.mark.slow
def test_two_offsets_are_both_named() -> None:
    model = model_of()
    other = model.with_rotary(q_offset=2, k_offset=-1)
    names = explained(model, other, inputs_of(), *POSITIONS)
    assert [parameters for _, parameters in names] == [
        {"role": "q", "offset": 2},
        {"role": "k", "offset": -1},
    ]


@pytest.mark.slow
def test_an_offset_of_both_changes_no_score_and_is_not_named() -> None:
    model = model_of()
    other = model.with_rotary(q_offset=2, k_offset=2)
    assert not searched(model, recorded(other, inputs_of()), *POSITIONS).causes


def test_heads_with_norms_over_the_width_and_sinks() -> None:
    generator = torch.Generator().manual_seed(2)
    sizes = {"q_norms": HEADS, "k_norms": KV_HEADS}
    norms = {
        name: torch.rand(count, 10, generator=generator) + 0.5 for name, count in sizes.items()
    }
    sink = torch.randn(HEADS, generator=generator).double()
    model = model_of(rotary=None, qk_norm=NormRule(over="width", eps=1e-6))
    model = model.with_weights(**{name: x.double() for name, x in norms.items()})
    weights = dict(model.weights)
    for name in weights.keys() - {"bo"}:
        heads = 2 if name in ("wq", "wo", "bq", "q_norms") else 1
        weights[name] = weights[name].flatten(0, 1).unflatten(0, (heads, -1))
    other = replace(model, weights=weights | {"sink": sink[:2]}).with_settings(
        num_heads=2, num_kv_heads=1
    )
    good = model.with_weights(sink=sink)
    names = explained(good, other, inputs_of(), "number of heads", "sinks", "scale")
    assert [name for name, _ in names] == ["number of heads", "sinks"]
    assert names[0][1] == {"heads": 2}
