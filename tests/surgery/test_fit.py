"""Repairs fitted to data: means, and refits kept where other tokens agree."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention
from headwise.errors import OptionError
from headwise.scanning.importance import mean_outputs
from headwise.surgery import ModelHeads, cut_model
from headwise.surgery.fit import (
    cut_heads,
    decide,
    fit_projection,
    output_error,
)
from headwise.surgery.moments import match_names, record_moments
from tests.scanning import models
from tests.surgery import small


def sums_of(outputs: Tensor) -> Tensor:
    """Sums of products of head outputs (tokens, heads, value_dim), as `record_moments` gives."""
    rows = torch.cat([outputs.flatten(1), outputs.new_ones(len(outputs), 1)], 1)
    return torch.stack([half.mT @ half for half in (rows[::2], rows[1::2])])


def planted_outputs(tokens: int, *, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of 4 heads of 3 channels; the last one is linear in two others, up to noise."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(tokens, 4, 3, generator=generator, dtype=torch.float64)
    turn = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    wo = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    linear = torch.einsum("tav,avw->tw", outputs[:, [0, 2]], turn) + 0.7
    outputs[:, 3] = linear + noise * outputs[:, 3]
    return outputs, wo, turn


def test_a_refit_recovers_a_linear_dependence() -> None:
    outputs, wo, turn = planted_outputs(60, noise=0.0)
    sums, ridge = sums_of(outputs).sum(0), 1e-12
    fitted, bias = fit_projection(sums, wo, [0, 1, 2], ridge)
    # The head that is gone was x0 @ turn[0] + x2 @ turn[1] + 0.7, and gave that times wo[3].
    expected = wo.clone()
    expected[[0, 2]] += turn @ wo[3]
    expected[3] = 0
    kept = outputs[:, :3].flatten(1)
    eigenvalues = torch.linalg.eigvalsh((kept - kept.mean(0)).mT @ (kept - kept.mean(0)))
    # A ridge r shrinks a component of the change by r / (eigenvalue + r).
    shrink = ridge * float(eigenvalues.mean() / eigenvalues.min())
    rounding = 9 * torch.finfo(torch.float64).eps * float(eigenvalues.max() / eigenvalues.min())
    size = float((turn @ wo[3]).norm())
    assert float((fitted - expected).abs().max()) <= (shrink + 100 * rounding) * size
    assert float((bias - 0.7 * wo[3].sum(0)).abs().max()) <= (shrink + 100 * rounding) * size * 9
    assert output_error(sums, wo, fitted, bias) < shrink + 1000 * rounding


def test_without_a_change_of_the_projection_the_refit_is_the_mean() -> None:
    outputs, wo, _ = planted_outputs(60, noise=1.0)
    sums = sums_of(outputs).sum(0)
    fitted, bias = fit_projection(sums, wo, [1, 3], math.inf)
    assert torch.equal(fitted[[1, 3]], wo[[1, 3]])
    assert not fitted[[0, 2]].any()
    mean = torch.einsum("hv,hvo->o", outputs.mean(0)[[0, 2]], wo[[0, 2]])
    torch.testing.assert_close(bias, mean, rtol=1e-13, atol=1e-13)
    # The error of a mean is the variance of what is gone, over that of the whole output.
    gone = torch.einsum("thv,hvo->to", outputs[:, [0, 2]], wo[[0, 2]])
    whole = torch.einsum("thv,hvo->to", outputs, wo)
    share = float(gone.var(0).sum() / whole.var(0).sum())
    assert output_error(sums, wo, fitted, bias) == pytest.approx(share, rel=1e-12)


def test_a_refit_is_kept_where_other_tokens_agree() -> None:
    outputs, wo, _ = planted_outputs(400, noise=0.1)
    kept = decide(sums_of(outputs), wo, [0, 1, 2])
    assert kept.ridge is not None
    assert kept.refit < 0.1 * kept.mean
    independent = torch.randn(22, 4, 3, generator=torch.Generator().manual_seed(1)).double()
    sums = sums_of(independent)
    assert decide(sums, wo, [0, 1, 2]).ridge is None
    # On its own tokens a fit looks better than the mean, on others it is worse.
    own, others = (
        [
            output_error(sums[half], wo, *fit_projection(sums[0], wo, [0, 1, 2], r))
            for half in (0, 1)
        ]
        for r in (1e-4, math.inf)
    )
    assert own[0] < others[0]
    assert own[1] > others[1]


def test_moments_are_those_of_real_tokens_by_turns() -> None:
    model, given = models.bert(), small.text(batch=5)
    parts = [{n: x[rows] for n, x in given.items()} for rows in (slice(0, 3), slice(3, 5))]
    recorded: dict[str, list[Tensor]] = {}

    def keep(call: Any) -> None:
        recorded.setdefault(call.layer, []).append(call.outputs.transpose(1, 2).flatten(2))

    from headwise.scanning.record import record_attention

    with torch.no_grad(), record_attention(model, keep):
        model(**given)
    real = given["attention_mask"].bool()
    made = record_moments(model, parts)
    assert made.keys() == recorded.keys()
    for name, [outputs] in recorded.items():
        for half, rows in enumerate(([0, 2, 4], [1, 3])):
            tokens = outputs[rows][real[rows]]
            tokens = torch.cat([tokens, tokens.new_ones(len(tokens), 1)], 1)
            torch.testing.assert_close(made[name][half], tokens.mT @ tokens, rtol=1e-12, atol=1e-12)


def test_a_constant_head_is_replaced_by_its_mean() -> None:
    model, given = small.tiny(), small.ids(3, 9)
    layer: Any = model.blocks[1].attention
    layer = Attention(
        40, 5, q_bias=False, k_bias=False, out_bias=False, rotary=layer.rotary
    ).double()
    with torch.no_grad():
        layer.v_proj.weight[16:24] = 0  # the output of head 2 is its bias
        layer.v_proj.bias[16:24] = torch.linspace(-1, 1, 8)
    model.blocks[1].attention = layer.requires_grad_(False)
    heads = ModelHeads(model)
    means = {f"{name}.": mean for name, mean in mean_outputs(model, given).items()}
    gone = {"blocks.1.attention.": [2]}
    expected, allowed = small.run(model, given), small.rounding(model, given)
    for zeroed in (True, False):
        made = cut_model(cut_heads(heads, gone, means, zeroed=zeroed), model)
        assert float((small.run(made, given) - expected).abs().max()) <= 4 * allowed
    zeroed = cut_model(cut_heads(heads, gone, None), model)
    assert float((small.run(zeroed, given) - expected).abs().max()) > 1e6 * allowed


@pytest.mark.parametrize("family", small.FAMILIES)
def test_a_cut_by_means_is_what_a_run_with_replaced_outputs_gives(family: str) -> None:
    make, data = small.FAMILIES[family]
    model, given = make(), data(0)
    heads, recorded = ModelHeads(model), mean_outputs(model, data(1))
    names = match_names(heads, recorded)
    assert names.keys() == heads.specs.keys()
    means = {name: recorded[label] for name, label in names.items()}
    group = {name: int(s.num_heads) // int(s.num_kv_heads) for name, s in heads.specs.items()}
    gone = {name: [*range(group[name])] for name in names}  # the first kv head of each layer
    made = cut_model(cut_heads(heads, gone, means), model)
    replaced = {
        names[name]: {head: means[name][head] for head in numbers} for name, numbers in gone.items()
    }
    expected, allowed = small.run_replaced(model, given, replaced), small.rounding(model, given)
    assert float((small.run(made, given) - expected).abs().max()) <= 8 * allowed
    assert float((small.run(model, given) - expected).abs().max()) > 1e6 * allowed


def test_a_layer_that_runs_twice_is_refused() -> None:
    model = small.tiny()
    model.blocks[2] = model.blocks[0]
    recorded = mean_outputs(model, small.ids(2, 7))
    with pytest.raises(OptionError, match="runs several times in one pass"):
        match_names(ModelHeads(model), recorded)


def test_attention_without_a_place_stays() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = Attention(20, 4)
            self.other = nn.MultiheadAttention(20, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.own(x)
            return x + self.other(x, x, x, need_weights=False)[0]

    model = Pair().eval()
    recorded = mean_outputs(model, torch.randn(2, 5, 20))
    assert set(recorded) == {"own", "other"}
    assert match_names(ModelHeads(model), recorded) == {"own.": "own"}
