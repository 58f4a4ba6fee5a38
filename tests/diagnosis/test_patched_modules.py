"""Attention modules of transformers whose ``forward`` was changed, alone and in their models."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    DeepseekV3Config,
    FalconConfig,
    FalconModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Phi3Config,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3Attention

from headwise import compare
from headwise.diagnosis.attentions import Comparison
from headwise.diagnosis.probes import choose_inputs
from headwise.diagnosis.subjects.transformers import TransformersSubject
from headwise.errors import OptionError
from headwise.identify import Diagnosis, Verdict
from headwise.identify.catalogue import CAUSES
from tests.quick import others_extra, others_slow

WIDTH, HEADS, HEAD_DIM = 48, 6, 8
TOKENS = torch.arange(26).reshape(2, 13)
EAGER: Any = {"attn_implementation": "eager"}
SIZES: Any = {
    "vocab_size": 97,
    "hidden_size": WIDTH,
    "intermediate_size": 50,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    **EAGER,
}


def spread(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def llama() -> Any:
    return spread(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)))


def gpt2() -> Any:
    return spread(
        GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=WIDTH, n_layer=1, n_head=HEADS, **EAGER))
    )


def bert() -> Any:
    return spread(BertModel(BertConfig(**SIZES)))


def bart() -> Any:
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS)
    counts: Any = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 50)
    return spread(
        BartModel(BartConfig(vocab_size=97, d_model=WIDTH, **counts, **heads, **widths, **EAGER))
    )


Project = Callable[[Any, Tensor], tuple[Tensor, ...]]
PROJECTIONS: dict[str, Project] = {
    "llama": lambda m, x: (m.q_proj(x), m.k_proj(x), m.v_proj(x)),
    "gpt2": lambda m, x: m.c_attn(x).split(WIDTH, 2),
    "bert": lambda m, x: (m.query(x), m.key(x), m.value(x)),
    "bart": lambda m, x: (m.q_proj(x), m.k_proj(x), m.v_proj(x)),
}


def attend(family: str, fault: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a forward written anew, which keeps no cache, with a fault."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        rows = PROJECTIONS[family](self, hidden_states)
        q, k, v = (x.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for x in rows)
        k, v = (v, k) if fault == "exchanged" else (k, v)
        if position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        group = HEADS // k.shape[1]
        k, v = (
            x.repeat(1, group, 1, 1) if fault == "tiled" else x.repeat_interleave(group, 1)
            for x in (k, v)
        )
        scores = q @ k.mT / (WIDTH if fault == "scale" else HEAD_DIM) ** 0.5
        scores = scores if attention_mask is None else scores + attention_mask
        if fault == "plus one":
            scores = nn.functional.pad(scores, (0, 1))
        weights = scores.softmax(-1)[..., : k.shape[2]]
        mixed = weights @ v
        mixed = mixed if fault == "merge" else mixed.transpose(1, 2)
        mixed = mixed.reshape(hidden_states.shape)
        names = ("o_proj", "c_proj", "out_proj")
        for name in (each for each in names if hasattr(self, each)):  # BERT's is another part
            mixed = getattr(self, name)(mixed)
        return (mixed + hidden_states if fault == "residual" else mixed), weights

    return forward


def bind(module: nn.Module, forward: Any) -> None:
    module.forward = MethodType(forward, module)


def derive(module: nn.Module, forward: Any) -> None:
    module.__class__ = type("Derived", (type(module),), {"forward": forward})


def close_over(module: nn.Module, forward: Any) -> None:
    """Patch a module by a function that holds it, which a copy then runs."""
    module.forward = lambda *args, **kwargs: forward(module, *args, **kwargs)


def attentions(model: nn.Module) -> list[nn.Module]:
    names = ("LlamaAttention", "GPT2Attention", "BertSelfAttention", "BartAttention")
    classes = ({each.__name__ for each in type(module).__mro__} for module in model.modules())
    return [x for x, kinds in zip(model.modules(), classes, strict=True) if kinds & {*names}]


FAMILIES = {"llama": llama, "gpt2": gpt2, "bert": bert, "bart": bart}
CASES = [
    ("llama", "scale", bind, "scale"),
    ("gpt2", "merge", derive, "merge without transpose"),
    ("bert", "exchanged", close_over, "k and v exchanged"),
    ("llama", "plus one", derive, "sinks"),
    ("llama", "tiled", close_over, "kv heads tiled instead of repeated"),
    ("bart", "residual", close_over, "residual inside"),
]


@pytest.mark.parametrize(("family", "fault", "patch", "cause"), others_slow(CASES, CASES[0]))
def test_a_fault_of_a_module_alone(family: str, fault: str, patch: Any, cause: str) -> None:
    good = FAMILIES[family]()
    bad = copy.deepcopy(good)
    for module in attentions(bad):
        patch(module, attend(family, fault))
    path = "encoder.layer.0.attention" if family == "bert" else ""
    first, second = (
        model.get_submodule(path) if path else attentions(model)[0] for model in (bad, good)
    )
    sides = TransformersSubject(first), TransformersSubject(second)
    tried = [each for each in CAUSES if each.name in {case[3] for case in CASES}]
    function = Comparison(*sides, choose_inputs(*sides, None), tried).diagnosis().function
    assert function is not None
    assert function.cause_names == [cause]
    assert not function.unexplained_places
    ran = "ran as it was given, in float32" in str(function.isolated)
    assert ran is (patch is close_over)


@pytest.mark.parametrize(
    ("family", "fault", "patch", "cause"), others_extra(CASES[:-1], CASES[1], quick=CASES[:1])
)
def test_a_fault_of_the_modules_of_a_model(family: str, fault: str, patch: Any, cause: str) -> None:
    good = FAMILIES[family]()
    bad = copy.deepcopy(good)
    for module in attentions(bad):
        patch(module, attend(family, fault))
    model = compare(bad, good, TOKENS).model
    assert model is not None
    assert model.cause_names == [cause]
    assert not model.unexplained_places
    assert ("ran as it was given" in model.kinds[0]) is (patch is close_over)


def named_in_model(diagnosis: Diagnosis) -> list[str]:
    assert diagnosis.model is not None
    assert not diagnosis.model.unexplained_places
    return diagnosis.model.cause_names


def test_a_closure_around_the_forward_of_a_model() -> None:
    good = llama()
    bad = copy.deepcopy(good)
    module = attentions(bad)[0]
    before: Any = module.forward
    module.forward = lambda *args, **kwargs: before(*args, **{**kwargs, "attention_mask": None})
    assert named_in_model(compare(bad, good, TOKENS)) == ["causal mask missing"]


def test_a_decoder_that_reads_in_both_directions() -> None:
    """torch's kernel reads a mask of float32 beside queries of float64, and past its end."""

    class Both(LlamaModel):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
            shape = (1, 1, *TOKENS.shape[1:], *TOKENS.shape[1:])
            return super().forward(input_ids, attention_mask=torch.zeros(shape), **more)

    config = LlamaConfig(**SIZES | {"attn_implementation": "sdpa"})
    good = spread(LlamaForCausalLM(config))
    bad = copy.deepcopy(good)
    bad.model.__class__ = Both
    assert named_in_model(compare(bad, good, TOKENS)) == ["causal mask missing"]


@pytest.mark.slow
def test_rows_of_queries_and_gates_in_another_order() -> None:
    """A rotation of 3 of 12 channels turns 4, by frequencies that are powers by thirds.

    The layer before has products too, whose number changes with the length.
    """
    linear = ("linear_num_value_heads", "linear_num_key_heads")
    sizes: Any = dict.fromkeys(linear, 2) | {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 20,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "head_dim": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    good = spread(Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES | sizes)))
    good.set_experts_implementation("eager")
    bad = copy.deepcopy(good)
    rows = good.model.layers[1].self_attn.q_proj.weight.data
    flat = rows.unflatten(0, (4, 2, 12)).transpose(0, 1).flatten(0, 2)
    bad.model.layers[1].self_attn.q_proj.weight.data = flat.contiguous()
    assert named_in_model(compare(bad, good, TOKENS)) == ["nesting of fused rows"]


def latent() -> nn.Module:
    sizes: Any = {"q_lora_rank": 16, "kv_lora_rank": 12, "v_head_dim": 8}
    sizes |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "num_key_value_heads": HEADS}
    return DeepseekV3Attention(DeepseekV3Config(**SIZES | sizes), 0)


def long_rotation() -> nn.Module:
    rotation = {"rope_type": "longrope", "rope_theta": 1e4}
    factors = {"short_factor": [1.1] * 4, "long_factor": [2.0] * 4}
    lengths: Any = {"max_position_embeddings": 64, "original_max_position_embeddings": 32}
    config = Phi3Config(**SIZES, **lengths, rope_parameters=rotation | factors, pad_token_id=0)
    return Phi3Attention(config, 0)


@pytest.mark.parametrize("make", others_slow([long_rotation, latent]))
def test_modules_without_a_layout_are_compared_as_functions(make: Any) -> None:
    good = spread(make())
    bad = copy.deepcopy(good)
    assert compare(bad, good).verdict is Verdict.SAME
    bad.o_proj.weight.data *= 1.1
    for inputs in (None, torch.randn(2, 12, WIDTH)):
        assert compare(bad, good, inputs).verdict is Verdict.DIFFERENT


def test_the_advice_for_a_module_that_needs_more_runs() -> None:
    config = FalconConfig(
        vocab_size=97, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, alibi=True
    )
    model_b = spread(FalconModel(config))
    model_a, tokens = copy.deepcopy(model_b), TOKENS
    with pytest.raises(OptionError, match="FalconAttention, which fails on tokens") as error:
        compare(model_a.h[0].self_attention, model_b.h[0].self_attention)
    code = error.value.do.partition(": ")[2]
    assert eval(code, {"compare": compare, **locals()}).verdict.is_same


def test_a_forward_without_a_cache_is_not_called_with_one() -> None:
    good = llama()
    bad = copy.deepcopy(good)
    bind(attentions(bad)[0], attend("llama", ""))
    function = compare(attentions(bad)[0], attentions(good)[0]).function
    assert function is not None
    assert not function.parted
    assert "leaves its cache empty" in str(function.unprobed)
