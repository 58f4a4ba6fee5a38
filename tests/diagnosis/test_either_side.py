"""Causes in either of the two: a part that one has and the other lacks, and who has it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Mask, Rotary, compare
from headwise.identify.comparison import FoundCause
from headwise.identify.results import Diagnosis, Verdict
from headwise.layers.distance import Alibi
from headwise.layers.norm import QKNorm

WIDTH, HEADS = 40, 5
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "rotary": ({"rotary": Rotary(theta=5e5)}, "rotary missing"),
    "alibi": ({"score_bias": Alibi()}, "distance bias coefficient"),
    "norm": ({"qk_norm": QKNorm()}, "qk-norm kind"),
    "window": ({"window": (3, 0)}, "window missing"),
    "softcap": ({"softcap": 5.0}, "softcap"),
}


def pair(options: dict[str, Any]) -> tuple[Attention, Attention]:
    """A layer with a part, and a layer with the same weights that lacks it."""
    torch.manual_seed(0)
    have, lack = Attention(WIDTH, HEADS, **options), Attention(WIDTH, HEADS)
    for norm in (have.q_norm, have.k_norm):
        if norm is not None:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    lack.load_state_dict({n: x for n, x in have.state_dict().items() if n in lack.state_dict()})
    return have, lack


def function_of(layer: Attention) -> Callable[..., Tensor]:
    def run(x: Tensor, mask: Tensor | None = None) -> Tensor:
        axes = "batch queries keys"
        named = (
            None if mask is None else Mask.may_attend(mask[:, 0].expand(len(x), -1, -1), axes=axes)
        )
        output: Tensor = layer(x, mask=named)
        return output

    return run


def only_cause(diagnosis: Diagnosis) -> FoundCause:
    assert diagnosis.verdict is Verdict.DIFFERENT, str(diagnosis)
    assert diagnosis.function is not None
    assert not diagnosis.function.unexplained_places
    [cause] = diagnosis.function.causes
    return cause


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_one_of_two_layers_lacks(part: str) -> None:
    options, name = PARTS[part]
    have, lack = pair(options)
    assert only_cause(compare(lack, have)).name == name
    unexpected = {"rotary missing": "rotary unexpected"}
    assert only_cause(compare(have, lack)).name == unexpected.get(name, name)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rotary", "alibi"])
def test_a_part_that_only_a_function_has(part: str) -> None:
    options, name = PARTS[part]
    have, lack = pair(options)
    cause = only_cause(compare(function_of(have), lack))
    assert cause.name == ("rotary unexpected" if part == "rotary" else name)
    wanted = {"rotary": ("theta", 5e5), "alibi": ("coefficient", 1.0)}
    parameter, value = wanted[part]
    assert cause.parameters[parameter] == pytest.approx(value, rel=1e-3)


@pytest.mark.slow
def test_the_side_that_has_the_cause_is_stated() -> None:
    """The layer is the one that is known, so the numbers are those of the function."""
    torch.manual_seed(0)
    layer = Attention(WIDTH, HEADS)
    original = Attention(WIDTH, HEADS, scale=1.0)
    original.load_state_dict(layer.state_dict())
    cause = only_cause(compare(layer, function_of(original)))
    assert cause.side == "second"
    assert cause.lines[0] == "scale: scale 1 in the second"
    assert cause.lines[2].startswith("  repair of the second, before scores are capped")
    assert cause.repair == "scores = scores * (1 / 8**0.5)  # scale 0.353553 in place of 1"
    cause = only_cause(compare(function_of(original), layer))
    assert cause.side == "first"
    assert cause.lines[2].startswith("  repair, before scores are capped")


@pytest.mark.slow
def test_a_scale_and_a_factor_have_a_formula() -> None:
    torch.manual_seed(0)
    right = Attention(WIDTH, HEADS)
    wrong = Attention(WIDTH, HEADS, scale=WIDTH**-0.5)
    wrong.load_state_dict(right.state_dict())
    assert only_cause(compare(wrong, right)).parameters["form"] == "1 / sqrt(width)"
    wrong.scale = right.scale
    with torch.no_grad():
        for parameter in wrong.v_proj.parameters():
            parameter.mul_(8**-0.25)
    cause = only_cause(compare(wrong, right))
    assert cause.name == "factor"
    assert "head_dim ** -0.25" in str(cause.lines)
