"""Proofs on classes that take more than text: two sources, reduced keys, inputs of the caller."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from headwise.checkpoints import load_attention
from headwise.errors import OptionError
from tests.checkpoints.test_proof import spread

SIZES: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}


def store(kind: str, path: Path) -> Path:
    if kind == "two sources":
        config: Any = transformers.RTDetrConfig(
            backbone_config=transformers.RTDetrResNetConfig(
                embedding_size=8,
                hidden_sizes=[8, 8, 8],
                depths=[1, 1, 1],
                out_features=["stage1", "stage2", "stage3"],
            ),
            encoder_in_channels=[8, 8, 8],
            encoder_hidden_dim=32,
            encoder_ffn_dim=12,
            decoder_ffn_dim=12,
            decoder_in_channels=[32, 32, 32],
            num_queries=7,
            **SIZES,
            **HEADS,
        )
    elif kind == "reduced keys":
        config = transformers.PvtConfig(
            image_size=64,
            hidden_sizes=[8, 16, 24, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[2, 2, 2, 2],
            sequence_reduction_ratios=[4, 2, 1, 1],
        )
    elif kind == "series":
        config = transformers.TimeSeriesTransformerConfig(
            prediction_length=5, context_length=9, lags_sequence=[1, 2], **SIZES, **HEADS
        )
    else:
        config = transformers.DbrxConfig(
            d_model=24,
            n_heads=6,
            n_layers=1,
            vocab_size=61,
            attn_config={"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 3.0},
            ffn_config={
                "ffn_hidden_size": 12,
                "moe_num_experts": 2,
                "moe_top_k": 1,
                "hidden_size": 24,
            },
        )
    torch.manual_seed(0)
    spread(transformers.AutoModel.from_config(config)).save_pretrained(path)
    return path


def series() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    given = {"past_values": torch.randn(2, 11), "past_time_features": torch.randn(2, 11, 0)}
    given |= {"past_observed_mask": torch.ones(2, 11), "future_values": torch.randn(2, 5)}
    return given | {"future_time_features": torch.randn(2, 5, 0)}


def test_values_of_an_input_of_their_own(tmp_path: Path) -> None:
    folder = store("two sources", tmp_path)
    layer = load_attention(folder, prefix="decoder.layers.0.self_attn.")
    assert layer.proof.startswith("proved against RTDetrSelfAttention")
    assert layer.proof.endswith("with value_source=")
    x, places = torch.randn(2, 2, 7, 32)
    assert layer(x + places, value_source=x).shape == (2, 7, 32)


def test_keys_of_a_reduced_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prefix = store("reduced keys", tmp_path), "encoder.block.0.0.attention."
    layer = load_attention(folder, prefix=prefix)
    assert "on inputs from behind self.layer_norm, self.sequence_reduction" in layer.proof
    assert "behind" not in load_attention(folder, prefix="encoder.block.3.0.attention.").proof
    # A tensor that acts behind the projections as well is no way to an input.
    kind = transformers.models.pvt.modeling_pvt.PvtEfficientSelfAttention
    forward = kind.forward

    def changed(self: Any, *args: Any, **named: Any) -> Any:
        output, *others = forward(self, *args, **named)
        scale = self.layer_norm.weight if self.sequences_reduction_ratio > 1 else 1
        return (output * scale, *others)

    monkeypatch.setattr(kind, "forward", changed)
    with pytest.raises(OptionError, match=r"but for `encoder.block.0.0.attention.self.layer_norm"):
        load_attention(folder, prefix=prefix)


def test_a_tensor_without_effect_on_the_inputs_is_refused(tmp_path: Path) -> None:
    model = transformers.LukeModel(
        transformers.LukeConfig(
            vocab_size=61,
            entity_vocab_size=13,
            entity_emb_size=8,
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=12,
        )
    )
    spread(model).save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=r"but for `encoder.layer.0.attention.self.e2e_query"):
        load_attention(tmp_path)


def test_inputs_of_the_caller(tmp_path: Path) -> None:
    folder, prefix = store("series", tmp_path), "decoder.layers.0.self_attn."
    with pytest.raises(OptionError, match="no made-up input runs") as refused:
        load_attention(folder, prefix=prefix)
    assert "inputs={...}" in refused.value.do
    layer = load_attention(folder, prefix=prefix, inputs=series())
    assert layer.proof == "proved against TimeSeriesTransformerAttention, 1 probes, up to 5 tokens"
    with pytest.raises(OptionError, match="TypeError"):
        load_attention(folder, prefix=prefix, inputs={"past_values": torch.randn(2, 11)})


def test_units_and_pooled_queries_are_refused_by_name(tmp_path: Path) -> None:
    """Before any layout is tried: a proof on all tokens of an image takes long."""
    sizes = {"embed_dim": 8, "image_size": [32, 32], "depths": [1, 1, 1, 1], "mlp_ratio": 1.0}
    model = transformers.HieraModel(transformers.HieraConfig(**sizes))
    spread(model).save_pretrained(tmp_path)
    for stage, words in ((0, "use_mask_unit_attn=True"), (3, "query_stride=4")):
        with pytest.raises(OptionError, match=words):
            load_attention(tmp_path, prefix=f"encoder.stages.{stage}.layers.0.attn.")


def test_heads_that_the_class_counts(tmp_path: Path) -> None:
    layer = load_attention(store("dbrx", tmp_path))
    assert (layer.num_heads, layer.num_kv_heads, layer.clip) == (6, 2, 3.0)
    assert layer.proof.startswith("proved against DbrxAttention")


def test_a_refusal_names_tensors(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleDict({"mix": nn.Linear(3, 5), "norm": nn.LayerNorm(5)})

    model = nn.Module()
    model.layers = nn.ModuleList([Odd()])
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OptionError, match=r"no layout has `layers.0.attention.mix.weight`"):
        load_attention(tmp_path)
