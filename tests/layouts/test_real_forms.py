"""Layouts of gates, norms and values: the real classes of transformers, by the proof of a load.

The proof runs the class itself on several inputs; its allowance is that of `headwise.checkpoints`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2TextModel
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from headwise import Attention, Mask
from headwise.checkpoints import load_attention
from headwise.errors import OptionError
from headwise.layers.conversion import canonical_state
from headwise.layouts.registry import layout
from tests.checkpoints.test_proof import spread

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 96,
    "intermediate_size": 26,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def _gemma4(**options: Any) -> Any:
    given = SIZES | KINDS | {"global_head_dim": 20, "hidden_size_per_layer_input": 8}
    return transformers.Gemma4TextConfig(
        **given | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 61} | options
    )


def _laguna(gating: str) -> Any:
    given = SIZES | KINDS | EXPERTS | {"mlp_layer_types": ["dense", "dense"], "gating": gating}
    given |= {"shared_expert_intermediate_size": 12, "num_attention_heads_per_layer": [6, 6]}
    return transformers.LagunaConfig(**given)


# layout -> a config of its class.
CASES: dict[str, Any] = {
    "afmoe": lambda: transformers.AfmoeConfig(**SIZES | KINDS | {"num_dense_layers": 2}),
    "lfm3": lambda: transformers.Lfm3Config(**SIZES | KINDS | {"pad_token_id": 0}),
    "step3p7": lambda: transformers.AutoConfig.for_model("step3p5", **SIZES | KINDS),
    "laguna": lambda: _laguna("per-head"),
    "laguna-channel": lambda: _laguna("per-element"),
    "muse": lambda: transformers.MuseSparkTextConfig(
        **SIZES | KINDS | EXPERTS, num_local_experts=4, moe_hidden_size=12
    ),
    "muse-glimmer": lambda: transformers.MuseGlimmerTextConfig(**SIZES | KINDS),
    "bitnet": lambda: transformers.BitNetConfig(**SIZES),
    "diffllama": lambda: transformers.DiffLlamaConfig(**SIZES),
    "nanochat": lambda: transformers.NanoChatConfig(**SIZES),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=26,
        num_local_experts=2,
        layer_types=["full_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
    "gemma4": _gemma4,
    "mimo": lambda: transformers.MiMoV2FlashConfig(
        **SIZES
        | KINDS
        | {"v_head_dim": 12, "mlp_layer_types": ["dense", "dense"], "num_attention_heads": 8}
    ),
    "kosmos2": lambda: transformers.AutoConfig.for_model(
        "kosmos_2_text_model", vocab_size=61, embed_dim=96, layers=2, ffn_dim=26, attention_heads=6
    ),
}


def _store(config: Any, path: Path) -> nn.Module:
    torch.manual_seed(0)
    if config.model_type == "kosmos_2_text_model":
        model = Kosmos2TextModel(config)
    elif config.model_type == "step3p5":
        model = Step3p7TextModel(config)
    else:
        model = transformers.AutoModel.from_config(config)
    spread(model).save_pretrained(path)
    return model


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("number", [0, 1])
def test_the_real_class_is_the_layer(name: str, number: int, tmp_path: Path) -> None:
    _store(CASES[name](), tmp_path)
    layer = load_attention(tmp_path, layer=number, layout=name)
    assert layer.proof.startswith("proved against"), layer.proof
    canonical = canonical_state(layer, layer.state_dict())
    stored = layout(name).tensors
    written = layer.to_layout(name, accept=["rotary", "qk_norm"])
    assert {*written} <= {*stored}
    assert "o_norms" not in canonical or name in ("bitnet", "kosmos2")
    _check_steps(layer)


def _check_steps(layer: Attention) -> None:
    x = torch.randn(3, 24, layer.embed_dim, generator=torch.Generator().manual_seed(1))
    layer, x = layer.double().requires_grad_(False), x.double()
    cache, whole = layer.cache(batch=3, length=24), layer(x, mask=Mask.causal())
    steps = [layer(x[:, [n]], mask=Mask.causal(), cache=cache) for n in range(24)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-9, atol=1e-11)


def test_values_of_gemma4_may_be_its_keys(tmp_path: Path) -> None:
    _store(_gemma4(attention_k_eq_v=True), tmp_path)
    layer = load_attention(tmp_path, layer=1)
    assert layer.proof.startswith("proved against")
    assert torch.equal(layer.v_proj.weight, layer.k_proj.weight)
    assert layer.head_dim == 20
    assert load_attention(tmp_path, layer=0).head_dim == 16
    with pytest.raises(OptionError, match="no projection of values"):
        load_attention(tmp_path, layer=1, layout="gemma4", config={"head_dim": 20}, proof=False)


@pytest.mark.parametrize("name", ["olmo", "olmoe"])
def test_what_olmo_clips_is_read(name: str, tmp_path: Path) -> None:
    given = {k: n for k, n in SIZES.items() if k != "head_dim"} | {"clip_qkv": 0.3}
    config = transformers.AutoConfig.for_model(name, **given)
    _store(config, tmp_path)
    layer = load_attention(tmp_path)
    assert layer.clip == 0.3
    assert layer.proof.startswith("proved against")
    with pytest.raises(OptionError, match=r"layers.0.self_attn. of a olmo"):
        load_attention(tmp_path, clip=0.4)
