"""Rotations bit for bit as the models of Hugging Face compute them, by their own modules."""

from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    PhiConfig,
)
from transformers.models.gptj import modeling_gptj

from headwise import Rotary
from headwise.function.scaling import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling
from tests.honest import normal

SIZES = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2}
FAR = 2_000


class Model(NamedTuple):
    """A config, its rotation as a value, and the width of a head."""

    config: Any
    rotary: Rotary
    head_dim: int = 10


def llama(head_dim: int = 10, **rope: Any) -> LlamaConfig:
    return LlamaConfig(
        **SIZES, head_dim=head_dim, max_position_embeddings=FAR, rope_parameters=rope or None
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 500}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, Model] = {
    "Llama": Model(llama(), Rotary()),
    "Llama, a head of 64": Model(llama(64), Rotary(), 64),
    "Llama, linear": Model(
        llama(rope_type="linear", factor=4.0, rope_theta=5e5),
        Rotary(5e5, scaling=LinearScaling(4.0)),
    ),
    "Llama, llama3": Model(
        llama(rope_theta=5e5, **LLAMA3), Rotary(5e5, scaling=Llama3Scaling(4.0, 1.0, 4.0, 500))
    ),
    "Llama, YaRN": Model(llama(rope_theta=1e6, **YARN), Rotary(1e6, scaling=YarnScaling(4.0, 500))),
    "Cohere": Model(CohereConfig(**SIZES), Rotary(5e5, pairing="interleaved")),
    "GPT-NeoX": Model(GPTNeoXConfig(hidden_size=240, num_attention_heads=6), Rotary(width=10), 40),
    "Phi": Model(PhiConfig(hidden_size=240, num_attention_heads=6), Rotary(width=20), 40),
    "gpt-oss": Model(
        GptOssConfig(),
        Rotary(150_000.0, scaling=YarnScaling(32.0, 4096, truncate=False)),
        64,
    ),
    "DeepSeek-V3, half-split": Model(
        DeepseekV3Config(
            qk_rope_head_dim=10,
            max_position_embeddings=FAR,
            rope_parameters=YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.6},
        ),
        Rotary(scaling=YarnScaling(4.0, 500, mscale=1.0, mscale_all_dim=0.6)),
    ),
}


def module_of(config: Any) -> Any:
    return import_module(type(config).__module__.replace("configuration", "modeling"))


def rotation_of(config: Any) -> Any:
    """The model's own rotary module."""
    module = module_of(config)
    return getattr(module, type(config).__name__.replace("Config", "RotaryEmbedding"))(config)


def drawn(head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, and positions that differ between sequences."""
    q, k = normal(3, 6, 24, head_dim), normal(3, 2, 24, head_dim, seed=1)
    positions = torch.randint(0, FAR, (3, 24), generator=torch.Generator().manual_seed(2))
    return q.to(dtype), k.to(dtype), positions


@pytest.mark.parametrize("name", MODELS)
def test_queries_and_keys_are_rotated_as_the_model_does(name: str) -> None:
    config, rotary, head_dim = MODELS[name]
    q, k, positions = drawn(head_dim)
    waves = rotation_of(config)(q, positions)
    width = rotary.rotated_width(head_dim)
    expected = module_of(config).apply_rotary_pos_emb(q[..., :width], k[..., :width], *waves)
    found = rotary.rotate_both(q, k, positions)
    for one, theirs, given in zip(found, expected, (q, k), strict=True):
        assert torch.equal(one[..., :width], theirs)
        assert torch.equal(one[..., width:], given[..., width:])
        assert not torch.equal(one[..., :width], given[..., :width])


def test_gpt_neox_passes_the_rest_itself() -> None:
    config, rotary, head_dim = MODELS["GPT-NeoX"]
    q, k, positions = drawn(head_dim)
    expected = module_of(config).apply_rotary_pos_emb(q, k, *rotation_of(config)(q, positions))
    for one, theirs in zip(rotary.rotate_both(q, k, positions), expected, strict=True):
        assert torch.equal(one, theirs)


@pytest.mark.parametrize(("width", "head_dim"), [(64, 256), (6, 10), (10, 10)])
def test_gpt_j(width: int, head_dim: int) -> None:
    q, _, positions = drawn(head_dim)
    table = modeling_gptj.create_sinusoidal_positions(FAR, width)[positions]
    sin, cos = table.chunk(2, dim=-1)
    by_token = q.transpose(1, 2)  # GPT-J rotates before the heads come first
    turned = modeling_gptj.apply_rotary_pos_emb(by_token[..., :width], sin, cos)
    expected = torch.cat((turned, by_token[..., width:]), dim=-1).transpose(1, 2)
    rotary = Rotary(width=width, pairing="interleaved")
    assert torch.equal(rotary.rotate(q, positions), expected)


def test_deepseek_v3_stores_interleaved_pairs_half_split() -> None:
    config, half_split, head_dim = MODELS["DeepSeek-V3, half-split"]
    q, k, positions = drawn(head_dim)
    waves = rotation_of(config)(q, positions)
    expected = module_of(config).apply_rotary_pos_emb_interleave(q, k, *waves)
    rotary = Rotary(pairing="interleaved", scaling=half_split.scaling)
    for one, theirs in zip(rotary.rotate_both(q, k, positions), expected, strict=True):
        assert torch.equal(torch.cat((one[..., ::2], one[..., 1::2]), -1), theirs)


def test_dynamic_scaling_beyond_the_trained_length_is_ntk() -> None:
    config = llama(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    q, k, positions = drawn(10)
    positions = torch.where(positions == positions.max(), FAR * 5 // 2 - 1, positions)
    waves = rotation_of(config)(q, positions)
    expected = module_of(config).apply_rotary_pos_emb(q, k, *waves)
    for one, theirs in zip(
        Rotary(scaling=NTKScaling(4.0)).rotate_both(q, k, positions), expected, strict=True
    ):
        assert torch.equal(one, theirs)
