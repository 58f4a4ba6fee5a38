"""Two faults at once: the share of each, pairs that explain only together, and the positions."""

from typing import Any

import pytest
import torch

from headwise import Attention, Rotary, compare
from headwise.identify.comparison import FunctionComparison
from headwise.identify.results import Verdict

WIDTH, HEADS = 40, 5


def compared(
    first: dict[str, Any], second: dict[str, Any], *, noise: bool = False
) -> FunctionComparison:
    """Two layers with the same weights; with noise, a column of the first's output is another."""
    torch.manual_seed(0)
    a, b = Attention(WIDTH, HEADS, **first), Attention(WIDTH, HEADS, **second)
    b.load_state_dict(a.state_dict())
    if noise:
        with torch.no_grad():
            a.out_proj.weight[3] += 0.1 * torch.randn(WIDTH)
    diagnosis = compare(a, b)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert diagnosis.function is not None
    return diagnosis.function


def test_one_cause_explains_everything() -> None:
    [cause] = compared({"scale": 0.2}, {}).causes
    assert (cause.share, cause.partner) == (1.0, "")
    assert cause.output_left < 1e-6
    assert cause.lines[1] == "  explains weights to rounding"


@pytest.mark.slow
def test_each_of_two_has_its_share() -> None:
    function = compared({"scale": 0.2, "rotary": Rotary(theta=5e5)}, {"rotary": Rotary()})
    first, second = function.causes
    assert {first.name, second.name} == {"rotary theta", "scale"}
    assert first.share + second.share == pytest.approx(1.0)
    assert 0.2 < first.share < 0.8
    assert not first.partner
    assert second.output_left < 1e-6 < first.output_left < function.output_gap
    assert f"{100 * first.share:.2g} % of the differences of stages" in first.lines[1]


@pytest.mark.slow
def test_what_is_not_explained_has_a_share_too() -> None:
    function = compared({"scale": 0.2}, {}, noise=True)
    [cause] = function.causes
    assert 0.5 < cause.share < 1.0
    assert 1e-3 < cause.output_left < function.output_gap
    assert function.unexplained_places == ["output"]


@pytest.mark.slow
def test_two_that_explain_only_together_say_so() -> None:
    """Both change the weights, of which neither alone explains an entry."""
    first, second = compared({"scale": 0.9, "window": (3, 3)}, {}).causes
    assert {first.name, second.name} == {"scale", "window missing"}
    assert {first.side, second.side} == {"second"}
    assert (first.partner, second.partner) == (second.name, first.name)
    assert f"but only together with {second.name}" in first.lines[1]


@pytest.mark.slow
def test_the_positions_at_which_a_stage_parts() -> None:
    """At position 0 no channel turns, whatever theta is."""
    function = compared({"rotary": Rotary(theta=5e5)}, {"rotary": Rotary()})
    queries, keys = function.parted
    assert queries.positions == keys.positions == tuple(range(1, 40))
    assert "heads 0 to 4, all but the first token; explained" in str(queries)
    gap = next(g for g in function.gaps if g.stage == "q after rotary" and len(g.by_position) == 3)
    assert gap.by_position[0] == 0
    assert 0 < gap.by_position[1] < gap.by_position[2]
    [weights] = compared({"scale": 0.2}, {}).parted
    assert weights.positions is None
