"""A running model decides between layouts that names and shapes leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from headwise.layouts.config import counts_of, layout_of
from headwise.layouts.detect import Detection, detect
from headwise.scanning.behaviour import by_behaviour

SMALL = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
WIDE = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2}
GROUPED = {**WIDE, "num_key_value_heads": 2, "intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "Cohere": GROUPED,
    "Granite": {**GROUPED, "attention_multiplier": 0.3},
    "GPT2": {"n_embd": 48, "n_head": 6, "n_layer": 2},
    "GPTNeoX": {**WIDE, "intermediate_size": 64},
    "Bert": {**WIDE, "intermediate_size": 64},
}


def model_of(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind], **SMALL)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model, config.to_dict()


def names_of(found: Detection) -> list[set[str]]:
    return [{one.layout.name for one in group} for group in found.candidates]


def asked(kind: str) -> tuple[Detection, Detection, str | None]:
    model, config = model_of(kind)
    state = model.state_dict()
    before = detect(state, **counts_of(config))
    inputs = {"input_ids": torch.randint(99, (2, 40))}
    return before, by_behaviour(before, state, model, inputs, config), layout_of(config)


@pytest.mark.parametrize("kind", MODELS)
def test_the_right_one_stays(kind: str) -> None:
    before, after, name = asked(kind)
    assert any(name in group for group in names_of(after))
    assert len(after.candidates) <= len(before.candidates)
    assert not after.refuted.keys() & {n for group in names_of(after) for n in group}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("Llama", "cohere"), ("Cohere", "llama"), ("GPT2", "jais"), ("Granite", "cohere")],
)
def test_a_wrong_one_goes_with_the_reason(kind: str, wrong: str) -> None:
    before, after, _ = asked(kind)
    assert any(wrong in group for group in names_of(before))
    assert "scores are others than the model's" in after.refuted[wrong]


def test_other_weights_leave_nothing() -> None:
    model, config = model_of("GPT2")
    state = {name: x.roll(1, -1) for name, x in model.state_dict().items()}
    found = detect(state, **counts_of(config))
    inputs = {"input_ids": torch.randint(99, (1, 40))}
    assert not by_behaviour(found, state, model, inputs, config).candidates


def test_a_transposed_output_projection_is_seen() -> None:
    """Square, so that no shape tells."""
    model, config = model_of("GPT2")
    state = dict(model.state_dict())
    name = "h.1.attn.c_proj.weight"
    state[name] = state[name].mT.contiguous()
    found = detect(state, **counts_of(config))
    inputs = {"input_ids": torch.randint(99, (1, 40))}
    after = by_behaviour(found, state, model, inputs, config)
    assert not after.candidates
    assert after.refuted["gpt2"] == "h.1.attn.: output projections are others than the model's"
