"""What a scan says around an attention call is so, or is not said."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import AttentionMatrix
from headwise.scanning._scan import scan
from headwise.scanning.call import CapturedCall
from headwise.scanning.inputs import check_tokens_and_limit_outputs, list_inputs
from headwise.scanning.record import record_attention
from tests.scanning.models import (
    BATCH,
    HEADS,
    LENGTH,
    PADDING,
    SMALL,
    VOCABULARY,
    WIDTH,
    Caller,
    gpt2,
    llama,
    spread,
    t5,
    text,
    tokens,
)
from tests.scanning.test_scan import close


def record_call_sizes(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, CapturedCall]:
    found: dict[str, CapturedCall] = {}

    def settled(call: CapturedCall) -> None:
        found[call.layer] = call

    with torch.no_grad(), record_attention(model, on_complete=settled):
        model(*args, **kwargs)
    return found


# ---- tokens ------------------------------------------------------------------------------------


def test_tokens_of_an_encoder_and_a_decoder() -> None:
    """Of texts of one length: cross attention has the keys of the encoder."""
    one, other = tokens(BATCH, LENGTH), tokens(BATCH, LENGTH)
    found = record_call_sizes(t5(), input_ids=one, decoder_input_ids=other)
    for name, call in found.items():
        expected = other if name.startswith("decoder") and "EncDec" not in name else one
        assert call.is_cross == ("EncDec" in name)
        assert call.tokens is not None
        assert torch.equal(call.tokens, expected)


def test_pictures_hold_no_tokens() -> None:
    """A text as long as a picture has patches."""
    config = transformers.CLIPConfig(
        text_config={**SMALL, "num_hidden_layers": 1},
        vision_config={
            "hidden_size": WIDTH,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "intermediate_size": 37,
            "image_size": 30,
            "patch_size": 10,
        },
    )
    ids = tokens(BATCH, 10)
    found = record_call_sizes(
        spread(transformers.CLIPModel(config)),
        input_ids=ids,
        pixel_values=torch.randn(BATCH, 3, 30, 30).double(),
    )
    by_tower = {name.partition(".")[0]: call.tokens for name, call in found.items()}
    assert by_tower["vision_model"] is None
    assert by_tower["text_model"] is not None
    assert torch.equal(by_tower["text_model"], ids)


def test_places_are_no_tokens() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.place = nn.Embedding(16, WIDTH), nn.Embedding(64, WIDTH)
            self.layer = Caller()

        def forward(self, ids: Tensor) -> Tensor:
            places = torch.arange(ids.shape[1]).expand_as(ids)
            return self.layer(self.place(places) + self.token(ids))

    ids = torch.randint(16, (BATCH, LENGTH))
    [call] = record_call_sizes(Model(), ids).values()
    assert call.tokens is not None
    assert torch.equal(call.tokens, ids)


def test_one_more_key_than_tokens_is_no_text() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.layer = nn.Embedding(VOCABULARY, WIDTH), Caller()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.token(ids)
            return self.layer(torch.cat([torch.zeros_like(x[:, :1]), x], 1))

    [call] = record_call_sizes(Model(), tokens(BATCH, LENGTH)).values()
    assert call.tokens is None


NAMES = ["previous_token", "first_token", "duplicate_token", "induction", "distance", "entropy"]


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_static_cache_is_the_whole_pass(make: Callable[[], Any]) -> None:
    model = make() if make is gpt2 else spread(_llama_with_a_head())
    ids = torch.randint(3, 9, (1, 5))
    kept = []

    def generate(model: Any, **given: Any) -> None:
        options = {} if make is gpt2 else {"cache_implementation": "static"}
        kept.append(
            model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options)
        )

    given = [{"input_ids": ids}, {"input_ids": ids.flip(1)}]
    steps = scan(model, given, statistics=NAMES, call=generate)
    whole = scan(model, [{"input_ids": one[:, :-1]} for one in kept], statistics=NAMES)
    for name in NAMES:
        close(steps[name], whole[name])
    assert bool(steps["duplicate_token"].isfinite().all())


def _llama_with_a_head() -> Any:
    config = transformers.LlamaConfig(num_key_value_heads=2, max_position_embeddings=32, **SMALL)
    return transformers.LlamaForCausalLM(config)


def test_a_packed_row_is_scanned_with_the_mask_that_the_model_uses() -> None:
    """transformers keeps packed documents apart only with ``use_cache=False``, which scan adds."""
    config = transformers.LlamaConfig(max_position_embeddings=128, **SMALL)
    model, ids = spread(transformers.LlamaForCausalLM(config)), tokens(2, 90)
    documents = torch.cat([torch.arange(70), torch.arange(20)]).expand(2, -1)
    given = {"input_ids": ids, "position_ids": documents}
    for options in ({}, {"use_cache": False}):
        found = scan(model, given | options, statistics="map")["map"]
        model.set_attn_implementation("eager")
        with torch.no_grad():
            attentions = model(**given, **options, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
        # Eager attention takes its softmax in float32.
        torch.testing.assert_close(found.float(), torch.stack(attentions).mean(1).float())
        crossing = found[:, :, 70:, :70].sum(-1).mean()
        assert (crossing == 0) == ("use_cache" in options)
    (plain,) = check_tokens_and_limit_outputs(model, list_inputs({"input_ids": ids}))
    assert plain.named == {"use_cache": False, "logits_to_keep": 1, "input_ids": ids}


def test_products_beyond_float16_are_noted() -> None:
    q, v = torch.full((1, 1, 3, 4), 200.0, dtype=torch.float16), torch.ones(1, 1, 3, 4).half()
    for query, count in ((q, 1), (q / 4, 0), (-q, 0)):
        matrix = AttentionMatrix(query, q, scale=1e-3)
        notes = scan(matrix, v, statistics="entropy").notes
        assert sum("float16" in note for note in notes) == count


def test_a_cache_that_was_filled_before_holds_tokens_that_nobody_saw() -> None:
    model, ids = gpt2(), tokens(1, LENGTH)
    with torch.no_grad():
        past = model(ids[:, :9], use_cache=True).past_key_values
    found = scan(
        model,
        {"input_ids": ids[:, 9:], "past_key_values": past},
        statistics=["previous_token", "entropy"],
    )
    whole = record_call_sizes(model, ids)
    for row, call in enumerate(whole.values()):
        weights = call.matrix.dense()[0]
        close(found["previous_token"][row], weights.diagonal(-1, -2, -1)[:, 8:].mean(-1))
    with pytest.raises(Exception, match="tokens are unknown"):
        scan(
            model,
            {"input_ids": ids[:, 12:], "past_key_values": past},
            statistics=["duplicate_token"],
        )


# ---- places ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_a_layer_appends_leave_no_places(slot: str) -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **{slot: True}).eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    [call] = record_call_sizes(layer, x, x, x).values()
    assert not call.is_cross
    assert call.own_key is None


class Pair(nn.Module):
    """Attention between two inputs, by projections of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, *, attended: Tensor, moved: Tensor | None = None) -> Tensor:
        parts = (self.q(x if moved is None else x + moved), self.k(attended), self.v(attended))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_what_keys_are_projected_from_says_whether_it_is_cross_attention() -> None:
    x, other = torch.randn(2, BATCH, LENGTH, WIDTH)
    assert next(iter(record_call_sizes(Pair(), x, attended=other).values())).is_cross
    assert not next(iter(record_call_sizes(Pair(), x, attended=x.clone()).values())).is_cross
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    assert not next(iter(record_call_sizes(layer, x + 0, x + 0, other).values())).is_cross
    assert next(iter(record_call_sizes(layer, x, other, other).values())).is_cross


def test_padded_queries_of_cross_attention_are_those_of_their_block() -> None:
    given = text()
    found = scan(
        t5(),
        {
            **given,
            "decoder_input_ids": tokens(BATCH, LENGTH),
            "decoder_attention_mask": PADDING.flip(0),
        },
        statistics=["maximum"],
    )
    calls = record_call_sizes(
        model := t5(),
        **given,
        decoder_input_ids=(ids := tokens(BATCH, LENGTH)),
        decoder_attention_mask=PADDING.flip(0),
    )
    again = scan(
        model,
        {**given, "decoder_input_ids": ids, "decoder_attention_mask": PADDING.flip(0)},
        statistics=["maximum"],
    )
    row = list(calls).index("decoder.block.1.layer.1.EncDecAttention")
    largest = calls["decoder.block.1.layer.1.EncDecAttention"].matrix.dense().amax(-1)
    close(again["maximum"][row], largest.transpose(1, 2)[PADDING.flip(0).bool()].mean(0))
    assert found.layers == tuple(calls)


# ---- the output projection and the residual ----------------------------------------------------


TIMES = 200  # passes, of which some reuse a place in memory


class Gated(Caller):
    """Its head outputs are multiplied by a gate that is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.project(z * torch.sigmoid(self.gate(z)))


class GatedByTokens(Caller):
    """Its head outputs are multiplied by factors of each token, which are made of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        z = F.scaled_dot_product_attention(q, k, v)
        factors = self.factors(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.project((z * factors).transpose(1, 2).flatten(2))

    def factors(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x))


class Normed(GatedByTokens):
    """Its head outputs are divided by their size in each token, before the projection."""

    def factors(self, x: Tensor) -> Tensor:
        return 1 / (1 + x.norm(dim=-1, keepdim=True)) * torch.sigmoid(self.gate.bias)


@pytest.mark.parametrize("width", [HEADS, WIDTH])
def test_head_outputs_are_those_after_an_output_gate(width: int) -> None:
    layer, x = GatedByTokens(width), torch.randn(BATCH, LENGTH, WIDTH)
    [call] = record_call_sizes(layer, x).values()
    assert call.outputs is not None
    assert call.out_proj is not None
    assert call.values is not None
    factors = layer.factors(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    assert torch.equal(call.outputs, call.mixed * factors)
    close(call.mixed, call.matrix @ call.values)
    written = torch.einsum("bhqd,hde->bqe", call.outputs, call.out_proj) + layer.project.bias
    close(written, layer(x))


def test_a_norm_between_heads_and_projection_is_no_gate() -> None:
    [call] = record_call_sizes(Normed(WIDTH), torch.randn(BATCH, LENGTH, WIDTH)).values()
    assert call.out_proj is None
    assert call.mixed is None


class Adapter(nn.Linear):
    """A matrix, and something beside it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.flip(-1)


def adapted() -> Caller:
    layer = Caller()
    layer.project = Adapter(WIDTH, WIDTH)
    return layer


@pytest.mark.parametrize("make", [Gated, adapted])
def test_what_is_not_the_whole_way_is_no_output_projection(make: Callable[[], Caller]) -> None:
    [call] = record_call_sizes(make(), torch.randn(BATCH, LENGTH, WIDTH)).values()
    assert call.out_proj is None


def test_what_runs_where_another_ended_is_not_given_what_that_was() -> None:
    """Python gives a new object the place of one that is gone: the gate's, to the projection."""
    layer = Gated()
    found = [record_call_sizes(layer, torch.randn(BATCH, LENGTH, WIDTH)) for _ in range(TIMES)]
    assert [call.out_proj for calls in found for call in calls.values()] == [None] * TIMES


def test_the_output_projection_is_the_one_that_is_called() -> None:
    layer = Caller()
    [call] = record_call_sizes(layer, torch.randn(BATCH, LENGTH, WIDTH)).values()
    assert call.out_proj is not None
    assert torch.equal(call.out_proj.flatten(0, 1), layer.project.weight.mT)
    model = gpt2()
    for n, call in enumerate(record_call_sizes(model, tokens(BATCH, LENGTH)).values()):
        assert call.out_proj is not None
        assert torch.equal(call.out_proj.flatten(0, 1), model.transformer.h[n].attn.c_proj.weight)


class Block(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.first, self.second, self.in_place = Caller(), Caller(), in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            x += self.first(x)
        else:
            x = x + self.first(x)
        return x + self.second(x)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_residual_is_the_state_of_the_block_before_its_first_attention(in_place: bool) -> None:
    model = nn.Sequential(Block(in_place=in_place), Block(in_place=in_place))
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        states = [x.clone(), model[0](x.clone())]
    found = record_call_sizes(model, x)
    for n, state in enumerate(states):
        first = found[f"{n}.first"].residual
        assert first is not None or in_place
        if first is not None and not in_place:
            assert torch.equal(first, state)
        assert found[f"{n}.second"].residual is None


def test_a_norm_before_the_layer_is_no_residual() -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), Caller())
    [call] = record_call_sizes(model, torch.randn(BATCH, LENGTH, WIDTH)).values()
    assert call.residual is None


# ---- the rest ----------------------------------------------------------------------------------


def test_chosen_heads_keep_their_values() -> None:
    model, given = llama(), text(left=True)
    names = ["value_weighted", "contribution_norm"]
    whole = scan(model, given, statistics=names)
    part = scan(model, given, statistics=names, heads=[3, 1])
    for name in names:
        close(part[name][:, [1, 3]], whole[name][:, [1, 3]])
        assert float(whole[name].std(1).min()) > 0


def test_a_language_model_has_an_unembedding() -> None:
    assert bool(scan(gpt2(), text(), statistics=["copying"])["copying"].isfinite().all())


def test_labels_are_read_with_all_their_logits() -> None:
    model, given = gpt2(), text()
    labelled = {**given, "labels": given["input_ids"]}
    kept = []
    hook = model.register_forward_hook(lambda *passed: kept.append(passed[-1]))
    found = scan(model, labelled, statistics=["entropy"])
    hook.remove()
    assert kept[0].logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert bool(kept[0].loss.isfinite())
    close(found["entropy"], scan(model, given, statistics=["entropy"])["entropy"])


def test_a_compiled_model_is_scanned_as_it_was_written() -> None:
    model, given = gpt2(), text()
    compiled = torch.compile(model, backend="eager")
    close(
        scan(compiled, given, statistics=["entropy"])["entropy"],
        scan(model, given, statistics=["entropy"])["entropy"],
    )


def test_a_window_drops_the_first_token() -> None:
    config = transformers.MistralConfig(num_key_value_heads=2, sliding_window=5, **SMALL)
    model = spread(transformers.MistralForCausalLM(config))
    kept = []

    def generate(model: Any, **given: Any) -> None:
        kept.append(model.generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False))

    names = ["first_token", "previous_token", "entropy", "distance"]
    steps = scan(model, {"input_ids": tokens(1, 4)}, statistics=names, call=generate)
    whole = scan(model, {"input_ids": kept[0][:, :-1]}, statistics=names)
    for name in names:
        close(steps[name], whole[name])
