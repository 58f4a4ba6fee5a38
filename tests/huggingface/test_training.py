"""Training steps: the gradients of transformers' own attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.function.budget import Budget
from headwise.function.rounding import BACKWARD
from headwise.huggingface import NAME
from tests.huggingface.models import MODELS, Pair, built, lengths_mask, watched

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "query", "key", "value", ".q.", ".k.", "sinks")


def gradients(pair: Pair, model: Any, x: Tensor, **inputs: Any) -> Tensor:
    """Of the attention layers' parameters and of the input, one after the other."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    with torch.enable_grad():
        pair.run(model, x, **inputs).square().mean().backward()
    names = [n for n, p in model.named_parameters() if any(part in n for part in PARTS)]
    own = [model.get_parameter(n).grad for n in names]
    assert all(g is not None for g in own)
    return torch.cat([g.flatten() for g in [*own, x.grad] if g is not None])


def padding(length: int) -> Tensor:
    """Right padding that leaves a key to every query: in float64, eager would give NaN."""
    return lengths_mask([length, length - 2, length - 4], length, side="right")


def budget_of(pair: Pair, x: Tensor, **inputs: Any) -> Budget:
    return Budget.for_function(
        lambda x: gradients(pair, pair.theirs[x.dtype], x, **inputs),
        x,
        factor=BACKWARD,
        name="gradients",
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert", "t5", "bart"])
def test_gradients(name: str, padded: bool) -> None:
    pair = Pair(MODELS[name])
    x = pair.input()
    inputs = {"attention_mask": padding(x.shape[1])} if padded else {}
    budget_of(pair, x, **inputs).assert_holds(gradients(pair, pair.ours, x, **inputs))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bart"])
def test_checkpointing_changes_nothing(name: str, use_reentrant: bool) -> None:
    pair = Pair(MODELS[name])
    x = pair.input()
    options = {"attention_mask": padding(x.shape[1]), "use_cache": False}
    model = pair.ours.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    old = "gradient_checkpointing_enable"  # its name in the first versions of transformers 5
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old)
    enable({"use_reentrant": use_reentrant})
    with watched() as seen:
        found = gradients(pair, model, x, **options)
    assert len(seen) == 2 * (6 if pair.case.source else 2)  # forward, and once more backward
    budget_of(pair, x, **options).assert_holds(found)


def test_dropout_is_that_of_sdpa() -> None:
    ours = built(MODELS["llama"], NAME, torch.float64).train()
    theirs = built(MODELS["llama"], "sdpa", torch.float64).train()
    for model in (ours, theirs):
        for layer in model.layers:
            layer.self_attn.attention_dropout = 0.3
    pair = Pair(MODELS["llama"])
    x = pair.input().double()
    torch.manual_seed(5)
    found = pair.run(ours, x)
    torch.manual_seed(5)
    assert torch.equal(found, pair.run(theirs, x))
    assert not torch.equal(found, pair.run(ours, x))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_under_autocast(name: str) -> None:
    pair = Pair(MODELS[name])
    x = pair.input()

    def under_autocast(model: Any, x: Tensor) -> Tensor:
        enabled = x.dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return gradients(pair, model, x)

    budget = Budget.for_function(
        lambda x: under_autocast(pair.theirs[x.dtype], x), x, factor=BACKWARD, name="gradients"
    )
    with watched() as seen:
        budget.assert_holds(under_autocast(pair.ours, x))
    assert {matrix.q.dtype for matrix in seen} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert", "t5"])
def test_in_bfloat16(name: str) -> None:
    pair = Pair(MODELS[name])
    x = pair.input().bfloat16()
    pair.theirs[torch.bfloat16] = built(pair.case, pair.case.reference, torch.bfloat16)
    # The same rounded weights in all.
    pair.theirs[torch.float64].load_state_dict(pair.theirs[torch.bfloat16].state_dict())
    budget = pair.budget(x)
    with torch.no_grad():
        budget.assert_holds(pair.run(built(pair.case, NAME, torch.bfloat16), x))
