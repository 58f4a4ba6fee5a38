"""Encoders of images: the real classes of transformers, and the files they write.

Those of timm and of vit-pytorch are tested on request: pip install timm vit-pytorch.
"""

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Rotary, ScoreBias
from headwise.function.spec import FROM_CONFIG
from headwise.layers import QKNorm
from headwise.layouts._layout import Layout
from headwise.layouts.registry import layout
from tests.layouts.real import Real, assert_same_function, inputs, sharpen
from tests.layouts.stored import (
    HEADS,
    ROTATED,
    SINGLE,
    WIDTHS,
    left_open,
    model_of,
    own_tensors,
    within,
    written,
)

PATCHES: dict[str, Any] = {"image_size": 8, "patch_size": 4}
WINDOW = 5


def plain(kind: str, name: str, ending: str, *, unit: float) -> Real:
    """A module that takes the input and gives the output."""
    model = model_of(kind, **WIDTHS, **PATCHES)
    x = inputs(40)
    outputs = within(model, ending)(x)[0]
    return Real(written(model, name, layer=1), x, outputs.detach(), HEADS, unit=unit)


DOUBLE = torch.finfo(torch.float64).eps


def videomae() -> Real:
    model = model_of("VideoMAE", **WIDTHS, **PATCHES, num_frames=2)
    attention, x = within(model, "layer.1.attention"), inputs(40)
    outputs = attention.output.dense(attention.attention(x)[0])
    return Real(written(model, "videomae", layer=1), x, outputs.detach(), HEADS)


def vitdet() -> tuple[Any, Any]:
    sizes = {name: size for name, size in WIDTHS.items() if name != "intermediate_size"}
    model = model_of("VitDet", **sizes, **PATCHES)
    return model, within(model, "layer.1.attention")


def given_vitdet(state: dict[str, Tensor], attention: Any) -> Real:
    x = inputs(40)
    outputs = attention(x.unflatten(1, (4, 6)))[0].flatten(1, 2)
    return Real(state, x, outputs.detach(), HEADS)


def vit_timm() -> Real:
    """VitDet has timm's tensors; its file has them elsewhere."""
    _, attention = vitdet()
    return given_vitdet(own_tensors(attention, "vit-timm"), attention)


def vitdet_file() -> Real:
    model, attention = vitdet()
    return given_vitdet(written(model, "vitdet", layer=1), attention)


def swin() -> Real:
    """Its table of places gives a score bias, made here of what the layout finds."""
    model = model_of(
        "Swin", embed_dim=40, depths=[2], num_heads=[8], window_size=WINDOW, image_size=20,
        patch_size=2,
    )  # fmt: skip
    attention, x = within(model, "blocks.1.attention"), inputs(40, length=WINDOW**2)
    state = written(model, "swin", stage=0, layer=1)
    distances = layout("swin").unpack(state, heads=8)["distances"]
    row, column = torch.arange(WINDOW**2) // WINDOW, torch.arange(WINDOW**2) % WINDOW
    down, right = (of[:, None] - of + WINDOW - 1 for of in (row, column))
    bias = distances[down * (2 * WINDOW - 1) + right].permute(2, 0, 1)
    del state["self.relative_position_bias_table"]
    score_bias = ScoreBias.dense(bias, axes="heads queries keys")
    outputs = attention(x)[0].detach()
    return Real(state, x, outputs, HEADS, unit=SINGLE, score_bias=score_bias)


@torch.no_grad()
def swin_v2() -> Real:
    """Cosines are products of RMS norms over head_dim; all heads have one learned scale here."""
    model = model_of(
        "Swinv2", embed_dim=40, depths=[2], num_heads=[8], window_size=WINDOW, image_size=20,
        patch_size=2,
    )  # fmt: skip
    attention, x = within(model, "blocks.1.attention"), inputs(40, length=WINDOW**2)
    inner = attention.self
    inner.logit_scale.fill_(log(7.0))
    table = inner.continuous_position_bias_mlp(inner.relative_coords_table).flatten(0, 2)
    places = inner.relative_position_index
    bias = 16 * table[places.flatten()].unflatten(0, places.shape).permute(2, 0, 1).sigmoid()
    state = written(model, "swinv2", stage=0, layer=1)
    norms = dict.fromkeys(("q_norm", "k_norm"), torch.ones(5, dtype=torch.float64))
    return Real(
        state | norms,
        x,
        attention(x)[0],
        HEADS | {"scale": 7.0 / 5, "qk_norm": QKNorm(eps=1e-30)},
        unit=SINGLE,
        score_bias=ScoreBias.dense(bias, axes="heads queries keys"),
    )


def swin_v2_with_norms() -> Layout:
    """The layout, with weights of norms, which the class lacks, and without its Other forms."""
    described = left_open("swinv2", "scale", "score_bias")
    norms = {"q_norm": "q_norm: head_dim", "k_norm": "k_norm: head_dim"}
    function = replace(described.function, qk_norm=FROM_CONFIG)
    return replace(described, tensors=described.tensors | norms, function=function)


@torch.no_grad()
def eva_clip() -> Real:
    """Timm's class, by the published names; without the norm of all heads."""
    library = pytest.importorskip("timm.models.eva")
    layer = library.EvaAttention(
        60, 6, qkv_fused=False, scale_norm=False, num_prefix_tokens=0, rotate_half=False
    )
    layer = layer.double().eval()
    sharpen(layer)
    x, rotary = inputs(60), Rotary()
    turns = (torch.arange(x.shape[1])[:, None] * rotary.frequencies(10).double()).repeat_interleave(
        2, dim=-1
    )
    outputs = layer(x, rope=torch.cat([turns.sin(), turns.cos()], dim=-1))
    names = {"q_proj.bias": "q_bias", "v_proj.bias": "v_bias"}
    state = {names.get(name, name): tensor for name, tensor in layer.state_dict().items()}
    return Real(state, x, outputs, {"num_heads": 6, "rotary": rotary}, unit=SINGLE)


@torch.no_grad()
def vit_pytorch(file: str, name: str) -> Real:
    """Without the norm in front, which stands in the same module."""
    library = pytest.importorskip(f"vit_pytorch.{file}")
    layer = library.Attention(40, heads=8, dim_head=6).double().eval()
    sharpen(layer)
    state = own_tensors(layer, name)
    layer.norm = nn.Identity()
    x = inputs(40)
    return Real(state, x, layer(x), HEADS)


def dinov3() -> Real:
    model = model_of("DINOv3ViT", **ROTATED, **PATCHES)
    x, rotary = inputs(60), Rotary()
    turns = torch.arange(x.shape[1])[:, None] * rotary.frequencies(10).double()
    cos, sin = (torch.cat([of, of], dim=-1) for of in (turns.cos(), turns.sin()))
    outputs = within(model, "layer.1.attention")(x, position_embeddings=(cos, sin))[0]
    options = {"num_heads": 6, "rotary": rotary}
    return Real(written(model, "dinov3", layer=1), x, outputs.detach(), options, unit=SINGLE)


CASES = {
    "vit": lambda: plain("ViT", "vit", "layers.1.attention", unit=SINGLE),
    "vit-timm": vit_timm,
    "vitdet": vitdet_file,
    "videomae": videomae,
    "vit-pytorch": lambda: vit_pytorch("vit", "vit-pytorch"),
    "vit-pytorch-simple": lambda: vit_pytorch("simple_vit", "vit-pytorch-simple"),
    "swin": swin,
    "swinv2": swin_v2,
    "eva-clip": eva_clip,
    "dinov3": dinov3,
    "clip": lambda: plain("CLIPVision", "clip", "layers.1.self_attn", unit=SINGLE),
    "blip": lambda: plain("BlipVision", "blip", "layers.1.self_attn", unit=DOUBLE),
}
# What these say of their function, and the layer has no option for; the call has it.
OPEN = {"swin": ("score_bias",), "eva-clip": ("rotary",)}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    open_layout = left_open(name, *OPEN.get(name, ()))
    assert_same_function(swin_v2_with_norms() if name == "swinv2" else open_layout, CASES[name]())


@torch.no_grad()
def test_timm_with_norms_of_queries_and_keys() -> None:
    library = pytest.importorskip("timm.layers.attention")
    layer = library.Attention(40, 8, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm)
    layer = layer.double().eval()
    sharpen(layer)
    x, options = inputs(40), HEADS | {"qk_norm": QKNorm("layer", eps=1e-5)}
    assert_same_function("vit-timm", Real(own_tensors(layer, "vit-timm"), x, layer(x), options))


@pytest.mark.parametrize("kind", ["Beit", "DeiT", "Dinov2"])
def test_those_that_share_vits_names(kind: str) -> None:
    ending = "layer.1.attention" if kind == "Dinov2" else "layers.1.attention"
    assert_same_function("vit", plain(kind, "vit", ending, unit=SINGLE))


class Beit(nn.Module):
    """As the published code has it: keys have no bias, and the other two biases stand alone."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(embed_dim))
        self.v_bias = nn.Parameter(torch.zeros(embed_dim))
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = (self.qkv(x) + bias).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(dim=-1)
        outputs: Tensor = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return outputs


def test_beit_written_after_its_description() -> None:
    layer, x = Beit(40, 8).double(), inputs(40)
    sharpen(layer)
    assert_same_function("beit", Real(layer.state_dict(), x, layer(x).detach(), HEADS))
