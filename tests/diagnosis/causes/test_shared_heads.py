"""A part of one head in all heads, and a gate without its sigmoid."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant
from headwise.diagnosis.causes.heads import merge_models
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.diagnosis.trials import SEARCHES
from headwise.function.spec import AlibiRule
from headwise.identify.catalogue import ANOTHER_COLUMN_CUT_OFF, GATE_WITHOUT_SIGMOID
from tests.diagnosis.causes.faulty_models import (
    HEADS,
    KV_HEADS,
    VALUE_DIM,
    gated,
    inputs_of,
    model_of,
    recorded,
    searched,
)
from tests.diagnosis.causes.test_parts_of_a_fault import SLOPES, outputs_of
from tests.quick import others_slow

ALIBI = {"causal": True, "rotary": None, "score_bias": AlibiRule(slopes=SLOPES)}


def biased() -> AttentionModel:
    """Return a gated model whose gate has a bias, and a sink for each head."""
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(HEADS, VALUE_DIM, generator=generator, dtype=torch.float64)
    return gated().with_weights(bg=bias, sink=bias[:, 0])


def of_head(model: AttentionModel, head: int, *names: str) -> AttentionModel:
    """Return a model whose heads all have the tensors of one."""
    held = {name: model.weights[name] for name in names}
    places = {n: head if len(x) == HEADS else head * KV_HEADS // HEADS for n, x in held.items()}
    return model.with_weights(
        **{name: torch.stack([x[places[name]]] * len(x)) for name, x in held.items()}
    )


@pytest.mark.parametrize("shows", [lambda m: recorded(m, inputs_of()), outputs_of])
@pytest.mark.parametrize("head", others_slow([0, HEADS - 1]))
@pytest.mark.parametrize(
    ("part", "names"),
    others_slow(
        [
            ("v", ("wv", "bv")),
            ("q, k and v", ("wq", "bq", "wk", "bk", "wv", "bv")),
            ("the bias of q", ("bq",)),
            ("the gate", ("wg", "bg")),
            ("the sinks", ("sink",)),
        ]
    ),
)
def test_the_part_is_named(part: str, names: tuple[str, ...], head: int, shows: object) -> None:
    model = biased()
    calls = shows(of_head(model, head, *names))  # type: ignore[operator]
    result = searched(model, calls)
    named = [each for each in result.causes if each.cause.name == "one head for all heads"]
    assert [each.variant.parameters for each in named] == [{"of": part, "head": head}]
    assert not result.left.cells_beyond_rounding


@pytest.mark.slow
def test_slopes_of_the_first_head() -> None:
    model = model_of(**ALIBI)
    faulty = model.with_slopes(torch.full((HEADS,), SLOPES[0]))
    [cause] = searched(model, outputs_of(faulty)).causes
    assert "one head for all heads" in (cause.cause.name, *cause.equals)


@pytest.mark.slow
@pytest.mark.parametrize("shows", [lambda m: recorded(m, inputs_of()), outputs_of])
@pytest.mark.parametrize(
    ("name", "parameters", "factor"),
    [
        ("gate without sigmoid", {"gate": "linear"}, lambda gate: gate),
        ("sign", {"roles": "g"}, lambda gate: 1 - gate.sigmoid()),
    ],
)
def test_a_gate_by_another_function(
    name: str, parameters: dict[str, str], factor: Callable[[Tensor], Tensor], shows: object
) -> None:
    model = biased()
    weight, bias = model.weights["wg"], model.weights["bg"]

    def changed(forced: ForcedStage) -> Tensor:
        values = forced["v"].repeat_interleave(HEADS // KV_HEADS, 1)
        gates = torch.einsum("ble,hde->bhld", forced.call.inputs.x, weight) + bias[:, None]
        return forced["weights"] @ values * factor(gates)

    calls = shows(model.with_stage_function("head outputs", changed))  # type: ignore[operator]
    [cause] = searched(model, calls).causes
    assert (cause.cause.name, cause.variant.parameters) == (name, parameters)


def test_two_changes_of_a_gate_or_a_sink_can_be_joined() -> None:
    """A pair of causes may leave out what the other one changes."""
    model = biased()
    calls = outputs_of(of_head(model, 0, "wq"))
    evidence = Evidence.of(model, calls)
    bare = model.with_weights(wg=None, bg=None, sink=None).with_settings(output_gate=None)
    for cause in (GATE_WITHOUT_SIGMOID, ANOTHER_COLUMN_CUT_OFF):
        for variant in SEARCHES[cause](evidence):
            assert isinstance(variant, Variant)
            joined = merge_models(model, variant.model, bare)
            assert joined is not None
            usual = bare.predict_stage("output", calls[0])
            assert torch.equal(joined.predict_stage("output", calls[0]), usual)
