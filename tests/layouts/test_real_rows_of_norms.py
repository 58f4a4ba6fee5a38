"""Norms of queries and keys with a row for each head, which `Attention` has no option for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Mask, Rotary
from headwise.layers.norm import QKNorm
from headwise.layouts._layout import Layout
from headwise.layouts.registry import layout
from tests.layouts.captured import DIVIDED, SINGLE, THETA, angles, captured, model_of
from tests.layouts.real import LENGTH, Real, assert_gives, inputs, sharpen

OPTIONS: dict[str, Any] = {"num_heads": 12, "num_kv_heads": 3, "rotary": Rotary(theta=THETA)}
NORM = QKNorm(kind="layer", eps=1e-5)


class RowsOfNorms(nn.Module):
    """A layer norm of each head, with its own row of weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight[:, None], 0.0 if bias is None else bias[:, None]

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + NORM.eps).sqrt()
        return centred / deviation * self.weight + self.bias


def cohere() -> Real:
    model = model_of(
        "CohereConfig",
        **DIVIDED,
        **angles(),
        use_qk_norm=True,
        attention_bias=True,
        layer_norm_eps=NORM.eps,
    )
    return captured(model, "layers.0.self_attn", options=OPTIONS)


@torch.no_grad()
def chameleon() -> Real:
    pytest.importorskip("transformers")
    from transformers import ChameleonConfig
    from transformers.models.chameleon import modeling_chameleon as real

    config = ChameleonConfig(**DIVIDED, **angles(), attention_bias=True)
    config._attn_implementation = "eager"
    module, x = real.ChameleonAttention(config, layer_idx=0).double().eval(), inputs(120)
    sharpen(module)
    places = torch.arange(LENGTH)[None]
    waves = real.ChameleonRotaryEmbedding(config)(x, places)
    future = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    outputs = module(x, attention_mask=future, position_embeddings=waves)[0]
    return Real(module.state_dict(), x, outputs, OPTIONS, Mask.causal(), SINGLE)


CASES: dict[str, Callable[[], Real]] = {"cohere-qk-norm": cohere, "chameleon": chameleon}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    described, real = layout(name), CASES[name]()
    assert_gives(layer_of(described, real), real)


def layer_of(described: Layout, real: Real) -> Attention:
    """A layer with the matrices, whose norms are replaced by rows of them."""
    canonical = described.unpack(real.state, heads=12, kv_heads=3)
    rows = {name: x for name, x in canonical.items() if "_norms" in name}
    matrices = {name: x for name, x in canonical.items() if name not in rows}
    headwise = layout("headwise")
    layer = Attention(120, qk_norm=NORM, dtype=torch.float64, **OPTIONS)
    loaded = layer.load_state_dict(headwise.pack(matrices), strict=False)
    assert all("norm" in name for name in loaded.missing_keys)
    for name in ("q", "k"):
        norm = RowsOfNorms(rows[f"{name}_norms"], rows.get(f"{name}_norms_bias"))
        setattr(layer, f"{name}_norm", norm)
    return layer
