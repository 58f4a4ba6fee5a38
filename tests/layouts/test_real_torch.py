"""torch's own layers, and those that took over their names."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import AttentionMatrix
from headwise.errors import ShapeError
from headwise.layouts._layout import Layout
from headwise.layouts.plan import convert
from headwise.layouts.registry import layout
from tests.layouts.real import BATCH, LENGTH, Real, assert_same_function, inputs, sharpen
from tests.layouts.stored import HEADS, VOCABULARY, WIDTHS, file_of, model_of, own_tensors

SOURCE_DIM = 36


def mha(**options: object) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(40, 8, **{"batch_first": True} | options).double().eval()
    sharpen(layer)
    return layer


def torch_packed() -> Real:
    layer, x = mha(), inputs(40)
    return Real(layer.state_dict(), x, layer(x, x, x)[0].detach(), HEADS)


def torch_separate() -> Real:
    layer = mha(kdim=SOURCE_DIM, vdim=SOURCE_DIM)
    x, source = inputs(40), inputs(SOURCE_DIM, seed=2)[:, :-5]
    outputs = layer(x, source, source)[0].detach()
    return Real(layer.state_dict(), x, outputs, HEADS, source=source)


def length_first(layer: nn.MultiheadAttention, name: str) -> Real:
    sharpen(layer)
    x = inputs(40)
    turned = x.transpose(0, 1)
    outputs = layer(turned, turned, turned)[0].transpose(0, 1)
    return Real(own_tensors(layer, name), x, outputs.detach(), HEADS)


def torch_quantizable() -> Real:
    layer = torch.ao.nn.quantizable.MultiheadAttention(40, 8).double().eval()
    return length_first(layer, "torch-quantizable")


def clip_openai() -> Real:
    return length_first(mha(batch_first=False), "clip-openai")


def clip_attnpool() -> Real:
    """CLIP calls torch's function with projections of its own; here all queries are kept."""
    parts = nn.ModuleDict(
        {name: nn.Linear(40, 40) for name in ("q_proj", "k_proj", "v_proj")}
        | {"c_proj": nn.Linear(40, 44)}
    ).double()
    sharpen(parts)
    x = inputs(40)
    turned, (q, k, v, c) = x.transpose(0, 1), parts.values()
    outputs, _ = F.multi_head_attention_forward(
        turned, turned, turned, 40, 8,
        in_proj_weight=None, in_proj_bias=torch.cat([q.bias, k.bias, v.bias]),
        bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0,
        out_proj_weight=c.weight, out_proj_bias=c.bias, training=False,
        need_weights=False, use_separate_proj_weight=True,
        q_proj_weight=q.weight, k_proj_weight=k.weight, v_proj_weight=v.weight,
    )  # fmt: skip
    return Real(parts.state_dict(), x, outputs.transpose(0, 1).detach(), HEADS)


CASES = {
    "torch-packed": torch_packed,
    "torch-separate": torch_separate,
    "torch-quantizable": torch_quantizable,
    "clip-openai": clip_openai,
    "clip-attnpool": clip_attnpool,
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())


@pytest.mark.parametrize("name", ["torch-packed", "torch-separate"])
@torch.no_grad()
def test_an_extra_key_and_value_stand_behind_the_others(name: str) -> None:
    """The layer has none: they are appended here, and weighed by an `AttentionMatrix`."""
    is_packed = name == "torch-packed"
    wide = 40 if is_packed else SOURCE_DIM
    layer = mha(add_bias_kv=True, **{} if is_packed else {"kdim": wide, "vdim": wide})
    x, source = inputs(40), inputs(wide, seed=2)[:, :-5]
    state = layer.state_dict()
    canonical = layout(name).unpack(state, heads=8)
    assert canonical["extra_k"].shape == canonical["extra_v"].shape == (8, 5)

    q, k, v = (
        _heads(canonical, letter, given)
        for letter, given in zip("qkv", (x, source, source), strict=True)
    )
    k, v = (
        torch.cat([of, canonical[f"extra_{letter}"][None, :, None].expand(BATCH, -1, -1, -1)], 2)
        for letter, of in (("k", k), ("v", v))
    )
    ours = torch.einsum("bhqd,hde->bqe", AttentionMatrix(q, k) @ v, canonical["wo"])
    theirs = layer(x, source, source)[0]
    torch.testing.assert_close(ours + canonical["bo"], theirs)  # torch's tolerance for float64
    again = layout(name).pack(canonical)
    assert all(torch.equal(again[stored], tensor) for stored, tensor in state.items())


def _heads(canonical: dict[str, Tensor], letter: str, x: Tensor) -> Tensor:
    projected = torch.einsum("bne,hde->bhnd", x, canonical[f"w{letter}"])
    return projected + canonical[f"b{letter}"][:, None]


def test_keys_and_values_of_two_widths_are_refused() -> None:
    """There is one source in the canonical form, as in the layer."""
    layer = mha(kdim=36, vdim=44)
    with pytest.raises(ShapeError, match="44"):
        layout("torch-separate").unpack(layer.state_dict(), heads=8)


def test_a_whole_bert_runs_as_torchs_encoder() -> None:
    model = model_of("Bert", **WIDTHS, vocab_size=VOCABULARY, layer_norm_eps=1e-5)
    made = convert(file_of(model), "bert", "torch-packed", heads=8)
    layer = nn.TransformerEncoderLayer(40, 8, 56, 0.0, F.gelu, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    encoder.load_state_dict({name: x for name, x in made.items() if name.startswith("layers.")})
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    with torch.no_grad():
        embedded, theirs = model.embeddings(tokens), model(tokens).last_hidden_state
        torch.testing.assert_close(encoder(embedded), theirs)  # torch's tolerance for float64
    back = convert(made, "torch-packed", "bert", heads=8)
    assert {name: x.shape for name, x in back.items()} == {
        name: x.shape for name, x in file_of(model).items()
    }


def broken(name: str, old: str, new: str) -> Layout:
    described = layout(name)
    tensors = {stored: text.replace(old, new) for stored, text in described.tensors.items()}
    assert tensors != dict(described.tensors)
    return replace(described, tensors=tensors)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("wk: heads head_dim | wv: heads head_dim", "wv: heads head_dim | wk: heads head_dim"),
        ("([wq: heads head_dim | wk: heads head_dim | wv: heads head_dim])",
         "(heads [wq: head_dim | wk: head_dim | wv: head_dim])"),
        ("wo: out_dim (heads head_dim)", "wo: out_dim (head_dim heads)"),
        ("wo: out_dim (heads head_dim)", "wo: (heads head_dim) out_dim"),
    ],
    ids=["values before keys", "head by head", "heads faster", "not transposed"],
)  # fmt: skip
def test_a_wrong_pattern_is_another_function(old: str, new: str) -> None:
    with pytest.raises(AssertionError, match="of the budget"):
        assert_same_function(broken("torch-packed", old, new), torch_packed())
