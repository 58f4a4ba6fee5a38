"""Weights with the arguments of their model: nanoGPT's ckpt.pt, and params.json as Meta has it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import Mask, detect, verify
from headwise.checkpoints import load_attention
from headwise.checkpoints.source import open_source
from headwise.cli.convert import convert
from headwise.errors import CheckpointError, OptionError
from tests.checkpoints import llamas
from tests.cli.alone import Alone

CONVERT = Alone(convert)


@dataclass
class GPTConfig:
    """nanoGPT's, model.py."""

    block_size: int = 16
    vocab_size: int = 31
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 24
    dropout: float = 0.0
    bias: bool = False


class CausalSelfAttention(nn.Module):
    """nanoGPT's, model.py."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GPT(nn.Module):
    """nanoGPT's names, without its forward pass."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        block = {
            "ln_1": lambda: nn.LayerNorm(config.n_embd, bias=config.bias),
            "attn": lambda: CausalSelfAttention(config),
            "ln_2": lambda: nn.LayerNorm(config.n_embd, bias=config.bias),
            "mlp": lambda: nn.ModuleDict(
                {
                    "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias),
                    "c_proj": nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias),
                }
            ),
        }
        blocks = [
            nn.ModuleDict({n: make() for n, make in block.items()}) for _ in range(config.n_layer)
        ]
        parts = {
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(blocks),
            "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        parts["wte"].weight = self.lm_head.weight


def ckpt(path: Path, *, compiled: bool = False, **changes: Any) -> GPT:
    """What nanoGPT's train.py saves after an evaluation."""
    torch.manual_seed(0)
    config = GPTConfig()
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    state = model.state_dict()
    checkpoint = {
        "model": {f"_orig_mod.{n}": x for n, x in state.items()} if compiled else state,
        "optimizer": optimizer.state_dict(),
        "model_args": asdict(config),
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.47),
        "config": {"dataset": "shakespeare_char", "learning_rate": 1e-3, "compile": True},
    }
    torch.save(checkpoint | changes, path)
    return model


@pytest.mark.parametrize("compiled", [False, True])
def test_a_ckpt_of_nanogpt_says_what_it_is(tmp_path: Path, compiled: bool) -> None:
    model = ckpt(tmp_path / "ckpt.pt", compiled=compiled)
    found = detect(tmp_path / "ckpt.pt")
    assert found.layout is not None
    assert found.layout.name == "nanogpt"
    assert found.candidates[0][0].sizes["heads"] == 4
    out, err = CONVERT.run(tmp_path / "ckpt.pt", tmp_path / "gpt2.safetensors", "--to", "gpt2")
    assert "Read with heads 4 (metadata)." in out.splitlines()
    assert "nanogpt -> gpt2" in err
    made = llamas.read(tmp_path / "gpt2.safetensors")
    weight = model.transformer["h"][1]["attn"].c_attn.weight
    assert torch.equal(made["transformer.h.1.attn.c_attn.weight"], weight.mT)
    assert verify(tmp_path / "ckpt.pt", tmp_path / "gpt2.safetensors")
    x = torch.randn(2, 16, 24)
    for path in ("ckpt.pt", "gpt2.safetensors"):
        layer = load_attention(tmp_path / path, layer=1)
        theirs = model.transformer["h"][1]["attn"](x)
        torch.testing.assert_close(layer(x, mask=Mask.causal()), theirs)


def test_arguments_that_do_not_fit_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    ckpt(path, model_args={**asdict(GPTConfig()), "n_layer": 3})
    with pytest.raises(CheckpointError) as error:
        detect(path)
    assert error.value.saw == (
        f"model_args in {path} describes 3 modules of nanogpt, but the tensors are of 2"
    )
    assert "torch.load('ckpt.pt', weights_only=True)['model']" in error.value.do
    ckpt(path, model_args={**asdict(GPTConfig()), "n_head": "four"})
    with pytest.raises(OptionError, match=r"n_head in model_args in .* is 'four'"):
        detect(path)


def test_arguments_that_are_no_ones(tmp_path: Path) -> None:
    """The tensors are read as those of any file."""
    ckpt(tmp_path / "ckpt.pt", model_args={"depth": 2})
    assert detect(tmp_path / "ckpt.pt", heads=4).candidates
    ckpt(tmp_path / "ckpt.pt", model_args=[2])
    with pytest.raises(CheckpointError, match=r"torch\.load\(\.\.\.\)\['model'\]"):
        open_source(tmp_path / "ckpt.pt")


PARAMS = {
    "dim": llamas.EMBED,
    "n_layers": llamas.LAYERS,
    "n_heads": llamas.HEADS,
    "n_kv_heads": llamas.KV_HEADS,
    "head_dim": llamas.HEAD_DIM,
    "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "use_scaled_rope": True,
}


def metas(folder: Path, **params: Any) -> Path:
    folder.mkdir()
    torch.save(llamas.in_metas(llamas.weights()), folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS | params))
    return folder


def test_the_folder_that_meta_publishes(tmp_path: Path) -> None:
    folder = metas(tmp_path / "meta")
    found = detect(folder)
    assert found.layout is not None
    assert found.layout.name == "llama-meta"
    layer = load_attention(folder)
    assert layer.rotary is not None
    assert layer.rotary.theta == 500_000.0
    assert layer.rotary.pairing == "interleaved"
    assert "Llama3Scaling(factor=8.0" in repr(layer.rotary)
    CONVERT.run(folder, tmp_path / "b", "--to", "llama")
    llamas.assert_same(llamas.read(tmp_path / "b"), llamas.weights())


def test_a_share_of_a_model_is_refused(tmp_path: Path) -> None:
    """Of several files each has its own heads, which no name tells."""
    folder = metas(tmp_path / "meta", n_heads=12, n_kv_heads=4)
    with pytest.raises(CheckpointError, match=r"1 of 2 shares, and lacks consolidated\.01\.pth"):
        detect(folder)
    with pytest.raises(
        CheckpointError, match=r"params\.json describes 2 modules of llama-meta, but"
    ):
        detect(folder / "consolidated.00.pth")


def test_params_that_are_damaged_or_no_ones(tmp_path: Path) -> None:
    folder = metas(tmp_path / "meta")
    (folder / "params.json").write_text("[3]")
    with pytest.raises(CheckpointError, match="holds a list"):
        detect(folder)
    (folder / "params.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no JSON"):
        detect(folder)
