"""`upgrade`: in place, the same objects, really called, measured, and undone where it fails."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from headwise import MultiheadAttention, upgrade
from tests.honest import hides_a_whole_sequence
from tests.layers.torch_api.cases import BATCH, EMBED, HEADS, KEYS, QUERIES

X, MEMORY = torch.randn(BATCH, QUERIES, EMBED), torch.randn(BATCH, KEYS, EMBED)
Layer = nn.TransformerEncoderLayer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of our forward, counted on the class: a hook would switch torch's path off."""
    made: list[str] = []
    forward = MultiheadAttention.forward

    def counted(self: MultiheadAttention, *arguments: object, **options: object) -> object:
        made.append("call")
        return forward(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MultiheadAttention, "forward", counted)
    return made  # type: ignore[return-value]


def encoder(layers: int = 2, **options: object) -> nn.TransformerEncoder:
    layer = Layer(EMBED, HEADS, 40, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers).eval()


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def test_the_report_says_what_fails_from_now_on() -> None:
    report = str(upgrade(nn.MultiheadAttention(EMBED, HEADS)))
    assert "fails now    torch.jit.script of a swapped layer; use torch.export" in report
    assert "torch.jit.script" not in str(upgrade(nn.Linear(2, 3)))


# ---- really called ----------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [lambda m: m, copy.deepcopy, pickled, saved_and_loaded])
def test_an_encoder_calls_its_layers_in_inference(
    calls: list[str], duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    model = encoder()
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[1, 9:] = True
    with torch.no_grad():
        model(X)
        assert calls == []  # torch reads the weights instead
        before = model(X)
        upgrade(model)
        model = duplicate(model)
        calls.clear()
        after = model(X)
        assert len(calls) == 2
        model(X, src_key_padding_mask=padding)
        assert len(calls) == 4
    with torch.inference_mode():
        model(X)
    assert len(calls) == 6
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


@hides_a_whole_sequence
def test_a_fully_padded_sample_shows_it_without_counting() -> None:
    model = encoder()
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[0] = True
    with torch.no_grad():
        assert model.layers[0](X, src_key_padding_mask=padding)[0].isnan().all()
        report = upgrade(model.layers[0], X, src_key_padding_mask=padding)
        assert model.layers[0](X, src_key_padding_mask=padding).isfinite().all()
    assert report.change.output.mended == QUERIES * EMBED
    assert report.change.largest < 1e-5
    assert "NaN or infinite values are now finite" in str(report)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_whole_transformer(calls: list[str], batch_first: bool) -> None:
    model = nn.Transformer(EMBED, HEADS, 2, 3, 40, batch_first=batch_first).eval()
    inputs = (MEMORY, X) if batch_first else (MEMORY.mT.permute(2, 0, 1), X.mT.permute(2, 0, 1))
    mask = nn.Transformer.generate_square_subsequent_mask(QUERIES)
    report = upgrade(model, *inputs, tgt_mask=mask, tgt_is_causal=True)
    assert len(report.swapped) == 2 + 3 * 2
    assert all(type(layer) is not nn.MultiheadAttention for layer in model.modules())
    assert 0 <= report.change.largest < 1e-5
    assert report.change.output.scale > 1
    assert report.change.within_budget
    calls.clear()
    with torch.no_grad():
        model(*inputs, tgt_mask=mask)
    assert len(calls) == 8
    expected = {"encoder", "encoder.layers.0", "encoder.layers.1"} if batch_first else set()
    assert expected <= report.switched_off.keys()


def test_a_decoder(calls: list[str]) -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(EMBED, HEADS, 40, batch_first=True), 2)
    report = upgrade(model.eval(), X, MEMORY)
    calls.clear()
    with torch.no_grad():
        model(X, MEMORY)
    assert len(calls) == 4
    assert report.swapped == tuple(
        f"layers.{n}.{name}" for n in range(2) for name in ("self_attn", "multihead_attn")
    )
    assert report.switched_off == {}


def test_every_condition_of_the_fused_path_was_on() -> None:
    # The attributes that are switched off exist in this torch, under these names.
    model = encoder()
    assert model.use_nested_tensor is True
    assert model.layers[0].activation_relu_or_gelu == 1
    assert encoder(activation="gelu").layers[0].activation_relu_or_gelu == 2
    report = upgrade(model)
    assert report.switched_off == {
        "": "use_nested_tensor = False",
        "layers.0": "activation_relu_or_gelu = 0",
        "layers.1": "activation_relu_or_gelu = 0",
    }
    assert upgrade(model).switched_off == {}  # once is enough


# ---- the same objects -------------------------------------------------------------------------


def test_the_layer_stays_the_object_it_was() -> None:
    layer = nn.MultiheadAttention(EMBED, HEADS, 0.25, kdim=12, vdim=7, add_bias_kv=True).train()
    layer.k_proj_weight.requires_grad_(False)
    layer.note = "mine"
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("layer"))
    layer.out_proj.register_forward_hook(lambda *_: seen.append("out_proj"))
    parameters, state = list(layer.parameters()), dict(vars(layer))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    report = upgrade(layer)
    assert type(layer) is MultiheadAttention
    assert report.swapped == ("",)
    assert vars(layer) == state
    assert layer.training
    assert all(a is b for a, b in zip(parameters, layer.parameters(), strict=True))
    assert "out_proj has hooks, which now run" in str(report)
    seen.clear()
    layer(X[:, 0], MEMORY[:, 0, :12], MEMORY[:, 0, :7])[0].sum().backward()
    assert seen == ["out_proj", "layer"]
    before = layer.q_proj_weight.clone()
    optimizer.step()
    assert not torch.equal(layer.q_proj_weight, before)
    assert layer.k_proj_weight.grad is None


def test_modes_and_random_state_are_put_back() -> None:
    model = encoder(dropout=0.5)
    model.train()
    model.layers[1].eval()
    model.layers[1].dropout.train()
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    report = upgrade(model, X)
    assert report.change.largest < 1e-5
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_a_shared_layer_is_swapped_once_and_named_twice() -> None:
    shared = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    report = upgrade(nn.ModuleDict({"first": shared, "second": nn.Sequential(shared)}))
    assert report.swapped == ("first", "second.0")
    assert list(report.change.layers) == ["first"]


def test_parametrized_layers_are_swapped_and_stay_parametrized() -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    layer = nn.MultiheadAttention(EMBED, HEADS, batch_first=True).eval()
    parametrize.register_parametrization(layer, "in_proj_weight", Halved())
    parametrize.register_parametrization(layer.out_proj, "weight", Halved())
    expected = layer(X, X, X)[0]
    report = upgrade(nn.ModuleList([layer]))
    assert report.swapped == ("0",)
    assert report.change.within_budget
    assert isinstance(layer, MultiheadAttention)
    torch.testing.assert_close(layer(X, X, X)[0], expected)
    torch.testing.assert_close(copy.deepcopy(layer)(X, X, X)[0], expected)
    parametrize.remove_parametrizations(layer, "in_proj_weight")
    assert type(layer) is MultiheadAttention
    torch.testing.assert_close(layer(X, X, X)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    model = encoder(dtype=dtype)
    report = upgrade(model, X.to(dtype))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert report.change.within_budget, report


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = encoder()
    report = upgrade(model)
    assert len(report.swapped) == 2
    assert report.change.layers["layers.0.self_attn"].difference is None
    assert "not measured: 2" in str(report)


# ---- what is kept -----------------------------------------------------------------------------


class Custom(nn.MultiheadAttention):
    def forward(self, *arguments: object, **options: object) -> object:
        return super().forward(*arguments, **options)


def test_what_is_not_swapped_and_why() -> None:
    patched = nn.MultiheadAttention(EMBED, HEADS)
    patched.forward = lambda *_: None  # type: ignore[method-assign]
    model = nn.ModuleDict(
        {
            "custom": Custom(EMBED, HEADS),
            "quantizable": torch.ao.nn.quantizable.MultiheadAttention(EMBED, HEADS),
            "patched": patched,
            "ours": MultiheadAttention(EMBED, HEADS),
            "plain": nn.MultiheadAttention(EMBED, HEADS),
        }
    )
    report = upgrade(model)
    assert report.swapped == ("plain",)
    assert report.kept.keys() == {"custom", "quantizable", "patched", "ours"}
    assert "Custom is a subclass, whose changes would be lost" in report.kept["custom"]
    assert "quantizable" in report.kept["quantizable"]
    assert "replaced on the instance" in report.kept["patched"]
    assert "already" in report.kept["ours"]
    assert type(model["custom"]) is Custom
    for name, reason in report.kept.items():
        assert f"{name}: {reason}" in str(report)


def test_an_encoder_around_a_kept_layer_keeps_its_fused_path() -> None:
    model = encoder(1)
    model.layers[0].self_attn.__class__ = Custom
    report = upgrade(model)
    assert report.switched_off == {}
    assert model.layers[0].activation_relu_or_gelu == 1


def test_a_model_without_attention() -> None:
    report = upgrade(nn.Linear(3, 4))
    assert (report.swapped, report.kept, report.switched_off) == ((), {}, {})
    assert report.change.largest == 0
    assert str(report).startswith("Upgrade: 0 layers swapped, 0 kept")
    assert "The model has no torch.nn.MultiheadAttention" in str(report)
    assert "register_huggingface" not in str(report)


def test_a_model_of_transformers_is_pointed_to_its_own_function() -> None:
    model = nn.Linear(3, 4)
    model.config = SimpleNamespace(model_type="llama")
    assert "headwise.register_huggingface()" in str(upgrade(model))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_output_of_padded_positions_is_explained_in_the_same_line() -> None:
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[0, -2:] = True
    lines = str(upgrade(encoder(), X, src_key_padding_mask=padding)).splitlines()
    (line,) = [line for line in lines if "output of the model" in line]
    assert "padded positions" in line
    assert sum("padded positions" in line for line in lines) == 1


def test_a_layer_that_cannot_be_measured_does_not_stop_the_others() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    model = nn.ModuleList([nn.MultiheadAttention(8, 2) for _ in range(3)])
    model[0].out_proj = Wrapped(model[0].out_proj)
    model[1].out_proj.to(torch.float64)
    report = upgrade(model)
    assert report.swapped == ("0", "1", "2")
    assert report.change.layers["2"].verdict
    assert [report.change.layers[n].difference for n in "01"] == [None, None]
    assert "several dtypes" in str(report)
    assert "not measured: 2" in str(report)


def test_a_model_that_fails_afterwards_is_as_it_was() -> None:
    # torch runs the hint without a mask as full attention; the drop-in refuses it.
    model = encoder()
    for layer in model.layers:
        layer.forward = lambda x, *_, layer=layer, **__: Layer.forward(layer, x, is_causal=True)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        upgrade(model, X)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.use_nested_tensor is True
    assert model.layers[0].activation_relu_or_gelu == 1


def test_the_measured_change_can_be_large() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = encoder(1)
    model.layers[0].self_attn.out_proj.__class__ = Doubled
    report = upgrade(model, X)
    assert report.change.largest > 0.1
    assert report.change.layers["layers.0.self_attn"].verdict is None  # it is no error
    assert "out_proj is a Doubled, which is now called" in str(report)


def test_outputs_of_any_shape() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)

        def forward(self, x: Tensor, *, scale: float) -> dict[str, object]:
            output, weights = self.attention(x, x, x)
            return {"outputs": [scale * output, None], "weights": (weights, x.argmax(-1))}

    model = Model()
    report = upgrade(model, X, scale=3.0)
    assert report.change.output.scale > 0
    assert report.change.largest < 1e-5
    assert model.training


def test_the_report_reads_well() -> None:
    text = str(upgrade(encoder(6), X))
    assert text.startswith("Upgrade: 6 layers swapped, 0 kept")
    assert "layers.0.self_attn" in text
    assert "... and 2 more" in text
    assert "output of the model:" in text
    assert "6 of 6 within the error budget" in text
