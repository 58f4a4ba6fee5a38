"""Axes that are flattened in one order and read in another, and heads that meet other kv heads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, Inputs, RecordedCall
from headwise.function.spec import AlibiRule
from tests.diagnosis.causes.faulty_models import (
    HEADS,
    TOKENS,
    VALUE_DIM,
    WIDTH,
    gated,
    inputs_of,
    model_of,
    recorded,
    searched,
)
from tests.diagnosis.causes.test_parts_of_a_fault import SLOPES, outputs_of
from tests.quick import others_extra, others_slow

Change = Callable[[ForcedStage], Tensor]
PADDED = torch.arange(TOKENS) < torch.tensor([TOKENS, 13, 9])[:, None]


def in_six_heads() -> AttentionModel:
    """Return a model of six heads and three kv heads, so that wrong divisions find a kv head."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"wq": (6, 10), "wk": (3, 10), "wv": (3, 5), "wo": (6, 5)}
    weights = {
        name: torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64) * 0.4
        for name, shape in shapes.items()
    }
    plain = model_of(num_heads=6, num_kv_heads=3, causal=True)
    return AttentionModel(plain.settings, weights)


def flat_and_split(x: Tensor) -> Tensor:
    """Return (batch, heads, ...) that bmm had as (batch * heads), and read as (heads, batch)."""
    batch, heads = x.shape[:2]
    flat = [x[n // heads, n % heads] for n in range(batch * heads)]
    return torch.stack(
        [torch.stack([flat[h * batch + b] for h in range(heads)]) for b in range(batch)]
    )


def in_memory_of_sequences(x: Tensor) -> Tensor:
    """Return (batch, heads, ...) of memory that has the tokens first."""
    return torch.stack([x[:, :, token].flatten() for token in range(x.shape[2])]).view(x.shape)


def merged_into_sequences(forced: ForcedStage) -> Tensor:
    """Return the output of (batch * heads, length, d) that is viewed as (length, batch, ...)."""
    mixed, weights = forced["head outputs"], forced.model.weights
    joined = mixed.flatten().view(mixed.shape[2], len(mixed), -1).transpose(0, 1)
    output = joined @ weights["wo"].flatten(0, 1)
    return output + weights["bo"] if "bo" in weights else output


def mask_as_a_block(forced: ForcedStage) -> Tensor:
    mask = forced.call.inputs.mask
    scores = forced.with_inputs(mask=None).usual_result()
    if mask is None:
        return scores
    repeated = mask.squeeze(1).repeat(scores.shape[1], 1, 1)
    return scores.flatten(0, 1).masked_fill(~repeated, -torch.inf).view_as(scores)


def slopes_as_a_block(forced: ForcedStage) -> Tensor:
    """Return scores with slopes of (heads, batch), where the rest is (batch, heads)."""
    scores, slopes = forced.usual_result(), torch.tensor(SLOPES, dtype=torch.float64)
    batch, heads, queries, keys = scores.shape
    distance = (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    wrong = slopes.repeat_interleave(batch).view(batch, heads)
    return scores - (wrong - slopes)[..., None, None] * distance


def gate_as_a_view(forced: ForcedStage) -> Tensor:
    x, weights = forced.call.inputs.x, forced.model.weights
    gate = torch.einsum("btw,hcw->bhtc", x, weights["wg"])
    merged = gate.reshape(len(x), x.shape[1], -1).sigmoid()
    bare = ForcedStage(forced.model.with_weights(wg=None), forced.call, forced.stage)
    merged_outputs = bare.usual_result().transpose(1, 2).flatten(2)
    return (merged_outputs * merged).unflatten(2, (HEADS, -1)).transpose(1, 2)


def mixed_along_queries(forced: ForcedStage) -> Tensor:
    weights, v = forced["weights"], forced["v"]
    values = v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
    return torch.einsum("bhqk,bhqd->bhkd", weights, values)


def divided_otherwise(stage: str, divide: Callable[[int], int]) -> Change:
    def scores(forced: ForcedStage) -> Tensor:
        q, k = forced["q after rotary"], forced["k after rotary"]
        products = [q[:, h] @ k[:, divide(h)].mT for h in range(6)]
        scores = forced.settings.factor * torch.stack(products, 1)
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)

    def outputs(forced: ForcedStage) -> Tensor:
        weights, v = forced["weights"], forced["v"]
        return torch.stack([weights[:, h] @ v[:, divide(h)] for h in range(6)], 1)

    return scores if stage == "scores" else outputs


FAULTS: dict[str, tuple[Callable[[], AttentionModel], dict[str, Change], str]] = {
    "mask": (
        lambda: model_of(causal=True),
        {"scores": mask_as_a_block},
        "batch and heads in another order",
    ),
    "slopes": (
        lambda: model_of(causal=True, rotary=None, score_bias=AlibiRule(slopes=SLOPES)),
        {"scores": slopes_as_a_block},
        "batch and heads in another order",
    ),
    **{
        stage: (
            model_of,
            {stage: lambda forced: flat_and_split(forced.usual_result())},
            "batch and heads in another order",
        )
        for stage in ("q", "v", "head outputs")
    },
    "tokens first": (
        model_of,
        {
            role: lambda forced: in_memory_of_sequences(forced.usual_result())
            for role in ("q", "k", "v")
        },
        "split without transpose",
    ),
    "tokens first at the end": (
        model_of,
        {"output": merged_into_sequences},
        "merge without transpose",
    ),
    "gate": (gated, {"head outputs": gate_as_a_view}, "gate merged without transpose"),
    "weights": (
        lambda: model_of(causal=True),
        {"head outputs": mixed_along_queries},
        "weights transposed",
    ),
    "kv heads": (
        in_six_heads,
        {stage: divided_otherwise(stage, lambda h: h // 3) for stage in ("scores", "head outputs")},
        "kv head of another group",
    ),
    "kv heads of values": (
        in_six_heads,
        {"head outputs": divided_otherwise("head outputs", lambda h: h % 2)},
        "kv head of another group",
    ),
    "no projection": (
        lambda: model_of().with_weights(
            wo=torch.ones(HEADS, VALUE_DIM, HEADS * VALUE_DIM).double(), bo=None
        ),
        {"output": lambda forced: forced["head outputs"].transpose(1, 2).flatten(2)},
        "output projection missing",
    ),
}


def faulty(fault: str) -> tuple[AttentionModel, AttentionModel, list[RecordedCall], str]:
    """Return the right model, the wrong one, its recorded calls, and the name of the fault."""
    make, changes, name = FAULTS[fault]
    right = wrong = make()
    for stage, change in changes.items():
        wrong = wrong.with_stage_function(stage, change)
    mask = PADDED[:, None, None] if fault == "mask" else None
    return right, wrong, recorded(wrong, inputs_of(mask=mask)), name


@pytest.mark.parametrize("fault", others_slow(FAULTS))
def test_the_fault_is_named(fault: str) -> None:
    right, _, calls, name = faulty(fault)
    result = searched(right, calls)
    assert [each.cause.name for each in result.causes] == [name]
    assert not result.left.cells_beyond_rounding


@pytest.mark.parametrize("fault", others_extra(FAULTS, *[*FAULTS][::3]))
def test_the_fault_is_named_of_outputs_alone(fault: str) -> None:
    right, wrong, calls, name = faulty(fault)
    outputs = [each.with_stages({"output": each.stages["output"]}) for each in calls]
    result = searched(right, [*outputs_of(wrong), *outputs])
    assert [each.cause.name for each in result.causes] == [name]
    assert not result.left.cells_beyond_rounding


def test_one_sequence_shows_no_order_of_batch_and_heads() -> None:
    x = torch.randn(1, 7, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    right = model_of()
    wrong = right.with_stage_function("q", lambda forced: flat_and_split(forced.usual_result()))
    call = RecordedCall(Inputs(x), {})
    assert torch.equal(*(each.predict_stage("output", call) for each in (right, wrong)))
