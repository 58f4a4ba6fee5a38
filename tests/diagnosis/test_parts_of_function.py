"""Parts of a hand-written module whose outputs are stages, beside its output."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, compare
from headwise.diagnosis.attentions import Comparison
from headwise.diagnosis.probes import choose_inputs
from headwise.diagnosis.subjects.function import BlackBox
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.diagnosis.subjects.parts import Parts
from headwise.errors import OptionError, ShapeError
from headwise.identify.comparison import FunctionComparison

WIDTH, HEADS, KV_HEADS = 40, 6, 2


class Port(nn.Module):
    """Grouped attention of a head_dim of 10, whose queries go through a function of their own."""

    def __init__(self, layer: Attention) -> None:
        super().__init__()
        self.q_proj, self.k_proj = layer.q_proj, layer.k_proj
        self.v_proj, self.out_proj = layer.v_proj, layer.out_proj
        self.unused = nn.Linear(WIDTH, HEADS * 10)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.bend(self.q_proj(x)), self.k_proj(x), self.v_proj(x)
        heads = [
            rows.unflatten(-1, (count, 10)).transpose(1, 2)
            for rows, count in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS))
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        joined: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return joined

    def bend(self, q: Tensor) -> Tensor:
        return q + q.square()


class Turned(Port):
    """The rows of its queries are in another order, and the scores are scaled by 1.3."""

    def __init__(self, layer: Attention) -> None:
        super().__init__(layer)
        self.q_proj = nn.Linear(WIDTH, HEADS * 10)
        with torch.no_grad():
            for mine, right in zip(
                self.q_proj.parameters(), layer.q_proj.parameters(), strict=True
            ):
                mine.copy_(right.unflatten(0, (HEADS, 10)).transpose(0, 1).flatten(0, 1))

    def bend(self, q: Tensor) -> Tensor:
        return 1.3 * q


@pytest.fixture
def layer() -> Attention:
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS, num_kv_heads=KV_HEADS, head_dim=10)


def test_what_the_parts_compute_is_told_from_what_follows(layer: Attention) -> None:
    port = Port(layer)
    alone = unexplained(port, layer, {})
    assert "parts={'q'" in alone.isolated[-1]
    shown = unexplained(port, layer, {"q": port.q_proj, "k": port.k_proj})
    assert [stage.stage for stage in shown.parted] == ["output"]
    assert shown.stages == ("q", "k", "output")
    assert not any("parts=" in sentence for sentence in shown.isolated)


def unexplained(
    port: nn.Module, layer: Attention, parts: dict[str, nn.Module]
) -> FunctionComparison:
    """Return the comparison in which no cause is looked for."""
    function, known = BlackBox(port), NativeSubject(layer)
    function.parts = Parts(parts, HEADS, KV_HEADS) if parts else None
    probes = choose_inputs(function, known, None)
    diagnosis = Comparison(function, known, probes, candidates=()).diagnosis()
    assert diagnosis.function is not None
    return diagnosis.function


@pytest.mark.slow
def test_the_stage_of_a_part_has_its_own_cause(layer: Attention) -> None:
    port = Turned(layer)
    diagnosis = compare(port, layer, parts={"q": port.q_proj})
    assert diagnosis.function is not None
    stages = {cause.name: cause.stages for cause in diagnosis.function.causes}
    assert stages == {"heads interleaved": ("q",), "scale": ("output",)}


class Tiled(Port):
    """Its queries are lost, its kv heads are tiled, and its scale is another one."""

    def __init__(self, layer: Attention) -> None:
        super().__init__(layer)
        self.q_proj = nn.Linear(WIDTH, HEADS * 10)
        with torch.no_grad():
            self.q_proj.weight.copy_(3 * layer.q_proj.weight.square())

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (HEADS, 10)).transpose(1, 2)
        k, v = (
            each(x).unflatten(-1, (KV_HEADS, 10)).transpose(1, 2).repeat(1, 3, 1, 1)
            for each in (self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2)
        joined: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return joined


@pytest.mark.extra
def test_two_causes_after_a_stage_that_nothing_explains(layer: Attention) -> None:
    port = Tiled(layer)
    function = compare(port, layer, parts={"q": port.q_proj, "v": port.v_proj}).function
    assert function is not None
    names = {"kv heads tiled instead of repeated", "scale"}
    assert {cause.name for cause in function.causes} == names
    assert function.unexplained_places == ["q"]


def test_parts_of_the_same_function_agree(layer: Attention) -> None:
    port = Port(layer)
    port.bend = lambda q: q  # type: ignore[method-assign]
    diagnosis = compare(port, layer, parts={"q": port.q_proj, "v": port.v_proj})
    assert diagnosis.verdict.is_same
    assert diagnosis.function is not None
    assert diagnosis.function.stages == ("q", "v", "output")


def test_parts_that_show_nothing_are_refused(layer: Attention) -> None:
    port = Port(layer)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"query": port.q_proj}, "modules for query"),
        ({"q": "q_proj"}, "modules for q"),
        ({"q": port.unused}, "parts for q that Port does not call"),
    ]
    for parts, words in cases:
        with pytest.raises(OptionError, match=words):
            compare(port, layer, parts=parts)
    with pytest.raises(ShapeError, match="the part for q with outputs of 40 channels"):
        compare(port, layer, parts={"q": port.out_proj})
    with pytest.raises(OptionError, match="parts beside"):
        compare(layer, layer, parts={"q": port.q_proj})
