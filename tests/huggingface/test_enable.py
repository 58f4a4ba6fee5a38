"""Which configurations are switched, and that all say afterwards what they said before."""

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, PreTrainedConfig, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from headwise import scan


class OuterConfig(PreTrainedConfig):
    model_type = "outer_config_of_a_test"
    sub_configs = {"inner": GPT2Config}  # noqa: RUF012 (transformers' own way)

    def __init__(self, inner: Any = None, **others: Any) -> None:
        self.inner = inner or GPT2Config(n_embd=40, n_head=4, attn_implementation="sdpa")
        super().__init__(**others)


class Outer(PreTrainedModel):
    """A model whose attention reads a configuration that no model of its own has."""

    config_class = OuterConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.attention = GPT2Attention(config.inner)
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)[0]


def test_a_configuration_without_a_model_of_its_own() -> None:
    model = Outer(OuterConfig())
    before = model.config._attn_implementation, model.config.inner._attn_implementation
    assert scan(model, torch.randn(1, 24, 40)).layers == ("attention",)
    assert (model.config._attn_implementation, model.config.inner._attn_implementation) == before
