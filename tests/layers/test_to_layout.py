"""`Attention.to_layout` to every layout: refused, or its readers compute the same function."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from headwise import Attention, Mask, Rotary, convert
from headwise.checkpoints.config import resolve
from headwise.errors import HeadwiseError, OptionError
from headwise.function.scaling import LinearScaling
from headwise.function.spec import FROM_CONFIG, BucketRule
from headwise.layers.conversion import options_of_spec
from headwise.layers.distance import Alibi, T5Bias
from headwise.layers.norm import QKNorm
from headwise.layouts._layout import Layout
from headwise.layouts.registry import layout, layouts_by_name
from headwise.masks.score_bias import ScoreBias
from headwise.testing import Budget

HEADS, HEAD_DIM, LENGTH = 4, 10, 24
WHOLE = Rotary(theta=300.0)
NO_BIASES = dict.fromkeys(("q_bias", "k_bias", "v_bias", "out_bias"), False)


@dataclass(frozen=True)
class Nearness:
    """A score bias of the user's own, without parameters."""

    def module(self, num_heads: int, **_: Any) -> nn.Module:
        return _NearnessModule()


class _NearnessModule(nn.Module):
    def forward(self, *, align: Any) -> ScoreBias:
        return ScoreBias.alibi(torch.full((HEADS,), 0.3, dtype=torch.float64), align=align)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale 1": {"scale": 1.0},
    "scale 1/head_dim": {"scale": 1 / HEAD_DIM},
    "scale of its own": {"scale": 0.2},
    "half-split": {"rotary": WHOLE},
    "interleaved, scaled": {
        "rotary": replace(WHOLE, pairing="interleaved", scaling=LinearScaling(4.0))
    },
    "a part of the head": {"rotary": replace(WHOLE, width=6)},
    "grouped, rotary": {"rotary": WHOLE, "num_kv_heads": 2},
    "rotary, rms norm": {"rotary": WHOLE, "qk_norm": QKNorm()},
    "rotary, weight + 1": {"rotary": WHOLE, "qk_norm": QKNorm(one_plus=True)},
    "rotary, layer norm": {"rotary": WHOLE, "qk_norm": QKNorm(kind="layer")},
    "rotary, norm after": {"rotary": WHOLE, "qk_norm": QKNorm(place="after")},
    "rotary, norm over width": {"rotary": WHOLE, "qk_norm": QKNorm(over="width")},
    "rotary, softcap": {"rotary": WHOLE, "softcap": 2.0},
    "softcap": {"softcap": 2.0},
    "sink": {"rotary": WHOLE, "sink": True},
    "alibi": {"score_bias": Alibi()},
    "alibi, other slopes": {"score_bias": Alibi(bias_max=4.0)},
    "a bias of its own": {"score_bias": Nearness()},
    "t5": {"score_bias": T5Bias(buckets=8, max_distance=16), "scale": 1.0},
    "window": {"window": (5, 0)},
    "causal, biases": {"window": (None, 0), **dict.fromkeys(NO_BIASES, True)},
    "grouped": {"num_kv_heads": 2},
    "value_dim": {"value_dim": 7},
    "gate of heads": {"output_gate": "head"},
    "gate of channels": {
        "output_gate": "channel",
        "rotary": replace(WHOLE, width=6),
        "qk_norm": QKNorm(one_plus=True),
        "gate_bias": False,
    },
}


def distinct() -> list[Layout]:
    """One layout for each function and each set of tensors; the other tests compare axis maps."""
    found: dict[object, Layout] = {}
    for described in layouts_by_name().values():
        bare = frozenset(described.canonical_tensor_names - {"bq", "bk", "bv", "bo"})
        shared = "kv_heads" in {
            name for p in described.patterns.values() for name in p.axis_names()
        }
        found.setdefault((described.function, bare, frozenset(described.fixed), shared), described)
    return list(found.values())


DISTINCT = distinct()


def made(options: Mapping[str, Any]) -> Attention:
    layer = Attention(HEADS * HEAD_DIM, HEADS, **{**NO_BIASES, **options}).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return layer.eval()


def given(described: Layout, layer: Attention, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader of the layout has from a model's config: its numbers, and what it leaves open.

    The reader does not know the layer. Where the layout says that there is something, the reader
    gives it; where the layout says that there is nothing, the reader gives nothing.
    """
    function = described.function
    found = options_of_spec(
        resolve(function, {"head_dim": HEAD_DIM, "rms_norm_eps": 1e-6}, layer=0)
    )
    for name in ("scale", "rotary", "softcap", "qk_norm", "score_bias", "window"):
        if getattr(function, name) is FROM_CONFIG:
            found[name] = options.get(name)
    if function.softcap:
        found["softcap"] = layer.softcap or 30.0
    if isinstance(function.score_bias, BucketRule):
        found["score_bias"] = options.get("score_bias", T5Bias())
    if layer.rotary is not None and found.get("rotary") is not None:
        width = layer.rotary.width if function.is_rotary_width_open else None
        width = width or (HEAD_DIM if function.is_rotary_width_open else None)
        found["rotary"] = replace(layer.rotary, width=width)
        if function.rotary is FROM_CONFIG:
            found["rotary"] = layer.rotary
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"plain", "half-split"}))  # parts of others
def test_every_layout_holds_the_function_or_is_refused(name: str) -> None:
    options, mask = LAYERS[name], Mask.causal()
    layer = made(options)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, LENGTH, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    budget = Budget.for_function(lambda x: layer(x, mask=mask), x)
    holding = []
    for described in DISTINCT:
        try:
            state = layer.to_layout(described)
        except HeadwiseError:
            continue
        again = Attention.from_layout(
            state,
            layout=described,
            num_heads=HEADS,
            num_kv_heads=layer.num_kv_heads,
            **given(described, layer, options),
        )
        outputs = again(x, mask=mask)
        assert budget.check(outputs), f"{described.name} is read as another function"
        holding.append(described.name)
    own = "headwise-width-norm" if name == "rotary, norm over width" else "headwise"
    assert own in holding


HELD = {
    "plain": {"gpt2", "torch-packed", "nanogpt", "bert"},
    "scale 1": {"gpt-neo"},
    "half-split": {"llama", "llama-meta", "neox", "gptj"},
    "interleaved, scaled": {"llama", "llama-meta"},
    "a part of the head": {"neox", "gptj", "phi"},
    "rotary, rms norm": {"qwen3"},
    "rotary, weight + 1": {"gemma3"},
    "rotary, norm after": {"hunyuan"},
    "rotary, norm over width": {"olmo2"},
    "rotary, layer norm": {"persimmon"},
    "rotary, softcap": {"gemma2"},
    "sink": {"gpt-oss"},
    "alibi": {"bloom", "mpt"},
    "t5": {"t5", "umt5"},
    "causal, biases": {"gpt2", "torch-packed", "opt"},
}


@pytest.mark.parametrize("name", HELD)
def test_what_the_layouts_of_real_models_hold(name: str) -> None:
    layer = made(LAYERS[name])
    for target in HELD[name]:
        assert layer.to_layout(target)


@pytest.mark.parametrize(
    ("name", "target", "field"),
    [
        ("plain", "gpt-neo", "scale"),
        ("plain", "maxtext", "scale"),
        ("plain", "t5x", "scale"),
        ("plain", "bloom", "score_bias"),
        ("plain", "mpt", "score_bias"),
        ("plain", "llama", "rotary"),
        ("half-split", "gpt2", "rotary"),
        ("a part of the head", "llama", "rotary_width"),
        ("softcap", "gpt2", "softcap"),
        ("alibi, other slopes", "bloom", "score_bias"),
        ("a bias of its own", "gpt2", "score_bias"),
        ("window", "gpt2", "window"),
    ],
)
def test_a_field_that_differs_is_named_and_can_be_accepted(
    name: str, target: str, field: str
) -> None:
    layer = made(LAYERS[name])
    with pytest.raises(OptionError) as refused:
        layer.to_layout(target)
    assert refused.value.saw.startswith(f"this layer and {target} use the same weights differently")
    assert f"{field}: " in refused.value.saw
    assert refused.value.do.endswith("pass accept=" + json.dumps(refused.value.parameter["accept"]))
    assert layer.to_layout(target, accept=refused.value.parameter["accept"])


def test_convert_refuses_what_to_layout_refuses() -> None:
    layer = made({})
    with pytest.raises(OptionError) as of_layer:
        layer.to_layout("gpt-neo")
    with pytest.raises(OptionError) as of_weights:
        convert(layer.to_layout("gpt2"), "gpt2", "gpt-neo", heads=HEADS)
    assert of_layer.value.saw == of_weights.value.saw.replace("gpt2 and", "this layer and")
    assert (of_layer.value.needed, of_layer.value.do) == (
        of_weights.value.needed,
        of_weights.value.do,
    )


def test_convert_knows_how_much_of_a_head_rotates() -> None:
    """GPT-J rotates a part of a head where Llama rotates the whole, by weights of one shape."""
    state = made(LAYERS["a part of the head"]).to_layout("gptj")
    with pytest.raises(OptionError, match="rotary_width: 6 of 10 against head_dim"):
        convert(state, "gptj", "llama", heads=HEADS, rotary_width=6)
    assert convert(state, "gptj", "phi", heads=HEADS, rotary_width=6)
    assert convert(state, "gptj", "llama", heads=HEADS, rotary_width=HEAD_DIM)
    accepted = convert(state, "gptj", "llama", heads=HEADS, rotary_width=6, accept="rotary_width")
    assert accepted.keys() == convert(accepted, "llama", "llama", heads=HEADS).keys()


def test_a_reader_says_no_other_function_than_the_layout() -> None:
    state = made({}).to_layout("gpt2")
    for name, option in (
        ("scale", 0.3),
        ("softcap", 2.0),
        ("window", (5, 0)),
        ("score_bias", Alibi()),
    ):
        with pytest.raises(OptionError, match=f"gpt2 and a layer with these options .*{name}: "):
            Attention.from_layout(state, layout="gpt2", num_heads=HEADS, **{name: option})
        accepted = Attention.from_layout(
            state, layout=layout("gpt2"), num_heads=HEADS, accept=[name], **{name: option}
        )
        assert getattr(accepted, name) is not None
    rotated: Any = {"num_heads": HEADS, "rotary": Rotary()}
    normed = made({"qk_norm": QKNorm(), "rotary": Rotary()}).to_layout("qwen3", accept=["qk_norm"])
    with pytest.raises(OptionError, match=r"qk_norm: .* against none"):
        Attention.from_layout(normed, layout="qwen3", **rotated)
    bare = Attention.from_layout(normed, layout="qwen3", accept="qk_norm", **rotated)
    assert torch.equal(bare.q_proj.weight, normed["q_proj.weight"])
