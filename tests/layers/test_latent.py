"""Keys and values from a latent: published values, both forms, caches, classes of transformers."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Mask, Rotary
from headwise.errors import OptionError, ShapeError
from headwise.function import ABSENT, AttentionSpec, Latent
from headwise.function.latent import count_products
from headwise.layers import latent as forms
from headwise.layers.conversion import options_of_spec
from headwise.layers.hooks import attention_hook
from headwise.layers.norm import QKNorm
from headwise.testing import Budget
from tests.layers import reference
from tests.layers.cases import inputs_of, layer_of, pairwise
from tests.refusals import refusals

EMBED, HEADS, PLAIN, SHARED, VALUE, RANK, QUERY_RANK, LENGTH = 12, 2, 6, 4, 3, 5, 7, 5
YARN = (0.1 * math.log(40) + 1) ** 2
INTERLEAVED, HALVES = Rotary(pairing="interleaved"), Rotary()
# First channels of the last token's output, of classes of transformers 5.23 with the same weights:
# query rank, rotation, factor of the scale, other options -> the values.
VALUES: dict[str, tuple[int | None, Rotary | None, float, dict[str, Any], tuple[float, ...]]] = {
    "both": (7, INTERLEAVED, 1, {}, (2.350585668, 0.698279989, -1.009650274)),
    "keys": (None, INTERLEAVED, 1, {}, (2.344806969, 0.702323454, -0.996106745)),
    "half-split": (7, HALVES, 1, {}, (2.338214633, 0.691295026, -1.010692746)),
    "yarn": (7, INTERLEAVED, YARN, {}, (2.354817245, 0.695484202, -1.019250713)),
    "unrotated": (None, None, 1, {}, (2.345312664, 0.702553222, -0.996171206)),
    "scaled": (7, INTERLEAVED, 1, {"scaled": True}, (3.64789805, 1.076898012, -1.579887105)),
    "eps": (7, INTERLEAVED, 1, {"eps": 1e-5}, (2.350405703, 0.698183078, -1.009656411)),
}


def numbered(rows: int, columns: int) -> Tensor:
    entries = torch.arange(1.0, rows * columns + 1, dtype=torch.float64)
    return (3 * entries.sin() / math.sqrt(columns)).reshape(rows, columns)


def near_one(width: int) -> Tensor:
    return 1 + 0.1 * torch.arange(1.0, width + 1, dtype=torch.float64).sin()


def tokens() -> Tensor:
    entries = torch.arange(1.0, LENGTH * EMBED + 1, dtype=torch.float64)
    return torch.cos(0.5 * entries).reshape(1, LENGTH, EMBED)


@torch.no_grad()
def layer_of_values(name: str) -> Attention:
    """Weights are numbered as the classes store them: a query's rotated channels come last."""
    query_rank, rotary, factor, options, _ = VALUES[name]
    rule = Latent(rank=RANK, shared_width=SHARED, query_rank=query_rank, **options)
    layer = Attention(
        EMBED,
        HEADS,
        head_dim=PLAIN + SHARED,
        value_dim=VALUE,
        q_bias=False,
        out_bias=False,
        rotary=rotary,
        scale=factor * (PLAIN + SHARED) ** -0.5,
        latent=rule,
        dtype=torch.float64,
    )
    rows = numbered(HEADS * (PLAIN + SHARED), query_rank or EMBED).unflatten(0, (HEADS, -1))
    up = numbered(HEADS * (PLAIN + VALUE), RANK).unflatten(0, (HEADS, -1))
    down = numbered(RANK + SHARED, EMBED)
    stored = {
        "q_proj": rows.roll(SHARED, 1).flatten(0, 1),
        "kv_latent_proj": down[:RANK],
        "shared_k_proj": down[RANK:],
        "kv_latent_norm": near_one(RANK),
        "k_proj": up[:, :PLAIN].flatten(0, 1),
        "v_proj": up[:, PLAIN:].flatten(0, 1),
        "out_proj": numbered(EMBED, HEADS * VALUE),
    }
    if query_rank is not None:
        stored |= {"q_latent_proj": numbered(query_rank, EMBED)}
        stored |= {"q_latent_norm": near_one(query_rank)}
    layer.load_state_dict({f"{name}.weight": x for name, x in stored.items()})
    return layer


@pytest.fixture(params=["expanded", "absorbed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All calls in one form."""
    chosen = request.param == "absorbed"
    monkeypatch.setattr(forms, "_is_absorbed", lambda *_, **__: (chosen, "a test"))
    return str(request.param)


def run_in_steps(layer: Attention, x: Tensor, *steps: int, **call: Any) -> Tensor:
    cache = layer.cache(batch=len(x), length=x.shape[1])
    return torch.cat(
        [layer(part, mask=Mask.causal(), cache=cache, **call) for part in x.split(steps, 1)], 1
    )


@pytest.mark.parametrize("name", VALUES)
@torch.no_grad()
def test_the_values_of_the_classes(name: str, form: str) -> None:
    layer, x = layer_of_values(name), tokens()
    whole = layer(x, mask=Mask.causal())
    for output in (whole, run_in_steps(layer, x, 2, 1, 1, 1)):
        expected = torch.tensor(VALUES[name][-1], dtype=torch.float64)
        assert (output[0, -1, :3] - expected).abs().max() < 6e-10  # all digits that are printed
    contributions = layer.contributions(x, mask=Mask.causal())
    torch.testing.assert_close(contributions.sum(1), whole, rtol=1e-12, atol=1e-13)


LATENTS = [case for case in pairwise() if case["latent"] != "none"]


@pytest.mark.parametrize("case", LATENTS, ids=lambda case: "; ".join(case.values()))
def test_both_forms_are_the_layer_written_out(case: dict[str, str], form: str) -> None:
    """With every other option, and their gradients."""
    layer, (tensors, options) = layer_of(case), inputs_of(case)
    found, expected = layer(*tensors, **options), reference.output(layer, *tensors, **options)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    leaves = [*tensors, *layer.parameters()]
    direction = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad(out, leaves, direction, materialize_grads=True)
        for out in (found, expected)
    )
    for gradient, wanted in zip(ours, theirs, strict=True):
        size = float(wanted.abs().max()) + 1
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11 * size)
    call = {name: x for name, x in options.items() if name != "gate"}
    outputs = reference.head_outputs(layer, *tensors, **call)
    torch.testing.assert_close(
        layer.head_outputs(*tensors, **call), outputs, rtol=1e-11, atol=1e-11
    )


def latent_layer(**options: Any) -> Attention:
    torch.manual_seed(0)
    rule = Latent(rank=11, shared_width=6, query_rank=13)
    given = {"head_dim": 16, "value_dim": 9, "latent": rule, "rotary": Rotary(), **options}
    return Attention(40, 6, **given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@torch.no_grad()
def test_both_forms_stay_within_the_budget(form: str, dtype: torch.dtype) -> None:
    layer = latent_layer(dtype=dtype)
    x, mask = torch.randn(2, 24, 40).to(dtype), Mask.causal()

    def read(x: Tensor, *parameters: Tensor) -> Tensor:
        copied = latent_layer(dtype=x.dtype)
        for parameter, value in zip(copied.parameters(), parameters, strict=True):
            parameter.copy_(value)
        return reference.output(copied, x, mask=mask)

    budget = Budget.for_function(read, x, *layer.parameters())
    floor = 40 * torch.finfo(dtype).eps * float(budget.exact.abs().max())
    assert ((layer(x, mask=mask).double() - budget.exact).abs() <= budget.allowed + floor).all()


@torch.no_grad()
def test_the_matrix_of_either_form_has_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = latent_layer(dtype=torch.float64), torch.randn(2, 9, 40, dtype=torch.float64)
    expanded = layer.matrix(x, mask=Mask.causal())
    monkeypatch.setattr(forms, "_is_absorbed", lambda *_, **__: (True, ""))
    absorbed = layer.matrix(x, mask=Mask.causal())
    assert (expanded.k.shape, absorbed.k.shape) == ((2, 6, 9, 16), (2, 1, 9, 17))
    torch.testing.assert_close(absorbed.dense(), expanded.dense(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(absorbed.entropy(), expanded.entropy(), rtol=1e-12, atol=1e-14)


# ---- the choice ---------------------------------------------------------------------------------


def test_few_queries_against_many_keys_are_absorbed() -> None:
    sizes = {"heads": 16, "head_dim": 192, "value_dim": 128, "rank": 512, "shared": 64}
    chosen = {
        (queries, keys): count_products(queries=queries, keys=keys, **sizes).is_absorbed
        for queries, keys in product((1, 16, 256), (1, 256, 4096))
    }
    assert [key for key, absorbed in chosen.items() if absorbed] == [
        *((1, 256), (1, 4096), (16, 256), (16, 4096)),
    ]
    one = count_products(queries=1, keys=1, **sizes)
    assert one.expanded == 16 * (512 * 256 + 192 + 128)
    assert one.absorbed == 16 * (512 * 256 + 2 * 512 + 2 * 64)


@torch.no_grad()
def test_explain_says_which_form_and_why() -> None:
    layer, x = latent_layer(), torch.randn(1, 24, 40)
    assert "latent: expanded: " in str(layer.explain(x))
    cache = layer.cache(batch=1, length=40)
    layer(x, mask=Mask.causal(), cache=cache)
    with torch.enable_grad():  # a cache keeps no graph, and the report needs none
        report = str(layer.explain(x[:, :1], mask=Mask.causal(), cache=cache))
    assert "latent: absorbed: " in report
    assert "0 GFLOP      11 to 60" in report  # k_proj is not called
    assert cache.length == 24
    layer.v_proj.register_forward_hook(lambda *_: None)
    report = str(layer.explain(x[:, :1], mask=Mask.causal(), cache=cache))
    assert "latent: expanded: v_proj may do more than multiply" in report


@torch.no_grad()
def test_projections_that_somebody_watches_are_called() -> None:
    layer, x = latent_layer(dtype=torch.float64), torch.randn(1, 24, 40, dtype=torch.float64)
    expected = run_in_steps(layer, x, 23, 1)
    calls = []
    layer.k_proj.register_forward_hook(lambda *call: calls.append(call[0]))
    torch.testing.assert_close(run_in_steps(layer, x, 23, 1), expected, rtol=1e-12, atol=1e-13)
    assert len(calls) == 2
    seen = []

    def hook(_: object, v: Tensor, outputs: Tensor) -> Tensor:
        seen.append((v.shape[1], outputs.shape[3]))
        return outputs

    with attention_hook(hook):
        run_in_steps(latent_layer(dtype=torch.float64), x, 23, 1)
    assert seen == [(6, 9), (6, 9)]


@torch.no_grad()
def test_hooks_of_all_modules_see_the_projections() -> None:
    layer, x = latent_layer(), torch.randn(1, 24, 40)
    cache = layer.cache(batch=1, length=25)
    layer(x, mask=Mask.causal(), cache=cache)
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        layer(x[:, :1], mask=Mask.causal(), cache=cache)
    finally:
        handle.remove()
    assert layer.k_proj in seen
    assert layer.v_proj in seen


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


@torch.no_grad()
def test_a_projection_of_another_class_is_called() -> None:
    layer, x = latent_layer(dtype=torch.float64), torch.randn(1, 12, 40, dtype=torch.float64)
    layer.k_proj.__class__ = Adapted
    whole = layer(x, mask=Mask.causal())
    torch.testing.assert_close(run_in_steps(layer, x, 11, 1), whole, rtol=1e-12, atol=1e-13)


# ---- the cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"window": (4, 0)}, {"sink": True}], ids=str)
@torch.no_grad()
def test_steps_equal_one_pass(options: dict[str, Any], form: str) -> None:
    layer = latent_layer(**options, dtype=torch.float64)
    x = torch.randn(2, 21, 40, dtype=torch.float64)
    whole = layer(x, mask=Mask.causal())
    for steps in ((10, 5, 3, 3), (1,) * 21):
        torch.testing.assert_close(run_in_steps(layer, x, *steps), whole, rtol=1e-12, atol=1e-13)


@torch.no_grad()
def test_a_cache_of_unequal_lengths(form: str) -> None:
    layer = latent_layer(dtype=torch.float64)
    x, lengths = torch.randn(2, 12, 40, dtype=torch.float64), torch.tensor([12, 7])
    cache = layer.cache(batch=2, length=13)
    layer(x, mask=Mask.lengths(queries=lengths, keys=lengths) & Mask.causal(), cache=cache)
    last = torch.randn(2, 1, 40, dtype=torch.float64)
    output = layer(last, mask=Mask.causal(), cache=cache)
    for row, length in enumerate(lengths.tolist()):
        alone = torch.cat((x[row : row + 1, :length], last[row : row + 1]), 1)
        expected = layer(alone, mask=Mask.causal())[:, -1:]
        torch.testing.assert_close(output[row : row + 1], expected, rtol=1e-12, atol=1e-13)


def test_a_cache_holds_the_latent_and_the_shared_key() -> None:
    """4,096 tokens in the sizes of DeepSeek-V2-Lite: 9 MiB, where keys and values take 80."""
    sizes: dict[str, Any] = {"head_dim": 192, "value_dim": 128, "device": "meta"}
    layer = Attention(2048, 16, latent=Latent(rank=512, shared_width=64), **sizes)
    cache = layer.cache(batch=1, length=4096)
    assert "latent and shared key, 576 numbers a token" in repr(cache)
    assert "9.4 MB" in repr(cache)  # 9 MiB
    assert "84 MB" in repr(Attention(2048, 16, **sizes).cache(batch=1, length=4096))


def test_a_cache_of_the_other_form_is_refused_with_its_numbers() -> None:
    layer, plain = latent_layer(), Attention(40, 6, head_dim=8)
    with pytest.raises(OptionError, match="latent and shared key, 17 numbers a token"):
        plain(torch.randn(1, 3, 40), cache=layer.cache(batch=1, length=4))
    with pytest.raises(OptionError, match="kv_heads=6, head_dim=8, value_dim=8"):
        layer(torch.randn(1, 3, 40), cache=plain.cache(batch=1, length=4))
    k, v = torch.randn(1, 6, 3, 16), torch.randn(1, 6, 3, 9)
    with pytest.raises(ShapeError, match=r"\(batch 1, kv_heads 1, new, 17\)"):
        layer.cache(batch=1, length=4).append(k, v)


# ---- options ------------------------------------------------------------------------------------


def test_the_function_of_a_layer() -> None:
    layer = latent_layer()
    assert layer.spec.latent == layer.latent
    assert layer.spec.words()["latent"] == "normed"
    assert layer.spec.rotation.width == 6
    assert options_of_spec(layer.spec)["latent"] == layer.latent
    assert "Latent(rank=11, shared_width=6, query_rank=13" in repr(layer)
    assert Attention(40, 4).spec.latent is ABSENT
    for rule in (Latent(normed=False, scaled=True), Latent()):
        spec = AttentionSpec(latent=rule)
        assert AttentionSpec.from_words(spec.words()).latent == rule
        assert spec.conflicts(AttentionSpec())["latent"] == (rule.words, "none")


def test_weights_make_the_layer_again() -> None:
    layer = latent_layer(latent_bias=True, q_bias=False, sink=True, output_gate="channel")
    again = Attention.from_layout(
        layer.to_layout("canonical"),
        layout="canonical",
        num_heads=6,
        rotary=Rotary(width=6),
        scale=None,
    )
    assert again.latent == layer.latent
    x = torch.randn(1, 5, 40)
    assert torch.equal(again(x), layer(x))


def make(**options: Any) -> Attention:
    return Attention(40, 4, **{"latent": Latent(rank=8, shared_width=4), **options})


test_a_latent_is_refused = refusals(
    {
        str(options): (partial(make, **options), words)
        for options, words in [
            ({"latent": 512}, ("latent=512", "Latent(rank=512, shared_width=64)")),
            ({"latent": Latent(shared_width=4)}, ("rank=None",)),
            ({"latent": Latent(rank=0, shared_width=4)}, ("rank=0", "whole number from 1")),
            ({"latent": Latent(8, 4, query_rank=0)}, ("query_rank=0",)),
            ({"latent": Latent(8, 10)}, ("shared_width=10", "head_dim of 10")),
            ({"rotary": Rotary(width=6)}, ("width=6", "shared_width=4", "Rotary(width=4)")),
            ({"latent": Latent(8, 3), "rotary": Rotary()}, ("shared_width=3", "even")),
            ({"num_kv_heads": 2}, ("num_kv_heads=2", "num_kv_heads=4")),
            ({"source_dim": 33}, ("source_dim=33", "source_dim=40")),
            ({"qk_norm": QKNorm()}, ("qk_norm=QKNorm", "qk_norm=None")),
            ({"k_bias": True}, ("k_bias=True", "without a bias")),
            ({"v_bias": True}, ("v_bias=True", "leave out v_bias")),
        ]
    },
    kind=OptionError,
)
