"""Models in which each query chooses its keys: scans see the weights of the class's eager mode."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import headwise
from headwise.errors import OptionError
from headwise.function.budget import Budget
from headwise.huggingface.attention import attend
from headwise.masks.clauses.chosen import Chosen
from headwise.scanning.call import CapturedCall
from headwise.scanning.record import record_attention
from tests.huggingface.models import lengths_mask, watched
from tests.quick import others_slow
from tests.scanning.statistics.dense_statistics import REFERENCE, Seen

BATCH, LENGTH, EMBED, HEADS, KEPT, BLOCK = 3, 23, 48, 6, 5, 4
SHORT = [LENGTH, 17, 11]
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": EMBED,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 64,
    "mlp_layer_types": ["dense", "dense"],  # rounding must not choose experts
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = SIZES | {
    "head_dim": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 7,
    "index_topk": KEPT,
    "index_n_heads": 9,  # with few, equal scores of 0 are frequent
    "index_head_dim": 14,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32", LATENT),
    "glm_moe_dsa": ("GlmMoeDsa", LATENT | {"indexer_types": ["full", "shared"]}),
    "hy_v4": ("HYV4", LATENT | {"indexer_types": ["full", "shared"]}),
    "axk2": ("AXK2", LATENT),
    "minimax_m3": (
        "MiniMaxM3VLText",
        SIZES
        | {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "rotary_dim": 8,
            "dense_intermediate_size": 40,
            "index_n_heads": 2,
            "index_head_dim": 14,
            "index_block_size": BLOCK,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
        },
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32, implementation: str | None = None) -> Any:
    prefix, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**options)
    if implementation is not None:
        config._attn_implementation = implementation
    model = getattr(transformers, f"{prefix}Model")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in key:
                parameter.normal_(std=0.3)
    return model.to(dtype).eval()


@cache
def eager(name: str, dtype: torch.dtype) -> Any:
    return build(name, dtype, "eager")


def tokens(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, LENGTH, EMBED, generator=torch.Generator().manual_seed(3))


def weights_of(model: Any, x: Tensor, **inputs: Any) -> Tensor:
    """The class's weights, (layers, batch, heads, queries, keys)."""
    outputs = model(inputs_embeds=x, output_attentions=True, **inputs)
    return torch.stack(outputs.attentions)


def budget(function: Callable[[Tensor], Tensor], x: Tensor) -> Budget:
    """What rounding may do, in which no key is chosen for another."""
    with torch.no_grad():
        made = Budget.for_function(function, x, name="weights")
    assert made.allowed.max() < 1e-4
    return made


def recorded(model: Any, x: Tensor, **inputs: Any) -> list[CapturedCall]:
    calls: list[CapturedCall] = []
    with record_attention(model, on_complete=calls.append):
        model(inputs_embeds=x, **inputs)
    return calls


def chosen_of(call: CapturedCall) -> Chosen:
    [clause] = call.matrix.mask.clauses_of_kind(Chosen)
    return clause


@pytest.mark.parametrize("side", [None, "right"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_class(name: str, side: str | None) -> None:
    mask = lengths_mask(SHORT if side else [LENGTH] * BATCH, LENGTH, side="right")
    real, x = mask.bool(), tokens()

    def at_real_queries(weights: Tensor) -> Tensor:
        return weights.transpose(2, 3)[:, real]

    made = budget(
        lambda x: at_real_queries(weights_of(eager(name, x.dtype), x, attention_mask=mask)), x
    )
    calls = recorded(build(name), x, attention_mask=mask)
    made.assert_holds(at_real_queries(torch.stack([call.matrix.dense() for call in calls])))
    assert len(calls) == 2
    for call in calls:
        # The causal mask stays a band, and a key that no query chose is a token.
        assert call.matrix.bound_mask.reach == (None, 0)
        assert (call.own_key, call.is_cross) == (0, False)
        assert torch.equal(call.real_keys, real)
    seen = calls[1].matrix.dense() > 0
    assert seen.sum(-1).max() == (2 * BLOCK if name == "minimax_m3" else KEPT)
    assert chosen_of(calls[1]).allowed.shape[1] == (2 if name == "minimax_m3" else 1)
    assert name == "minimax_m3" or not seen.any(2).all()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "minimax_m3"])
def test_padding_on_the_left(name: str) -> None:
    """In float64 eager has no numbers for a query without keys; this is float32 alone."""
    mask = lengths_mask(SHORT, LENGTH, side="left")
    real, x = mask.bool(), tokens()
    with torch.no_grad():
        expected = weights_of(eager(name, x.dtype), x, attention_mask=mask).transpose(2, 3)[:, real]
    allowed = budget(lambda x: weights_of(eager(name, x.dtype), x), x).allowed.max()
    calls = recorded(build(name), x, attention_mask=mask)
    got = torch.stack([call.matrix.dense() for call in calls]).transpose(2, 3)[:, real]
    assert (got - expected).abs().max() < 2 * allowed
    assert all(torch.equal(call.real_keys, real) for call in calls)


def test_blocks_with_padding_on_the_left() -> None:
    """The class's blocks hang on its outputs at padding, in which its eager and sdpa differ."""
    mask, x = lengths_mask(SHORT, LENGTH, side="left"), tokens()
    inputs = {"inputs_embeds": x, "attention_mask": mask}
    model, states = build("minimax_m3", implementation="sdpa"), []
    with torch.no_grad():
        states.append(model(**inputs).last_hidden_state)
        with record_attention(model):
            states.append(model(**inputs).last_hidden_state)
    torch.testing.assert_close(*(state[mask.bool()] for state in states), rtol=0, atol=1e-5)


NAMES = [
    "entropy",
    "relative_entropy",
    "maximum",
    "participation",
    "previous_token",
    "first_token",
    "one_key",
    "distance",
    "within_16",
    "offset_profile",
    "map",
]


@pytest.mark.parametrize("padded", others_slow([True, False]))
@pytest.mark.parametrize("name", others_slow(MODELS))
def test_statistics_are_those_of_the_classs_weights(name: str, padded: bool) -> None:
    mask = lengths_mask(SHORT if padded else [LENGTH] * BATCH, LENGTH, side="right")
    x = tokens()
    found = headwise.scan(
        build(name), {"inputs_embeds": x, "attention_mask": mask}, statistics=NAMES
    )
    assert found.tokens == mask.sum()
    assert found.notes == ()

    def measure(statistic: str, x: Tensor) -> Tensor:
        layers = weights_of(eager(name, x.dtype), x, attention_mask=mask)
        # A query of padding may have no key, which is NaN in float64.
        layers = layers.where(mask.bool()[:, None, :, None], 0.0)
        with_sink = name == "hy_v4"
        values = [REFERENCE[statistic](write_down(w, mask, with_sink=with_sink)) for w in layers]
        return torch.stack(values).nan_to_num(-1)

    for statistic in NAMES:
        made = budget(partial(measure, statistic), x)
        made.assert_holds(found[statistic].float().nan_to_num(-1))


def write_down(weights: Tensor, mask: Tensor, *, with_sink: bool) -> Seen:
    """What the statistics read of one call: its weights, and which tokens are real."""
    none = torch.zeros(0)
    seen = Seen(
        scores=weights.log(),
        weights=weights,
        sink_logit=torch.zeros(HEADS) if with_sink else None,
        real_queries=mask.bool(),
        real=mask.bool(),
        own_key=0,
        tokens=none,
        separators=none,
        specials=none,
        values=none,
        outputs=none,
        out_proj=none,
        residual=none,
        unembedding=none,
        samples=0,
    )
    share = 1 - weights.sum(-1)
    vars(seen)["sink_share"] = lambda b: share[b] * with_sink
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_with_a_cache(name: str) -> None:
    """A prompt, one token, and several tokens after it."""
    x, steps = tokens(), [(0, 14), (14, 15), (15, LENGTH)]

    def run(model: Any, x: Tensor) -> list[Tensor]:
        cache = transformers.DynamicCache(config=model.config)
        return [weights_of(model, x[:, a:b], past_key_values=cache).flatten() for a, b in steps]

    made = budget(lambda x: torch.cat(run(eager(name, x.dtype), x)), x)
    calls: list[CapturedCall] = []
    ours = build(name)
    with record_attention(ours, on_complete=calls.append):
        run(ours, x)
    assert [call.own_key for call in calls] == [0, 0, 14, 14, 15, 15]
    assert not any(call.is_cross for call in calls)
    made.assert_holds(torch.cat([call.matrix.dense().flatten() for call in calls]))


@pytest.mark.parametrize("name", MODELS)
def test_with_a_static_cache(name: str) -> None:
    """The free places of the cache are no tokens, whatever the class chooses among them."""
    x, steps = tokens(), [(0, 14), (14, 15), (15, LENGTH)]
    model, states = build(name), []
    calls: list[CapturedCall] = []

    def run() -> None:
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 7)
        outputs = [model(inputs_embeds=x[:, a:b], past_key_values=cache) for a, b in steps]
        states.append(torch.cat([output.last_hidden_state for output in outputs], 1))

    with torch.no_grad():
        run()
        with record_attention(model, on_complete=calls.append):
            run()
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)
    assert not any(call.is_cross for call in calls)
    assert [int(call.real_keys[0].sum()) for call in calls] == [14, 14, 15, 15, LENGTH, LENGTH]


def test_generated_tokens_are_scanned() -> None:
    prefix, options = MODELS["deepseek_v32"]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**options, initializer_range=0.3)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(1))
    prompts = {"input_ids": ids, "attention_mask": lengths_mask([13, 9], 13, side="left")}
    lengths = {"min_new_tokens": 6, "max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        expected = model.generate(**prompts, **lengths)
    kept = []
    found = headwise.scan(
        model,
        prompts,
        statistics=["entropy", "distance"],
        call=lambda model, **inputs: kept.append(model.generate(**inputs, **lengths)),
    )
    assert torch.equal(kept[0], expected)
    assert found.tokens == 13 + 9 + 2 * 5


def test_the_choices_of_deepseek_v32() -> None:
    """Weights, input and results by a formula, as in the reference's own test values."""
    modeling = transformers.models.deepseek_v32.modeling_deepseek_v32
    headwise.register_huggingface()
    config = transformers.DeepseekV32Config(
        hidden_size=12,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=7,
        kv_lora_rank=5,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        head_dim=4,
        v_head_dim=3,
        index_topk=3,
        index_n_heads=2,
        index_head_dim=6,
        attn_implementation="headwise",
    )
    layer = modeling.DeepseekV32Attention(config, 0).double().eval()
    for key, parameter in layer.named_parameters():
        wave = (torch.arange(parameter.numel()) + 1.0).double().sin().view(parameter.shape)
        columns = parameter.shape[1] if parameter.dim() == 2 else 1
        is_norm = parameter.dim() == 1 and not key.endswith("bias")
        parameter.data = 1 + 0.1 * wave if is_norm else 3 * wave / columns**0.5
    x = (0.5 * (torch.arange(96) + 1.0).double()).cos().view(1, 8, 12)
    positions = modeling.DeepseekV32RotaryEmbedding(config)(x, torch.arange(8)[None])
    causal = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    with torch.no_grad(), watched() as seen:
        output, _ = layer(x, positions, causal)
    [matrix] = seen
    [clause] = matrix.mask.clauses_of_kind(Chosen)
    assert [row.nonzero().flatten().tolist() for row in clause.allowed[0, 0, 5:]] == [
        [3, 4, 5],
        [4, 5, 6],
        [0, 6, 7],
    ]
    # The first queries name later keys, which the causal mask hides.
    assert clause.allowed[0, 0, 0].sum() == 3
    assert (matrix.dense()[0, :, 0] > 0).sum(-1).tolist() == [1, 1]
    first = torch.tensor([4.905435429, 7.345755937, 9.200917739]).double()
    # The class's RMS norms and rotation are float32.
    torch.testing.assert_close(output[0, -1, :3], first, rtol=0, atol=2e-6)


def test_advice_of_a_recording_goes_beyond_the_implementation() -> None:
    """The model is on sdpa, and a recording replaces that."""

    class Asking(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(self, q, q, q, None, sinks=torch.zeros(1))[0]

    with pytest.raises(OptionError, match="sinks from Asking") as error:
        recorded_alone(Asking(), torch.randn(2, 3, 5, 4))
    assert "output_attentions=True" in str(error.value.do)
    assert "load this model" not in str(error.value.do)


def recorded_alone(model: nn.Module, x: Tensor) -> None:
    with record_attention(model):
        model(x)


def test_two_choices_are_both_kept() -> None:
    """A float mask that has the choice already, and the numbers beside it (MiniMax M3 in eager)."""
    x = tokens()
    model = build("minimax_m3", implementation="eager")
    calls: list[CapturedCall] = []
    with torch.no_grad():
        expected = weights_of(model, x)
        with record_attention(model, on_complete=calls.append, keep_implementation=True):
            model(inputs_embeds=x)
    got = torch.stack([call.matrix.dense() for call in calls])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert chosen_of(calls[1]).size == BLOCK
