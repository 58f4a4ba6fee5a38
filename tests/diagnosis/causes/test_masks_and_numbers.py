"""Masks that are missing or inverted, numbers for -inf, and scales that follow the length."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Family, Variant
from headwise.diagnosis.outputs.reading import read_values, read_values_by_head
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, Inputs, RecordedCall
from headwise.diagnosis.trials import SEARCHES
from headwise.function.rotary import rotate_by_rule
from headwise.function.spec import AlibiRule, NormRule, Softcap
from headwise.identify.catalogue import MASK_ALONG_QUERIES
from tests.diagnosis.causes.faulty_models import (
    BATCH,
    HEAD_DIM,
    TOKENS,
    WIDTH,
    inputs_of,
    model_of,
    recorded,
    searched,
)
from tests.diagnosis.causes.test_parts_of_a_fault import all_keys, outputs_of
from tests.quick import others_slow

EARLIER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
PADDED = (torch.arange(TOKENS) < torch.tensor([TOKENS, 13, 9])[:, None])[:, None, None]
CAUSAL = {"causal": True}


def scores_by(function: Callable[[Tensor], Tensor]) -> Callable[[AttentionModel], AttentionModel]:
    """Return a change that computes scores from those of all keys, without a mask."""
    return lambda model: model.with_stage_function("scores", lambda x: function(all_keys(x)))


def backwards(role: str) -> Callable[[AttentionModel], AttentionModel]:
    def rotated(forced: ForcedStage) -> Tensor:
        rule = forced.settings.rotation
        assert rule is not None
        positions = -forced.call.query_positions
        return rotate_by_rule(rule, forced[f"{forced.stage[0]} after norm"], positions)

    return lambda model: model.with_stage_function(f"{role} after rotary", rotated)


@pytest.mark.parametrize(
    ("name", "settings", "change"),
    [
        ("rotary direction", {}, backwards("q")),
        ("rotary direction", {}, backwards("k")),
        ("causal mask missing", CAUSAL, scores_by(lambda s: s)),
        ("causal mask missing", {"window": (5, 0)}, lambda m: m.with_settings(window=(5, None))),
        (
            "causal mask inverted",
            CAUSAL,
            scores_by(lambda s: s.masked_fill(~EARLIER.mT, -math.inf)),
        ),
        (
            "causal mask inverted",
            CAUSAL,
            scores_by(lambda s: s.masked_fill(EARLIER, -math.inf)),
        ),
        ("window missing", {"window": (5, 0)}, lambda m: m.with_settings(window=(None, 0))),
        ("window missing", {"window": (5, 5)}, scores_by(lambda s: s)),
        ("mask added as 0/1", CAUSAL, scores_by(lambda s: s + EARLIER)),
        ("mask added as 0/1", CAUSAL, scores_by(lambda s: s + ~EARLIER)),
        ("finite number for -inf", CAUSAL, scores_by(lambda s: s * EARLIER)),
        (
            "finite number for -inf",
            CAUSAL,
            scores_by(lambda s: s.masked_fill(~EARLIER, -2.5)),
        ),
        ("finite number for -inf", CAUSAL, scores_by(lambda s: s - 3.5 * ~EARLIER)),
    ],
)
def test_each_is_named_by_its_stages(
    name: str,
    settings: dict[str, object],
    change: Callable[[AttentionModel], AttentionModel],
) -> None:
    model = model_of(**settings)
    result = searched(model, recorded(change(model), inputs_of()))
    assert [cause.cause.name for cause in result.causes] == [name]
    assert not result.left.cells_beyond_rounding


def late(hidden: Tensor) -> Callable[[AttentionModel], AttentionModel]:
    """Return a change that gives hidden keys no weight after a softmax over all keys."""
    return lambda model: scores_by(lambda s: s)(model).with_stage_function(
        "weights", lambda x: x["scores"].softmax(-1) * ~hidden
    )


def seen_by(seen: Tensor, number: float = -math.inf) -> Callable[[AttentionModel], AttentionModel]:
    return scores_by(lambda s: s.masked_fill(~seen, number))


BACK = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
WINDOW = {"window": (5, 0)}


@pytest.mark.parametrize(
    ("name", "settings", "change", "shows"),
    [
        ("mask after the softmax", {}, late(~PADDED), "stages"),
        pytest.param(
            "mask after the softmax",
            CAUSAL,
            late(~(PADDED & EARLIER)),
            "outputs",
            marks=pytest.mark.slow,
        ),
        ("mask along queries", {}, seen_by(PADDED.mT), "stages"),
        pytest.param(
            "mask along queries",
            {},
            seen_by(PADDED.mT, -1e9),
            "outputs",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "window on the wrong side",
            WINDOW,
            seen_by(PADDED & (BACK >= 6), -1e9),
            "outputs",
            marks=pytest.mark.slow,
        ),
        ("window on the wrong side", WINDOW, seen_by(PADDED & (BACK >= 5)), "stages"),
        (
            "window on the wrong side",
            WINDOW,
            seen_by(PADDED & ((BACK >= 0) | (BACK <= -7))),
            "stages",
        ),
    ],
)
def test_a_mask_at_another_place(
    name: str,
    settings: dict[str, object],
    change: Callable[[AttentionModel], AttentionModel],
    shows: str,
) -> None:
    model = model_of(**settings)
    faulty = change(model)
    calls = recorded(faulty, inputs_of(mask=PADDED))
    calls = calls if shows == "stages" else outputs_under(faulty, PADDED)
    result = searched(model, calls)
    assert [cause.cause.name for cause in result.causes] == [name]
    assert not result.left.cells_beyond_rounding


def test_a_mask_of_fewer_keys_than_queries_cannot_lie_along_them() -> None:
    seen = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    seen[..., -2:] = False
    calls = recorded(model_of(), Inputs(inputs_of().x, inputs_of().x[:, :7], seen))
    [variant] = SEARCHES[MASK_ALONG_QUERIES](Evidence.of(model_of(), calls))
    assert isinstance(variant, Variant)
    scores = variant.model.predict_stage("scores", calls[0])
    assert torch.equal(scores, calls[0].stages["scores"])


@pytest.mark.parametrize(("place", "kept"), [(-1, slice(1, None)), (0, slice(None, -1))])
def test_the_column_of_a_key_is_cut_off_for_that_of_the_sink(place: int, kept: slice) -> None:
    model = model_of(**CAUSAL).with_weights(sink=torch.tensor([0.5, -0.3, 1.0, 0.1]).double())

    def weights(forced: ForcedStage) -> Tensor:
        scores = forced["scores"]
        sink = forced.model.weights["sink"][:, None, None].expand(*scores.shape[:3], 1)
        parts = [scores, sink] if place else [sink, scores]
        return torch.cat(parts, -1).softmax(-1)[..., kept]

    faulty = model.with_stage_function("weights", weights)
    [cause] = searched(model, recorded(faulty, inputs_of())).causes
    assert cause.cause.name == "another column cut off"
    assert cause.variant.parameters == {"cut": "the first column" if place else "the last column"}


@pytest.mark.parametrize(
    ("number", "function", "words"),
    [
        (0.0, lambda s: s.masked_fill(~PADDED, -1e-9), "set to hidden keys"),
        (-1.25, lambda s: s.masked_fill(~PADDED, -1.25), "set to hidden keys"),
        (-4.5, lambda s: s - 4.5 * ~PADDED, "added hidden keys"),
    ],
)
def test_a_number_is_found_by_its_size(
    number: float, function: Callable[[Tensor], Tensor], words: str
) -> None:
    model, inputs = model_of(), inputs_of(mask=PADDED)
    [cause] = searched(model, recorded(scores_by(function)(model), inputs)).causes
    assert cause.cause.name == "finite number for -inf"
    assert cause.variant.parameters[words] == pytest.approx(number, abs=1e-6)


@pytest.mark.parametrize("number", [-5.2, -9.0])
def test_a_small_weight_of_hidden_keys_is_found_by_its_number(number: float) -> None:
    model = model_of(causal=True)
    other = scores_by(lambda s: s.masked_fill(torch.ones(s.shape[2:]).triu(1).bool(), number))
    x = 0.1 * inputs_of().x[:1, :2]
    few = RecordedCall(Inputs(x), {})  # one key is hidden
    calls = [few.with_stages({"output": other(model).predict_stage("output", few)})]
    [cause] = searched(model, calls, "finite number for -inf").causes
    assert cause.variant.parameters["set to hidden keys"] == pytest.approx(number, abs=1e-6)


@pytest.mark.parametrize("number", [-1e4, -1e9])
def test_a_large_number_that_is_added_shows_in_rows_without_keys(number: float) -> None:
    seen = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    seen[..., 3, :] = False

    def added(forced: ForcedStage) -> Tensor:
        return (all_keys(forced).float() + number * ~seen).softmax(-1).double()

    model = model_of().with_stage_function("weights", added)
    calls = [replace(call, dtype=torch.float32) for call in recorded(model, inputs_of(mask=seen))]
    [cause] = searched(model_of(), calls).causes
    names = {cause.cause.name, *cause.equals}
    assert "finite number for -inf" in names
    if number == -1e4:  # beside which three digits of the scores are left
        assert cause.variant.parameters == {"added hidden keys": number}


def test_a_causal_mask_of_the_call_that_is_ignored_is_no_padding() -> None:
    free = model_of()
    calls = recorded(scores_by(lambda s: s)(free), inputs_of(mask=EARLIER[None, None]))
    assert [cause.cause.name for cause in searched(free, calls).causes] == ["causal mask missing"]
    both = recorded(scores_by(lambda s: s)(free), inputs_of(mask=EARLIER & PADDED))
    assert [cause.cause.name for cause in searched(free, both).causes] == ["padding ignored"]


@pytest.mark.parametrize(("side", "believed"), [("right", PADDED), ("left", PADDED.flip(-1))])
def test_padding_whose_number_alone_is_kept(side: str, believed: Tensor) -> None:
    model = model_of()
    faulty = scores_by(lambda s: s.masked_fill(~believed, -math.inf))(model)
    calls = []
    for mask in (PADDED, PADDED.flip(-1)):
        inputs = inputs_of(mask=mask)
        calls += [replace(call, inputs=inputs) for call in recorded(faulty, inputs)]
    [cause] = searched(model, calls).causes
    assert cause.cause.name == "padding side"
    assert cause.variant.parameters == {"padding": f"always on the {side}"}


@pytest.mark.slow
def test_a_padding_side_with_rows_that_are_left_without_keys() -> None:
    model = model_of(causal=True)

    def scores(s: Tensor) -> Tensor:
        return s.masked_fill(~(EARLIER & PADDED.flip(-1)), -1e9)

    calls = outputs_under(scores_by(scores)(model), PADDED)
    [cause] = searched(model, calls).causes
    assert cause.cause.name == "padding side"
    assert cause.variant.details == {"rows without keys": "equal weights"}


def outputs_under(model: AttentionModel, mask: Tensor) -> list:
    return [
        call.with_stages({"output": call.stages["output"]})
        for call in recorded(model, inputs_of(mask=mask))
    ]


@pytest.mark.parametrize(
    ("factor", "words"),
    others_slow(
        [
            (lambda n, _: HEAD_DIM**0.5 * n**-0.5, "1 / sqrt(keys) in place of the scale"),
            (lambda n, _: math.log(n) / math.log(50), "log(keys) times 0.255622"),
            (
                lambda _, i: ((i + 1).log() / math.log(5)).clamp_min(1.0),
                "log(position) / log(5), from there on",
            ),
            (
                lambda _, i: 1 + 0.2 * (1 + ((i + 1) / 4).floor()).log(),
                "1 + 0.2 log(1 + floor(position / 4))",
            ),
        ]
    ),
)
def test_a_temperature_by_length(factor: Callable[[int, Tensor], Tensor], words: str) -> None:
    def scores(forced: ForcedStage) -> Tensor:
        s = all_keys(forced)
        return s * factor(s.shape[-1], torch.arange(s.shape[-1]).double()[:, None])

    faulty = model_of().with_stage_function("scores", scores)
    [cause] = searched(model_of(), outputs_of(faulty), "temperature by length", "scale").causes
    assert cause.variant.parameters == {"temperature": words}


@pytest.mark.parametrize(
    ("text", "capped"),
    [
        ("tanh(scores / softcap)", lambda s: (s / 3).tanh()),
        ("scores * tanh(scores / softcap)", lambda s: s * (s / 3).tanh()),
        ("scores.clamp(-softcap, softcap)", lambda s: s.clamp(-3, 3)),
    ],
)
def test_a_softcap_by_another_formula(text: str, capped: Callable[[Tensor], Tensor]) -> None:
    model = model_of(softcap=Softcap(3.0), causal=True)
    faulty = scores_by(lambda s: capped(s).masked_fill(~EARLIER, -math.inf))(model)
    [cause] = searched(model, recorded(faulty, inputs_of()), "softcap", "scale").causes
    assert (cause.cause.name, cause.variant.parameters) == ("softcap", {"formula": text})


SETTINGS: list[dict[str, object]] = [
    {},
    {"causal": True},
    {"window": (4, 0)},
    {"window": (5, 5)},
    {"softcap": Softcap(2.0), "causal": True},
    {"score_bias": AlibiRule(slopes=(0.5, 0.25, 0.125, 0.0625)), "rotary": None},
    {"qk_norm": NormRule(eps=1e-6)},
]


@pytest.mark.parametrize("settings", others_slow(SETTINGS), ids=lambda x: ", ".join(x) or "plain")
def test_no_repair_is_in_force_already(settings: dict[str, object]) -> None:
    """A variant that equals the model on some inputs would repair nothing there."""
    model = model_of(**settings)
    if model.settings.norm is not None:
        norms = {f"{role}_norm": torch.linspace(0.5, 1.5, HEAD_DIM).double() for role in "qk"}
        model = model.with_weights(**norms)
    calls = [*recorded(model, inputs_of(mask=EARLIER & PADDED)), *recorded(model, inputs_of())]
    evidence = Evidence.of(model, calls)
    assert not evidence.gaps.cells_beyond_rounding
    for cause, search in SEARCHES.items():
        if "scores" not in cause.stages and "q after rotary" not in cause.stages:
            continue
        for variant in search(evidence):
            shown = variant.make(variant.starts[0]) if isinstance(variant, Family) else variant
            assert not _is_in_force(model, shown, evidence), (cause.name, shown.parameters)


def _is_in_force(model: AttentionModel, variant: Variant, evidence: Evidence) -> bool:
    bare = [replace(call, stages={}) for call in evidence.calls]
    return all(
        torch.equal(
            variant.model.predict_stage("output", call).nan_to_num(9.0),
            model.predict_stage("output", call).nan_to_num(9.0),
        )
        for call in bare
    )


def test_the_models_have_several_sequences() -> None:
    assert BATCH > 1


def test_a_token_that_sees_none_has_no_values_to_read() -> None:
    model = model_of()
    x = torch.randn(60, 1, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    bias = model.weights["bo"].expand(60, 1, -1)
    call = RecordedCall(Inputs(x), {"output": torch.zeros_like(bias)})
    for read in (read_values, read_values_by_head):
        assert read(model, call, 1e-6) is None
