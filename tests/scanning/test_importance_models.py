"""Importance in models of transformers and of torch, against hooks on their own attention."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.scanning.importance import ablations, gradients, next_token
from tests.huggingface.models import (
    BATCH,
    EMBED,
    ENCODER,
    HEADS,
    LENGTH,
    MODELS,
    built,
    lengths_mask,
    shaken,
)
from tests.quick import others_extra

LENGTHS = [LENGTH, 5, 2]
WHERE = {"llama": "model.layers.{}.self_attn.o_proj", "gpt2": "transformer.h.{}.attn.c_proj"}
NAMES = ("gate_gradient", "gate_gradient_normalised", "taylor")


def words(side: str) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (BATCH, LENGTH))
    return {"input_ids": ids, "attention_mask": lengths_mask(LENGTHS, LENGTH, side=side)}


def language(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    return built(MODELS[kind], "eager", dtype, head=True)


def rounding(measured: Any, kind: str) -> Tensor:
    """How far float32 is from float64: a mistake is larger, rounding in float64 much smaller."""
    narrow, wide = (measured(language(kind, d)) for d in (torch.float32, torch.float64))
    error = (narrow - wide).abs().max()
    assert 0 < error < 1e-3 * wide.abs().max()
    return error


@pytest.mark.parametrize("kind", WHERE)
def test_gradients_are_what_hooks_see(kind: str) -> None:
    """In transformers' own attention, where each head goes into the output projection."""
    model, inputs = language(kind), words("right")
    merged: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        merged.append(args[0])

    handles = [
        model.get_submodule(WHERE[kind].format(layer)).register_forward_pre_hook(keep)
        for layer in range(2)
    ]
    next_token(model(**inputs), inputs).sum().backward()
    for handle in handles:
        handle.remove()
    scan = gradients(model, inputs)
    assert (scan.sequences, scan.tokens, scan.notes) == (BATCH, sum(LENGTHS), ())
    for layer, of_layer in enumerate(merged):
        assert of_layer.grad is not None
        parts = (of_layer * of_layer.grad).detach().unflatten(-1, (HEADS, -1)).sum(-1)
        for name, expected in (
            ("gate_gradient", parts.sum(1).abs().mean(0)),
            ("taylor", parts.abs().sum(1).mean(0)),
        ):
            allowed = rounding(lambda m, name=name: gradients(m, inputs)[name], kind)
            assert torch.all((scan[name][layer] - expected).abs() <= allowed)
            assert torch.all(allowed < 1e-2 * expected.max())


@pytest.mark.parametrize("kind", WHERE)
def test_ablation_is_what_a_hook_does(kind: str) -> None:
    model, inputs = language(kind), words("right")
    scan = ablations(model, inputs)
    allowed = rounding(lambda m: ablations(m, inputs)["ablation_zero"], kind)
    with torch.no_grad():
        as_it_is = next_token(model(**inputs), inputs)
        for layer in range(2):
            projection = model.get_submodule(WHERE[kind].format(layer))
            for head in range(HEADS):

                def silent(module: nn.Module, args: tuple[Tensor, ...], head: int = head) -> Any:
                    heads = args[0].unflatten(-1, (HEADS, -1)).clone()
                    heads[..., head, :] = 0
                    return (heads.flatten(-2),)

                handle = projection.register_forward_pre_hook(silent)
                effect = (next_token(model(**inputs), inputs) - as_it_is).mean()
                handle.remove()
                assert abs(scan["ablation_zero"][layer, head] - effect) <= allowed
                assert allowed < scan["ablation_zero"].abs().median()


@pytest.mark.parametrize("kind", others_extra(WHERE))
@pytest.mark.parametrize("side", others_extra(["left", "right"]))
def test_padding_of_others_is_nothing(kind: str, side: str) -> None:
    """A padded batch, and each sequence alone without padding, merged."""
    model, inputs = language(kind), words(side)
    alone = [
        {name: tensor[row : row + 1, inputs["attention_mask"][row].bool()]}
        for row in range(BATCH)
        for name, tensor in inputs.items()
        if name == "input_ids"
    ]
    if kind == "gpt2":  # counts positions from the first place, padding or not
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    allowed = {
        name: rounding(lambda m, name=name: gradients(m, inputs)[name], kind) for name in NAMES
    }
    batch, merged = gradients(model, inputs), gradients(model, alone)
    assert (batch.sequences, batch.tokens) == (merged.sequences, merged.tokens)
    for name in NAMES:
        assert torch.all((batch[name] - merged[name]).abs() <= allowed[name])
    for by in ("zero", "mean"):
        name = f"ablation_{by}"

        def of(model: Any, given: Any = inputs, by: Any = by, name: str = name) -> Tensor:
            return ablations(model, given, by=by, heads=[1, 4])[name][:, [1, 4]]

        assert torch.all((of(model) - of(model, alone)).abs() <= rounding(of, kind))


def test_a_masked_language_model_has_no_default() -> None:
    config = transformers.BertConfig(**ENCODER)
    model = shaken(transformers.AutoModelForMaskedLM.from_config(config))
    with pytest.raises(OptionError, match="attends to later tokens"):
        gradients(model, words("right"))
    labels = torch.randint(60, (BATCH, LENGTH))

    def masked(output: Any, given: Any) -> Tensor:
        each = nn.functional.cross_entropy(output.logits.mT, labels, reduction="none")
        return (each * given["attention_mask"]).sum(-1) / given["attention_mask"].sum(-1)

    scan = gradients(model, words("right"), loss=masked)
    assert torch.all(scan["gate_gradient"] > 0)


def test_an_encoder_and_a_decoder() -> None:
    model = built(MODELS["t5"], "eager", torch.float64, head=True)
    inputs = {**words("right"), "decoder_input_ids": torch.randint(3, 60, (BATCH, 7))}
    scan = gradients(model, inputs, loss=lambda o, i: o.logits.square().mean((1, 2)))
    kinds = [layer.kind for layer in scan.layer_scans]
    assert kinds == ["self", "self", "self", "cross", "self", "cross"]
    assert torch.all(scan["gate_gradient"] > 0)
    with pytest.raises(OptionError, match=r"layer encoder.*attends to later"):
        gradients(model, inputs)


def test_layers_of_torch() -> None:
    """Its fused inference path would show nothing."""
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    x, padding = torch.randn(BATCH, LENGTH, EMBED), torch.arange(LENGTH) >= 9
    inputs = {"src": x, "src_key_padding_mask": padding.expand(BATCH, -1)}

    def first(output: Tensor, given: Any) -> Tensor:
        return output[:, 0, :3].square().sum(-1)

    for scan, name in (
        (gradients(model, inputs, loss=first), "taylor"),
        (ablations(model, inputs, loss=first), "ablation_zero"),
    ):
        assert scan.layers == ("layers.0.self_attn", "layers.1.self_attn")
        assert torch.all(scan[name] != 0)
        assert scan.sequences == BATCH
