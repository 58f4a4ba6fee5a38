"""Rotations along several axes: read from the angles of a class, and proved by running it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.checkpoints import load_attention, loading
from headwise.checkpoints.turns import HandedPlaces, Turn, fit_rotation
from headwise.errors import OptionError
from headwise.function.rotary import Rotary, frequencies_of_rule
from headwise.function.spec import Pairing, RotaryRule
from tests.quick import others_extra
from tools.huggingface_classes import classes, loads
from tools.huggingface_classes.trial import Row, built, model_and_inputs

WIDTH, THETA = 24, 50.0
ROWS, COLUMNS = 5, 7
GRID = torch.cartesian_prod(torch.arange(3), torch.arange(ROWS), torch.arange(COLUMNS)).mT


def turn_of(rule: RotaryRule, places: Tensor) -> Turn:
    """The angles of all channels, as classes make them in a proof: of frequencies in float32."""
    assert rule.axes is not None
    frequencies = frequencies_of_rule(rule).float().double()
    angles = torch.stack([places[axis] for axis in rule.axes], -1) * frequencies
    if rule.pairing == "interleaved":
        every = angles.repeat_interleave(2, -1)
    else:
        every = angles.unflatten(-1, (rule.parts, -1)).repeat(1, 1, 2).flatten(1)
    return Turn(places, torch.complex(every.cos(), every.sin()))


RULES: dict[str, RotaryRule] = {
    "rows, then columns": Rotary.of_plane(THETA, WIDTH).rule,
    "even and odd frequencies": Rotary.of_plane(THETA, WIDTH, order="alternating").rule,
    "two parts": Rotary.of_plane(THETA, WIDTH, order="parts").rule,
    "neighbours": RotaryRule(
        THETA,
        WIDTH,
        "interleaved",
        None,
        axes=(1, 0) * 6,
        numbers=(0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10),
    ),
    "three axes": RotaryRule(THETA, WIDTH, scaling=None, axes=(0, 1, 2) * 4),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rotation_is_read_from_its_angles(name: str) -> None:
    rule = RULES[name]
    places = GRID if max(rule.axes or ()) == 2 else GRID[1:]
    assert fit_rotation([turn_of(rule, places)], THETA) == rule
    assert fit_rotation([turn_of(rule, places[:, :9]), turn_of(rule, places[:, 9:])], THETA) == rule
    assert fit_rotation([turn_of(rule, places)], THETA * 1.001) is None
    turned = turn_of(rule, places)
    turned.angles[3, 2] *= 1j
    assert fit_rotation([turned], THETA) is None


def test_an_axis_along_which_nothing_moves_tells_no_rotation() -> None:
    rule = RULES["three axes"]
    still = GRID[:, GRID[0] == 0]
    assert fit_rotation([turn_of(rule, still)], THETA) is None
    assert fit_rotation([turn_of(rule, still), turn_of(rule, GRID)], THETA) == rule
    assert fit_rotation([], THETA) is None


class _Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = torch.ones(2)

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        angles = places.repeat(1, 2) * 0.3
        return angles.cos(), angles.sin()


class _Tower(nn.Module):
    """Hands on every second row of its angles, the last first, and where the images begin."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation, self.attention = _Rotation(), nn.Identity()

    def forward(self, x: Tensor, places: Tensor) -> None:
        cos, sin = (each.flip(0)[::2] for each in self.rotation(x, places))
        self.attention(x[::2], (cos, sin), torch.tensor([0, 1, 3]))


class _Attention(nn.Identity):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def test_places_are_those_of_the_angles_that_the_attention_got() -> None:
    tower, kept = _Tower(), HandedPlaces()
    tower.attention = _Attention()
    places = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [1, 0]])
    with kept.keep(tower, tower.attention):
        tower(torch.ones(6, 5), places)
    turn = kept.find_turn()
    assert turn is not None
    assert torch.equal(turn.places, places.flip(0)[::2].mT)
    positions = turn.positions(2, 3)
    assert positions is not None
    assert torch.equal(positions, turn.places[:, None].expand(2, 2, 3))
    assert turn.positions(1, 4) is None
    images = kept.find_images(3)
    assert images is not None
    assert images.tolist() == [0, 1, 1]
    assert kept.find_images(4) is None
    assert not tower.attention._forward_pre_hooks
    assert not tower.rotation._forward_hooks


# model_type -> the axes and the numbers of the frequencies of a head of 16 channels, and the order
# of stored rows.
TOWERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Pairing]] = {
    "qwen3_vl_vision": ((0, 0, 0, 0, 1, 1, 1, 1), (0, 2, 4, 6) * 2, "half-split"),
    # in windows, with an order of their own
    "qwen2_5_vl_vision": ((0, 0, 0, 0, 1, 1, 1, 1), (0, 2, 4, 6) * 2, "half-split"),
    "kimi_k25_vision": ((1, 0) * 4, (0, 0, 2, 2, 4, 4, 6, 6), "half-split"),
    "minimax_m3_vl_vision": ((0, 0, 1, 1, 2, 2), (0, 3) * 3, "half-split"),
    "sam3_vit_model": ((0, 0, 0, 0, 1, 1, 1, 1), (0, 2, 4, 6) * 2, "interleaved"),
    "step3p5_vision": ((1, 1, 1, 1, 0, 0, 0, 0), (0, 2, 4, 6) * 2, "interleaved"),
    "muse_spark_vision": ((0, 0, 0, 0, 1, 1, 1, 1), (0, 2, 4, 6) * 2, "half-split"),
}


@pytest.mark.parametrize(
    "model_type", others_extra(TOWERS, "minimax_m3_vl_vision", quick=["qwen3_vl_vision"])
)
def test_a_tower_is_proved_with_the_rotation_of_its_class(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = classes.model_class(model_type)
    assert kind is not None
    found = model_and_inputs(kind, Row(model_type, None))
    assert found is not None
    model, given = found
    assert loads.load_of(model, given) == (loads.LOADED, "")
    model.save_pretrained(tmp_path)
    layer = load_attention(tmp_path, layer=1)
    axes, numbers, pairing = TOWERS[model_type]
    rotary = Rotary(10_000.0, 2 * len(axes), pairing, axes=axes, numbers=numbers)
    assert layer.rotary == rotary
    monkeypatch.setattr(loading, "fit_rotation", lambda *_: None)
    with pytest.raises(OptionError):
        load_attention(tmp_path, layer=1)


@pytest.mark.slow
def test_a_tower_beside_a_model_of_the_catalogue_loads_by_its_prefix(tmp_path: Path) -> None:
    kind = classes.model_class("qwen2_vl")
    assert kind is not None
    model = built(kind, Row("qwen2_vl", None))
    assert model is not None
    model.save_pretrained(tmp_path)
    layer = load_attention(tmp_path, prefix="visual.blocks.1.attn.")
    assert layer.proof == "proved against VisionAttention, 3 probes, up to 160 tokens"
    assert load_attention(tmp_path, layer=1).proof.startswith("proved against Qwen2VLAttention")
    with pytest.raises(OptionError, match="0 modules"):
        load_attention(tmp_path, prefix="visual.blocks.7.attn.")
