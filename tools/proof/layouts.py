"""Bytes of conversions: every layout of the catalogue, and checkpoints as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import headwise
from headwise.function.weights import AXES, State
from headwise.layouts.drawing import equalise_indistinct_axes
from headwise.layouts.registry import layouts_by_name
from tools.proof.commands import call_command
from tools.proof.digests import Entries, digest_files, digest_tensors

SIZES = {
    "heads": 12,
    "kv_heads": 3,
    "head_dim": 10,
    "key_dim": 9,
    "value_dim": 7,
    "embed_dim": 40,
    "query_dim": 38,
    "source_dim": 36,
    "out_dim": 44,
    "buckets": 5,
    "gate_width": 7,
    "shared_width": 6,
    "rank": 36,
    "lambda_dim": 11,
}
ROTARY_WIDTH = 6


def measure_layouts() -> Entries:
    """Convert a canonical state to every layout of the catalogue, and back."""
    for name, layout in layouts_by_name().items():
        sizes = equalise_indistinct_axes(layout, SIZES)
        generator = torch.Generator().manual_seed(0)
        canonical: State = {}
        for tensor in sorted(layout.canonical_tensor_names):
            x = torch.randn([sizes[axis] for axis in AXES[tensor]], generator=generator)
            x.view(-1)[0], x.view(-1)[-1] = -0.0, torch.inf  # bits that arithmetic would change
            canonical[tensor] = x
        paper = headwise.Layout(
            name="paper",
            tensors={tensor: f"{tensor}: {' '.join(AXES[tensor])}" for tensor in canonical},
            function=layout.function,
            source="Vaswani et al. 2017",
        )
        known: dict[str, Any] = {count: sizes[count] for count in ("heads", "kv_heads")}
        if layout.rows == "interleaved" and layout.function.is_rotary_width_open:
            known["rotary_width"] = ROTARY_WIDTH
        stored = headwise.convert(canonical, paper, layout, **known)
        back = headwise.convert(stored, layout, paper, **known)
        yield name, [digest_tensors(stored), digest_tensors(back)]


FILES = {
    "llama-meta": "llama --to llama-meta",
    "meta-1": "llama --to llama-meta --as meta",
    "meta-2": "llama --to llama-meta --as meta --shards 2",
    "meta-2-read": "files/meta-2 --to llama --heads 6 --kv-heads 2",
    "megatron-1": "llama --to megatron --as megatron",
    "megatron-2": "llama --to megatron --as megatron --shards 2",
    "megatron-2-read": "files/megatron-2 --from megatron --to llama --heads 6 --kv-heads 2",
    "megatron-gpt": "gpt2 --to megatron-gpt",
    "flax-gpt2": "gpt2 --to flax-gpt2",
    "torch-packed": "bert --to torch-packed",
}


def measure_files() -> Entries:
    """Write checkpoints in other layouts and in shares, and digest the files."""
    Path("files").mkdir()
    for name, line in FILES.items():
        folder = Path("files", name)
        source, *options = line.split()
        call_command("convert", source, folder, *options)
        yield line, digest_files(folder)
