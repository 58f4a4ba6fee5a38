"""The recorder: what it leaves behind, and attention by explicit products in any module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import scan
from headwise.diagnosis.subjects.run import record_layers
from headwise.layers.hooks import record_modules
from headwise.scanning.record import SOURCES, record_attention
from tests.scanning.models import (
    SMALL,
    VOCABULARY,
    bert,
    callers,
    own,
    spread,
    text,
    tokens,
)

T5 = {"d_model": 40, "d_kv": 10, "d_ff": 24, "num_layers": 1, "num_heads": 4}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Mix(nn.Module):
    """A layer whose name does not say attention."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.project, self.attend = nn.Linear(16, 48), attend
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 8**0.5
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    weights = F.softmax(scores.masked_fill(later, -torch.inf), dim=-1, dtype=torch.float64)
    return torch.einsum("bhqk,bhkd->bhqd", F.dropout(weights.to(q), 0.1, training=False), v)


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = torch.zeros(len(q), q.shape[1], k.shape[1])
    return torch.bmm(nn.Softmax(2)(torch.baddbmm(bias, q, k.mT)), v).view(shape)


def between(layer: nn.Module) -> nn.Module:
    attends = Mix(F.scaled_dot_product_attention)
    return nn.Sequential(nn.Embedding(20, 16), attends, layer, nn.Linear(16, 20), nn.Softmax(-1))


@pytest.mark.parametrize("attend", [by_matmul, by_einsum, by_bmm])
def test_explicit_products_in_a_class_of_any_name_are_captured(attend: Attend) -> None:
    found = scan(between(Mix(attend)), torch.randint(20, (2, 12)), statistics=["entropy"])
    assert found.layers == ("1", "2")
    assert found["entropy"].shape == (2, 2)  # (layers, heads)
    assert found.notes == ()


def by_halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) / 2) @ v


def test_a_block_with_a_captured_layer_may_attend_by_products_that_are_not_read() -> None:
    class Block(Mix):
        def __init__(self) -> None:
            super().__init__(by_halves)
            self.inner = Mix(F.scaled_dot_product_attention)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.inner(x)

    found = scan(between(Block()), torch.randint(20, (2, 12)), statistics=["entropy"])
    assert found.layers == ("1", "2.inner")
    assert found.notes[0].endswith("2 (Block)")


class Routed(nn.Module):
    """Experts chosen by a router, whose weights come from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.linear = nn.Parameter(torch.randn(16, 4)), nn.Linear(16, 4)
        self.experts = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        by_product = (x @ self.router).softmax(-1)
        by_einsum = torch.einsum("btd,de->bte", x, self.router).softmax(-1)
        each = torch.einsum("btd,edf->btef", x, self.experts)
        return ((by_product + by_einsum + self.linear(x).softmax(-1))[:, :, None] @ each)[:, :, 0]


class Linear(nn.Module):
    """Linear attention: a softmax over channels, and none over keys."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(2, (2, 8)).transpose(1, 2)
        return (q.softmax(-1) @ (q.softmax(-2).mT @ q)).transpose(1, 2).flatten(2)


class Slots(nn.Module):
    """Soft mixture of experts: tokens are combined from slots, whose keys are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(1, 6, 16))

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.keys.mT
        return scores.softmax(-1) @ (scores.softmax(1).mT @ x)


@pytest.mark.parametrize("layer", [Routed, Linear, Slots])
def test_other_softmaxes_are_no_attention(layer: type[nn.Module]) -> None:
    found = scan(between(layer()), torch.randint(20, (2, 12)), statistics=["entropy"])
    assert found.layers == ("1",)
    assert found.notes == ()


@pytest.mark.parametrize(
    "kind", [transformers.MixtralConfig, transformers.GptOssConfig, transformers.Qwen2MoeConfig]
)
def test_routers_of_transformers_are_no_attention(kind: Any) -> None:
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    config = kind(num_key_value_heads=2, head_dim=10, moe_intermediate_size=8, **experts, **SMALL)
    config._experts_implementation = "eager"
    model = transformers.AutoModel.from_config(config).eval()
    found = scan(model, tokens(2, 9), statistics=["entropy"])
    assert len(found.layers) == 2
    assert found.notes == ()


# ---- what a recorder leaves behind ---------------------------------------------------------------


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_an_exception_in_a_nested_module_leaves_no_hook() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = between(nn.Sequential(Mix(by_matmul), Fails())).train()
    with pytest.raises(ZeroDivisionError), record_attention(model):
        model(torch.randint(20, (2, 12)))
    assert hooks_of(model) == 0
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()
    assert scan(model, torch.randint(20, (2, 12)), call=lambda m, ids: m[:2](ids)).layers == ("1",)


def test_a_recorder_that_cannot_start_leaves_no_hook() -> None:
    class Refuses(nn.Module):
        def register_forward_hook(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

    model = between(Refuses())
    with pytest.raises(ZeroDivisionError), record_attention(model):
        pass
    with pytest.raises(ZeroDivisionError), record_modules(model.modules()):
        pass
    assert hooks_of(model) == 0


def test_a_scan_within_a_scan() -> None:
    model, given = bert(), text()
    inner = []

    def call(model: Any, **named: Any) -> None:
        model(**named)
        inner.append(scan(model, named, statistics=["entropy"]))
        model(**named)

    found = scan(model, given, statistics=["entropy"], call=call)
    alone = scan(model, given, statistics=["entropy"])
    assert torch.equal(inner[0]["entropy"], alone["entropy"])
    assert torch.equal(found["entropy"], alone["entropy"])
    assert [layer.calls for layer in found.layer_scans] == [2, 2]
    assert hooks_of(model) == 0


@pytest.mark.parametrize("make", [own, callers])
def test_with_gradients_the_model_runs_as_it_is(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = tokens(2, 9) if make is own else torch.randn(2, 9, 40).double()
    with torch.inference_mode(), record_attention(model, gradients=True) as recorder:
        recorder.begin_input()
        assert model(x).requires_grad
    with record_attention(model):
        assert not model(x).requires_grad


def test_passes_of_modules_are_recorded_in_order() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    x, y = torch.randn(2, 4), torch.randn(3, 4)
    with record_modules([model[1]]) as runs:
        model(x)
        model(y)
        model[1](input=x)
    assert list(runs) == [model[1]]
    assert [run.output.shape[0] for run in runs[model[1]]] == [2, 3, 2]
    assert torch.equal(runs[model[1]][1].first, model[0](y))
    assert runs[model[1]][2].first is x
    assert hooks_of(model) == 0


# ---- the source of cross attention ---------------------------------------------------------------


def test_the_source_of_cross_attention_is_what_its_keys_are_projected_from() -> None:
    torch_layer = nn.TransformerDecoderLayer(40, 4, 24, batch_first=True).double().eval()
    x, memory = torch.randn(2, 6, 40).double(), torch.randn(2, 9, 40).double()
    layers, _ = record_layers(torch_layer, ((x, memory), {}))
    assert [layer.call.inputs.source is None for layer in layers] == [True, False]
    assert torch.equal(layers[1].call.inputs.key_source, memory)
    model = spread(transformers.T5Model(transformers.T5Config(vocab_size=VOCABULARY, **T5)))
    ids = {"input_ids": tokens(2, 9), "decoder_input_ids": tokens(2, 6)}
    layers, outputs = record_layers(model, ((), ids))
    cross = [layer.call.inputs for layer in layers if "EncDec" in layer.name]
    assert torch.equal(cross[0].key_source, outputs[".encoder_last_hidden_state"])


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_by_any_of_its_names_is_cross_attention(name: str) -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key_first = nn.Linear(16, 16)

        def forward(self, x: Tensor, **named: Tensor) -> Tensor:
            # The order of the projections does not say which are the queries.
            k = self.key_first(named[name]).unflatten(2, (2, 8)).transpose(1, 2)
            q = x.unflatten(2, (2, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cross = nn.Embedding(VOCABULARY, 16), Cross()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            output: Tensor = self.cross(x, **{name: x + 1})
            return output

    found = scan(Model(), tokens(2, 9), statistics=["entropy"])
    assert [layer.kind for layer in found.layer_scans] == ["cross"]
