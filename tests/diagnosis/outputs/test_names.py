"""Faults of weights in functions of which nothing but outputs is known, made by hand."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Attention, compare
from headwise.diagnosis.outputs import reading
from headwise.diagnosis.outputs.names import FEWEST, find_output_moves
from headwise.diagnosis.outputs.runs import Runs, agrees
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.identify.moves.move import Move
from tests.diagnosis.outputs import plain
from tests.diagnosis.outputs.plain import State
from tests.quick import others_slow

Edit = Callable[[State], None]


def search(
    edit: Edit, options: dict[str, Any], **how: bool
) -> tuple[AttentionModel, list[tuple[Move, ...]], Runs]:
    """Return the right model, the moves that outputs show, and the runs of the function."""
    layer, state = plain.make(**options)
    edit(state)
    model, runs = plain.model_and_runs(layer, plain.port(state, layer, **how))
    return model, [*find_output_moves(model, runs, crosses=False)], runs


def reproduce(model: AttentionModel, moves: tuple[Move, ...], runs: Runs) -> bool:
    """True if a model after moves has the outputs of three tokens at the last query."""
    for move in moves:
        model = replace(model, weights=move.apply(model.weights))
    return agrees(model, runs.random_call(model, 9, 3, crosses=False), 1e-5)


def heads(rows: Tensor, count: int) -> Tensor:
    """Return a view of rows by head."""
    return rows.unflatten(0, (count, -1))


def permute_heads_of_values(state: State) -> None:
    for name in ("wv", "bv"):
        state[name] = heads(state[name], 5)[[2, 0, 1, 4, 3]].flatten(0, 1)


def negate_heads_of_queries(state: State) -> None:
    for name in ("wq", "bq"):
        heads(state[name], 5)[[1, 4]] *= -1


def drop_bias_of_two_heads(state: State) -> None:
    heads(state["bq"], 5)[3:] = 0


def double_output_bias(state: State) -> None:
    state["bo"] = 2 * state["bo"]


def merge_adapter_into_two_heads(state: State) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, 2, generator=generator) for n in (12, 30))
    heads(state["wv"], 5)[1:3] += (0.1 * a @ b.T).view(2, 6, 30)


def merge_adapter(state: State) -> None:
    """All heads look initialised before it and after it."""
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(30, 2, generator=generator) for _ in range(2))
    state["wv"] += 0.02 * a @ b.T


def clear_a_head_of_keys(state: State) -> None:
    for name in ("wk", "bk"):
        heads(state[name], 5)[3] = 0


def leave_values_at_their_start(state: State) -> None:
    state["wv"] = 0.02 * torch.randn(30, 30, generator=torch.Generator().manual_seed(5))


def lose_a_head(state: State) -> None:
    for name in ("wq", "wk", "wv"):
        heads(state[name], 5)[4] = 0


def take_keys_for_values_in_one_head(state: State) -> None:
    keys, values = heads(state["wk"], 5), heads(state["wv"], 5)
    keys[2], values[2] = values[2].clone(), keys[2].clone()


def load_one_matrix_everywhere(state: State) -> None:
    for role in "qkv":
        state[f"w{role}"], state[f"b{role}"] = state["wo"], state["bo"]


MANY: dict[str, tuple[Edit, str, dict[str, Any]]] = {
    "permuted": (permute_heads_of_values, "heads permuted", {"order": (2, 0, 1, 4, 3)}),
    "negated": (negate_heads_of_queries, "sign", {"heads": (1, 4)}),
    "bias of heads": (drop_bias_of_two_heads, "bias missing", {"heads": (3, 4)}),
    "bias of o": (double_output_bias, "factor", {"roles": "bo", "factor": 2.0}),
    "adapter": (merge_adapter_into_two_heads, "adapters merged or not", {"heads": (1, 2)}),
    "whole adapter": (merge_adapter, "adapters merged or not", {"roles": "v", "rank": 2}),
    "start": (leave_values_at_their_start, "weights at their initial values", {"roles": "v"}),
    "lost": (lose_a_head, "rows zero", {"heads": (4,)}),
    "one head": (take_keys_for_values_in_one_head, "k and v exchanged", {"heads": (2,)}),
}
QUICK = ("one head",)


@pytest.mark.parametrize("is_array", [False, pytest.param(True, marks=pytest.mark.extra)])
@pytest.mark.parametrize(
    ("edit", "cause", "parameters"),
    [
        pytest.param(*row, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, row in MANY.items()
    ],
)
def test_the_cause_and_its_place_are_named(
    edit: Edit, cause: str, parameters: dict[str, Any], is_array: bool
) -> None:
    model, found, runs = search(edit, plain.MANY, is_array=is_array)
    exact = [moves for moves in found if reproduce(model, moves, runs)]
    named = next(moves for moves in exact if moves[0].cause.name == cause)
    stated = {"roles": "".join(named[0].roles), **dict(named[0].name.parameters)}
    assert parameters.items() <= stated.items()


@pytest.mark.slow
@pytest.mark.parametrize("edit", [permute_heads_of_values, load_one_matrix_everywhere])
def test_compare_names_the_cause(edit: Edit) -> None:
    layer, state = plain.make(**plain.MANY)
    edit(state)
    diagnosis = compare(plain.port(state, layer), layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.output_left < 1e-6 < diagnosis.function.output_gap
    assert cause.name in {"heads permuted", "rows of another role"}


@pytest.mark.slow
@pytest.mark.parametrize("roles", ["qkv", "kv"])
def test_biases_of_several_roles_beside_sinks(roles: str) -> None:
    """A sink takes a part of the weight, so that one token does not show the values alone."""
    torch.manual_seed(1)
    layer = Attention(26, 4, head_dim=6, window=(None, 0), sink=True)
    with torch.no_grad():
        for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
            part.bias.normal_(std=0.3)
    wrong = deepcopy(layer)
    for role in roles:
        torch.nn.init.zeros_(getattr(wrong, f"{role}_proj").bias)
    diagnosis = compare(lambda x: wrong(x), layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert (cause.name, cause.parameters["roles"]) == ("bias missing", roles)


def negate_a_kv_head(state: State) -> None:
    heads(state["wv"], 2)[1] *= -1
    heads(state["bv"], 2)[1] *= -1


def interleave_heads_of_queries(state: State) -> None:
    for name in ("wq", "bq"):
        state[name] = heads(state[name], 6).transpose(0, 1).flatten(0, 1)


def test_a_head_of_zeros_is_named_beside_another_scale() -> None:
    layer, state = plain.make(**plain.MANY)
    for name in ("wv", "bv"):
        heads(state[name], 5)[3] = 0
    model, runs = plain.model_and_runs(layer, plain.port(state, layer))
    found = find_output_moves(model.with_settings(scale=0.1), runs, crosses=False)
    assert {"rows zero"} <= {move.cause.name for moves in found for move in moves}


@pytest.mark.parametrize("is_array", [False, pytest.param(True, marks=pytest.mark.extra)])
@pytest.mark.parametrize(
    ("edit", "cause"),
    [(negate_a_kv_head, "sign"), (interleave_heads_of_queries, "heads interleaved")],
)
def test_grouped_heads_that_turn_under_a_causal_mask(
    edit: Edit, cause: str, is_array: bool
) -> None:
    """The last of two tokens sees both, so that the mask hides nothing from what is read."""
    model, found, runs = search(edit, plain.GROUPED, causal=True, is_array=is_array)
    exact = [moves for moves in found if reproduce(model, moves, runs)]
    assert exact[0][0].cause.name == cause


def damage_a_row(state: State) -> None:
    state["wv"][4] += torch.randn(30, generator=torch.Generator().manual_seed(6))


def mix_two_heads(state: State) -> None:
    rows = heads(state["wq"], 5)
    rows[0] += 0.3 * rows[1]


def repeat_a_head(state: State) -> None:
    state["wv"] = state["wv"][:6].repeat(5, 1)


@pytest.mark.slow
@pytest.mark.parametrize("edit", others_slow([damage_a_row, mix_two_heads, repeat_a_head]))
def test_weights_that_no_name_explains_have_no_moves(edit: Edit) -> None:
    model, found, runs = search(edit, plain.MANY, is_array=True)
    assert not [moves for moves in found if reproduce(model, moves, runs)]


@pytest.mark.parametrize("factor", others_slow([1.0, 2.0]))
def test_outputs_are_read_where_they_differ_alone(factor: float) -> None:
    layer, state = plain.make(**plain.MANY)
    state["wq"] *= factor
    function, batches = plain.port(state, layer), set[int]()

    def counted(x: Tensor) -> Tensor:
        batches.add(len(x))
        return function(x)

    is_same = bool(compare(counted, layer))
    assert is_same == (factor == 1.0)
    assert is_same == (max(batches) < FEWEST)


@pytest.mark.slow
def test_a_head_of_zeros_is_named_where_nothing_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "MOST_INPUTS", 0)  # as at the widths of whole models
    model, moves, runs = search(clear_a_head_of_keys, plain.MANY)
    # Scores of 0 do not tell whether q or k is 0.
    assert {(move.cause.name, *move.roles, move.name.text) for [move] in moves} == {
        ("rows zero", role, "head 3") for role in "qk"
    }
    assert all(reproduce(model, each, runs) for each in moves)
