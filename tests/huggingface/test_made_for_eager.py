"""Models without an sdpa form read masks as eager has them: floats, and none means all is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from headwise.huggingface import register_huggingface
from headwise.huggingface.masks import LazyMask, file_has_no_sdpa

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
VISION = {**SIZES, "image_size": 32, "patch_size": 16}
IDS = torch.arange(3, 16).repeat(2, 1)
PADDING = (torch.arange(13) < torch.tensor([[13], [9]])).long()


def git() -> tuple[nn.Module, dict[str, Tensor]]:
    """Adds its mask by code of its own, beside a vision model of the interface."""
    config = transformers.GitConfig(**SIZES, vocab_size=160, vision_config=VISION)
    given = {"input_ids": IDS, "attention_mask": PADDING, "pixel_values": torch.randn(2, 3, 32, 32)}
    return transformers.GitModel(config), given


def bridgetower() -> tuple[nn.Module, dict[str, Tensor]]:
    """Gives no mask where all is seen, to layers that call themselves causal."""
    layers = {"num_hidden_layers": 2}
    config = transformers.BridgeTowerConfig(
        **SIZES,
        text_config={**SIZES, "vocab_size": 160},
        vision_config={"hidden_size": 64, **layers, "image_size": 32, "patch_size": 16},
    )
    given = {
        "input_ids": IDS,
        "attention_mask": torch.ones_like(IDS),
        "pixel_values": torch.randn(2, 3, 32, 32),
    }
    return transformers.BridgeTowerModel(config), given


def gpt_oss() -> tuple[nn.Module, dict[str, Tensor]]:
    """Adds its mask in eager's own function only."""
    config = transformers.GptOssConfig(
        **SIZES,
        vocab_size=160,
        head_dim=16,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    return transformers.GptOssModel(config), {"input_ids": IDS, "attention_mask": PADDING}


@torch.no_grad()
def spread(model: nn.Module) -> nn.Module:
    """Weights large enough that a wrong mask shows."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("make", [git, bridgetower])
def test_outputs_are_those_of_eager(
    make: Callable[[], tuple[Any, dict[str, Tensor]]],
) -> None:
    register_huggingface()
    model, given = make()
    spread(model).double()
    given = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    eager = model(**given)[0]
    model.set_attn_implementation("headwise")
    real = torch.ones(eager.shape[:2], dtype=torch.bool)
    if eager.shape[1] == PADDING.shape[1]:
        real = PADDING.bool()
    # Both in float64: what is left is far below the roundings of float32, a wrong mask far above.
    error = float((model(**given)[0] - eager)[real].abs().max())
    assert error <= torch.finfo(torch.float32).eps * float(eager[real].abs().max())


@torch.no_grad()
def test_the_mask_of_the_interface_stays_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    register_huggingface()
    model, given = gpt_oss()
    model.eval().set_attn_implementation("headwise")  # type: ignore[operator]

    def refuse(self: LazyMask) -> Tensor:
        raise AssertionError("the mask was written")

    monkeypatch.setattr(LazyMask, "materialise", refuse)
    model(**given)


def test_who_is_made_for_eager() -> None:
    from transformers.models.bert.modeling_bert import BertSelfAttention
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    assert file_has_no_sdpa(GptOssAttention)
    assert not file_has_no_sdpa(BertSelfAttention)
    assert not file_has_no_sdpa(nn.MultiheadAttention)
