"""Shares of a small llama, as the code of Meta and of Megatron divides it over processes."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.layouts.plan import convert
from tests.checkpoints import llamas

HEADS = {"heads": 6, "kv_heads": 2}
COUNTS = ("--heads", 6, "--kv-heads", 2)
# 6 heads and 2 kv heads of 10, embed_dim 60; 2 and 6 divide the rest
SIZES = {"vocab_size": 36, "intermediate_size": 174}
INNER, VOCABULARY = SIZES["intermediate_size"], SIZES["vocab_size"]


def metas_shares(llama: Path, count: int, *, columns: bool = False) -> list[dict[str, Tensor]]:
    """Shares after meta-llama's model.py: columns of wo and w2, rows of the others."""
    whole = convert(llamas.read(llama), "llama", "llama-meta", accept=(), root=None, **HEADS)

    def part(name: str, x: Tensor, rank: int) -> Tensor:
        leaf = name.split(".")[-2]
        by_rows = leaf in ("wq", "w1", "w3", "output") or (leaf == "tok_embeddings" and not columns)
        if leaf in ("wk", "wv"):  # a kv head each, held by neighbours where there are fewer
            copies = max(count // 2, 1)
            return x.chunk(count // copies, dim=0)[rank // copies]
        if by_rows or leaf in ("wo", "w2", "tok_embeddings"):
            return x.chunk(count, dim=0 if by_rows else 1)[rank]
        return x

    return [
        {name: part(name, x, rank).clone() for name, x in whole.items()} for rank in range(count)
    ]


def write_shares(
    folder: Path, shares: list[dict[str, Tensor]], name: str = "consolidated.{:02}.pth"
) -> Path:
    for rank, share in enumerate(shares):
        path = folder / name.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(share, path)
    return folder


def metas_params(folder: Path, **changes: Any) -> Path:
    params = {
        "dim": 60,
        "n_layers": 2,
        "n_heads": 6,
        "n_kv_heads": 2,
        "vocab_size": VOCABULARY,
        "multiple_of": 2,
        "ffn_dim_multiplier": INNER / 160,
        "norm_eps": 1e-3,
        "rope_theta": 700.0,
    }
    (folder / "params.json").write_text(json.dumps(params | changes))
    return folder


def megatrons_shares(llama: Path, count: int) -> list[dict[str, Tensor]]:
    """Shares after Megatron core: groups of rows, columns of the outputs, and gate and up apart."""
    state = {name.removeprefix("model."): x for name, x in llamas.read(llama).items()}
    heads, kv_heads, shares = 6 // count, 2 // count, []
    for rank in range(count):
        share = {
            "embedding.word_embeddings.weight": state["embed_tokens.weight"].chunk(count)[rank],
            "output_layer.weight": state["lm_head.weight"].chunk(count)[rank],
            "decoder.final_layernorm.weight": state["norm.weight"],
        }
        for layer in range(2):
            ours, theirs = f"layers.{layer}.", f"decoder.layers.{layer}."

            def mine(name: str, dim: int = 0, ours: str = ours, rank: int = rank) -> Tensor:
                return state[f"{ours}{name}_proj.weight"].chunk(count, dim=dim)[rank]

            q, k, v = (mine(f"self_attn.{n}").unflatten(0, (-1, 10)) for n in "qkv")
            groups = [torch.cat([*q[g * 3 : g * 3 + 3], k[g], v[g]]) for g in range(kv_heads)]
            assert (len(q), len(k)) == (heads, kv_heads)
            share |= {
                f"{theirs}self_attention.linear_qkv.weight": torch.cat(groups),
                f"{theirs}self_attention.linear_proj.weight": mine("self_attn.o", 1),
                f"{theirs}mlp.linear_fc1.weight": torch.cat([mine("mlp.gate"), mine("mlp.up")]),
                f"{theirs}mlp.linear_fc2.weight": mine("mlp.down", 1),
                f"{theirs}self_attention.linear_qkv.layer_norm_weight": state[
                    f"{ours}input_layernorm.weight"
                ],
                f"{theirs}mlp.linear_fc1.layer_norm_weight": state[
                    f"{ours}post_attention_layernorm.weight"
                ],
            }
        shares.append({name: x.clone() for name, x in share.items()})
    return shares


def write_megatron(folder: Path, shares: list[dict[str, Tensor]], *, within: str = "") -> Path:
    """Files as Megatron-LM writes them without its optimizer."""
    for rank, share in enumerate(shares):
        path = folder / within / f"mp_rank_{rank:02}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        content = {
            "args": argparse.Namespace(num_layers=2, params_dtype=torch.float32),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "model": {**share, "decoder.layers.0.mlp.linear_fc1._extra_state": None},
        }
        torch.save(content, path)
    if within:
        (folder / "latest_checkpointed_iteration.txt").write_text(within.removeprefix("iter_"))
    return folder
