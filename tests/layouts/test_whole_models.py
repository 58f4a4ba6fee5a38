"""Whole models, tensor by tensor, as other projects' own converters make them. On request: see
tests/layouts/test_real_libraries.py.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.layouts.plan import convert
from headwise.support.tensors import same_bytes
from tests.layouts.captured import DIVIDED, GROUPED, VOCABULARY, WHOLE
from tests.layouts.real import sharpen
from tests.layouts.test_real_libraries import flash_module

# What these libraries warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = 2
State = dict[str, Tensor]


def model_of(name: str, **sizes: Any) -> nn.Module:
    """A class of transformers, with a config of its own kind."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    common = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
    model: nn.Module = kind(kind.config_class(**common | sizes))
    sharpen(model)
    return model


def llama() -> nn.Module:
    return model_of("LlamaForCausalLM", **GROUPED)


def lens(kind: str, model: nn.Module, **counts: Any) -> State:
    """TransformerLens's tensors, without what it fills with zeros and masks."""
    conversions = pytest.importorskip("transformer_lens.pretrained.weight_conversions")
    cfg = SimpleNamespace(
        n_layers=LAYERS,
        n_heads=12,
        d_head=10,
        d_mlp=56,
        n_ctx=64,
        n_key_value_heads=None,
        load_in_4bit=False,
        dtype=torch.float32,
        device=None,
    )
    vars(cfg).update(d_vocab=VOCABULARY, d_vocab_out=VOCABULARY, **counts)
    made: State = getattr(conversions, f"convert_{kind}_weights")(model, cfg)
    return {
        name: x.detach()
        for name, x in made.items()
        if x.numel() and x.any() and not name.endswith((".mask", "IGNORE"))
    }


def gpt2_in_lens() -> tuple[State, State, str, str]:
    sizes = {"n_embd": 120, "n_head": 12, "n_layer": LAYERS, "n_positions": 64, "n_inner": 56}
    model = model_of("GPT2LMHeadModel", **sizes)
    theirs = lens("gpt2", model, d_model=120)
    del theirs["unembed.W_U"]  # it stands outside of the model that is converted here
    return model.transformer.state_dict(), theirs, "gpt2", "transformer-lens"


def bert_in_lens() -> tuple[State, State, str, str]:
    model = model_of("BertForPreTraining", **WHOLE)
    theirs = lens("bert", model, d_model=120)
    head = ("mlm_head", "nsp_head", "unembed")
    theirs = {name: x for name, x in theirs.items() if not name.startswith(head)}
    return model.bert.state_dict(), theirs, "bert", "transformer-lens-encoder"


def llama_in_lens() -> tuple[State, State, str, str]:
    model = llama()
    theirs = lens("llama", model, d_model=48, n_key_value_heads=3)
    return model.state_dict(), theirs, "llama", "transformer-lens-gqa"


def llama_in_litgpt() -> tuple[State, State, str, str]:
    converter = pytest.importorskip("litgpt.scripts.convert_hf_checkpoint")
    config = pytest.importorskip("litgpt.config").Config(
        mlp_class_name="LLaMAMLP", intermediate_size=56
    )
    state, theirs = llama().state_dict(), dict[str, Tensor]()
    converter.copy_weights_hf_llama(config, {}, theirs, dict(state))
    return state, theirs, "llama", "litgpt"


def llama_in_torchtune() -> tuple[State, State, str, str]:
    converter = pytest.importorskip("torchtune.models.convert_weights")
    state = llama().state_dict()
    theirs = converter.hf_to_tune(state, num_heads=12, num_kv_heads=3, dim=48, head_dim=10)
    return state, theirs, "llama", "torchtune"


def llama_in_flash_attn() -> tuple[State, State, str, str]:
    converter = flash_module("models.llama")
    state = model_of("LlamaForCausalLM", **DIVIDED).state_dict()
    config = SimpleNamespace(n_layer=LAYERS, n_head=12, n_embd=120, tie_word_embeddings=False)
    return state, converter.remap_state_dict_hf_llama(state, config), "llama", "flash-attn-llama"


@pytest.mark.parametrize(
    "case",
    [
        gpt2_in_lens,
        bert_in_lens,
        llama_in_lens,
        llama_in_litgpt,
        llama_in_torchtune,
        llama_in_flash_attn,
    ],
)
def test_the_same_tensors(case: Callable[[], tuple[State, State, str, str]]) -> None:
    state, theirs, source, target = case()
    known = {"heads": 12, "kv_heads": 3 if source == "llama" else 12}
    ours = convert(state, source, target, **known)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not same_bytes(ours[name], theirs[name].contiguous())] == []
    back = convert(theirs, target, source, **known)
    assert back.keys() == state.keys()
    assert [name for name in state if not same_bytes(back[name], state[name])] == []


@pytest.mark.parametrize(
    ("target", "fused", "order"),
    [
        ("megatron", "decoder.layers.0.mlp.linear_fc1.weight", ("gate", "up")),
        ("flash-attn-llama", "transformer.layers.0.mlp.fc1.weight", ("up", "gate")),
    ],
)
def test_an_mlp_is_fused_and_taken_apart(target: str, fused: str, order: tuple[str, str]) -> None:
    rows = {"q": (120, 40), "k": (30, 40), "v": (30, 40), "o": (40, 120)}
    shapes = {f"self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
    shapes |= {f"mlp.{name}_proj.weight": (56, 40) for name in ("gate", "up")}
    state = {f"model.layers.0.{name}": torch.randn(shape) for name, shape in shapes.items()}
    made = convert(state, "llama", target, heads=12, kv_heads=3)
    wanted = torch.cat([state[f"model.layers.0.mlp.{name}_proj.weight"] for name in order])
    assert same_bytes(made[fused], wanted)
    back = convert(made, target, "llama", heads=12, kv_heads=3)
    assert back.keys() == state.keys()
    assert [name for name in state if not same_bytes(back[name], state[name])] == []
    # Half of it has no place of its own there: it is passed on.
    gate = "model.layers.0.mlp.gate_proj.weight"
    half = convert({n: x for n, x in state.items() if n != gate}, "llama", target, heads=12)
    assert fused not in half
    assert "model.layers.0.mlp.up_proj.weight" in half
