"""Merged kv heads: what queries and outputs lose, in layers of all kinds and in models."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Rotary
from headwise.errors import OptionError, ShapeError
from headwise.layers.conversion import canonical_state
from headwise.layers.distance import Alibi
from headwise.layers.norm import QKNorm
from headwise.surgery import Cut, LayerCut, ModelHeads, cut_layer, cut_model, regroup
from headwise.surgery.maps import How, key_channels, value_channels
from headwise.surgery.merge import merge_heads
from headwise.surgery.moments import record_products
from headwise.surgery.steps import Merge
from tests.quick import others_slow
from tests.scanning import models
from tests.surgery import small
from tests.surgery.layers import budget_of

BATCH, TOKENS, WIDTH, KV_HEADS, HEADS, HEAD_DIM, VALUE_DIM = 2, 13, 34, 4, 8, 10, 6


def layer_with(**options: Any) -> Attention:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
    layer = Attention(WIDTH, HEADS, **sizes, **options).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.requires_grad_(False)


def x_of(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


ROTARY = {
    "no rotary": {},
    "rotary": {"rotary": Rotary()},
    "partial rotary": {"rotary": Rotary(width=6)},
}
rotary = pytest.mark.parametrize("options", ROTARY.values(), ids=ROTARY)


def make_alike(layer: Attention, groups: list[list[int]], how: How) -> None:
    """Make the kv heads of each group equal to the first, up to maps that the layer allows."""
    generator = torch.Generator().manual_seed(2)
    rule = layer.spec.rotation
    width = 0 if rule is None else HEAD_DIM if rule.width is None else rule.width
    for name, size in (("k_proj", HEAD_DIM), ("v_proj", VALUE_DIM)):
        projection = getattr(layer, name)
        heads = projection.weight.unflatten(0, (KV_HEADS, size))
        biases = None if projection.bias is None else projection.bias.unflatten(0, (KV_HEADS, size))
        for first, *others in groups:
            for other in others:
                turn = torch.linalg.qr(
                    torch.randn(size, size, generator=generator, dtype=torch.float64)
                )[0]
                if how == "fitted":  # any map that can be undone
                    turn = turn * torch.linspace(0.5, 2.0, size, dtype=torch.float64)
                if name == "k_proj" and width:
                    turn = planes(generator, width, size, scaled=how == "fitted")
                heads[other] = turn @ heads[first]
                if biases is not None:
                    biases[other] = turn @ biases[first]


def planes(generator: torch.Generator, width: int, size: int, *, scaled: bool) -> Tensor:
    """A matrix that turns each plane of a rotation by itself, and leaves other channels alone."""
    matrix, half = torch.eye(size, dtype=torch.float64), width // 2
    for i in range(half):
        angle = torch.rand((), generator=generator, dtype=torch.float64) * 6
        factor = 1.5 if scaled else 1.0
        cos, sin = factor * angle.cos(), factor * angle.sin()
        matrix[i, i] = matrix[i + half, i + half] = cos
        matrix[i, i + half], matrix[i + half, i] = -sin, sin
    return matrix


@rotary
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("how", ["aligned", "fitted"])
def test_heads_that_are_alike_up_to_maps_merge_without_loss(
    options: dict[str, Any], bias: bool, how: How
) -> None:
    biases = dict.fromkeys(("q_bias", "k_bias", "v_bias", "out_bias"), bias)
    layer, groups = layer_with(**options, **biases), [[0, 2], [1, 3]]
    make_alike(layer, groups, how)
    heads = ModelHeads(layer)
    products = record_products(heads, [x_of()])
    cut, merged = merge_heads(heads, products, 2, how)
    assert merged[""].groups == groups
    assert max(merged[""].keys, merged[""].values) < 1e-9
    made, held_out = cut_layer(cut.layers[""], layer), x_of(seed=3)
    assert made.num_kv_heads == 2
    error = (made(held_out) - layer(held_out)).abs().max()
    assert error < 1e4 * float(budget_of(layer, [held_out]).allowed.max())
    # The plain mean of the same heads is another function.
    plain, _ = merge_heads(heads, products, 2, "mean")
    assert (cut_layer(plain.layers[""], layer)(held_out) - layer(held_out)).abs().max() > 0.01


def cost_of_keys(q: Tensor, k: Tensor, width: int, *, centred: bool) -> float:
    """The mean square of all products of queries and keys, over all turns of each plane."""
    half = width // 2
    sizes = [x[..., :half].square() + x[..., half:width].square() for x in (q, k)]
    turned = torch.einsum("shp,thp->st", *sizes).mean() / 2
    rest = k[..., width:]
    if centred:
        rest = rest - rest.mean(0)
    free = torch.einsum("shd,thd->sth", q[..., width:], rest).square().sum(2).mean()
    return float(turned + free)


@pytest.mark.parametrize("kind", [*ROTARY, "sink"])
def test_channels_are_those_of_keys_queries_and_values(kind: str) -> None:
    layer = layer_with(**(ROTARY | {"sink": {"sink": True}})[kind])
    products = record_products(ModelHeads(layer), [x_of(), x_of(2)])[""]
    state = canonical_state(layer, layer.state_dict())
    x = torch.cat([x_of(), x_of(2)]).flatten(0, 1)
    k = torch.einsum("te,hde->thd", x, state["wk"]) + state["bk"]
    q = torch.einsum("te,hde->thd", x, state["wq"]) + state["bq"]
    v = torch.einsum("te,hde->thd", x, state["wv"]) + state["bv"]
    keys = key_channels(state, layer.spec, products)
    width = {"no rotary": 0, "sink": 0, "rotary": HEAD_DIM, "partial rotary": 6}[kind]
    # What all keys have in common changes no weight, unless it turns or a sink has none of it.
    expected = cost_of_keys(q, k.repeat_interleave(2, 1), width, centred=kind == "no rotary")
    assert sum(each.total for each in keys) == pytest.approx(expected, rel=1e-10)
    [values] = value_channels(state, products)
    mean = 0.0 if kind == "sink" else v.mean(0)  # which the bias can hold where weights sum to 1
    spread = (v - mean).repeat_interleave(2, 1)
    written = torch.einsum("thv,hvo->tho", spread, state["wo"])
    assert values.total == pytest.approx(float(written.square().sum((1, 2)).mean()), rel=1e-10)


@pytest.mark.parametrize("how", ["fitted", "aligned"])
def test_the_mean_output_stays_where_the_bias_can_hold_it(how: How) -> None:
    """With equal weights every output is the mean, of which a merge of values may lose nothing."""
    layer = layer_with()
    for projection in (layer.q_proj, layer.k_proj):
        projection.weight.zero_()
        projection.bias.zero_()
    heads, x = ModelHeads(layer), x_of()[:1]
    cut, merged = merge_heads(heads, record_products(heads, [x]), 1, how)
    assert merged[""].values > 0.01
    made = cut_layer(cut.layers[""], layer)
    error = (made(x) - layer(x)).abs().max()
    assert error < 1e4 * float(budget_of(layer, [x]).allowed.max())
    without = LayerCut(HEADS, KV_HEADS, cut.layers[""].steps[:-1])
    assert (cut_layer(without, layer)(x) - layer(x)).abs().max() > 1e-3


def test_keys_that_are_normed_are_averaged() -> None:
    layer = layer_with(qk_norm=QKNorm("rms"))
    heads = ModelHeads(layer)
    cut, _ = merge_heads(heads, record_products(heads, [x_of()]), 2, "fitted")
    step = next(step for step in cut.layers[""].steps if isinstance(step, Merge))
    assert step.key is None
    assert step.value is not None
    assert cut_layer(cut.layers[""], layer)(x_of()).isfinite().all()


def test_under_slopes_neighbours_are_merged() -> None:
    """The order of heads decides their slopes."""
    layer, groups = layer_with(score_bias=Alibi()), [[0, 2], [1, 3]]
    make_alike(layer, groups, "fitted")
    heads = ModelHeads(layer)
    _, merged = merge_heads(heads, record_products(heads, [x_of()]), 2, "fitted")
    assert merged[""].groups == [[0, 1], [2, 3]]


@pytest.mark.parametrize("family", others_slow(small.FAMILIES, "llama", "t5"))
def test_every_family_is_regrouped(family: str) -> None:
    make, data = small.FAMILIES[family]
    model = make()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    kv_heads = int(next(iter(ModelHeads(model).specs.values())).num_kv_heads)
    result = regroup(model, [data(0)], kv_heads=1, held_out=[data(5)])
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    rows = result.plan.table()
    assert [sorted(chain(*row["groups"])) for row in rows] == [[*range(kv_heads)]] * len(rows)
    assert all(0 <= row[name] < 1 for row in rows for name in ("keys", "values"))
    numbers = [point.kv_heads for point in result.curve]
    assert numbers[0] == 1
    assert numbers[-1] == kv_heads
    assert [point.is_chosen for point in result.curve] == [True] + [False] * (len(numbers) - 1)
    # The cut that was saved gives the same model.
    made = cut_model(Cut.from_json(result.cut.to_json()), model)
    held_out = data(5)
    output = small.run(result.model, held_out)
    assert torch.equal(small.run(made, held_out), output)
    assert (output - small.run(model, held_out)).abs().max() > 1e-3


def test_grouped_heads_of_a_real_config_shrink() -> None:
    model, given = small.grouped(), small.text(seed=0)
    result = regroup(model, [given], kv_heads=1, held_out=[small.text(seed=5)])
    attention = result.model.model.layers[0].self_attn
    assert attention.k_proj.weight.shape[0] == attention.head_dim
    assert result.model.config.num_key_value_heads == 1


def test_a_number_that_divides_no_layer_is_refused() -> None:
    model, given = small.tiny(), small.ids(4, 12)
    with pytest.raises(OptionError, match="kv_heads=3 for layers of 5 kv heads") as caught:
        regroup(model, [given], kv_heads=3)
    assert caught.value.needed == "a divisor below: 1"
    with pytest.raises(OptionError, match="merge='median'"):
        regroup(model, [given], kv_heads=1, merge="median")  # type: ignore[arg-type]


def test_a_map_of_one_side_alone_is_refused() -> None:
    one = torch.eye(HEAD_DIM).repeat(KV_HEADS, 1, 1)
    with pytest.raises(OptionError, match="a map of key alone"):
        LayerCut(HEADS, KV_HEADS).merge(2, key=one)
    with pytest.raises(ShapeError, match="maps of query"):
        LayerCut(HEADS, KV_HEADS).merge(2, key=one, query=one[:2])


def test_padding_has_no_part_in_the_products() -> None:
    model, given = models.bert(), small.text()
    heads, mask = ModelHeads(model), given["attention_mask"].bool()
    padded = record_products(heads, [given])
    alone = [ids[real][None] for ids, real in zip(given["input_ids"], mask, strict=True)]
    expected = record_products(heads, [{"input_ids": ids} for ids in alone])
    assert padded.keys() == expected.keys() == heads.specs.keys()
    for name, products in padded.items():
        for part in ("queries", "source"):
            torch.testing.assert_close(
                getattr(products, part), getattr(expected[name], part), rtol=1e-9, atol=1e-9
            )


def test_the_curve_has_the_plain_mean_of_neighbours() -> None:
    model, given, held_out = models.bert(), small.text(seed=0), small.text(seed=5)
    result = regroup(model, [given], kv_heads=2, held_out=[held_out])
    assert any(row["groups"] != [[0, 1], [2, 3]] for row in result.plan.table())
    plain = Cut({name: layer.merge(2) for name, layer in ModelHeads(model).whole()})
    value = result.plan.quality.values(cut_model(plain, model), [held_out]).mean()
    [point] = [point for point in result.curve if point.kv_heads == 2]
    assert point.mean == pytest.approx(float(value), rel=1e-12)
    assert point.merged == pytest.approx(float(result.after.mean()), rel=1e-12)
    assert point.merged != pytest.approx(point.mean, rel=1e-6)
