"""What prunings and regroupings report alike: the sign of a change, and its interval."""

import math
from dataclasses import replace

import pytest
import torch

from headwise.surgery import prune, regroup
from tests.surgery import small


def test_a_change_is_after_less_before() -> None:
    result = prune(small.tiny(), small.ids(8, 12), held_out=small.ids(10, 12, seed=1), keep=0.6)
    difference = result.after - result.before
    mean, low, high = result.change
    assert mean == pytest.approx(float(difference.mean()), rel=1e-12)
    assert mean != 0
    assert float(difference.min()) <= low <= mean <= high <= float(difference.max())
    assert result.values()["change"] == {"mean": mean, "low": low, "high": high}
    assert f"{mean:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}" in str(result)


def test_a_report_says_how_far_outputs_moved_and_whether_the_model_guesses() -> None:
    model, held_out = small.tiny(), small.ids(9, 12, seed=1)
    result = prune(model, small.ids(8, 12), held_out=held_out, keep=0.6)
    before, after = (small.run(each, held_out) for each in (model, result.model))
    moved, guess = float((after - before).norm() / before.norm()), -math.log(before.shape[-1])
    assert moved > 0.01
    values = result.values()
    assert (values["moved"], values["guess"]) == pytest.approx((moved, guess), rel=1e-9)
    assert f"; outputs moved by {moved:.1%}" in str(result)
    # Random weights are no better than the same probability for all tokens.
    assert f"in nats; before no better than guessing, {guess:.4f}" in str(result)
    trained = replace(result, before=guess + torch.linspace(0.1, 1, 9).double())
    assert "guess" not in str(trained)


def test_likeness_has_no_guess_and_padding_moves_nothing() -> None:
    model, given = small.FAMILIES["bert"][0](), small.text(6)
    result = regroup(model, given, kv_heads=2, held_out=small.text(6, seed=1), merge="mean")
    assert "guess" not in str(result)
    assert result.values()["guess"] is None
    real = small.text(6, seed=1)["attention_mask"].bool()
    before, after = (small.run(x, small.text(6, seed=1))[real] for x in (model, result.model))
    assert result.moved == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-9)
