"""Decoders that fuse queries, keys and values: the real classes of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headwise import Rotary
from headwise.layers.distance import Alibi
from headwise.layers.norm import QKNorm
from tests.layouts.captured import DIVIDED, THETA, WHOLE, angles, captured, model_of
from tests.layouts.real import Real, assert_same_function

HEADS = {"num_heads": 12}
GROUPS = {"num_heads": 12, "num_kv_heads": 3}
HALF = Rotary(theta=THETA)
PART = Rotary(theta=THETA, width=6)
DOUBLE = torch.finfo(torch.float64).eps


def gpt2() -> Real:
    model = model_of("GPT2Config", n_embd=120, n_head=12, n_layer=1, n_positions=64)
    return captured(model, "h.0.attn", options=HEADS, unit=DOUBLE)


def codegen() -> Real:
    # Frequencies are of the base 10,000 whatever the config says.
    model = model_of(
        "CodeGenConfig", n_embd=120, n_head=12, n_layer=1, n_positions=64, rotary_dim=6
    )
    return captured(model, "h.0.attn", options=HEADS | {"rotary": Rotary(width=6)})


def bigcode(*, is_mqa: bool) -> Real:
    model = model_of(
        "GPTBigCodeConfig", n_embd=120, n_head=12, n_layer=1, n_positions=64, multi_query=is_mqa
    )
    return captured(model, "h.0.attn", options=HEADS)


def neox() -> Real:
    model = model_of("GPTNeoXConfig", **WHOLE, **angles(0.6))
    return captured(model, "layers.0.attention", options=HEADS | {"rotary": PART})


def bloom() -> Real:
    model = model_of("BloomConfig", hidden_size=120, n_head=12, n_layer=1)
    return captured(model, "h.0.self_attention", options=HEADS)


def persimmon() -> Real:
    model = model_of("PersimmonConfig", **WHOLE, **angles(0.6))
    options = HEADS | {"rotary": PART, "qk_norm": QKNorm(kind="layer", eps=1e-5)}
    return captured(model, "layers.0.self_attn", options=options)


def falcon(options: dict[str, Any], **config: Any) -> Real:
    model = model_of("FalconConfig", **config, bias=True, **angles())
    return captured(model, "h.0.self_attention", options=options)


def falcon_rw() -> Real:
    # Not "eager": there transformers 5.23 adds the bias twice, in the mask and to the scores.
    model = model_of(
        "FalconConfig",
        attention="sdpa",
        hidden_size=80,
        num_attention_heads=8,
        alibi=True,
        multi_query=False,
        bias=True,
    )
    return captured(model, "h.0.self_attention", options={"num_heads": 8}, unit=DOUBLE)


def falcon_7b() -> Real:
    config = {"hidden_size": 120, "num_attention_heads": 12, "multi_query": True}
    return falcon(HEADS | {"rotary": HALF}, **config)


def falcon_40b() -> Real:
    config = {"hidden_size": 120, "num_attention_heads": 12, "num_kv_heads": 3}
    return falcon(GROUPS | {"rotary": HALF}, **config, new_decoder_architecture=True)


def mpt() -> Real:
    # The model scales its embedding's gradient only; the slopes are those of Alibi.
    model = model_of("MptConfig", d_model=120, n_heads=12, n_layers=1, max_seq_len=64)
    return captured(model, "blocks.0.attn", options=HEADS | {"score_bias": Alibi()})


def dbrx() -> Real:
    # It always clamps; here, where nothing is.
    model = model_of(
        "DbrxConfig",
        d_model=120,
        n_heads=12,
        n_layers=1,
        attn_config={"kv_n_heads": 3, "clip_qkv": 1e6, "rope_theta": THETA},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
        **angles(),
    )
    inside = "blocks.0.norm_attn_norm.attn"
    return captured(model, inside, options=GROUPS | {"rotary": HALF})


def phi3() -> Real:
    model = model_of("Phi3Config", **DIVIDED, **angles())
    whole = replace(HALF, width=model.config.hidden_size // model.config.num_attention_heads)
    return captured(model, "layers.0.self_attn", options=GROUPS | {"rotary": whole})


CASES = {
    "gpt2": gpt2,
    "codegen": codegen,
    "gpt-bigcode-mqa": lambda: bigcode(is_mqa=True),
    "gpt-bigcode-mha": lambda: bigcode(is_mqa=False),
    "neox": neox,
    "bloom": bloom,
    "persimmon": persimmon,
    "falcon-rw": falcon_rw,
    "falcon-7b": falcon_7b,
    "falcon-40b": falcon_40b,
    "mpt": mpt,
    "dbrx": dbrx,
    "phi3": phi3,
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())
