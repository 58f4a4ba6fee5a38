"""Forms of causes that outputs alone show, each made by a formula of its own."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, Inputs, RecordedCall
from headwise.function.spec import NormRule
from tests.diagnosis.causes.faulty_models import (
    BATCH,
    HEAD_DIM,
    HEADS,
    TOKENS,
    inputs_of,
    model_of,
    recorded,
    searched,
)
from tests.diagnosis.causes.test_parts_of_a_fault import outputs_of
from tests.quick import others_slow

THETA = 2e6
CAUSAL = {"causal": True}
NORMED = {"qk_norm": NormRule("rms", "head", eps=1e-6)}
Function = Callable[[ForcedStage], Tensor]


def turned(forced: ForcedStage) -> Tensor:
    """Return q or k whose channels i and i + 5 turn by position * theta ** (-i / 5)."""
    x, half = forced[f"{forced.stage[0]} after norm"], HEAD_DIM // 2
    angles = torch.arange(x.shape[2])[:, None] * THETA ** (-torch.arange(half).double() / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def divided_by_log(forced: ForcedStage) -> Tensor:
    scores = forced.usual_result()
    return 0.7 * scores / math.log(scores.shape[-1])


def negated(hidden: float) -> Function:
    def scores(forced: ForcedStage) -> Tensor:
        usual = forced.usual_result()
        return -usual.masked_fill(usual == -math.inf, hidden)

    return scores


def normed(forced: ForcedStage) -> Tensor:
    x = forced[forced.stage[0]]
    return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()


def softmax_before_mask(forced: ForcedStage) -> Tensor:
    """Return weights of all keys, with -inf in place of those that are hidden."""
    q, k = forced["q after rotary"], forced["k after rotary"].repeat_interleave(2, 1)
    weights = (forced.settings.factor * q @ k.mT).softmax(-1)
    return weights.masked_fill(forced["scores"] == -math.inf, -math.inf)


def first_heads_mask(forced: ForcedStage) -> Tensor:
    mask = forced.call.inputs.mask
    return (forced if mask is None else forced.with_inputs(mask=mask[:, :1])).usual_result()


def plus_input(forced: ForcedStage) -> Tensor:
    return forced.usual_result() + 2.5 * forced.call.inputs.x


CASES: dict[str, tuple[str, dict[str, object], dict[str, Function], dict[str, object]]] = {
    "rotation of a large base": (
        "rotary missing",
        {"rotary": None},
        {"q after rotary": turned, "k after rotary": turned},
        {"theta": pytest.approx(THETA, rel=1e-4)},
    ),
    "temperature": (
        "temperature by length",
        {},
        {"scores": divided_by_log},
        {"temperature": "0.7 / log(keys)"},
    ),
    "large eps": (
        "qk-norm eps",
        NORMED,
        {"q after norm": normed, "k after norm": normed},
        {"eps": pytest.approx(0.1)},
    ),
    "negated, set to": (
        "sign",
        CAUSAL,
        {"scores": negated(-1e9)},
        {"hidden keys": 1e9},
    ),
    "negated, -inf": ("sign", CAUSAL, {"scores": negated(-math.inf)}, {"hidden keys": math.inf}),
    "weights of -inf": (
        "mask after the softmax",
        CAUSAL,
        {"weights": softmax_before_mask},
        {"weight": -math.inf},
    ),
    "residual": (
        "residual inside",
        {},
        {"output": plus_input},
        {"times": pytest.approx(2.5)},
    ),
    "mask of the first head": (
        "one head for all heads",
        {},
        {"scores": first_heads_mask},
        {"of": "the mask", "head": 0},
    ),
}
RIVALS = ("scale", "softmax axis", "padding ignored", "number of heads", "factor")


@pytest.mark.parametrize("words", others_slow(CASES, "negated, -inf", "residual", "temperature"))
def test_the_form_is_named(words: str) -> None:
    name, settings, faults, parameters = CASES[words]
    model = faulty = model_of(**settings)
    for stage, function in faults.items():
        faulty = faulty.with_stage_function(stage, function)
    calls = outputs_of_heads(faulty) if words == "mask of the first head" else outputs_of(faulty)
    result = searched(model, calls, name, *RIVALS)
    [cause] = result.causes
    assert cause.cause.name == name
    assert parameters.items() <= {**cause.variant.parameters, **cause.variant.details}.items()
    assert not result.left.cells_beyond_rounding


def outputs_of_heads(model: AttentionModel) -> list[RecordedCall]:
    """Return a call under a mask for each head, of which nothing but the output is known."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=generator) < 0.6
    call = RecordedCall(inputs_of(mask=mask | torch.eye(TOKENS, dtype=torch.bool)), {})
    return [call.with_stages({"output": model.predict_stage("output", call)})]


def test_a_scale_under_a_mask_for_each_head() -> None:
    """Another number of heads fits no such mask."""
    calls = outputs_of_heads(model_of(scale=0.2))
    [cause] = searched(model_of(), calls, "scale", "number of heads").causes
    assert cause.variant.parameters["scale"] == pytest.approx(0.2)


def test_sinks_of_weights_whose_scores_were_not_recorded() -> None:
    sink = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64)
    model = model_of().with_weights(sink=sink)
    [call] = recorded(model.with_weights(sink=-sink), inputs_of())
    stages = {name: x for name, x in call.stages.items() if name != "scores"}
    [cause] = searched(model, [replace(call, stages=stages)], "sinks", "scale").causes
    assert cause.variant.parameters["sinks"] == pytest.approx((-sink).tolist())


def test_rows_of_q_are_found_beside_a_call_with_a_source() -> None:
    """Rows of k are channels over other tokens there."""
    model = model_of(rotary=None, num_kv_heads=HEADS)
    names = {
        f"{kind}{role}": f"{kind}{other}" for kind in "wb" for role, other in ("qk", "kv", "vq")
    }
    rows = {
        name: torch.randn(HEADS, HEAD_DIM, model.weights["wq"].shape[2]).double()
        for name in ("wq", "wk", "wv")
    }
    rows |= {f"b{role}": torch.randn(HEADS, HEAD_DIM).double() for role in "qkv"}
    model = model.with_weights(**rows, wo=torch.randn(HEADS, HEAD_DIM, 26).double())
    faulty = model.with_weights(**{name: rows[other] for name, other in names.items()})
    source = Inputs(inputs_of().x, torch.randn(BATCH, 7, 26).double())
    calls = [*recorded(faulty, inputs_of()), *recorded(faulty, source)]
    [cause] = searched(model, calls).causes
    assert cause.cause.name == "order of fused rows"
