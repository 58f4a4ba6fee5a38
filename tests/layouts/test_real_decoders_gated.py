"""Decoders with an output gate: the real Qwen3-Next of transformers, through every room."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import headwise
from headwise import Attention, Layout, Mask, Rotary, convert
from headwise.checkpoints import load_attention
from headwise.checkpoints.description import open_checkpoint
from headwise.cli.convert import convert as convert_command
from headwise.identify.results import Verdict
from headwise.layers.norm import QKNorm
from headwise.layouts.equality import same_bytes
from headwise.layouts.registry import layout
from headwise.scanning.importance import ablations, gradients
from tests.cli.alone import Alone
from tests.layouts.captured import THETA, angles, captured, model_of
from tests.layouts.real import Real, assert_gives, assert_same_function
from tests.quick import others_slow

HEADS, KV_HEADS, HEAD_DIM, EMBED, LENGTH = 6, 2, 16, 40, 19
PLACE = "model.layers.1.self_attn"
ROTARY = Rotary(theta=THETA, width=HEAD_DIM // 4)
SIZES: dict[str, Any] = {
    "hidden_size": EMBED,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def real(*, attention_bias: bool = True) -> Real:
    model = model_of("Qwen3NextConfig", **SIZES, **angles(0.25), attention_bias=attention_bias)
    options = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "rotary": ROTARY}
    norm = QKNorm(one_plus=True, eps=model.config.rms_norm_eps)
    return captured(model, "layers.1.self_attn", options=options | {"qk_norm": norm})


CASES = {"qwen3-next": real}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A causal language model in float32 with two layers, of which the second attends."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(vocab_size=50, **SIZES, **angles(0.25))
    torch.manual_seed(0)
    found: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            nn.init.normal_(parameter, std=0.3)
    return found


@pytest.fixture(scope="module")
def stored(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-next")
    model.save_pretrained(folder)
    return folder


def tokens() -> Tensor:
    return torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(2))


# ---- the layout --------------------------------------------------------------------------------


@pytest.mark.parametrize("attention_bias", [True, False])
def test_same_function(attention_bias: bool) -> None:
    assert_same_function("qwen3-next", real(attention_bias=attention_bias))


def test_the_function_fails_with_queries_and_gates_exchanged() -> None:
    given = real()
    exchanged = {
        name: text.replace("wq:", "x:").replace("wg:", "wq:").replace("x:", "wg:")
        for name, text in layout("qwen3-next").tensors.items()
    }
    wrong = Layout(
        name="exchanged",
        tensors=exchanged,
        source="",
        function=layout("qwen3-next").function,
    )
    layer = Attention.from_layout(given.state, layout=wrong, **given.options).double()
    with pytest.raises(AssertionError, match="off by"):
        assert_gives(layer, given)


@torch.no_grad()
def test_steps_with_a_cache_give_the_outputs_of_the_real_module() -> None:
    given = real()
    layer = Attention.from_layout(given.state, layout="qwen3-next", **given.options).double()
    whole = layer(given.x, mask=Mask.causal())
    cache = layer.cache(batch=len(given.x), length=given.x.shape[1])
    parts = [layer(x, mask=Mask.causal(), cache=cache) for x in given.x.split([7, 1, 16], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("other", ["headwise", "canonical"])
@pytest.mark.parametrize("attention_bias", [True, False])
def test_there_and_back_bit_for_bit(other: str, attention_bias: bool) -> None:
    state = {n: x.bfloat16() for n, x in real(attention_bias=attention_bias).state.items()}
    state["q_proj.weight"][3, 2] = -0.0
    counts = {"heads": HEADS, "kv_heads": KV_HEADS}
    there = convert(state, "qwen3-next", other, **counts)
    back = convert(there, other, "qwen3-next", **counts)
    assert back.keys() == state.keys()
    assert all(same_bytes(back[name], x) for name, x in state.items())


# ---- files -------------------------------------------------------------------------------------


def test_a_file_there_and_back_says_that_it_has_gates(stored: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    Alone(convert_command).run(stored, there, "--to", "megatron-gated")
    description = open_checkpoint(there, {}).description
    assert description is not None
    assert description.layout.function.output_gate == "channel"
    Alone(convert_command).run(there, back, "--to", "qwen3-next")
    before, after = (load_file(folder / "model.safetensors") for folder in (stored, back))
    assert before.keys() == after.keys()
    assert all(same_bytes(after[name], x) for name, x in before.items())
    report = headwise.verify(stored, there, outputs=True)
    assert report
    assert "output" in str(report)
    layer = load_attention(there, layer=1)
    assert layer.output_gate == "channel"
    assert layer.rotary == ROTARY


def test_verify_sees_gates_of_another_head(stored: Path, tmp_path: Path) -> None:
    state = load_file(stored / "model.safetensors")
    rows = state[f"{PLACE}.q_proj.weight"].unflatten(0, (HEADS, 2, HEAD_DIM))
    rows[[1, 2], 1] = rows[[2, 1], 1]
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(stored / "config.json", tmp_path)
    report = headwise.verify(stored, tmp_path, outputs=True)
    assert not report
    assert "gate of heads 1 and 2" in str(report)


def test_detect(stored: Path) -> None:
    assert headwise.detect(stored).require_only_layout().name == "qwen3-next"
    # Names and shapes alone tell it from layouts with as many rows as heads have channels.
    state = load_file(stored / "model.safetensors")
    found = headwise.detect(state, heads=HEADS).require_only_layout()
    assert found.name == "qwen3-next"


# ---- running -----------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", others_slow([LENGTH, 1], 1))
def test_compare_with_the_real_module(model: nn.Module, stored: Path, queries: int) -> None:
    module, layer = model.get_submodule(PLACE), load_attention(stored, layer=1)
    x = torch.randn(2, queries, EMBED, generator=torch.Generator().manual_seed(5))
    # One key has all of the weight, whatever the scores are.
    expected = Verdict.INCONCLUSIVE if queries == 1 else Verdict.UNDER_MASK
    assert headwise.compare(module, layer, x).verdict is expected
    layer.gate_proj = layer.output_gate = None
    for pair in ((module, layer), (layer, module)):
        diagnosis = headwise.compare(*pair, x)
        assert not diagnosis
        assert diagnosis.function is not None
        assert [each.name for each in diagnosis.function.causes] == ["output gate missing"]


@pytest.mark.slow
def test_compare_of_models_names_a_gate_that_is_not_applied(model: nn.Module) -> None:
    x = {"input_ids": tokens()}
    assert headwise.compare(copy.deepcopy(model), model, x)
    ungated, seen = copy.deepcopy(model), {}
    module = ungated.get_submodule(PLACE)
    module.q_proj.register_forward_hook(lambda _, __, rows: seen.update(rows=rows))

    def undo_gate(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        gates = seen["rows"].unflatten(-1, (HEADS, 2, HEAD_DIM))[:, :, :, 1].flatten(2)
        return args[0] / torch.sigmoid(gates)

    module.o_proj.register_forward_pre_hook(undo_gate)
    diagnosis = headwise.compare(ungated, model, x)
    assert diagnosis.model is not None
    [layer] = diagnosis.model.layers
    assert [each.name for each in layer.comparison.causes] == ["output gate missing"]


# ---- a scan ------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_scan_finds_its_heads_after_the_gate(model: nn.Module, stored: Path) -> None:
    """Contributions, by hand: the input of o_proj through the columns of each head."""
    module, seen = model.get_submodule(PLACE), {}
    with module.o_proj.register_forward_pre_hook(lambda _, args: seen.update(z=args[0])):
        model(tokens())
    heads = seen["z"].unflatten(-1, (HEADS, HEAD_DIM)).double()
    weight = module.o_proj.weight.double().unflatten(1, (HEADS, HEAD_DIM))
    norms = torch.einsum("bqhd,ehd->bhqe", heads, weight).norm(dim=-1).mean((0, 2))
    found = headwise.scan(model, {"input_ids": tokens()})
    assert found.layers == (PLACE,)
    assert found["contribution_norm"].shape == (1, HEADS)
    torch.testing.assert_close(found["contribution_norm"][0], norms, rtol=1e-5, atol=0)


def test_importance_is_that_of_the_gated_outputs(model: nn.Module) -> None:
    """Off means that the head's columns of o_proj get zeros, whatever its gate is."""
    x, module = {"input_ids": tokens()}, model.get_submodule(PLACE)

    def losses() -> Tensor:
        with torch.no_grad():
            logits = model(**x).logits[:, :-1].double()
        return nn.functional.cross_entropy(
            logits.transpose(1, 2), tokens()[:, 1:], reduction="none"
        ).mean(1)

    before, off = losses(), []
    for head in range(HEADS):
        with torch.no_grad():
            kept = module.o_proj.weight.clone()
            module.o_proj.weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0
        off.append((losses() - before).mean())
        with torch.no_grad():
            module.o_proj.weight.copy_(kept)
    found = ablations(model, x)["ablation_zero"][0]
    torch.testing.assert_close(found, torch.stack(off).to(found), rtol=1e-4, atol=1e-5)
    assert (gradients(model, x)["gate_gradient"] > 0).all()
