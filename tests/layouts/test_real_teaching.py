"""Multi-head attention as it is taught, written after the published descriptions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import Mask
from headwise.layouts.plan import convert
from headwise.study.implementations import (
    Annotated,
    EinopsPage,
    Implementation,
    Paper,
    Tensor2Tensor,
)
from tests.layouts.real import BATCH, LENGTH, Real, assert_same_function, inputs, sharpen
from tests.layouts.stored import HEADS, VOCABULARY, file_of, own_tensors


def peer(kind: type[Implementation], name: str, suffix: str = "") -> Real:
    layer = kind(40, 8).double().eval()
    sharpen(layer)
    x = inputs(40)
    if suffix:
        state = {f"{stored}{suffix}": tensor for stored, tensor in layer.state_dict().items()}
    else:
        state = own_tensors(layer, name)
    return Real(state, x, layer(x).detach(), HEADS)


def paper_with_biases() -> Real:
    """Head by head in a loop: the paper has no biases, those who write like it often do."""
    shapes = {"wq": (8, 5, 40), "wk": (2, 5, 36), "wv": (2, 7, 36), "wo": (56, 44)}
    shapes |= {"bq": (8, 5), "bk": (2, 5), "bv": (2, 7), "bo": (44,)}
    parts = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()}).double()
    sharpen(parts)
    state = {name: tensor.detach() for name, tensor in parts.items()}
    x, source, heads = inputs(40), inputs(36, length=LENGTH - 5, seed=2), []
    for head in range(8):
        shared = head // 4
        q = x @ state["wq"][head].mT + state["bq"][head]
        k = source @ state["wk"][shared].mT + state["bk"][shared]
        v = source @ state["wv"][shared].mT + state["bv"][shared]
        heads.append((q @ k.mT / 5**0.5).softmax(dim=-1) @ v)
    outputs = torch.cat(heads, dim=-1) @ state["wo"] + state["bo"]
    return Real(state, x, outputs, HEADS, source=source)


def einops_without_biases() -> Real:
    """As the code that the page rewrites, which has the same names."""
    layer = EinopsPage(40, 8)
    for part in (layer.w_qs, layer.w_ks, layer.w_vs, layer.fc):
        part.bias = None
    layer = layer.double().eval()
    sharpen(layer)
    x = inputs(40)
    return Real(own_tensors(layer, "einops"), x, layer(x).detach(), HEADS)


class NanoAttention(nn.Module):
    """nanoGPT's: one linear layer, split in three, and a causal mask."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.c_attn = nn.Linear(embed_dim, 3 * embed_dim)
        self.c_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        split = (y.unflatten(-1, (self.num_heads, -1)) for y in self.c_attn(x).chunk(3, dim=-1))
        q, k, v = (y.transpose(1, 2) for y in split)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        out: Tensor = self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class MinAttention(nn.Module):
    """The older layer of minGPT: three linear layers, and a causal mask among its buffers."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.key, self.query, self.value, self.proj = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )
        self.register_buffer("mask", torch.ones(1, 1, LENGTH, LENGTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        split = (f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.query, self.key))
        q, k = (y.transpose(1, 2) for y in split)
        v = self.value(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(self.mask == 0, -1e10)
        out: Tensor = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def test_the_older_layer_of_mingpt_written_after_its_source() -> None:
    layer, x = MinAttention(40, 8).double(), inputs(40)
    sharpen(layer)
    real = Real(own_tensors(layer, "mingpt"), x, layer(x).detach(), HEADS, mask=Mask.causal())
    assert_same_function("mingpt", real)


class NanoBlock(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, hidden_dim: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.attn = NanoAttention(embed_dim, num_heads)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(embed_dim, hidden_dim), "c_proj": nn.Linear(hidden_dim, embed_dim)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return out


class NanoGPT(nn.Module):
    """The model around it, whose names are GPT-2's."""

    def __init__(self, *, embed_dim: int, num_heads: int, hidden_dim: int, layers: int) -> None:
        super().__init__()
        blocks = (NanoBlock(embed_dim, num_heads, hidden_dim) for _ in range(layers))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, embed_dim),
                "wpe": nn.Embedding(LENGTH, embed_dim),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(embed_dim),
            }
        )

    def forward(self, tokens: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x = block(x)
        out: Tensor = parts["ln_f"](x) @ parts["wte"].weight.mT
        return out


def nanogpt() -> Real:
    layer = NanoAttention(40, 8).double()
    sharpen(layer)
    x = inputs(40)
    return Real(layer.state_dict(), x, layer(x).detach(), HEADS, mask=Mask.causal())


CASES = {
    "per-head": lambda: peer(Paper, "per-head"),
    "tensor2tensor": lambda: peer(Tensor2Tensor, "tensor2tensor", "/kernel"),
    "annotated": lambda: peer(Annotated, "annotated"),
    "einops": lambda: peer(EinopsPage, "einops"),
    "nanogpt": nanogpt,
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())


def test_per_head_with_biases_and_fewer_heads_of_keys() -> None:
    assert_same_function("per-head", paper_with_biases())


def test_the_example_without_biases_has_the_same_names() -> None:
    assert_same_function("einops", einops_without_biases())


@torch.no_grad()
def test_a_whole_gpt2_runs_as_nanogpt_and_comes_back() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=40, n_head=8, n_layer=2, n_inner=56, n_positions=LENGTH, vocab_size=VOCABULARY,
        activation_function="gelu", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    sharpen(theirs)
    stored = file_of(theirs)
    made = convert(stored, "gpt2", "nanogpt", heads=8)
    model = NanoGPT(embed_dim=40, num_heads=8, hidden_dim=56, layers=2).double()
    model.load_state_dict(made)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    logits = theirs(tokens).logits
    torch.testing.assert_close(model(tokens), logits)  # torch's tolerance for float64
    back = convert(made, "nanogpt", "gpt2", heads=8)
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())
