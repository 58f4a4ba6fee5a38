"""Files that other code loads: those of Megatron-LM's processes, and those of Meta's Llama code."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headwise.checkpoints import config as config_json
from headwise.checkpoints import torch_file
from headwise.checkpoints.config import attention_window, text_config
from headwise.checkpoints.description import PARAMS, SCALING, Description, mlp_width
from headwise.checkpoints.fields import ConfigFields
from headwise.checkpoints.rotations import rotary_scaling_kind
from headwise.checkpoints.safetensors import KEY, TensorFile
from headwise.checkpoints.shares import RANK_FOLDER, TRACKER
from headwise.checkpoints.staging import write_synced
from headwise.errors import OptionError
from headwise.layouts._layout import Layout

LAYOUTS = ("megatron", "megatron-gpt", "megatron-gated")
FOLDER, FILE, CHECKPOINT_VERSION = "release", "model_optim_rng.pt", 3.0


def require_megatron_layout(stored: Layout) -> None:
    if stored.name not in LAYOUTS:
        raise OptionError(
            saw=f"weights in the layout {stored.name}, for {RANK_FOLDER}00/{FILE}",
            needed=f"one of {', '.join(LAYOUTS)}",
            do="choose one of them, or write safetensors files, the default",
        )


def write_megatron_files(folder: Path, shares: Iterable[TensorFile]) -> None:
    for number, share in enumerate(shares):
        content = {
            "model": {name: share.tensor(name) for name in share.headers},
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": 0,
            KEY: share.metadata[KEY],
        }
        rank = folder / FOLDER / f"{RANK_FOLDER}{number:02}"
        rank.mkdir(parents=True)
        torch_file.save_torch_file(rank / FILE, content)
    write_synced(folder / TRACKER, FOLDER)


LAYOUT, WEIGHTS = "llama-meta", "consolidated"
TOKENS, OUTPUT = "tok_embeddings.weight", "output.weight"
_ONCE = (TOKENS, "norm.weight", OUTPUT)
_IN_A_LAYER = (
    *(f"attention.w{letter}.weight" for letter in "qkvo"),
    *(f"feed_forward.w{number}.weight" for number in (1, 2, 3)),
    "attention_norm.weight",
    "ffn_norm.weight",
)
Shapes = Mapping[str, tuple[int, ...]]


def make_meta_params(description: Description, shapes: Shapes) -> dict[str, Any]:
    """Return the content of params.json for tensors in the layout llama-meta.

    Raises:
        OptionError: Meta's code cannot run the model: a tensor is missing, or the config has a
            setting without a counterpart.
    """
    config = text_config(description.config)
    _require_loadable_by_meta(description, shapes, config)
    vocabulary, width = shapes[TOKENS]
    heads = description.counts["heads"]
    return {
        "dim": width,
        "n_layers": description.modules,
        "n_heads": heads,
        "n_kv_heads": description.counts["kv_heads"],
        "vocab_size": vocabulary,
        **_meta_mlp_params(width, shapes["layers.0.feed_forward.w1.weight"][0]),
        "norm_eps": config.number("rms_norm_eps") or 1e-6,
        **_meta_rotary_params(config),
    }


def write_meta_files(folder: Path, shares: Iterable[TensorFile], params: Mapping[str, Any]) -> None:
    for number, share in enumerate(shares):
        state = {name: share.tensor(name) for name in share.headers}
        state.setdefault(OUTPUT, state[TOKENS])  # tied weights are stored once
        torch_file.save_torch_file(folder / f"{WEIGHTS}.{number:02}.pth", state)
    write_synced(folder / PARAMS, json.dumps(params, indent=1) + "\n")


def _require_loadable_by_meta(
    description: Description, shapes: Shapes, config: ConfigFields
) -> None:
    if (name := description.layout.name) != LAYOUT:
        raise _not_loadable_by_meta_error(f"weights in the layout {name}", f"the layout {LAYOUT}")
    if not config:
        raise _not_loadable_by_meta_error(
            "weights without a config.json and without metadata",
            "rope_theta and rms_norm_eps, which no tensor holds",
        )
    layers = range(description.modules)
    needed = [*_ONCE, *(f"layers.{n}.{name}" for n in layers for name in _IN_A_LAYER)]
    missing = [name for name in needed if name not in shapes]
    if missing == [OUTPUT] and config.flag("tie_word_embeddings"):
        missing = []
    if missing:
        names = ", ".join(missing[:3])
        raise _not_loadable_by_meta_error(
            f"weights without {names}", f"the {len(needed)} of a Llama"
        )
    counts, width = description.counts, shapes[TOKENS][1]
    if counts["heads"] * counts["head_dim"] != width:
        saw = f"{counts['heads']} heads of {counts['head_dim']} in an embed_dim of {width}"
        raise _not_loadable_by_meta_error(saw, "heads * head_dim equal to embed_dim")
    activation = config.text("hidden_act") or "silu"
    if activation != "silu":
        raise _not_loadable_by_meta_error(f"an MLP with {activation}", "silu")
    for layer in layers:
        if (window := attention_window(config, layer)) is not None:
            raise _not_loadable_by_meta_error(
                f"a window of {window} keys in layer {layer}", "full attention"
            )


def _meta_rotary_params(config: ConfigFields) -> dict[str, Any]:
    rotation = config_json.rotary_section_of_layer(config, 0)
    theta = rotation.number("rope_theta") or config.number("rope_theta") or 10_000.0
    kind = rotary_scaling_kind(rotation)
    if kind is None:
        return {"rope_theta": theta}
    scaling = {name: rotation.get(name) for name in SCALING if name != "rope_type"}
    if {"rope_type": kind, **scaling} != SCALING:
        supported = ", ".join(f"{name} {value}" for name, value in SCALING.items())
        raise _not_loadable_by_meta_error(
            f"the rotary scaling {kind} with {scaling}", f"none, or {supported}"
        )
    return {"rope_theta": theta, "use_scaled_rope": True}


def _meta_mlp_params(width: int, inner: int) -> dict[str, Any]:
    """Return the two parameters from which Meta's code computes the width of the MLP."""
    usual, multiple_of = int(2 * (4 * width) / 3), math.gcd(inner, 256)
    for factor in (None, inner / usual, math.nextafter(inner / usual, math.inf)):
        if mlp_width(width, multiple_of, factor) == inner:
            multiplier = {} if factor is None else {"ffn_dim_multiplier": factor}
            return {"multiple_of": multiple_of, **multiplier}
    raise _not_loadable_by_meta_error(
        f"an MLP of {inner} in an embed_dim of {width}", "a width by its formula"
    )


def _not_loadable_by_meta_error(saw: str, needed: str) -> OptionError:
    return OptionError(
        saw=f"{saw}, for {WEIGHTS}.00.pth and {PARAMS}",
        needed=f"{needed}: Meta's code loads no other",
        do="write safetensors files, the default",
    )
