"""Decoders with a matrix for each projection: the real classes of transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Mask, Rotary
from headwise.layers.norm import QKNorm
from tests.layouts.captured import (
    DIVIDED,
    GROUPED,
    SINGLE,
    THETA,
    WHOLE,
    angles,
    captured,
    model_of,
)
from tests.layouts.real import LENGTH, Real, assert_same_function, inputs, sharpen

HEADS = {"num_heads": 12}
HALF = Rotary(theta=THETA)
PART = Rotary(theta=THETA, width=6)
PLACE = "layers.0.self_attn"


def grouped(name: str, *, place: str = PLACE, share: float = 1.0, **config: Any) -> Real:
    """A model of Llama's kind, in which no two axes coincide."""
    return captured_with(model_of(name, **(GROUPED | angles(share) | config)), place=place)


def captured_with(model: nn.Module, *, place: str = PLACE, **options: Any) -> Real:
    given = HEADS | {"num_kv_heads": 3, "rotary": HALF} | options
    return captured(model, place, options=given)


def gptj() -> Real:
    # Frequencies are of the base 10,000 whatever the config says.
    model = model_of("GPTJConfig", n_embd=120, n_head=12, n_layer=1, n_positions=64, rotary_dim=6)
    return captured(model, "h.0.attn", options=HEADS | {"rotary": Rotary(width=6)})


def gpt_neo() -> Real:
    model = model_of(
        "GPTNeoConfig",
        hidden_size=120,
        num_heads=12,
        num_layers=2,
        num_hidden_layers=2,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
        max_position_embeddings=64,
    )
    mask = Mask.causal() & Mask.window(4, 0)
    return captured(model, "h.1.attn.attention", options=HEADS, mask=mask)


def opt() -> Real:
    model = model_of(
        "OPTConfig",
        hidden_size=120,
        num_attention_heads=12,
        ffn_dim=56,
        word_embed_proj_dim=120,
        max_position_embeddings=64,
    )
    return captured(model, "decoder.layers.0.self_attn", options=HEADS)


def phi() -> Real:
    model = model_of("PhiConfig", **DIVIDED, **angles(0.6))
    return captured_with(model, rotary=PART)


def nemotron() -> Real:
    model = model_of("NemotronConfig", **GROUPED, **angles(0.6), attention_bias=True)
    return captured_with(model, rotary=PART)


def granite() -> Real:
    config = DIVIDED | angles() | {"attention_multiplier": 0.2, "attention_bias": True}
    return captured_with(model_of("GraniteConfig", **config), scale=0.2)


def gpt_oss() -> Real:
    model = model_of(
        "GptOssConfig",
        **GROUPED,
        **angles(),
        layer_types=["full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    return captured_with(model, scale=None)


def gemma2() -> Real:
    model = model_of(
        "Gemma2Config",
        **GROUPED,
        **angles(),
        layer_types=["full_attention"],
        query_pre_attn_scalar=20,
        attn_logit_softcapping=3.0,
        attention_bias=True,
    )
    return captured_with(model, scale=20**-0.5, softcap=3.0)


def gemma3() -> Real:
    theta = {"rope_type": "default", "rope_theta": THETA}
    model = model_of(
        "Gemma3TextConfig",
        **GROUPED,
        rope_parameters={"full_attention": theta, "sliding_attention": theta},
        layer_types=["full_attention"],
        query_pre_attn_scalar=20,
        attention_bias=True,
    )
    norm = QKNorm(one_plus=True, eps=1e-6)
    return captured_with(model, scale=20**-0.5, qk_norm=norm)


def glm() -> Real:
    model = model_of("GlmConfig", **GROUPED, **angles(0.6), attention_bias=True)
    return captured_with(model, rotary=PART)


def qwen3() -> Real:
    model = model_of("Qwen3Config", **GROUPED, **angles(), attention_bias=True)
    return captured_with(model, qk_norm=QKNorm(eps=1e-6))


def olmo2() -> Real:
    model = model_of("Olmo2Config", **DIVIDED, **angles(), attention_bias=True)
    return captured_with(model, qk_norm=QKNorm(over="width", eps=model.config.rms_norm_eps))


def hunyuan() -> Real:
    model = model_of("HunYuanDenseV1Config", **GROUPED, **angles(), attention_bias=True)
    return captured_with(model, qk_norm=QKNorm(place="after", eps=model.config.rms_norm_eps))


def lfm2() -> Real:
    model = model_of("Lfm2Config", **DIVIDED, **angles(), norm_eps=1e-6)
    return captured_with(model, qk_norm=QKNorm(eps=1e-6))


class MetaAttention(nn.Module):
    """Rotation as a product of complex numbers, neighbours as their two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(40, 120, bias=False)
        self.wk = nn.Linear(40, 30, bias=False)
        self.wv = nn.Linear(40, 30, bias=False)
        self.wo = nn.Linear(120, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 10)) for layer in (self.wq, self.wk, self.wv))
        turns = THETA ** (-torch.arange(0, 10, 2, dtype=torch.float64) / 10)
        phases = torch.outer(torch.arange(LENGTH, dtype=torch.float64), turns)
        waves = torch.polar(torch.ones_like(phases), phases)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (5, 2))) * waves).flatten(3)
            for t in (q, k)
        )
        k, v = (t.repeat_interleave(4, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 10**0.5
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


@torch.no_grad()
def llama_meta() -> Real:
    module, x = MetaAttention().double(), inputs(40)
    sharpen(module)
    # Frequencies are float32 in the layer.
    options = HEADS | {"rotary": Rotary(theta=THETA, pairing="interleaved")}
    return Real(module.state_dict(), x, module(x), options, Mask.causal(), SINGLE)


CASES = {
    "gptj": gptj,
    "gpt-neo": gpt_neo,
    "opt": opt,
    "phi": phi,
    "llama": lambda: grouped("LlamaConfig", attention_bias=True),
    "qwen2": lambda: captured_with(model_of("Qwen2Config", **DIVIDED, **angles())),
    "starcoder2": lambda: captured_with(model_of("Starcoder2Config", **DIVIDED, **angles())),
    "nemotron": nemotron,
    "granite": granite,
    "gpt-oss": gpt_oss,
    "gemma2": gemma2,
    "cohere": lambda: captured_with(
        model_of("CohereConfig", **DIVIDED, **angles(), attention_bias=True)
    ),
    "glm": glm,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "olmo2": olmo2,
    "hunyuan": hunyuan,
    "lfm2": lfm2,
}

# The same layout and function: other models that are said to share it.
SHARED = {
    "MistralConfig": ("llama", {"sliding_window": None}),
    "GemmaConfig": ("llama", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())


def test_llama_meta_by_complex_numbers() -> None:
    """Written after the source: Meta's own code is no package."""
    assert_same_function("llama-meta", llama_meta())


@pytest.mark.parametrize("config", SHARED)
def test_models_that_share_a_layout(config: str) -> None:
    layout, options = SHARED[config]
    assert_same_function(layout, grouped(config, **options))


def test_as_many_kv_heads_as_heads() -> None:
    """The layout needs no count of them."""
    model = model_of("LlamaConfig", **WHOLE, **angles())
    real = captured(model, PLACE, options=HEADS | {"rotary": HALF})
    assert_same_function("llama", real)
