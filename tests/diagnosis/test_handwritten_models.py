"""`compare` of hand-written models with those of transformers: the layer, the stage, the place."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from headwise import compare
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.diagnosis.subjects.aligned import arrange
from headwise.diagnosis.subjects.run import run_beside, run_model
from headwise.errors import OptionError
from headwise.identify.comparison import ModelComparison
from headwise.identify.results import Diagnosis, Verdict
from headwise.scanning.sites import find_sites
from headwise.scanning.tape import record_tape, run_with
from tests.quick import others_extra, others_slow
from tests.refusals import refusals

WIDTH, HEADS, LAYERS, TOKENS, BATCH = 30, 3, 3, 11, 2
INPUTS = {"input_ids": torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) * 5 % 61}


def gpt2() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=16, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        initializer_range=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


class HandAttention(nn.Module):
    """GPT-2's attention, with a line for each thing that can be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way, self.fault = "softmax", ""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.fault == "q and k exchanged":
            q, k = k, q
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in (q, k, v))
        if self.fault == "split inside out":
            q = q.transpose(1, 2).reshape(b, t, -1, HEADS).permute(0, 3, 1, 2)
        y = getattr(self, f"mix_by_{self.way}")(q, k, v)
        y = y if self.fault == "merged without transpose" else y.transpose(1, 2)
        y = y.reshape(b, t, c)
        if self.fault == "one head at its mean":
            y[..., :10] = y[..., :10].mean((0, 1))  # in place
        return self.out(y)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        width = WIDTH if self.fault == "scale" else q.shape[-1]
        scores = q @ k.mT / math.sqrt(width)
        ahead = torch.ones(scores.shape[-2:]).triu(2 if self.fault == "one ahead" else 1).bool()
        return scores.masked_fill(ahead, -1e4)

    def mix_by_softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.scores(q, k).softmax(-1)
        return (weights / 0.9 if self.fault == "rescaled" else weights) @ v

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.scores(q, k)
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        return powers @ v / powers.sum(-1, keepdim=True)

    def mix_by_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def mix_by_einsum(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        ahead = torch.ones(scores.shape[-2:]).triu(1).bool()
        weights = scores.masked_fill(ahead, -math.inf).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    def mix_by_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = [self.scores(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(HEADS)]
        return torch.stack(each, 1)


class HandBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = HandAttention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.approximate = "tanh"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate=self.approximate))


class HandModel(nn.Module):
    def __init__(self, peer: transformers.GPT2LMHeadModel) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(61, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(HandBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.double().eval()
        state, names = peer.state_dict(), {"words": "wte", "places": "wpe", "norm": "ln_f"}
        parts = {"norm_1": "ln_1", "norm_2": "ln_2", "attend.qkv": "attn.c_attn"}
        parts |= {"attend.out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
        for n in range(LAYERS):
            names |= {f"blocks.{n}.{mine}": f"h.{n}.{other}" for mine, other in parts.items()}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                module, _, kind = name.rpartition(".")
                stored = state[f"transformer.{names[module]}.{kind}"]
                is_turned = stored.dim() == 2 and "c_" in names[module]
                parameter.copy_(stored.mT if is_turned else stored)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.words.weight.mT


@pytest.fixture(scope="module")
def peer() -> transformers.GPT2LMHeadModel:
    return gpt2()


def compared(port: nn.Module, peer: nn.Module) -> tuple[Diagnosis, ModelComparison]:
    diagnosis = compare(port, peer, INPUTS)
    assert diagnosis.model is not None
    return diagnosis, diagnosis.model


@pytest.mark.parametrize(
    "way", others_slow(["softmax", "hand", "kernel", "einsum", "heads"], "hand", "kernel")
)
def test_ways_to_write_attention_are_the_same(peer: Any, way: str) -> None:
    port = HandModel(peer)
    for block in port.blocks:
        block.attend.way = way
    diagnosis, model = compared(port, peer)
    assert diagnosis.verdict is Verdict.TO_ROUNDING
    assert [layer.name for layer in model.layers] == [f"blocks.{n}.attend" for n in range(LAYERS)]


FAULTS = {  # of the second layer -> its first stage, and its cause
    "q and k exchanged": ("q", ["q and k exchanged"]),
    "split inside out": ("q", ["heads interleaved"]),
    "scale": ("scores", ["scale"]),
    "one ahead": ("scores", ["causal alignment"]),
    "rescaled": ("weights", ["factor"]),
    "merged without transpose": ("head outputs", ["merge without transpose"]),
    "one head at its mean": ("head outputs", []),
}


@pytest.mark.parametrize(
    "name", others_extra(FAULTS, "q and k exchanged", quick=["scale", "one ahead"])
)
def test_a_fault_of_one_layer_has_its_stage_and_its_cause(peer: Any, name: str) -> None:
    port = HandModel(peer)
    port.blocks[1].attend.fault = name  # type: ignore[union-attr]
    diagnosis, model = compared(port, peer)
    [layer] = model.differing_layers
    assert (layer.name, layer.other_name) == ("blocks.1.attend", "transformer.h.1.attn")
    assert not model.difference_outside_attention
    assert (layer.comparison.parted[0].stage, layer.comparison.cause_names) == FAULTS[name]
    assert "no causal mask" not in str(diagnosis)


def test_an_attention_inside_a_model_runs_on_other_tokens(peer: Any) -> None:
    port = HandModel(peer)
    layer = run_beside(run_model(peer, INPUTS), port, INPUTS).layers[1]
    runs = layer.make_runs(RecordedCall(Inputs(layer.call.inputs.x), {}))
    assert runs is not None
    for batch, tokens in ((5, TOKENS), (3, 2), (1, 1)):
        x = torch.randn(batch, tokens, WIDTH).double()
        wanted = port.blocks[1].attend(x)  # type: ignore[union-attr, operator]
        assert_close(runs.record(Inputs(x)).stages["output"], wanted)
    hidden = torch.ones(BATCH, 1, 1, TOKENS).bool()
    hidden[..., 0] = False
    assert layer.make_runs(RecordedCall(Inputs(layer.call.inputs.x, mask=hidden), {})) is None


def test_the_output_projection_of_a_middle_layer_is_named(peer: Any) -> None:
    port = HandModel(peer)
    with torch.no_grad():
        weight = port.blocks[1].attend.out.weight  # type: ignore[union-attr]
        weight.copy_(weight.mT.clone())
    _, model = compared(port, peer)
    [layer] = model.differing_layers
    assert layer.name == "blocks.1.attend"
    assert layer.comparison.cause_names == ["square matrix transposed"]


def test_the_port_may_be_the_second(peer: Any) -> None:
    port = HandModel(peer)
    port.blocks[2].attend.fault = "scale"  # type: ignore[union-attr]
    diagnosis = compare(peer, port, INPUTS)
    assert diagnosis.model is not None
    [layer] = diagnosis.model.differing_layers
    assert layer.other_name == "blocks.2.attend"
    assert layer.comparison.cause_names == ["scale"]


def test_two_models_written_by_hand_are_compared_by_their_stages(peer: Any) -> None:
    first, second = HandModel(peer), HandModel(peer)
    second.blocks[2].attend.way = "einsum"
    assert compared(first, second)[0].verdict.is_same
    with torch.no_grad():
        first.blocks[1].attend.qkv.weight[:WIDTH] *= 1.1  # of the queries
    diagnosis, model = compared(first, second)
    assert diagnosis.verdict is Verdict.UNKNOWN
    [layer] = [each for each in model.differing_layers if not each.has_other_input]
    assert layer.name == "blocks.1.attend"
    parted = [each.stage for each in layer.comparison.parted]
    assert parted == ["q after rotary", "weights", "head outputs"]


def test_a_difference_outside_attention_is_between_two_attentions(peer: Any) -> None:
    port = HandModel(peer)
    port.blocks[1].approximate = "none"
    diagnosis, model = compared(port, peer)
    assert model.differing_layers == []
    assert model.difference_outside_attention == "between `blocks.1.attend` and `blocks.2.attend`"
    assert "between `blocks.1.attend` and `blocks.2.attend`, outside attention" in str(diagnosis)


# ---- rotation, and another order of axes --------------------------------------------------------


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=40, intermediate_size=52, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


class Turning(nn.Module):
    """A model around Llama's layers whose attention turns neighbours, with tokens first."""

    def __init__(self, peer: transformers.LlamaForCausalLM, theta: float = 1e4) -> None:
        super().__init__()
        self.peer = peer.model
        self.theta, self.head = theta, peer.lm_head
        order = torch.arange(10).view(2, 5).mT.flatten()  # halves of a head to neighbours
        self.rows = {n: (10 * torch.arange(n)[:, None] + order).flatten() for n in (4, 2)}

    def turn(self, x: Tensor) -> Tensor:
        powers = torch.arange(0, 10, 2).double() / 10
        angles = torch.arange(len(x)).double()[:, None] / self.theta**powers
        turns = torch.polar(torch.ones_like(angles), angles)[:, None, None]
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)

    def attend(self, x: Tensor, of: Any) -> Tensor:
        q, k = (
            (x @ layer.weight[self.rows[n]].mT).unflatten(-1, (n, 10))  # (tokens, batch, heads, ..)
            for layer, n in ((of.q_proj, 4), (of.k_proj, 2))
        )
        v = (x @ of.v_proj.weight.mT).unflatten(-1, (2, 10)).repeat_interleave(2, 2)
        q, k = self.turn(q), self.turn(k).repeat_interleave(2, 2)
        scores = torch.einsum("ibhd,jbhd->bhij", q, k) / math.sqrt(10)
        ahead = torch.ones(scores.shape[-2:]).triu(1).bool()
        weights = scores.masked_fill(ahead, -math.inf).softmax(-1)
        return torch.einsum("bhij,jbhd->ibhd", weights, v).flatten(-2) @ of.o_proj.weight.mT

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.peer.embed_tokens(input_ids).transpose(0, 1)
        for layer in self.peer.layers:
            x = x + self.attend(layer.input_layernorm(x), layer.self_attn)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.peer.norm(x).transpose(0, 1))


def test_channels_and_axes_may_have_another_order() -> None:
    peer = llama()
    diagnosis, _ = compared(Turning(peer), peer)
    assert diagnosis.verdict.is_same


def test_an_attention_with_tokens_first_runs_on_others() -> None:
    peer = llama()
    port = Turning(peer)
    layer = run_beside(run_model(peer, INPUTS), port, INPUTS).layers[1]
    runs = layer.make_runs(RecordedCall(Inputs(layer.call.inputs.x), {}))
    assert runs is not None
    x = torch.randn(3, 4, 40).double()
    wanted = port.attend(x.transpose(0, 1), peer.model.layers[1].self_attn).transpose(0, 1)
    assert_close(runs.record(Inputs(x)).stages["output"], wanted)


@pytest.mark.slow
def test_another_theta_is_named_in_the_known_order_of_channels() -> None:
    peer = llama()
    _, model = compared(Turning(peer, 5e4), peer)
    assert [layer.comparison.parted[0].stage for layer in model.differing_layers] == [
        "q after rotary"
    ] * 2
    assert model.cause_names == ["rotary theta"]


# ---- encoder and decoder ------------------------------------------------------------------------


class Translator(nn.Module):
    """Torch's layers, registered in another order than that of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(61, 32)
        layers = [nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(5)]
        self.read, *rest = layers
        self.own, self.cross = nn.ModuleList(rest[:2]), nn.ModuleList(rest[2:])

    def attend(self, layer: nn.MultiheadAttention, x: Tensor, keys: Tensor, ahead: Any) -> Tensor:
        return layer(x, keys, keys, need_weights=False, attn_mask=ahead)[0]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.words(source), self.words(target)
        ahead = torch.ones(y.shape[1], y.shape[1]).triu(1).bool()
        x = x + self.attend(self.read, x, x, None)
        for own, cross in zip(self.own, self.cross, strict=True):
            y = y + self.attend(own, y, y, ahead)  # type: ignore[arg-type]
            y = y + self.attend(cross, y, x, None)  # type: ignore[arg-type]
        return y


class HandTranslator(Translator):
    """The same by products of its own, with queries of cross attention divided by ``divisor``."""

    divisor = 8**0.5

    def attend(self, layer: nn.MultiheadAttention, x: Tensor, keys: Tensor, ahead: Any) -> Tensor:
        rows = zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
        q, k, v = (
            F.linear(y, w, b).unflatten(-1, (4, 8)).transpose(1, 2)
            for y, (w, b) in zip((x, keys, keys), rows, strict=True)
        )
        scores = q @ k.mT / (8**0.5 if x is keys else self.divisor)
        scores = scores if ahead is None else scores.masked_fill(ahead, -math.inf)
        return layer.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("divisor", [8**0.5, 32**0.5])
def test_attentions_are_paired_in_the_order_of_the_run(divisor: float) -> None:
    torch.manual_seed(0)
    original, port = Translator().eval(), HandTranslator().eval()
    port.load_state_dict(original.state_dict())
    port.divisor = divisor
    tokens = torch.arange(36) * 5 % 61
    diagnosis = compare(
        port, original, {"source": tokens[:22].view(2, 11), "target": tokens[22:].view(2, 7)}
    )
    model = diagnosis.model
    assert model is not None
    names = ["read", "own.0", "cross.0", "own.1", "cross.1"]
    assert [layer.other_name for layer in model.layers] == names
    assert [layer.other_name for layer in model.differing_layers] == (
        [] if divisor == 8**0.5 else ["cross.0", "cross.1"]
    )
    assert model.cause_names == ([] if divisor == 8**0.5 else ["scale"])


# ---- models of transformers that compute attention by products of their own ---------------------

OWN_PRODUCTS: dict[str, dict[str, Any]] = {
    "Bloom": {"hidden_size": 40, "n_layer": 2, "n_head": 4},
    "GPTJ": {"n_embd": 40, "n_layer": 2, "n_head": 4, "rotary_dim": 6, "n_positions": 32},
    "GPTNeo": {
        "hidden_size": 40, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32,
        "attention_types": [[["global", "local"], 1]], "window_size": 5,
    },
    "Falcon": {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
    "GptOss": {
        "hidden_size": 40, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 10,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3,
        "num_experts_per_tok": 2, "sliding_window": 6, "pad_token_id": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", others_slow(OWN_PRODUCTS, "Falcon"))
def test_models_with_products_of_their_own_are_compared(name: str) -> None:
    torch.manual_seed(0)
    kind: Any = getattr(transformers, f"{name}ForCausalLM")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    original = kind(kind.config_class(vocab_size=61, **ends, **OWN_PRODUCTS[name])).eval()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    port = copy.deepcopy(original)
    diagnosis, model = compared(port, original)
    assert diagnosis.verdict.is_same
    assert len(model.layers) == 2
    ends_in = ("attention.dense.weight", "attn.out_proj.weight", "attention.out_proj.weight")
    outs = [w for n, w in port.named_parameters() if n.endswith((*ends_in, "attn.o_proj.weight"))]
    with torch.no_grad():
        outs[1].copy_(outs[1].mT.clone())
    _, model = compared(port, original)
    assert [layer.name for layer in model.differing_layers] == [model.layers[1].name]
    assert model.cause_names == ["square matrix transposed"]


# ---- what cannot be compared --------------------------------------------------------------------


class OneLayerLess(HandModel):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks[:2]:  # type: ignore[index]
            x = block(x)
        return x


class Narrow(HandModel):
    """Attention of half of the tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids[:, :5])


def _refused(kind: type[HandModel]) -> Callable[[], Any]:
    def call() -> Any:
        peer = gpt2()
        return compare(kind(peer), peer, INPUTS)

    return call


test_refused = refusals(
    {
        "layers": (_refused(OneLayerLess), ["2 attentions in a OneLayerLess", "beside 3"]),
        "tokens": (_refused(Narrow), ["projects q from a tensor of shape (2, 5, 30)"]),
    }
)


# ---- the tape -----------------------------------------------------------------------------------


def test_every_order_of_axes_is_read() -> None:
    x = torch.randn(2, 3, 5, 7)
    flat = x.permute(2, 0, 1, 3).reshape(5, 6, 7)  # (queries, batch and heads, channels)
    assert any(torch.equal(y, x) for y in arrange(flat, x.shape))
    assert len([*arrange(x.reshape(6, 35), x.shape)]) == 4  # 2 and 3 joined, 5 and 7 joined
    assert [*arrange(x, (2, 3, 5, 8))] == []


def test_a_tape_keeps_what_is_changed_in_place() -> None:
    layer = nn.Linear(4, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y[:, 1].zero_()
            return y * 2

    x = torch.randn(3, 4)
    tape, output = record_tape(Model(), (x,), {})
    [product] = [node for node in tape.nodes if node.is_projection]
    assert torch.equal(product.value, layer(x))
    doubled = tape.nodes[-1]
    assert torch.equal(doubled.value, output)
    assert not doubled.parents[0].value[:, 1].any()
    assert find_sites(tape.nodes) == []


class Loops(nn.Module):
    """A layer that multiplies token by token, and a product of an attention after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for place in range(x.shape[1]):
            x = x + self.before(x[:, place : place + 1])
        return 2 * self.after(x)


def test_a_place_is_found_again_whatever_the_number_of_products_elsewhere() -> None:
    model, x = Loops(), torch.randn(3, 7, 4)
    tape, _ = record_tape(model, (x,), {})
    [end] = [node.place for node in tape.nodes if node.is_projection and node.module == "after"]
    assert end is not None
    few = x[:, :2]
    output, products = run_with({}, end, model, (few,), {})
    assert_close(output.view(3, 2, 4), model(few) / 2)
    assert sum(products.values()) == 1


def test_attention_of_torchs_decoder_runs_on_other_tokens() -> None:
    """Its module computes with tokens first, and with other products for one token."""
    torch.manual_seed(0)
    model = nn.Transformer(12, 2, 1, 2, 16, batch_first=True).eval().double()
    inputs = {"src": torch.randn(5, 7, 12), "tgt": torch.randn(5, 6, 12)}
    layer = run_model(model, inputs).layers[-1]
    runs = layer.make_runs(layer.call)
    assert runs is not None
    x, source = torch.randn(2, 4, 12).double(), torch.randn(2, 3, 12).double()
    call = runs.record(Inputs(x, source=source))
    attention = model.decoder.layers[1].multihead_attn
    assert_close(call.stages["output"], attention(x, source, source)[0])
    with pytest.raises(OptionError, match="products in the place of"):
        runs.record(Inputs(x[:, :1].contiguous(), source=source[:, :1].contiguous()))
