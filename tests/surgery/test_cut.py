"""Cuts as data: JSON, composition, words, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import Attention, Rotary
from headwise.errors import CheckpointError, OptionError
from headwise.layers.conversion import canonical_state
from headwise.surgery import Cut, LayerCut, cut_layer


def state_of(layer: Attention) -> dict[str, torch.Tensor]:
    return canonical_state(layer, layer.state_dict())


def a_cut_with_every_step() -> LayerCut:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(4, 7, 7, generator=generator)
    cut = LayerCut(12, 4).turn(value=value).keep([3, 4, 0, 1, 9, 10, 6, 7]).merge(2).zero([5])
    wo = torch.randn(8, 7, 40, generator=generator)
    return cut.refit(wo, torch.randn(40, generator=generator)).shift(torch.ones(40))


def test_a_cut_comes_back_from_its_file(tmp_path: Path) -> None:
    cut = Cut({"a.": a_cut_with_every_step(), "b.": LayerCut(6, 2).expand(6)})
    cut.save(tmp_path / "cut.json")
    read = Cut.load(tmp_path / "cut.json")
    assert read.to_json() == cut.to_json()
    written = json.loads(cut.to_json())["layers"]["a."]
    assert (written["left"], written["off"]) == ([3, 4, 0, 1, 9, 10, 6, 7], [10])
    layer = Attention(40, 12, num_kv_heads=4, head_dim=10, value_dim=7)
    expected, made = (state_of(cut_layer(c.layers["a."], layer)) for c in (cut, read))
    assert all(torch.equal(x, made[name]) for name, x in expected.items())
    assert [path.name for path in tmp_path.iterdir()] == ["cut.json"]


def test_original_numbers_follow_every_step() -> None:
    heads = a_cut_with_every_step().origins
    assert heads.query == (3, 4, 0, 1, 9, 10, 6, 7)
    assert heads.kv == ((0, 1), (2, 3))
    assert heads.off == {10}
    assert a_cut_with_every_step().gone == [2, 5, 8, 10, 11]


def test_a_merge_is_the_mean_of_neighbours() -> None:
    layer = Attention(40, 6, head_dim=10).double()
    made = cut_layer(LayerCut(6, 6).keep([5, 0, 1, 2, 4, 3]).merge(3), layer)
    before, after = state_of(layer), state_of(made)
    for name in ("wk", "wv"):
        for place, pair in enumerate([(5, 0), (1, 2), (4, 3)]):
            mean = (before[name][pair[0]] + before[name][pair[1]]) / 2
            assert torch.equal(after[name][place], mean)
    assert torch.equal(after["wq"][0], before["wq"][5])
    assert (made.num_heads, made.num_kv_heads) == (6, 3)


def test_a_mean_is_added_to_the_bias() -> None:
    vector = torch.linspace(-1, 1, 40, dtype=torch.float64)
    for has_bias in (True, False):
        layer = Attention(40, 6, head_dim=10, out_bias=has_bias).double()
        if has_bias:
            torch.nn.init.normal_(layer.out_proj.bias)
        before = state_of(layer).get("bo", torch.zeros(40, dtype=torch.float64))
        after = state_of(cut_layer(LayerCut(6, 6).drop([1]).shift(vector), layer))
        assert torch.equal(after["bo"], before + vector)
        assert bool(before.any()) == has_bias


def test_the_outputs_of_a_cut_are_those_of_the_layer_that_changes_most() -> None:
    reordered, turned = (
        LayerCut(4, 2).keep([2, 3, 0, 1]),
        LayerCut(4, 2).turn(key=torch.ones(2, 3, 3)),
    )
    layers = {"a.": reordered, "b.": turned, "c.": LayerCut(4, 2).zero([1])}
    kinds = [Cut(dict([*layers.items()][:count])).equality for count in range(4)]
    assert kinds == ["indices", "indices", "rounding", "no"]


def test_two_cuts_are_one() -> None:
    layer = Attention(40, 6, num_kv_heads=3, head_dim=10, rotary=Rotary()).double()
    first = Cut({"x.": LayerCut(6, 3).keep([4, 5, 0, 1])})
    second = Cut({"x.": LayerCut(4, 2).drop([1, 2]), "y.": LayerCut(8, 8).zero([2])})
    both = first.then(second)
    assert both.gone == {"x.": [0, 2, 3, 5], "y.": [2]}
    assert both.layers["x."].origins.query == (4, 1)
    stepwise = cut_layer(second.layers["x."], cut_layer(first.layers["x."], layer))
    at_once = cut_layer(both.layers["x."], layer)
    assert all(
        torch.equal(x, at_once.state_dict()[name]) for name, x in stepwise.state_dict().items()
    )
    with pytest.raises(OptionError, match="2 heads and 2 kv heads after the first cut"):
        both.then(second)


def test_words() -> None:
    cut = Cut({"a.": LayerCut(12, 4).drop([0, 1, 2]), "long.": LayerCut(6, 6).merge(2)})
    assert str(cut) == (
        "a.     9 of 12 heads without 0, 1, 2, 3 of 4 kv heads\n"
        "long.  6 of 6 heads, 2 of 6 kv heads (0+1+2 3+4+5), merged by their mean\n"
        "outputs change"
    )
    same = Cut({"a.": LayerCut(4, 2).keep([2, 3, 0, 1]).expand(4)})
    assert str(same).splitlines()[-1] == "outputs stay equal: numbers only change their places"
    assert "at full size" in str(LayerCut(4, 4).zero([1]))


REFUSED: dict[str, tuple[Any, str]] = {
    "all heads": (lambda: LayerCut(4, 4).drop(range(4)), "none of 4 heads"),
    "no heads": (lambda: LayerCut(4, 4).keep([]), "none of 4 heads"),
    "uneven groups": (lambda: LayerCut(6, 2).drop([0]), "2 of kv head 0, 3 of kv head 1"),
    "a group apart": (lambda: LayerCut(4, 2).keep([0, 2, 1, 3]), "1 of kv head 0, 1 of kv head 1"),
    "twice": (lambda: LayerCut(4, 4).keep([1, 1]), "heads 1 twice"),
    "out of range": (lambda: LayerCut(4, 4).drop([4]), "heads 4 of 4"),
    "negative": (lambda: LayerCut(4, 4).zero([-1]), "heads -1 of 4"),
    "7 kv heads": (lambda: LayerCut(12, 4).expand(7), "7 kv heads from 4"),
    "3 kv heads": (lambda: LayerCut(12, 4).merge(3), "3 kv heads from 4"),
    "no kv heads": (lambda: LayerCut(12, 4).collapse(0), "0 kv heads from 4"),
    "a wide basis": (lambda: LayerCut(4, 2).turn(key=torch.eye(3)[None]), "for 2 kv heads"),
    "another fit": (lambda: LayerCut(4, 2).refit(torch.ones(3, 5, 6)), "3 heads for 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, saw = REFUSED[name]
    with pytest.raises((OptionError, ValueError), match=saw):
        make()


def test_another_layer_is_refused() -> None:
    with pytest.raises(OptionError, match="a layer of 6 heads and 2 kv heads"):
        cut_layer(LayerCut(6, 6).zero([0]), Attention(48, 6, num_kv_heads=2))


@pytest.mark.parametrize("edit", ["format", "step", "left", "off", "text", "list"])
def test_damaged_files_are_refused(edit: str) -> None:
    values = json.loads(Cut({"a.": a_cut_with_every_step()}).to_json())
    if edit == "format":
        values["format"] = 7
    if edit == "step":
        values["layers"]["a."]["steps"][0]["step"] = "turn"
    if edit in ("left", "off"):  # other heads than the steps leave
        values["layers"]["a."][edit].reverse()
        values["layers"]["a."][edit][0] += 1
    texts = {"text": "no cut", "list": "[1]"}
    with pytest.raises(CheckpointError, match="a text that is no cut"):
        Cut.from_json(texts.get(edit, json.dumps(values)))
