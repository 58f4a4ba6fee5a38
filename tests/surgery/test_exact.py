"""Cuts that change no output: heads reordered, without output, expanded, collapsed, turned."""

import random

import pytest
import torch
from torch import Tensor

from headwise import Attention, Rotary
from headwise.errors import OptionError
from headwise.function.weights import AXES
from headwise.layers.conversion import canonical_state
from headwise.layers.norm import QKNorm
from headwise.surgery import LayerCut, cut_layer
from tests.layers.cases import Case
from tests.quick import others_slow
from tests.surgery.layers import GEOMETRIES, budget_of, cut_of, layer_of, named, tensors_of

FLOATS = (torch.float64, torch.float32)
geometries = pytest.mark.parametrize("case", GEOMETRIES, ids=named)
WITHOUT_SLOPES = [case for case in GEOMETRIES if case["by distance"] != "alibi"]
without_slopes = pytest.mark.parametrize("case", WITHOUT_SLOPES, ids=named)


def shuffled(layer: Attention, seed: int = 0) -> list[int]:
    """An order of all heads that keeps groups together, and moves both groups and heads."""
    chance, group = random.Random(seed), layer.num_heads // layer.num_kv_heads
    kv_heads = chance.sample(range(layer.num_kv_heads), layer.num_kv_heads)
    inner = [chance.sample(range(group), group) for _ in kv_heads]
    return [kv * group + i for kv, places in zip(kv_heads, inner, strict=True) for i in places]


def assert_same_outputs(made: Attention, layer: Attention, tensors: list[Tensor]) -> None:
    with torch.no_grad():
        budget_of(layer, tensors).assert_holds(made(*tensors))


@pytest.mark.parametrize("dtype", others_slow(FLOATS, torch.float64), ids=str)
@without_slopes
def test_reordered_heads_give_the_same_outputs(case: Case, dtype: torch.dtype) -> None:
    layer, tensors = layer_of(case, dtype), tensors_of(case, dtype)
    order = shuffled(layer)
    cut = cut_of(layer).keep(order)
    made = cut_layer(cut, layer)
    assert cut.equality == "indices"
    assert list(cut.origins.query) == order
    assert_same_outputs(made, layer, tensors)
    # Head i is the head that was at order[i], to the bit: nothing was computed.
    before, after = (canonical_state(x, x.state_dict()) for x in (layer, made))
    for name, axes in AXES.items():
        if name in before and "heads" in axes:
            dim = axes.index("heads")
            for place, head in enumerate(order):
                assert torch.equal(after[name].select(dim, place), before[name].select(dim, head))
    if order != sorted(order):
        assert not torch.equal(after["wq"], before["wq"])


@without_slopes
def test_the_order_is_undone_by_its_inverse(case: Case) -> None:
    layer = layer_of(case)
    order = shuffled(layer)
    cut = cut_of(layer).keep(order)
    back = cut.keep([order.index(head) for head in range(layer.num_heads)])
    made, state = cut_layer(back, layer), layer.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in made.state_dict().items())


def zeroed(layer: Attention, heads: list[int]) -> Attention:
    width = layer.value_dim
    with torch.no_grad():
        for head in heads:
            layer.out_proj.weight[:, head * width : (head + 1) * width] = 0
    return layer


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in WITHOUT_SLOPES
        if case["qk_norm"] != "width" and case["output_norm"] in ("none", "head")
    ],
    ids=named,
)
def test_heads_without_output_go(case: Case, dtype: torch.dtype) -> None:
    layer, tensors = layer_of(case, dtype), tensors_of(case, dtype)
    group = layer.num_heads // layer.num_kv_heads
    gone = [1, 4] if group in (1, 3) else [0, 2, 5]  # one of each group of 3, or any
    cut = cut_of(zeroed(layer, gone)).drop(gone, are_zero=True)
    made = cut_layer(cut, layer)
    assert (made.num_heads, cut.gone, cut.equality) == (6 - len(gone), gone, "indices")
    assert_same_outputs(made, layer, tensors)


def test_heads_with_output_are_not_said_to_have_none() -> None:
    without = {"output_norm": "none", "qk_norm": "none"}.items()
    layer = layer_of(next(case for case in WITHOUT_SLOPES if without <= case.items()))
    group = layer.num_heads // layer.num_kv_heads
    cut = cut_of(layer).drop(range(group), are_zero=True) if group < 6 else cut_of(layer)
    if group == 6:
        cut = cut.drop([0], are_zero=True)
    with pytest.raises(OptionError, match="output projection that is not 0"):
        cut_layer(cut, layer)


@pytest.mark.parametrize("dtype", others_slow(FLOATS, torch.float64), ids=str)
@geometries
def test_expanded_kv_heads_give_the_same_outputs_and_collapse_to_the_bit(
    case: Case, dtype: torch.dtype
) -> None:
    layer, tensors = layer_of(case, dtype), tensors_of(case, dtype)
    if layer.num_kv_heads == layer.num_heads:
        with pytest.raises(OptionError, match="multiple of 6"):
            cut_of(layer).expand(12)
        return
    expanded = cut_of(layer).expand(layer.num_heads)
    if case["qk_norm"] == "width":
        with pytest.raises(OptionError, match="norm over the width"):
            cut_layer(expanded, layer)
        return
    made = cut_layer(expanded, layer)
    assert (made.num_kv_heads, expanded.equality) == (layer.num_heads, "indices")
    assert_same_outputs(made, layer, tensors)
    collapsed, state = cut_layer(expanded.collapse(layer.num_kv_heads), layer), layer.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in collapsed.state_dict().items())
    again = cut_layer(LayerCut(6, 6).collapse(layer.num_kv_heads), made)
    assert all(torch.equal(x, state[name]) for name, x in again.state_dict().items())


def test_copies_that_differ_do_not_collapse() -> None:
    layer = Attention(40, 6, head_dim=10).double()
    with pytest.raises(OptionError, match="they differ in wk, wv"):
        cut_layer(LayerCut(6, 6).collapse(3), layer)


def planes(layer: Attention, seed: int = 5) -> Tensor:
    """A basis for each kv head: turns and factors of planes, and any matrix beside them."""
    generator = torch.Generator().manual_seed(seed)
    width = 0 if layer.rotary is None else layer.rotary.rotated_width(layer.head_dim)
    half, rest = width // 2, layer.head_dim - width
    basis = torch.zeros(layer.num_kv_heads, layer.head_dim, layer.head_dim, dtype=torch.float64)
    a, b = (torch.randn(layer.num_kv_heads, half, generator=generator).double() for _ in range(2))
    low, high = torch.arange(half), torch.arange(half) + half
    basis[:, low, low] = basis[:, high, high] = a
    basis[:, low, high], basis[:, high, low] = -b, b
    free = torch.randn(layer.num_kv_heads, rest, rest, generator=generator).double()
    basis[:, width:, width:] = free + 3 * torch.eye(rest)
    return basis


@geometries
def test_another_basis_gives_the_same_outputs(case: Case) -> None:
    layer, tensors = layer_of(case), tensors_of(case)
    generator = torch.Generator().manual_seed(6)
    width = layer.value_dim
    value = torch.randn(layer.num_kv_heads, width, width, generator=generator).double()
    value += 3 * torch.eye(width)
    is_clipped = case["clip"] != "none"
    key = None if case["qk_norm"] != "none" or is_clipped or layer.latent else planes(layer)
    if layer.latent:
        with pytest.raises(OptionError, match="a key that all heads share"):
            cut_layer(cut_of(layer).turn(key=planes(layer)), layer)
    cut = cut_of(layer).turn(key=key, value=value)
    obstacles = {
        "gate for each channel": case["output_gate"] == "channel",
        "projections that are clipped": is_clipped,
        "a norm of values or head outputs": case["values"] == "norm"
        or case["output_norm"] != "none",
    }
    words = [each for each, is_there in obstacles.items() if is_there]
    if words:
        with pytest.raises(OptionError, match="|".join(words)):
            cut_layer(cut, layer)
        if key is None:
            return
        cut, value = cut_of(layer).turn(key=key), None
    made = cut_layer(cut, layer)
    assert cut.equality == "rounding"
    with torch.no_grad():
        before, after = layer(*tensors), made(*tensors)
    # Bases of condition c multiply the rounding of a product by at most c.
    conditions = [torch.linalg.cond(x).max() for x in (key, value) if x is not None]
    budget = budget_of(layer, tensors)
    allowed = budget.allowed * float(max(conditions)) ** 2
    assert bool(((after - before).abs() <= allowed).all())
    states = canonical_state(layer, layer.state_dict()), canonical_state(made, made.state_dict())
    changed = {name for name, x in states[0].items() if not torch.equal(x, states[1][name])}
    assert ({"wq", "wk"} <= changed) == (key is not None)
    assert ({"wv", "wo"} <= changed) == (value is not None)


@pytest.mark.parametrize("width", [None, 6])
def test_a_basis_that_mixes_planes_is_refused(width: int | None) -> None:
    layer = Attention(40, 6, head_dim=10, rotary=Rotary(width=width)).double()
    mixing = planes(layer)
    mixing[:, 0, 1] = 0.5
    with pytest.raises(OptionError, match="mixes planes of the rotation"):
        cut_layer(cut_of(layer).turn(key=mixing), layer)
    normed = Attention(40, 6, head_dim=10, qk_norm=QKNorm()).double()
    with pytest.raises(OptionError, match="norm of queries and keys"):
        cut_layer(cut_of(normed).turn(key=planes(normed)), normed)
