"""Encoders with decoders: the real classes of transformers, and the files they write."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Mask
from headwise.layers.distance import T5Bias
from headwise.layouts._layout import Layout
from headwise.layouts.plan import convert
from tests.layouts.real import LENGTH, Real, assert_same_function, inputs, sharpen
from tests.layouts.stored import (
    HEADS,
    VOCABULARY,
    file_of,
    hidden_later,
    left_open,
    model_of,
    within,
    written,
)

SIX = {"num_heads": 6}
BUCKETS, REACH = 12, 18
# d_kv is free: 6 heads of 10 for a width of 40.
T5: dict[str, Any] = {
    "d_model": 40,
    "num_heads": 6,
    "d_kv": 10,
    "d_ff": 56,
    "num_layers": 2,
    "vocab_size": VOCABULARY,
    "relative_attention_num_buckets": BUCKETS,
    "relative_attention_max_distance": REACH,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "d_model": 40,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "vocab_size": VOCABULARY,
}
WHISPER = BART | {
    "num_mel_bins": 9,
    "max_source_positions": LENGTH,
    "max_target_positions": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 0,
}


# What its modules call a mask, and the source of keys and values.
MASK = {"T5": "mask", "UMT5": "attention_mask"}
SOURCE = {"T5": "key_value_states", "UMT5": "encoder_hidden_states"}


def t5(kind: str, name: str, *, role: str, layer: int) -> Real:
    """Self attention of one side, with the table of its own."""
    model = model_of(kind, **T5)
    is_causal = role == "decoder"
    x, attention = inputs(40), within(model, f"{role}.block.{layer}.layer.0.SelfAttention")
    outputs = attention(x, **{MASK[kind]: hidden_later(LENGTH) if is_causal else None})[0]
    bias = T5Bias(buckets=BUCKETS, max_distance=REACH, bidirectional=not is_causal)
    state = written(model, name, role=role, layer=layer)
    mask = Mask.causal() if is_causal else None
    return Real(state, x, outputs.detach(), SIX | {"score_bias": bias}, mask)


def t5_cross(kind: str, name: str) -> Real:
    model = model_of(kind, **T5)
    x, source = inputs(40), inputs(40, length=LENGTH - 5, seed=2)
    attention = within(model, "decoder.block.1.layer.1.EncDecAttention")
    outputs = attention(x, **{SOURCE[kind]: source})[0]
    state = written(model, name, role="cross", layer=1)
    return Real(state, x, outputs.detach(), SIX, source=source)


def bart(kind: str, sizes: dict[str, Any], *, role: str) -> Real:
    """BART's, and Whisper's."""
    model = model_of(kind, **sizes)
    inside = {
        "encoder": "encoder.layers.1.self_attn",
        "decoder": "decoder.layers.1.self_attn",
        "cross": "decoder.layers.1.encoder_attn",
    }
    x, attention = inputs(40), within(model, inside[role])
    source = inputs(40, length=LENGTH - 5, seed=2) if role == "cross" else None
    mask = hidden_later(LENGTH) if role == "decoder" else None
    outputs = attention(x, key_value_states=source, attention_mask=mask)[0].detach()
    state = written(model, kind.lower(), role=role, layer=1)
    causal = Mask.causal() if role == "decoder" else None
    return Real(state, x, outputs, HEADS, causal, source=source)


CASES = {
    "t5": lambda: t5("T5", "t5", role="encoder", layer=0),
    "umt5": lambda: t5("UMT5", "umt5", role="encoder", layer=1),
    "bart": lambda: bart("Bart", BART, role="encoder"),
    "whisper": lambda: bart("Whisper", WHISPER, role="encoder"),
}
OTHER_ROLES = {
    "t5 decoder": lambda: ("t5", t5("T5", "t5", role="decoder", layer=0)),
    "t5 cross": lambda: (left_open("t5", "score_bias"), t5_cross("T5", "t5")),
    "umt5 decoder": lambda: ("umt5", t5("UMT5", "umt5", role="decoder", layer=1)),
    "umt5 cross": lambda: (left_open("umt5", "score_bias"), t5_cross("UMT5", "umt5")),
    "bart decoder": lambda: ("bart", bart("Bart", BART, role="decoder")),
    "bart cross": lambda: ("bart", bart("Bart", BART, role="cross")),
    "whisper decoder": lambda: ("whisper", bart("Whisper", WHISPER, role="decoder")),
    "whisper cross": lambda: ("whisper", bart("Whisper", WHISPER, role="cross")),
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())


@pytest.mark.parametrize("case", OTHER_ROLES)
def test_the_other_roles(case: str) -> None:
    described: tuple[str | Layout, Real] = OTHER_ROLES[case]()
    assert_same_function(*described)


class OpenAIWhisper(nn.Module):
    """As OpenAI's code has it: queries and keys are scaled before their product."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.value, self.out = (nn.Linear(embed_dim, embed_dim) for _ in range(3))
        self.key = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        split = (self.num_heads, -1)
        q, k, v = (
            part(x).unflatten(-1, split).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scale = q.shape[-1] ** -0.25
        weights = ((q * scale) @ (k * scale).mT).softmax(dim=-1)
        outputs: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return outputs


class Sockeye(nn.Module):
    """As Sockeye's code has it: length first, and for each head its key and its value."""

    def __init__(self, embed_dim: int, num_heads: int, source_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ff_q = nn.Linear(embed_dim, embed_dim, bias=False)
        self.ff_kv = nn.Linear(source_dim, 2 * embed_dim, bias=False)
        self.ff_out = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        q = self.ff_q(x).unflatten(-1, (self.num_heads, -1))
        k, v = self.ff_kv(source).unflatten(-1, (self.num_heads, 2, -1)).unbind(-2)
        scores = torch.einsum("qbhd,kbhd->bhqk", q * q.shape[-1] ** -0.5, k)
        heads = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(dim=-1), v)
        outputs: Tensor = self.ff_out(heads.flatten(2))
        return outputs


def test_openais_whisper_written_after_its_description() -> None:
    layer, x = OpenAIWhisper(40, 8).double(), inputs(40)
    sharpen(layer)
    assert_same_function("whisper-openai", Real(layer.state_dict(), x, layer(x).detach(), HEADS))


def test_sockeyes_cross_attention_written_after_its_description() -> None:
    layer, x = Sockeye(40, 8, 36).double(), inputs(40)
    source = inputs(36, length=LENGTH - 5, seed=2)
    sharpen(layer)
    outputs = layer(x.transpose(0, 1), source.transpose(0, 1)).transpose(0, 1).detach()
    real = Real(layer.state_dict(), x, outputs, HEADS, source=source)
    assert_same_function("sockeye-cross", real)


def test_a_whole_whisper_gets_openais_names_and_comes_back() -> None:
    stored = file_of(model_of("Whisper", **WHISPER))
    made = convert(stored, "whisper", "whisper-openai", heads=8)
    blocks = {
        f"decoder.blocks.1.{place}"
        for place in (
            "attn.query.weight", "attn.key.weight", "cross_attn.out.bias", "attn_ln.weight",
            "cross_attn_ln.bias", "mlp.0.weight", "mlp.2.bias", "mlp_ln.weight",
        )
    }  # fmt: skip
    rest = {
        "encoder.positional_embedding", "decoder.positional_embedding", "encoder.conv1.weight",
        "decoder.token_embedding.weight", "encoder.ln_post.weight", "decoder.ln.bias",
    }  # fmt: skip
    assert blocks | rest <= made.keys()
    assert not [name for name in made if "layers" in name or "_proj" in name]
    back = convert(made, "whisper-openai", "whisper", heads=8)
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())
