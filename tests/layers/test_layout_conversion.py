"""`Attention.from_layout` and `.to_layout`: what is read, what must be said, what is refused."""

from typing import Any

import pytest
import torch

from headwise import Attention, Mask, Rotary
from headwise.errors import OptionError
from headwise.layers.distance import Alibi, T5Bias
from headwise.layers.norm import QKNorm
from headwise.layouts._layout import Layout
from headwise.layouts.registry import layout
from headwise.masks.score_bias import ScoreBias

SIZES: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 10, "value_dim": 7, "out_dim": 44}
ROTARY = Rotary(theta=300.0, width=6)


def made(**options: Any) -> Attention:
    layer = Attention(40, 6, **{**SIZES, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def x() -> torch.Tensor:
    return torch.randn(3, 24, 40, dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_bias": False, "v_bias": False},
        {"k_bias": False, "out_bias": False, "sink": True},
        {"rotary": ROTARY},
        {"rotary": Rotary(theta=300.0, width=6, pairing="interleaved"), "qk_norm": QKNorm()},
        {"qk_norm": QKNorm(over="width"), "softcap": 5.0, "scale": 0.2},
        {"score_bias": T5Bias(buckets=8, max_distance=16)},
        {"score_bias": Alibi(), "window": (5, 0)},
    ],
    ids=str,
)
def test_a_layer_of_its_own_layout_is_the_layer(options: dict[str, Any]) -> None:
    layer = made(**options)
    name = "headwise-width-norm" if "width" in str(options.get("qk_norm")) else "headwise"
    kept = {k: v for k, v in options.items() if not k.endswith("_bias") or k == "score_bias"}
    again = Attention.from_layout(
        layer.to_layout(name),
        layout=name,
        num_heads=6,
        num_kv_heads=2,
        **{"scale": None, **{k: v for k, v in kept.items() if k != "sink"}},
    )
    assert again.state_dict().keys() == layer.state_dict().keys()
    given = x()
    assert torch.equal(again(given), layer(given))


def test_both_pairings_of_one_checkpoint_are_one_function() -> None:
    """Rows are in the order of the layer's own pairing, whatever the file's is."""
    plain = {"q_bias": False, "k_bias": False, "v_bias": False, "out_bias": False, "value_dim": 10}
    layer = made(rotary=ROTARY, **plain)
    given = x()
    for name in ("llama", "llama-meta"):
        for pairing in ("half-split", "interleaved"):
            rotary = Rotary(theta=300.0, width=6, pairing=pairing)
            again = Attention.from_layout(
                layer.to_layout(name, accept="rotary_width"),
                layout=name,
                num_heads=6,
                rotary=rotary,
                accept="rotary_width",
            )
            mask = Mask.causal()
            torch.testing.assert_close(again(given, mask=mask), layer(given, mask=mask))
    halves, neighbours = (
        layer.to_layout(name, accept="rotary_width")[tensor]
        for name, tensor in (("llama", "q_proj.weight"), ("llama-meta", "wq.weight"))
    )
    assert not torch.equal(halves, neighbours)


def test_what_the_layout_says_is_set() -> None:
    state = {n: torch.randn(40, 40) for n in ("q.weight", "k.weight", "v.weight", "o.weight")}
    state["relative_attention_bias.weight"] = torch.randn(32, 4)
    layer = Attention.from_layout(state, layout="t5", num_heads=4, score_bias=T5Bias())
    assert layer.scale == 1.0


def test_the_table_that_another_layer_has() -> None:
    state = {n: torch.randn(40, 40) for n in ("q.weight", "k.weight", "v.weight", "o.weight")}
    with pytest.raises(OptionError, match="without a table of distances"):
        Attention.from_layout(state, layout="t5", num_heads=4, score_bias=T5Bias())


def test_a_table_that_nothing_reads() -> None:
    """Swin's is of places in a window: no parameter of the layer."""
    state = {f"self.{n}.weight": torch.randn(40, 40) for n in ("query", "key", "value")}
    state |= {"output.dense.weight": torch.randn(40, 40)}
    state["self.relative_position_bias_table"] = torch.randn(9, 4)
    score_bias = ScoreBias.dense(torch.randn(4, 7, 7), axes="heads queries keys")
    with pytest.raises(OptionError, match="a table of distances without score_bias=T5Bias"):
        Attention.from_layout(state, layout="swin", num_heads=4, score_bias=score_bias)


def refused(of: str | Layout, **options: Any) -> OptionError:
    packed = layout(of).pack(
        {
            "wq": torch.randn(4, 10, 40),
            "wk": torch.randn(4, 10, 40),
            "wv": torch.randn(4, 10, 40),
            "wo": torch.randn(4, 10, 40),
        }
    )
    with pytest.raises(OptionError) as error:
        Attention.from_layout(packed, layout=of, num_heads=4, **options)
    return error.value


def test_a_rotation_that_the_layout_has_must_be_given() -> None:
    error = refused("llama")
    assert "rotary: half-split against none" in error.saw
    assert error.do.startswith("pass rotary=... as in the layout")


def test_an_option_that_the_layout_excludes() -> None:
    assert "rotary: none against half-split" in refused("gpt2", rotary=Rotary()).saw


def test_a_scale_that_the_layout_leaves_open() -> None:
    assert refused("granite", rotary=Rotary()).saw == "no scale"


def test_the_weights_are_not_shared() -> None:
    layer = made()
    stored = layer.to_layout("headwise")
    stored["q_proj.weight"].zero_()
    assert layer.q_proj.weight.abs().max() > 0


def test_a_whole_model_is_told_from_a_module() -> None:
    whole = Rotary(theta=300.0)
    module = made(value_dim=10, out_dim=40, rotary=whole).to_layout("llama")
    model = {
        f"model.layers.{n}.self_attn.{name}": x for n in range(2) for name, x in module.items()
    }
    with pytest.raises(OptionError, match=r"2 modules of llama, such as model.layers.0.self_attn."):
        Attention.from_layout(model, layout="llama", num_heads=6, rotary=whole)


def test_how_much_of_a_head_turns_must_be_given_where_it_may_be_a_part() -> None:
    layer = made(num_kv_heads=6, value_dim=10, out_dim=40, rotary=ROTARY)
    module = layer.to_layout("neox")
    with pytest.raises(OptionError, match="without a width") as refused:
        Attention.from_layout(module, layout="neox", num_heads=6, rotary=Rotary(theta=300.0))
    assert "neox may rotate a part" in refused.value.needed
    whole = Rotary(theta=300.0, width=10)
    assert Attention.from_layout(module, layout="neox", num_heads=6, rotary=whole)
