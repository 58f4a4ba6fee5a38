"""`compare` on whole models of transformers and on their attention modules."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    FalconConfig,
    FalconModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.dia.configuration_dia import DiaDecoderConfig
from transformers.models.dia.modeling_dia import DiaCrossAttention

from headwise import Attention, Rotary, compare
from headwise.diagnosis.simulation.model import Inputs
from headwise.diagnosis.subjects.transformers import TransformersSubject
from headwise.errors import OptionError, ShapeError
from headwise.identify.comparison import ModelComparison
from headwise.identify.results import Diagnosis, Verdict
from headwise.layers.hooks import record_modules
from tests.diagnosis.test_stopped import interrupt_at
from tests.quick import others_slow

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}


TOKENS = torch.arange(26).reshape(2, 13)


def llama(theta: float = 1e4, **sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    rotation = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(**SIZES | sizes, num_key_value_heads=2, rope_parameters=rotation)
    return LlamaForCausalLM(config)


def bart() -> BartModel:
    counts = ("encoder_layers", "decoder_layers")
    heads = ("encoder_attention_heads", "decoder_attention_heads")
    widths = ("encoder_ffn_dim", "decoder_ffn_dim")
    sizes = dict.fromkeys(counts, 2) | dict.fromkeys(heads, 6) | dict.fromkeys(widths, 64)
    return BartModel(BartConfig(vocab_size=97, d_model=48, **sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=6)),
    "bert": lambda: BertModel(BertConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=5)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=48, d_ff=64, num_layers=2, num_heads=6, d_kv=8)
    ),
    "bart": bart,
}


def compared(first: nn.Module, second: nn.Module) -> tuple[Diagnosis, ModelComparison]:
    diagnosis = compare(first, second)
    assert diagnosis.model is not None
    return diagnosis, diagnosis.model


def names(comparison: ModelComparison) -> dict[str, list[str]]:
    return {
        layer.name: [cause.name for cause in layer.comparison.causes]
        for layer in comparison.differing_layers
    }


@pytest.mark.parametrize("name", others_slow(MODELS, "llama", "bert"))
def test_every_attention_of_a_model_is_read_as_data(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    diagnosis, comparison = compared(model, copy.deepcopy(model))
    assert diagnosis.verdict is Verdict.SAME
    assert not [layer.name for layer in comparison.layers if layer.note]
    counts = {"llama": 3, "gpt2": 2, "bert": 3, "gemma2": 3, "qwen3": 3, "t5": 6, "bart": 6}
    assert len(comparison.layers) == counts[name]


@pytest.mark.slow
def test_another_theta_is_named_in_every_layer() -> None:
    good, ported = llama(), llama(theta=5e5)
    ported.load_state_dict(good.state_dict())
    before = copy.deepcopy(good.state_dict())
    implementation = good.config._attn_implementation
    good.train()
    diagnosis, comparison = compared(ported, good)
    assert diagnosis.verdict is Verdict.DIFFERENT
    layers = [f"model.layers.{n}.self_attn" for n in range(3)]
    assert names(comparison) == {layer: ["rotary theta"] for layer in layers}
    assert [layer.has_other_input for layer in comparison.layers] == [False, True, True]
    assert "the same in 2 more: `model.layers.1.self_attn`" in str(diagnosis)
    # The models are not changed.
    assert good.training
    assert good.config._attn_implementation == implementation
    assert all(torch.equal(x, before[name]) for name, x in good.state_dict().items())


@pytest.mark.slow
def test_falcon_adds_its_bias_twice_on_its_eager_path(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {n: SIZES[n] for n in ("vocab_size", "hidden_size", "num_attention_heads")}
    config = FalconConfig(**sizes, num_hidden_layers=1, alibi=True)
    eager, sdpa = (
        FalconModel._from_config(copy.deepcopy(config), attn_implementation=way).eval()
        for way in ("eager", "sdpa")
    )
    eager.load_state_dict(sdpa.state_dict())
    _, model = compared(eager, sdpa)
    [cause] = model.layers[0].comparison.causes
    assert cause.name == "distance bias coefficient"
    assert cause.parameters["coefficient"] == pytest.approx(2)
    sdpa.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="rounds its distance bias"):
        assert compare(sdpa, tmp_path, TOKENS).verdict.is_same


def test_documents_of_a_row_that_see_each_other_are_named() -> None:
    """transformers reads packed positions only where no cache is used."""
    isolated = llama(num_hidden_layers=2)
    leaking = copy.deepcopy(isolated)
    isolated.config.use_cache, leaking.config.use_cache = False, True
    places = torch.cat([torch.arange(6), torch.arange(7)])[None]
    inputs = {"input_ids": TOKENS[:1], "position_ids": places}
    seen = "positions 6 to 12 of the {} also see keys 0 to 5"
    for pair, side in (((leaking, isolated), "first"), ((isolated, leaking), "second")):
        comparison = compare(*pair, inputs).model
        assert comparison is not None
        first, other = comparison.layers
        assert first.comparison.isolated == (seen.format(side),)
        assert f"  {seen.format(side)}" in first.lines
        assert other.note.endswith(seen.format(side))


@pytest.mark.slow
def test_a_fault_in_one_layer_is_not_seen_in_those_after_it() -> None:
    good = llama()
    ported = copy.deepcopy(good)
    with torch.no_grad():
        weight = ported.model.layers[1].self_attn.o_proj.weight
        weight.copy_(weight.mT.clone())
    diagnosis, comparison = compared(ported, good)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert names(comparison) == {"model.layers.1.self_attn": ["square matrix transposed"]}


def test_exchanged_layers_are_named() -> None:
    good = llama()
    ported = copy.deepcopy(good)
    layers = ported.model.layers
    layers[0].self_attn, layers[2].self_attn = layers[2].self_attn, layers[0].self_attn
    diagnosis, comparison = compared(ported, good)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert {layer.name: layer.exchanged_with for layer in comparison.differing_layers} == {
        "model.layers.0.self_attn": "model.layers.2.self_attn",
        "model.layers.2.self_attn": "model.layers.0.self_attn",
    }


def test_a_difference_outside_attention_is_placed() -> None:
    good = llama()
    ported = copy.deepcopy(good)
    with torch.no_grad():
        ported.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    diagnosis, comparison = compared(ported, good)
    assert diagnosis.verdict is Verdict.UNKNOWN
    assert not comparison.differing_layers
    place = "between `model.layers.1.self_attn` and `model.layers.2.self_attn`"
    assert comparison.difference_outside_attention == place
    with torch.no_grad():
        good.model.norm.weight.mul_(1.01)
    assert compared(good, llama())[1].difference_outside_attention == "after the last attention"


@pytest.mark.slow
def test_a_cast_model_has_rounded_weights_and_rounded_frequencies() -> None:
    good = llama(num_hidden_layers=1)
    cast = copy.deepcopy(good).bfloat16()  # also rounds inv_freq, unlike loading in bfloat16
    _, comparison = compared(cast, good)
    expected = ["dtype's rounding of weights", "rotary dtype"]
    assert names(comparison)["model.layers.0.self_attn"] == expected


def test_other_numbers_of_layers_are_refused() -> None:
    with pytest.raises(OptionError, match="3 attentions in a, 2 in b"):
        compare(llama(), llama(num_hidden_layers=2))


@pytest.mark.slow
def test_a_module_is_compared_with_its_port() -> None:
    module = llama(theta=5e5).model.layers[1].self_attn
    options = {"layout": "llama", "num_heads": 6, "num_kv_heads": 2}
    port = Attention.from_layout(module.state_dict(), rotary=Rotary(theta=5e5), **options)
    assert compare(port, module).verdict is Verdict.UNDER_MASK
    assert compare(module, port).verdict is Verdict.UNDER_MASK
    wrong = Attention.from_layout(module.state_dict(), rotary=Rotary(), **options)
    diagnosis = compare(wrong, module)
    assert diagnosis.function is not None
    assert [cause.name for cause in diagnosis.function.causes] == ["rotary theta"]
    assert diagnosis.function.causes[0].repair == "Rotary(theta=500000)"


@pytest.mark.parametrize(
    ("name", "path"),
    others_slow(
        [
            ("gpt2", "transformer.h.1.attn"),
            ("bert", "encoder.layer.1.attention"),
            ("qwen3", "model.layers.1.self_attn"),
            ("bart", "decoder.layers.1.encoder_attn"),
        ]
    ),
)
def test_modules_run_by_their_own_signature(name: str, path: str) -> None:
    module = MODELS[name]().get_submodule(path)
    assert compare(copy.deepcopy(module), module).verdict is Verdict.SAME


def gpt2_port(module: nn.Module, x: torch.Tensor, *, causal: bool) -> torch.Tensor:
    q, k, v = (
        part.unflatten(2, (6, 8)).transpose(1, 2)
        for part in (x @ module.c_attn.weight + module.c_attn.bias).split(48, 2)
    )
    heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return heads.transpose(1, 2).flatten(2) @ module.c_proj.weight + module.c_proj.bias


def test_a_causal_module_runs_causally_alone() -> None:
    module = MODELS["gpt2"]().get_submodule("transformer.h.1.attn")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    for implementation in ("eager", "sdpa"):
        module.config._attn_implementation = implementation
        assert compare(lambda x: gpt2_port(module, x, causal=True), module).verdict.is_same
        forgot = compare(
            lambda x: gpt2_port(module, x, causal=False), module, progress=interrupt_at("trying")
        )
        assert not forgot.verdict.is_same
        assert forgot.verdict is not Verdict.INCONCLUSIVE


@pytest.mark.slow
def test_a_causal_module_beside_a_layer_that_takes_the_mask_from_its_caller() -> None:
    module = llama().model.layers[1].self_attn
    options = {"layout": "llama", "num_heads": 6, "num_kv_heads": 2, "rotary": Rotary()}
    port = Attention.from_layout(module.state_dict(), **options)
    diagnosis = compare(module, port, torch.randn(2, 13, 48))
    assert diagnosis.verdict.is_same
    assert "your input of 13 tokens under a causal mask" in str(diagnosis)
    causal = Attention.from_layout(module.state_dict(), **options, window=(None, 0))
    assert compare(lambda x: causal(x), module).verdict.is_same
    forgot = compare(lambda x: port(x), module)
    assert forgot.function is not None
    assert forgot.function.cause_names == ["causal mask missing"]


@pytest.mark.slow
def test_a_module_alone_has_the_window_of_its_config() -> None:
    torch.manual_seed(0)
    module = (
        MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5))
        .model.layers[1]
        .self_attn
    )
    options = {"layout": "llama", "num_heads": 6, "num_kv_heads": 2, "rotary": Rotary()}
    port, full = (
        Attention.from_layout(module.state_dict(), **options, window=window)
        for window in ((4, 0), (None, 0))
    )
    assert compare(lambda x: port(x), module).verdict.is_same
    stop = interrupt_at("trying")  # the outputs alone
    assert compare(lambda x: full(x), module, progress=stop).verdict is Verdict.UNKNOWN


@pytest.mark.slow
def test_a_module_that_names_its_mask_otherwise_gets_it() -> None:
    module = MODELS["t5"]().eval().get_submodule("encoder.block.0.layer.0.SelfAttention")

    def run(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        added = None if mask is None else torch.where(mask, 0.0, torch.finfo(x.dtype).min)
        output: torch.Tensor = module(x, mask=added)[0]
        return output

    assert compare(run, module).verdict.is_same
    diagnosis = compare(lambda x, mask=None: run(x), module)
    assert diagnosis.function is not None
    assert diagnosis.function.cause_names == ["padding ignored"]


@pytest.mark.slow
def test_a_softcap_that_no_score_reaches_is_inconclusive() -> None:
    good = gemma(window=5)
    config = copy.deepcopy(good.config)
    config.attn_logit_softcapping = None
    ported = Gemma2ForCausalLM(config)
    ported.load_state_dict(good.state_dict())
    diagnosis = compare(ported, good)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "the softcap is 50 in the second, and inputs of 24 tokens do not show" in str(diagnosis)
    with torch.no_grad():
        for model in (ported, good):
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(4000)
    assert compare(ported, good).verdict in (Verdict.DIFFERENT, Verdict.UNKNOWN)


@pytest.mark.slow
def test_a_module_that_counts_its_positions_itself_gets_them() -> None:
    model = GPTJModel(GPTJConfig(vocab_size=97, n_embd=48, n_layer=1, n_head=6, rotary_dim=4))
    assert compare(copy.deepcopy(model.h[0].attn), model.h[0].attn).verdict is Verdict.SAME


class Noisy(nn.Module):
    """A model with noise that eval() leaves on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.config = self.model.config

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids).logits
        return logits + 1e-3 * torch.randn_like(logits)


def test_noise_of_a_model_is_no_rounding() -> None:
    noisy = Noisy()
    for pair in ((noisy, noisy.model), (noisy.model, noisy)):
        with pytest.raises(OptionError, match="Noisy with other outputs in a second run"):
            compare(*pair)


def test_a_module_without_its_output_projection_is_a_function() -> None:
    module = MODELS["bert"]().get_submodule("encoder.layer.1.attention.self")
    assert compare(copy.deepcopy(module), module).verdict is Verdict.SAME


@pytest.mark.parametrize("is_two_sided", [True, False])
def test_a_window_of_a_config_is_that_of_the_module_and_of_the_folder(
    is_two_sided: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8}
    kinds: Any = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    config = Gemma3TextConfig(**sizes, **kinds, use_bidirectional_attention=is_two_sided)
    model = Gemma3TextModel(config).double().eval()
    module = model.layers[0].self_attn
    with record_modules([module]) as passes, torch.no_grad():
        model(TOKENS)
    [run] = passes[module]
    subject = TransformersSubject(module)
    assert subject.model is not None
    assert subject.model.settings.sides == ((4, 4) if is_two_sided else (7, None))
    x = run.kwargs["hidden_states"]
    assert torch.equal(subject.output(Inputs(x)), run.output[0])
    model.save_pretrained(tmp_path)
    assert compare(model, tmp_path, TOKENS).verdict.is_same


def test_a_model_is_compared_with_stored_weights(tmp_path: Path) -> None:
    good = llama()
    good.save_pretrained(tmp_path / "original")
    assert compare(good, tmp_path / "original").verdict is Verdict.TO_ROUNDING
    with torch.no_grad():
        good.model.layers[2].self_attn.v_proj.weight.neg_()
    for pair in ((good, tmp_path / "original"), (tmp_path / "original", good)):
        diagnosis = compare(*pair)
        assert diagnosis.verdict is Verdict.DIFFERENT
        assert diagnosis.model is not None
        [layer] = diagnosis.model.differing_layers
        assert layer.comparison.causes[0].name == "sign"
        assert layer.name.endswith(("layers.2.self_attn", "layer 2 of original"))


def gemma(window: int) -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, sliding_window=window))


@pytest.mark.parametrize(("window", "named"), others_slow([(5, 5), (8, 8), (99, None)]))
def test_a_window_of_a_mask_is_named(window: int, named: int | None) -> None:
    """Nearly equal weights of a narrower window look as if some had been dropped."""
    diagnosis, comparison = compared(gemma(window), gemma(6))
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert comparison.cause_names == ["window off by one" if named else "window missing"]
    [cause] = comparison.differing_layers[0].comparison.causes
    parameters = {"window": named} if named else {}
    assert (cause.parameters, cause.repair) == (parameters, "sliding_window=6")


@pytest.mark.slow
def test_one_token_cannot_show_another_theta() -> None:
    first, second = llama(), llama(theta=5e5)
    token = torch.tensor([[3]])
    diagnosis = compare(first, second, token)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "one key: its weight is 1 whatever the scores are" in str(diagnosis)
    assert compare(first, copy.deepcopy(first), token).verdict is Verdict.SAME
    assert compare(first, second).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize("batch_first", others_slow([True, False]))
def test_a_fault_of_torchs_own_layer_is_placed_in_it(batch_first: bool) -> None:
    """Its output projection is no call of a module, and its tokens may be the first axis."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first)
    good = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    ported = copy.deepcopy(good)
    attention = ported.layers[1].self_attn
    with torch.no_grad():
        attention.out_proj.weight.copy_(attention.out_proj.weight.mT.clone())
    diagnosis = compare(ported, good, torch.randn(7, 5, 32))
    assert diagnosis.model is not None
    assert names(diagnosis.model) == {"layers.1.self_attn": ["square matrix transposed"]}
    assert not diagnosis.model.difference_outside_attention


@pytest.mark.slow
def test_a_source_of_another_name_is_passed_to_a_module() -> None:
    sizes = {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    cross = {"cross_hidden_size": 24} | {f"cross_{name}": size for name, size in sizes.items()}
    config = DiaDecoderConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, **sizes, **cross)
    config._attn_implementation = "eager"
    module = DiaCrossAttention(config, 0)  # which takes cross_attention_states
    without_bias = {f"{name}_bias": False for name in ("q", "k", "v", "out")}
    layer = Attention(32, 4, source_dim=24, scale=1.0, **without_bias)
    state = module.state_dict()
    state["out_proj.weight"] = state.pop("o_proj.weight")
    layer.load_state_dict(state)
    assert compare(module, layer).verdict.is_same
    with torch.no_grad():
        layer.k_proj.weight.mul_(1.5)
    assert not compare(module, layer).verdict.is_same


@pytest.mark.slow
def test_cross_attention_of_torch_is_compared_with_its_weights() -> None:
    torch.manual_seed(0)
    good = nn.Transformer(32, 4, 2, 2, 64, batch_first=True).eval()
    ported = copy.deepcopy(good)
    with torch.no_grad():
        weight = ported.decoder.layers[1].multihead_attn.in_proj_weight
        q, k, v = weight.clone().chunk(3)
        weight.copy_(torch.cat([k, q, v]))
    inputs = {"src": torch.randn(5, 7, 32), "tgt": torch.randn(5, 6, 32)}
    diagnosis = compare(ported, good, inputs)
    assert diagnosis.model is not None
    assert not [layer for layer in diagnosis.model.layers if layer.note]
    faults = {"decoder.layers.1.multihead_attn": ["q and k exchanged"]}
    assert names(diagnosis.model) == faults


def mistral(window: int, dropout: float = 0.0) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=window,
        attention_dropout=dropout,
    )
    return MistralForCausalLM(config)


@pytest.mark.slow
def test_a_window_that_no_input_reaches_is_inconclusive() -> None:
    """24 tokens are within both windows."""
    diagnosis, _ = compared(mistral(30), mistral(31))
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "the window is 30 keys in the first and 31 keys in the second" in str(diagnosis)
    diagnosis = compare(mistral(30), mistral(31), torch.randint(97, (1, 33)))
    assert diagnosis.verdict is Verdict.DIFFERENT


@pytest.mark.slow
def test_a_dropout_shows_in_training_alone() -> None:
    first, second = mistral(30, dropout=0.2).train(), mistral(30).train()
    diagnosis, _ = compared(first, second)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "dropout is 0.2 in the first and 0 in the second" in str(diagnosis)
    diagnosis, _ = compared(first.eval(), second.eval())
    assert diagnosis.verdict is Verdict.SAME


def test_a_model_in_training_is_not_its_twin_in_evaluation() -> None:
    first = mistral(30, dropout=0.2).train()
    diagnosis, _ = compared(first, copy.deepcopy(first).eval())
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert "dropout is 0.2 in the first and 0 in the second" in str(diagnosis)


def albert() -> AlbertModel:
    torch.manual_seed(0)
    return AlbertModel(AlbertConfig(**SIZES, embedding_size=40)).eval()


def test_a_module_that_attends_in_every_layer() -> None:
    """ALBERT runs one module three times; each run is compared with its own input."""
    first, second = albert(), albert()
    diagnosis, comparison = compared(first, second)
    assert diagnosis.verdict is Verdict.SAME
    assert [each.name.partition(" ")[2] for each in comparison.layers] == ["", "(2)", "(3)"]
    [attention] = [m for n, m in second.named_modules() if n.endswith("layers.0.attention")]
    with torch.no_grad():
        attention.query.weight[:8].mul_(3)
    assert not compared(first, second)[0].verdict.is_same


class Decoder(nn.Module):
    """Two layers that decode with caches, in three calls of one forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(97, 48)
        self.layers = nn.ModuleList(
            Attention(48, 6, num_kv_heads=2, rotary=rotary) for rotary in (Rotary(), None)
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            assert isinstance(layer, Attention)
            cache = layer.cache(batch=len(tokens), length=12)
            x = x + torch.cat([layer(part, cache=cache) for part in x.split((5, 4, 3), 1)], 1)
        return x


@pytest.mark.slow
def test_a_module_that_decodes_with_a_cache_in_one_run() -> None:
    first, second = Decoder(), Decoder()
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    diagnosis = compare(first, second, tokens)
    assert diagnosis.verdict is Verdict.SAME
    assert diagnosis.model is not None
    assert len(diagnosis.model.layers) == 6
    with torch.no_grad():
        second.layers[1].v_proj.weight[:8].mul_(3)
    diagnosis = compare(first, second, tokens)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert diagnosis.model is not None
    assert names(diagnosis.model) == {f"layers.1{n}": ["factor"] for n in ("", " (2)", " (3)")}


@pytest.mark.slow
def test_tokens_are_those_that_both_models_know() -> None:
    small = llama()
    large = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 130}, num_key_value_heads=2))
    state = large.state_dict()
    large.load_state_dict(
        {
            n: torch.cat([x, state[n][97:]]) if x.shape != state[n].shape else x
            for n, x in small.state_dict().items()
        }
    )
    _, comparison = compared(small, large)
    assert not comparison.differing_layers
    assert not comparison.layers[0].has_other_input
    assert "the outputs have other shapes" in str(comparison.lines)
    with pytest.raises(OptionError, match="token 120 in input_ids, for a LlamaForCausalLM with a"):
        compare(small, large, torch.full((1, 5), 120))


def test_models_that_cannot_be_compared_say_why() -> None:
    with pytest.raises(ShapeError, match="takes tokens of width 48, `model"):
        compare(llama(), llama(hidden_size=60))
    with pytest.raises(OptionError, match="a LlamaForCausalLM that fails: ValueError") as error:
        compare(llama(), llama(), {"tokens": torch.zeros(1, 3, dtype=torch.long)})
    assert error.value.needed.endswith("on tokens of shape (1, 3)")


class Port(nn.Module):
    """A model whose result has another form than that of transformers."""

    def __init__(self, model: nn.Module, result: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.model, self.result = model, result

    def forward(self, input_ids: torch.Tensor) -> object:
        return self.result(self.model(input_ids).logits)


@dataclass
class Answer:
    scores: torch.Tensor
    loss: None = None


RESULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "a tensor": lambda x: x,
    "a tuple": lambda x: (x, None),
    "a dict with a scalar first": lambda x: {"loss": x.mean(), "scores": x},
    "a dataclass": Answer,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", others_slow(RESULTS, "a dict with a scalar first"))
def test_outputs_of_other_names_are_compared(form: str) -> None:
    good = llama()
    assert compare(Port(good, RESULTS[form]), good, TOKENS).verdict is Verdict.SAME
    diagnosis = compare(Port(good, lambda x: RESULTS[form](x + x.abs())), good, TOKENS)
    assert diagnosis.verdict is Verdict.UNKNOWN, diagnosis
    assert diagnosis.model is not None
    assert diagnosis.model.difference_outside_attention == "after the last attention"
    assert diagnosis.model.output_gap == pytest.approx(1.0)  # |x| beside x


@pytest.mark.parametrize(
    ("result", "words"),
    others_slow(
        [
            (lambda x: x[:, -1], "the output of the first has shape (2, 97)"),
            (lambda x: (x.flatten(), x[0, 0]), "`0` of the first has shape (2522,)"),
            (lambda x: x.argmax(-1), "the first returns no tensor of floating-point numbers"),
        ]
    ),
)
def test_outputs_without_a_counterpart_are_not_compared(
    result: Callable[[torch.Tensor], object], words: str
) -> None:
    good = llama()
    diagnosis = compare(Port(good, result), good, TOKENS)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE, diagnosis
    assert f"the outputs were not compared: {words}" in str(diagnosis)
    assert diagnosis.as_dict()["model"]["output_gap"] is None


@pytest.mark.slow
def test_a_cause_is_named_where_outputs_have_no_counterpart() -> None:
    good, ported = llama(), llama(theta=5e5)
    ported.load_state_dict(good.state_dict())
    diagnosis = compare(Port(ported, lambda x: x[:, -1]), good, TOKENS)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert diagnosis.model is not None
    assert diagnosis.model.cause_names == ["rotary theta"]
    assert "the outputs were not compared" in str(diagnosis)
