"""consolidated.00.pth and params.json: the files that Meta's code loads.

The one file is for a model_parallel_size of 1. Tensors pass through the memory of their file, so
that no more of them is held than the system likes to.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from headwise.checkpoints import safetensors_file
from headwise.checkpoints.config import ConfigFields, rotation_of, text_of, window_of
from headwise.checkpoints.description import Description
from headwise.checkpoints.model_args import PARAMS, SCALING, mlp_width
from headwise.errors import OptionError
from headwise.support.atomic_write import write_whole

LAYOUT, WEIGHTS = "llama-meta", "consolidated.00.pth"
TOKENS, OUTPUT = "tok_embeddings.weight", "output.weight"
_ONCE = (TOKENS, "norm.weight", OUTPUT)
_IN_A_LAYER = (
    *(f"attention.w{letter}.weight" for letter in "qkvo"),
    *(f"feed_forward.w{number}.weight" for number in (1, 2, 3)),
    "attention_norm.weight",
    "ffn_norm.weight",
)
Shapes = Mapping[str, tuple[int, ...]]


def params_of(description: Description, shapes: Shapes) -> dict[str, Any]:
    """Return what params.json says of tensors in the layout llama-meta.

    Raises:
        OptionError: Meta's code has no class for the model: it lacks a tensor, or its config says
            what this code cannot do.
    """
    config = text_of(description.config)
    _require_model(description, shapes, config)
    vocabulary, width = shapes[TOKENS]
    heads = description.counts["heads"]
    return {
        "dim": width,
        "n_layers": description.modules,
        "n_heads": heads,
        "n_kv_heads": description.counts["kv_heads"],
        "vocab_size": vocabulary,
        **_inner_width(width, shapes["layers.0.feed_forward.w1.weight"][0]),
        "norm_eps": config.number("rms_norm_eps") or 1e-6,
        **_rotation(config),
    }


def write_meta(folder: Path, files: Iterable[str], params: Mapping[str, Any]) -> None:
    """Turn safetensors files of a folder into the files that Meta's code loads."""
    shards = [safetensors_file.read(folder / name) for name in files]
    state = {name: shard.tensor(name) for shard in shards for name in shard.headers}
    state.setdefault(OUTPUT, state[TOKENS])  # tied, and stored once
    with (folder / WEIGHTS).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    write_whole(folder / PARAMS, json.dumps(params, indent=1) + "\n")
    for shard in shards:
        shard.path.unlink()


def _require_model(description: Description, shapes: Shapes, config: ConfigFields) -> None:
    named = description.layout.name
    if named != LAYOUT:
        raise _unable(f"weights in the layout {named}", f"the layout {LAYOUT}")
    if not config:
        raise _unable(
            "weights without a config.json and without metadata",
            "rope_theta and rms_norm_eps, which no tensor holds",
        )
    layers = range(description.modules)
    needed = [*_ONCE, *(f"layers.{n}.{name}" for n in layers for name in _IN_A_LAYER)]
    missing = [name for name in needed if name not in shapes]
    if missing == [OUTPUT] and config.flag("tie_word_embeddings"):
        missing = []
    if missing:
        raise _unable(f"weights without {', '.join(missing[:3])}", f"the {len(needed)} of a Llama")
    counts, width = description.counts, shapes[TOKENS][1]
    if counts["heads"] * counts["head_dim"] != width:
        saw = f"{counts['heads']} heads of {counts['head_dim']} in an embed_dim of {width}"
        raise _unable(saw, "heads that divide embed_dim among them")
    function = config.text("hidden_act") or "silu"
    if function != "silu":
        raise _unable(f"an MLP with {function}", "silu")
    for layer in layers:
        if (window := window_of(config, layer)) is not None:
            raise _unable(f"a window of {window} keys in layer {layer}", "layers that see all keys")


def _rotation(config: ConfigFields) -> dict[str, Any]:
    """theta, and the one scaling that Meta's code has, by constants of its own."""
    rotation = rotation_of(config, 0)
    theta = rotation.number("rope_theta") or config.number("rope_theta") or 10_000.0
    kind = rotation.text("rope_type" if "rope_type" in rotation else "type") or "default"
    if kind == "default":
        return {"rope_theta": theta}
    scaling = {name: rotation.get(name) for name in SCALING if name != "rope_type"}
    if {"rope_type": kind, **scaling} != SCALING:
        wanted = ", ".join(f"{name} {value}" for name, value in SCALING.items())
        raise _unable(f"a rotation scaled by {kind} with {scaling}", f"none, or {wanted}")
    return {"rope_theta": theta, "use_scaled_rope": True}


def _inner_width(width: int, inner: int) -> dict[str, Any]:
    """The two numbers from which Meta's code computes how wide the MLP is."""
    usual, multiple_of = int(2 * (4 * width) / 3), math.gcd(inner, 256)
    for factor in (None, inner / usual, math.nextafter(inner / usual, math.inf)):
        if mlp_width(width, multiple_of, factor) == inner:
            chosen = {} if factor is None else {"ffn_dim_multiplier": factor}
            return {"multiple_of": multiple_of, **chosen}
    raise _unable(f"an MLP of {inner} in an embed_dim of {width}", "a width that its rule gives")


def _unable(saw: str, needed: str) -> OptionError:
    return OptionError(
        saw=f"{saw}, for {WEIGHTS} and {PARAMS}",
        needed=f"{needed}: Meta's code loads no other",
        do="write safetensors files, which is the default",
    )
