"""Rows of an output gate that are read as others, of a layer of which outputs alone are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headwise.diagnosis.simulation.model import AttentionModel
from headwise.function.weights import State
from tests.diagnosis.causes.faulty_models import HEAD_DIM, HEADS, WIDTH, model_of, searched
from tests.diagnosis.causes.test_parts_of_a_fault import outputs_of


def gated() -> AttentionModel:
    """Return a model whose gate has the shape of q."""
    generator = torch.Generator().manual_seed(8)
    shapes = {
        "wg": (HEADS, HEAD_DIM, WIDTH),
        "bg": (HEADS, HEAD_DIM),
        "wo": (HEADS, HEAD_DIM, WIDTH),
    }
    shapes |= {"wv": (2, HEAD_DIM, WIDTH), "bv": (2, HEAD_DIM)}
    drawn = {
        name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    return model_of(output_gate="channel", causal=True).with_weights(**drawn)


def halves_of_fused_rows(weights: State) -> State:
    """Rows [q|gate] of each head, of which the first half is taken as q."""
    made = {}
    for kind in "wb":
        fused = torch.cat([weights[f"{kind}q"], weights[f"{kind}g"]], 1).flatten(0, 1)
        first, second = fused.chunk(2)
        made |= {f"{kind}q": first.view_as(weights[f"{kind}q"])}
        made |= {f"{kind}g": second.view_as(weights[f"{kind}g"])}
    return made


def gate_in_front(weights: State) -> State:
    return {f"{kind}{to}": weights[f"{kind}{of}"] for kind in "wb" for to, of in ("qg", "gq")}


def all_reshaped(weights: State) -> State:
    """Matrices (rows, inputs) that are reshaped as if they were (inputs, rows)."""
    names = ("wq", "wk", "wv", "wg")
    return {n: weights[n].reshape(WIDTH, -1).T.reshape(weights[n].shape) for n in names}


def channels_before_heads(weights: State) -> State:
    return {n: weights[n].transpose(0, 1).reshape(weights[n].shape) for n in ("wg", "bg")}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (halves_of_fused_rows, "nesting of fused rows"),
        (gate_in_front, "order of fused rows"),
        (all_reshaped, "projection reshaped with exchanged axes"),
        (channels_before_heads, "heads interleaved"),
    ],
)
def test_the_mistake_is_named(change: Callable[[State], State], name: str) -> None:
    right = gated()
    wrong = right.with_weights(**change(right.weights))
    result = searched(right, outputs_of(wrong), name)
    assert [each.cause.name for each in result.causes] == [name]
    assert "g" in result.causes[0].variant.parameters["roles"]
    assert not result.left.cells_beyond_rounding


def test_a_gate_of_other_weights_has_no_such_name() -> None:
    right = gated()
    other = right.weights["wg"].flip(2)
    names = ("nesting of fused rows", "order of fused rows", "rows of another role")
    assert not searched(right, outputs_of(right.with_weights(wg=other)), *names).causes
