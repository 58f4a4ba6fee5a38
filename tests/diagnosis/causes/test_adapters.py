"""Adapters of low rank that are merged on one side alone."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise import Attention, compare
from headwise.diagnosis.simulation.model import AttentionModel
from tests.diagnosis.causes.faulty_models import (
    inputs_of,
    model_of,
    recorded,
    searched,
    with_function,
)
from tests.quick import others_slow

NAME = "adapters merged or not"


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def with_rank(model: AttentionModel, role: str, rank: int) -> AttentionModel:
    """Return the model with a matrix of some rank added to the weights of a role."""
    weight = model.weights[f"w{role}"]
    rows, columns = (weight.shape[0] * weight.shape[1], weight.shape[2])
    change = 0.1 * random(rows, rank) @ random(rank, columns)
    return model.with_weights(**{f"w{role}": weight + change.reshape(weight.shape)})


@pytest.mark.parametrize(("role", "rank"), [("q", 2), ("k", 5), ("v", 3), ("o", 1)])
def test_the_rank_of_a_missing_adapter(role: str, rank: int) -> None:
    model = model_of(causal=True)
    result = searched(model, recorded(with_rank(model, role, rank), inputs_of()))
    assert [each.cause.name for each in result.causes] == [NAME]
    assert result.causes[0].variant.parameters == {"roles": role, "rank": rank}
    assert not result.left.cells_beyond_rounding


def test_adapters_of_two_projections_beside_a_scale() -> None:
    model = model_of(causal=True)
    other = with_rank(with_rank(model, "q", 2), "v", 2).with_settings(scale=0.25)
    result = searched(model, recorded(other, inputs_of()))
    assert [each.cause.name for each in result.causes] == [NAME, "scale"]
    assert result.causes[0].variant.parameters == {"roles": "qv", "rank": 2}


@pytest.mark.parametrize("times", others_slow([1, 2]))
def test_an_adapter_on_some_heads_keeps_the_others(times: int) -> None:
    torch.manual_seed(0)
    original = Attention(64, 4)
    merged = copy.deepcopy(original)
    adapter = 0.1 * torch.randn(48, 2) @ torch.randn(2, 64)
    with torch.no_grad():
        for _ in range(times):
            merged.q_proj.weight[16:] += adapter
    diagnosis = compare(merged, original)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert (cause.name, cause.parameters) == (NAME, {"roles": "q", "rank": 2})
    assert cause.heads == (1, 2, 3)
    assert "NOT explained" not in str(diagnosis)


@pytest.mark.slow
def test_a_merge_that_was_stored_in_float32_with_more_columns_than_tokens() -> None:
    torch.manual_seed(0)
    original = Attention(192, 4)
    merged = copy.deepcopy(original)
    with torch.no_grad():
        merged.q_proj.weight += 0.01 * torch.randn(192, 3) @ torch.randn(3, 192)
    diagnosis = compare(merged, original)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert (cause.name, cause.parameters) == (NAME, {"roles": "q", "rank": 3})


def with_noise(model: AttentionModel) -> AttentionModel:
    other = with_rank(model, "q", 2)
    wq = other.weights["wq"]
    return other.with_weights(wq=wq + 1e-6 * random(*wq.shape))


def with_some_rows(model: AttentionModel) -> AttentionModel:
    wq = model.weights["wq"].clone()
    wq[:, 0] += random(*wq[:, 0].shape)
    return model.with_weights(wq=wq)


def with_some_columns(model: AttentionModel) -> AttentionModel:
    wq = model.weights["wq"].clone()
    wq[..., :3] += random(*wq[..., :3].shape)
    return model.with_weights(wq=wq)


def with_another_bias(model: AttentionModel) -> AttentionModel:
    bq = model.weights["bq"]
    return model.with_weights(bq=bq + random(*bq.shape))


def with_a_gate(model: AttentionModel) -> AttentionModel:
    change = random(1, 4, 1, 10)
    return with_function(model, "q", lambda q: q + change * q.mean((1, 3), keepdim=True).tanh())


def with_high_rank(model: AttentionModel) -> AttentionModel:
    return with_rank(model, "q", 12)


def mirrored(rows: Tensor) -> Tensor:
    """Return rows (heads, channels, width) mirrored at a plane in each head: of rank 1 there."""
    normal = random(rows.shape[1], 1)
    normal = normal / normal.norm()
    return rows - 2 * normal @ (normal.mT @ rows)


def with_mirrored_values(model: AttentionModel) -> AttentionModel:
    weights = {name: model.weights[name] for name in ("wv", "bv")}
    mirrors = {"wv": mirrored(weights["wv"]), "bv": mirrored(weights["bv"][..., None])[..., 0]}
    return model.with_weights(**mirrors)


def with_mirrored_outputs(model: AttentionModel) -> AttentionModel:
    return model.with_weights(wo=mirrored(model.weights["wo"]))


@pytest.mark.parametrize(
    "change",
    others_slow(
        [
            with_mirrored_values,
            with_mirrored_outputs,
            with_noise,
            with_some_rows,
            with_some_columns,
            with_another_bias,
            with_a_gate,
            with_high_rank,
        ],
        with_noise,
    ),
)
def test_other_changes_of_a_projection(
    change: Callable[[AttentionModel], AttentionModel],
) -> None:
    model = model_of(causal=True)
    result = searched(model, recorded(change(model), inputs_of()))
    assert NAME not in [each.cause.name for each in result.causes]


@pytest.mark.extra
def test_heads_of_a_function_that_are_mirrored() -> None:
    torch.manual_seed(0)
    layer = Attention(60, 3, q_bias=False, k_bias=False, v_bias=False, out_bias=False)
    wo = mirrored(layer.out_proj.weight.detach().double().T.reshape(3, 20, 60)).reshape(60, 60)
    heads = [layer.q_proj, layer.k_proj, layer.v_proj]

    def port(x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(2, (3, 20)).transpose(1, 2) for linear in heads)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).flatten(2) @ wo.float()

    diagnosis = compare(port, layer)
    assert diagnosis.function is not None
    assert NAME not in [each.name for each in diagnosis.function.causes]


@pytest.mark.extra
def test_a_gate_with_more_columns_than_tokens() -> None:
    torch.manual_seed(0)
    original = Attention(192, 4)
    gated = copy.deepcopy(original)
    direction, change = torch.randn(192), torch.randn(192)
    gated.q_proj.register_forward_hook(
        lambda _, inputs, output: (
            output + (inputs[0] @ direction.to(output)).tanh()[..., None] * change.to(output)
        )
    )
    diagnosis = compare(gated, original)
    assert diagnosis.function is not None
    assert NAME not in [each.name for each in diagnosis.function.causes]
