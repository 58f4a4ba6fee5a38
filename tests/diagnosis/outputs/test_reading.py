"""Weights that are read from outputs: products that are known, roles by the others, and noise."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headwise.diagnosis.outputs import reading
from headwise.diagnosis.outputs.reading import solve, with_constant
from headwise.diagnosis.outputs.runs import agrees, draw_tokens, relative_gap
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from tests.diagnosis.outputs import plain

EXACT, NEAR = 1e-10, 1e-3  # of what is read in float64 and in float32
CASES = {"many": plain.MANY, "grouped": plain.GROUPED}


def test_the_matrix_of_one_token_is_known() -> None:
    """The output is x @ M + c, where M and c are sums over heads."""
    x, matrix, bias = draw_tokens((40, 9), 1), draw_tokens((9, 5), 2), draw_tokens((5,), 3)
    solution = solve(with_constant(x), x @ matrix + bias)
    assert solution is not None
    assert torch.allclose(solution.x, torch.cat([matrix, bias[None]]), atol=EXACT)
    assert solution.residual < EXACT


def test_noise_is_what_is_left() -> None:
    x, matrix = draw_tokens((400, 9), 1), draw_tokens((9, 5), 2)
    solution = solve(x, x @ matrix + 1e-3 * draw_tokens((400, 5), 4))
    assert solution is not None
    apart = (solution.x - matrix).abs().max()
    # Of 45 normal numbers, the largest is between 1 and 4 standard deviations.
    assert float(solution.noise.max()) < float(apart) < 4 * float(solution.noise.max())


@pytest.mark.parametrize("count", [8, 9])
def test_too_few_equations_have_no_solution(count: int) -> None:
    x = draw_tokens((count, 9), 1)
    assert solve(x, x[:, :2]) is None


def test_dependent_unknowns_have_no_solution() -> None:
    x = draw_tokens((30, 9), 1)
    x[:, 4] = x[:, 3]
    assert solve(x, x[:, :2]) is None


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_values_follow_from_the_output_projection(options: dict[str, Any]) -> None:
    layer, state = plain.make(**options)
    model, _ = plain.model_and_runs(layer, lambda x: x)
    state["wv"] = 0.3 * torch.randn(state["wv"].shape)
    state["bv"] = torch.randn(state["bv"].shape)
    _, runs = plain.model_and_runs(layer, plain.port(state, layer, is_array=True))
    read = reading.read_values(model, runs.random_call(model, 70, 1, crosses=False), 1e-6)
    assert read is not None
    assert runs.is_fine
    assert torch.allclose(read.weights["wv"].flatten(0, 1).float(), state["wv"], atol=1e-6)
    assert torch.allclose(read.weights["bv"].flatten().float(), state["bv"], atol=1e-5)


def test_values_of_wide_heads_follow_from_several_tokens() -> None:
    layer, state = plain.make(**plain.WIDE)
    state["wv"] = 0.3 * torch.randn(state["wv"].shape)
    model, runs = plain.model_and_runs(layer, plain.port(state, layer, is_array=True))
    single = runs.random_call(model, 70, 1, crosses=False)
    assert reading.read_values(model, single, 1e-6) is None
    few = runs.random_call(model, reading.count_sequences(model), 3, crosses=False)
    read = reading.read_values_by_head(model, few, 1e-6)
    assert read is not None
    assert torch.allclose(read.weights["wv"].flatten(0, 1).float(), state["wv"], atol=1e-6)


def test_the_output_projection_follows_from_values() -> None:
    layer, state = plain.make(**plain.GROUPED)
    state["wo"] = torch.randn(state["wo"].shape)
    model, runs = plain.model_and_runs(layer, plain.port(state, layer, is_array=True))
    few = runs.random_call(model, 60, 3, crosses=False)
    read = reading.read_output_projection(model, few, 1e-6)
    assert read is not None
    assert torch.allclose(read.weights["wo"].flatten(0, 1).T.float(), state["wo"], atol=1e-5)


def test_outputs_that_are_not_affine_show_no_values() -> None:
    layer, state = plain.make(**plain.MANY)
    function = plain.port(state, layer)
    model, runs = plain.model_and_runs(layer, lambda x: function(x) ** 3)
    single = runs.random_call(model, 70, 1, crosses=False)
    assert reading.read_values(model, single, 1e-6) is None
    assert reading.read_output_projection(model, single, 1e-6) is None


def test_weights_of_two_tokens_are_those_of_the_softmax() -> None:
    layer, state = plain.make(**plain.MANY)
    model, runs = plain.model_and_runs(layer, plain.port(state, layer, is_array=True))
    call = runs.record(Inputs(draw_tokens((7, 2, 30), 5)))
    read = reading.read_two_weights(model, call, 1e-6)
    assert read is not None
    heads = (call.inputs.x @ state[f"w{role}"].T.double() + state[f"b{role}"] for role in "qk")
    q, k = (rows.unflatten(-1, (5, 6)).transpose(1, 2) for rows in heads)
    expected = (q[:, :, -1:] @ k.mT / 6**0.5).softmax(-1)[:, :, 0]
    assert torch.allclose(read, expected, atol=EXACT)


@pytest.mark.parametrize("role", ["q", "k"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("is_array", "limit"), [(True, EXACT), (False, NEAR)])
def test_queries_follow_from_keys_and_keys_from_queries(
    role: str, options: dict[str, Any], is_array: bool, limit: float
) -> None:
    layer, state = plain.make(**options)
    matrix = state[f"w{role}"] = 0.2 * torch.randn(state[f"w{role}"].shape)
    function = plain.port(state, layer, causal=True, is_array=is_array)
    model, runs = plain.model_and_runs(layer, function)
    reader = {"q": reading.read_queries, "k": reading.read_keys}[role]
    read = reader(model, runs, runs.tolerance, crosses=False)
    assert read is not None
    apart = read.weights[f"w{role}"].flatten(0, 1) - matrix
    assert float(apart.abs().max()) < limit
    if not is_array:  # the noise that is said is that which is there
        size = float(matrix.square().mean().sqrt())
        assert read.noise / 10 < float(apart.square().mean().sqrt()) / size < 10 * read.noise


@pytest.mark.parametrize("reader", [reading.read_queries, reading.read_keys])
def test_other_values_show_no_scores(reader: Any) -> None:
    layer, state = plain.make(**plain.MANY)
    state["wv"] = state["wv"].flip(0)
    model, runs = plain.model_and_runs(layer, plain.port(state, layer))
    assert reader(model, runs, runs.tolerance, crosses=False) is None


def test_a_head_without_values_keeps_the_queries_of_the_model() -> None:
    layer, state = plain.make(**plain.MANY)
    state["wq"] = 0.2 * torch.randn(state["wq"].shape)
    state["wo"][:, 12:18] = 0
    with torch.no_grad():
        layer.out_proj.weight.copy_(state["wo"])
    model, runs = plain.model_and_runs(layer, plain.port(state, layer, is_array=True))
    read = reading.read_queries(model, runs, runs.tolerance, crosses=False)
    assert read is not None
    expected = state["wq"].double().view(5, 6, 30).clone()
    expected[2] = model.weights["wq"][2]
    assert torch.allclose(read.weights["wq"], expected, atol=1e-8)


def test_a_model_agrees_with_its_own_outputs_alone() -> None:
    layer, state = plain.make(**plain.GROUPED)
    model, runs = plain.model_and_runs(layer, plain.port(state, layer))
    call = runs.random_call(model, 12, 2, crosses=False)
    assert agrees(model, call, runs.tolerance)
    other = replace(model, weights={**model.weights, "bo": model.weights["bo"] + 1e-3})
    assert not agrees(other, call, runs.tolerance)
    assert (
        relative_gap(other, RecordedCall(call.inputs, {"output": call.stages["output"][:, :, 1:]}))
        > 1
    )


def test_a_singular_matrix_divides_nothing() -> None:
    """A head of zeros in the output projection has any values."""
    right = torch.eye(4).double()
    right[2] = 0
    assert reading._divide(torch.ones(3, 4).double(), right, 1e-9) is None
