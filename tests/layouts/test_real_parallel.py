"""Megatron core, whose layers run in one process on a CPU. On request:

pip install -e ".[dev,libraries]" && python -m pytest tests/layouts/test_real_parallel.py
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Mask, Rotary
from tests.layouts.captured import SINGLE, THETA
from tests.layouts.real import LENGTH, Real, assert_same_function, inputs, sharpen

# What Megatron warns of is its own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """A process group of one, and a CPU where Megatron asks for a GPU."""
    state = pytest.importorskip("megatron.core.parallel_state")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    state.initialize_model_parallel()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    yield
    state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config_of(**sizes: Any) -> Any:
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    return config.TransformerConfig(
        num_layers=1,
        num_attention_heads=12,
        kv_channels=10,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        attention_softmax_in_fp32=False,
        add_bias_linear=True,
        **sizes,
    )


def built(spec: Any, config: Any) -> nn.Module:
    specs = pytest.importorskip("megatron.core.transformer.spec_utils")
    layer: nn.Module = specs.build_module(spec, config=config, layer_number=1).double().eval()
    # Dropout, of nothing, then asks for no random state of a GPU.
    config.sequence_parallel = True
    sharpen(layer)
    return layer


@torch.no_grad()
def ran(layer: nn.Module, x: Tensor, options: dict[str, Any], **given: Any) -> Real:
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    outputs, bias = layer(x.transpose(0, 1), hidden, **given)
    state = {name: t for name, t in layer.state_dict().items() if isinstance(t, Tensor)}
    return Real(state, x, (outputs + bias).transpose(0, 1), options, Mask.causal())


def self_attention(**sizes: Any) -> nn.Module:
    specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_layer_local_spec().submodules.self_attention
    return built(spec, config_of(hidden_size=40, num_query_groups=3, add_qkv_bias=True, **sizes))


def megatron() -> Real:
    rotary = pytest.importorskip("megatron.core.models.common.embeddings.rotary_pos_embedding")
    layer = self_attention()
    turns = rotary.RotaryEmbedding(10, 1.0, rotary_base=THETA, use_cpu_initialization=True)
    options = {"num_heads": 12, "num_kv_heads": 3, "rotary": Rotary(theta=THETA)}
    real = ran(layer, inputs(40), options, rotary_pos_emb=turns(LENGTH))
    return replace(real, unit=SINGLE)


def megatron_gpt() -> Real:
    return ran(self_attention(), inputs(40), {"num_heads": 12, "num_kv_heads": 3})


def megatron_cross() -> Real:
    specs = pytest.importorskip("megatron.core.models.T5.t5_spec")
    spec = specs.decoder_model_with_local_spec().submodules.cross_attention
    layer = built(spec, config_of(hidden_size=40))
    source = inputs(40, seed=2)
    real = ran(layer, inputs(40), {"num_heads": 12}, key_value_states=source.transpose(0, 1))
    return replace(real, source=source)


CASES = {
    "megatron": megatron,
    "megatron-gpt": megatron_gpt,
    "megatron-cross": megatron_cross,
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())
