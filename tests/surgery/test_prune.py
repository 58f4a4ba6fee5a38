"""Pruning of whole models: heads chosen, layers mended, quality measured on other data."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from headwise import Attention
from headwise.errors import OptionError
from headwise.layers.distance import Alibi
from headwise.models import planted
from headwise.scanning.importance import ablations, mean_outputs
from headwise.support.progress import no_progress
from headwise.surgery import ModelHeads, choice, cut_model, full_size, plan_prune, prune
from headwise.surgery.choice import HeadEffects, Journal
from headwise.surgery.fit import RIDGES, cut_heads, refit_heads
from headwise.surgery.moments import match_names, record_moments
from headwise.surgery.quality import Quality
from headwise.surgery.steps import Refit
from tests.quick import others_slow
from tests.refusals import refusals
from tests.scanning import models
from tests.surgery import small


def planted_texts(seed: int) -> torch.Tensor:
    """Texts of the planted model: id 0 begins them."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(2, planted.VOCABULARY, (4, 8), generator=generator)
    texts = texts.repeat(1, 24)  # so that induction has something to find
    texts[:, 0] = planted.BEGIN
    return texts


def test_the_circuit_of_induction_stays() -> None:
    model = planted.model()
    result = prune(model, planted_texts(0), held_out=planted_texts(1), keep=0.2, repair="zero")
    # The logits come from the induction head, which reads the head of the previous token.
    assert result.plan.gone == {"layers.0.": [1, 2, 3, 4], "layers.1.": [1, 2, 3, 4]}
    assert result.plan.choice.predicted == 0
    assert torch.equal(result.after, result.before)
    assert [len(layer.origins.query) for layer in result.cut.layers.values()] == [1, 1]


def test_a_head_without_use_goes_first() -> None:
    model = small.tiny()
    with torch.no_grad():
        model.blocks[2].attention.out_proj.weight[:, 24:32] = 0  # head 3 of 5
    fit, other = small.ids(6, 12), small.ids(4, 12, seed=1)
    original = {len(given): small.run(model, given) for given in (fit, other)}

    def likeness(output: Any, given: Any) -> torch.Tensor:
        return -(output - original[len(given)]).square().mean((1, 2))

    plan = plan_prune(model, fit, held_out=other, keep=0.9, repair="zero", measure=likeness)
    assert plan.gone == {"blocks.2.attention.": [3]}
    assert plan.choice.effects["blocks.2.attention."][3] == 0
    others = [e for row in plan.choice.effects.values() for e in row.tolist() if e]
    assert len(others) == 14
    assert min(others) > 0


@pytest.mark.parametrize("repair", others_slow(["zero", "mean"]))
def test_effects_and_the_curve_are_those_of_ablation(repair: Any) -> None:
    model, fit, other = small.tiny(), small.ids(5, 12), small.ids(4, 12, seed=1)
    result = prune(model, fit, held_out=other, keep=0.7, repair=repair)
    scan = ablations(model, fit, by=repair)
    for row, effects in enumerate(result.plan.choice.effects.values()):
        torch.testing.assert_close(effects, scan[f"ablation_{repair}"][row], rtol=1e-9, atol=1e-12)
    # One head less: the mean quality falls by that head's effect on the same data.
    plan = result.plan
    name, [head] = next((n, h) for n, h in plan.choice.gone(1).items() if h)
    means = {f"{n}.": mean for n, mean in mean_outputs(model, fit).items()}
    given = None if repair == "zero" else means
    made = cut_model(cut_heads(plan.heads, {name: [head]}, given), model)
    lost = plan.quality.values(model, [fit]) - plan.quality.values(made, [fit])
    assert float(lost.mean()) == pytest.approx(float(plan.choice.effects[name][head]), rel=1e-8)
    [chosen] = [point for point in result.curve if point.is_chosen]
    assert chosen.kept == plan.choice.kept() == 11  # 10 would be less than 0.7 * 15
    value = chosen.zero if repair == "zero" else chosen.mean
    assert value == pytest.approx(float(result.after.mean()), rel=1e-9)
    assert result.curve[0].kept == 15
    assert result.curve[-1].kept == 3


@pytest.mark.parametrize("family", others_slow(small.FAMILIES, "llama"))
def test_families(family: str) -> None:
    make, data = small.FAMILIES[family]
    model = make()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    options = {"even": family in ("llama", "gpt2"), "keep": 0.5 if family == "llama" else 0.75}
    result = prune(model, data(0), held_out=data(1), **options)
    assert result.plan.gone
    allowed = small.rounding(model, data(1))
    zeroed = cut_heads(result.plan.heads, result.plan.gone, result.plan.means, zeroed=True)
    outputs = [small.run(each, data(1)) for each in (result.model, cut_model(zeroed, model))]
    assert float((outputs[0] - outputs[1]).abs().max()) <= 8 * allowed
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    sizes = [sum(x.numel() for x in each.state_dict().values()) for each in (result.model, model)]
    assert sizes[0] < sizes[1]
    left = {name: len(layer.origins.query) for name, layer in result.cut}
    if options["even"]:
        assert len({*left.values()}) == 1
        assert left.keys() == ModelHeads(model).specs.keys()


@pytest.mark.parametrize("take", others_slow(["groups", "heads"]))
def test_grouped_heads(take: Any) -> None:
    model = small.grouped()
    result = prune(model, small.text(), held_out=small.text(seed=1), keep=0.5, take=take)
    for name, layer in result.cut:
        left = layer.origins
        assert len(left.query) % len(left.kv) == 0
        assert (len(left.kv) == 2) == (take == "heads"), name
    assert small.run(result.model, small.text()).shape == (4, 11, 99)


def test_under_alibi_heads_are_zeroed() -> None:
    model = small.tiny()
    by_distance = Attention(40, 5, score_bias=Alibi()).double()
    model.blocks[1].attention = by_distance.requires_grad_(False)
    with torch.no_grad():
        by_distance.out_proj.weight *= 0.01
    result = prune(model, small.ids(4, 12), keep=0.6, even=True)
    assert len(result.plan.gone["blocks.1.attention."]) == 2
    left = {name: len(layer.origins.query) for name, layer in result.cut}
    assert left == {"blocks.0.attention.": 3, "blocks.1.attention.": 5, "blocks.2.attention.": 3}
    assert float(result.after.mean()) != float(result.before.mean())


@pytest.mark.parametrize("by", others_slow(["ablation", "gradient"], "gradient"))
def test_a_pruned_model_is_pruned_again(by: Any) -> None:
    model, fit, other = small.tiny(), small.ids(5, 12), small.ids(4, 12, seed=1)
    first = prune(model, fit, held_out=other, keep=0.7, by=by)
    second = prune(first.model, fit, held_out=other, keep=0.7, by=by)
    assert [len(row) for row in second.plan.choice.effects.values()] == [
        5 - len(numbers) for numbers in first.plan.choice.gone().values()
    ]
    assert not any(row.isnan().any() for row in second.plan.choice.effects.values())
    both = cut_model(first.cut.then(second.cut), model)
    outputs = [small.run(each, other) for each in (second.model, both)]
    assert float((outputs[0] - outputs[1]).abs().max()) <= 8 * small.rounding(model, other)


def test_effects_that_are_kept_are_those_of_the_same_cut(tmp_path: Path) -> None:
    model, given = small.tiny(), [small.ids(3, 9)]
    heads = ModelHeads(model)
    names = match_names(heads, mean_outputs(model, given))
    first, second, _ = names
    usual = partial(HeadEffects, heads, names, given, Quality.of(model, given), None, no_progress)
    asked: list[Any] = [({}, {second: [1, 2]}), ({first: [0]}, {second: [1, 2]})]
    expected = [usual().by_ablation(*each)[second] for each in asked]
    assert not torch.equal(*(row[[1, 2]] for row in expected))
    for _ in range(2):  # measured, then read
        effects = usual(Journal(tmp_path / "effects.json", "of this model"))
        rows = [effects.by_ablation(*each)[second] for each in asked]
        torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)


def test_gradients_choose_too() -> None:
    model, fit, other = small.tiny(), small.ids(5, 12), small.ids(4, 12, seed=1)
    result = prune(model, fit, held_out=other, by="gradient", keep=0.7, rounds=2)
    assert result.plan.choice.kept() == 11
    assert all((effects > 0).all() for effects in result.plan.choice.effects.values())


def test_a_likeness_is_estimated_to_second_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PROBES", 60)
    model, given = models.bert(), small.text()
    heads = ModelHeads(model)
    names = match_names(heads, means := mean_outputs(model, [given]))
    by_name = {name: means[label] for name, label in names.items()}
    quality = Quality.of(model, [given])
    effects = HeadEffects(heads, names, [given], quality, by_name, no_progress)
    first, second = names
    made = effects.by_gradient({first: [0]}, {second: [1, 2]})[second]
    assert made.isnan().tolist() == [head not in (1, 2) for head in range(len(made))]
    cut = cut_heads(heads, {first: [0]}, by_name, zeroed=True)
    wo, bo, step = f"{second}output.dense.weight", f"{second}output.dense.bias", 1e-5
    for head in (1, 2):
        units = []
        for part in (step, -step):  # a part of the head's output becomes its mean
            moved = cut_model(cut, model)
            state, width = moved.state_dict(), means[names[second]].shape[1]
            columns = slice(head * width, (head + 1) * width)
            state[bo] += part * state[wo][:, columns] @ by_name[second][head]
            state[wo][:, columns] *= 1 - part
            states = small.run(moved, given) * given["attention_mask"][..., None]
            units.append(F.normalize(states.sum(1), dim=-1))
        slope = (units[0] - units[1]) / (2 * step)
        states = small.run(model, given) * given["attention_mask"][..., None]
        away = sum(units) / 2 - F.normalize(states.sum(1), dim=-1)
        square = float(slope.square().sum(-1).mean()) / 2  # estimated by random directions
        expected = float((away * slope).sum(-1).mean()) + square
        assert float(made[head]) == pytest.approx(expected, abs=0.4 * square)


def test_a_refit_beats_the_mean_where_heads_depend_on_each_other() -> None:
    model, fit, other = small.tiny(), small.ids(40, 12), small.ids(9, 12, seed=1)
    name = "blocks.1.attention."
    layer: Any = model.blocks[1].attention
    with torch.no_grad():  # heads 1 and 4 are equal: one can do the work of both
        for linear in (layer.q_proj, layer.k_proj, layer.v_proj):
            linear.weight[32:40] = linear.weight[8:16]
    heads, means = ModelHeads(model), mean_outputs(model, fit)
    sums = {f"{label}.": each for label, each in record_moments(model, fit).items()}
    expected, gone = small.run(model, other), {name: [4]}
    refit, decisions = refit_heads(heads, gone, sums)
    assert decisions[name].ridge is not None
    mean = cut_heads(heads, gone, {f"{k}.": x for k, x in means.items()})
    wrong = [
        float((small.run(cut_model(c, model), other) - expected).norm()) for c in (refit, mean)
    ]
    assert wrong[0] < 0.02 * wrong[1]
    outputs = [small.run(cut_model(c, model), other) for c in (refit, full_size(refit))]
    assert float((outputs[0] - outputs[1]).abs().max()) <= 8 * small.rounding(model, other)


def test_a_fitted_projection_keeps_the_bias() -> None:
    model, given = small.tiny(), small.ids(40, 12)
    layer = Attention(40, 5).double()
    with torch.no_grad():  # heads 1 and 4 are equal, so that the refit is exact but for its ridge
        for linear in (layer.q_proj, layer.k_proj, layer.v_proj):
            linear.weight[32:40], linear.bias[32:40] = linear.weight[8:16], linear.bias[8:16]
        layer.out_proj.bias += torch.linspace(1, 2, 40)
    model.blocks[1].attention = layer.requires_grad_(False)
    name = "blocks.1.attention."
    sums = {f"{label}.": each for label, each in record_moments(model, given).items()}
    cut, decisions = refit_heads(ModelHeads(model), {name: [4]}, sums)
    assert decisions[name].ridge == min(RIDGES)
    [refit] = (step for step in cut.layers[name].steps if isinstance(step, Refit))
    assert refit.bo is not None
    # The mean of the outputs stays, so the bias changes by what the ridge leaves of the refit.
    left = float((refit.bo - layer.out_proj.bias).norm() / layer.out_proj.bias.norm())
    assert left < 10 * min(RIDGES)


def test_a_repair_by_refit() -> None:
    model, fit, other = small.tiny(), small.ids(40, 12), small.ids(9, 12, seed=1)
    result = prune(model, fit, held_out=other, keep=0.7, repair="refit")
    assert result.decisions.keys() == result.plan.gone.keys()
    for name, layer in result.cut:
        kinds = [step.kind for step in layer.steps]
        assert kinds == ["take", "shift" if result.decisions[name].ridge is None else "refit"]
    assert any(each.ridge is not None for each in result.decisions.values())
    assert "fitted in" in str(result)


def test_the_report_and_its_numbers() -> None:
    model, seen = small.tiny(), []
    given = small.ids(8, 12)
    plan = plan_prune(model, given, keep=0.7, progress=lambda *x: seen.append(x))
    assert seen[-1][1] == seen[-1][2] == 1 + 3 * 5
    result = plan.measure()
    report = str(result)
    assert report.startswith(str(plan))
    lines = report.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100
    assert lines[0] == "11 of 15 heads stay, 4 go, chosen by ablation"
    change, low, high = result.change
    assert low < change < high
    assert f"{change:+.4f}, no interval below 10 sequences" in report
    assert "on 4 sequences; the second half of the sequences held out" in report
    values = json.loads(result.to_json())
    assert values["change"] == {
        "mean": change,
        "low": None,
        "high": None,
    }  # too few for an interval
    assert (values["kept"], values["heads"]) == (11, 15)
    assert [row["kept"] for row in values["layers"]] == [
        5 - len(numbers) for numbers in plan.choice.gone().values()
    ]
    assert sum(point["is_chosen"] for point in values["curve"]) == 1
    many = plan_prune(small.tiny(), given, keep=0.7, measure=lambda o, _: o[:, 0, 0])
    assert many.quality.title == "the given measure"


def _prune(model: Any = None, given: Any = None, **options: Any) -> Any:
    model = small.tiny() if model is None else model
    return prune(model, small.ids(4, 9) if given is None else given, **options)


test_refusals = refusals(
    {
        "keep 1": (lambda: _prune(keep=1.0), OptionError, ["keep=1.0", "between 0 and 1"]),
        "keep 0": (lambda: _prune(keep=0.0), OptionError, ["keep=0.0", "keep=0.75"]),
        "per cent": (lambda: _prune(keep=75), OptionError, ["keep=75"]),
        "no rounds": (lambda: _prune(rounds=0), OptionError, ["rounds=0"]),
        "by": (lambda: _prune(by="taylor"), OptionError, ["by='taylor'", "ablation, gradient"]),
        "take": (lambda: _prune(take="all"), OptionError, ["take='all'", "groups, heads"]),
        "repair": (lambda: _prune(repair="median"), OptionError, ["repair='median'", "refit"]),
        "the same data": (
            lambda: _prune(held_out=small.ids(4, 9)),
            OptionError,
            ["4 held-out sequences", "other sequences"],
        ),
        "no data": (lambda: _prune(given=[]), OptionError, ["an empty list of inputs"]),
        "texts": (lambda: _prune(given="a text"), OptionError, ["type str", "tokenizer(text"]),
        "other tokens": (
            lambda: _prune(models.bert(), {"input_ids": small.ids(4, 9) + 90}),
            OptionError,
            ["embedding has 99 rows"],
        ),
        "no layout": (
            lambda: _prune(torch.nn.Linear(3, 3), torch.ones(4, 3)),
            OptionError,
            ["without a config"],
        ),
    }
)
