"""Arguments of a model as Meta's code and nanoGPT store them, in the words of a config.json.

Meta's params.json lies beside consolidated.00.pth. nanoGPT's ckpt.pt holds model_args beside the
tensors; llama2.c's has Meta's arguments there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.checkpoints.config import ConfigFields
from headwise.checkpoints.source import CheckpointSource
from headwise.errors import CheckpointError

PARAMS = "params.json"
# The constants of Meta's apply_scaling: meta-llama/llama-models, models/llama3/model.py.
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class ModelArgs:
    """The layout and the config of a model that is stored with its arguments.

    Attributes:
        layout: its name.
        layers: how many layers the model has.
        config: as in config.json.
        removal: how to read the weights without the arguments, for messages.
    """

    layout: str
    layers: int
    config: ConfigFields
    removal: str


def model_args_of(source: CheckpointSource) -> ModelArgs | None:
    """Return the arguments that are stored with a checkpoint; None where there are none.

    Raises:
        CheckpointError: params.json beside consolidated.00.pth is no JSON.
        OptionError: an argument of another type.
    """
    first = source.shards[0]
    if first.model_args:
        alone = f"torch.save(torch.load({first.path.name!r}, weights_only=True)['model'], NEW)"
        place, removal = f"model_args in {first.path}", f"save them alone: {alone}"
        return _read(ConfigFields(first.model_args, place=place), removal)
    params = source.folder / PARAMS
    if first.path.name.startswith("consolidated") and params.is_file():
        return _read(ConfigFields(_loaded(params), place=str(params)), f"remove {params}")
    return None


def _read(fields: ConfigFields, removal: str) -> ModelArgs | None:
    layers, heads = (fields.count(name) for name in ("n_layers", "n_heads"))
    if layers is not None and heads is not None:
        return ModelArgs("llama-meta", layers, _of_meta(fields, layers, heads), removal)
    layers, heads, width = (fields.count(name) for name in ("n_layer", "n_head", "n_embd"))
    if layers is None or heads is None or width is None:
        return None
    config = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": width,
        "n_positions": fields.count("block_size"),
        "vocab_size": fields.count("vocab_size"),
        "activation_function": "gelu",
    }
    return ModelArgs("nanogpt", layers, ConfigFields(config, place=fields.place), removal)


def _of_meta(fields: ConfigFields, layers: int, heads: int) -> ConfigFields:
    width = fields.count("dim")
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("n_kv_heads") or heads,
        "rms_norm_eps": fields.number("norm_eps") or 1e-5,
        "rope_theta": fields.number("rope_theta") or 10_000.0,
    }
    if width is not None:
        config["hidden_size"] = width
        config["head_dim"] = fields.count("head_dim") or width // heads
        inner = mlp_width(
            width, fields.count("multiple_of") or 256, fields.number("ffn_dim_multiplier")
        )
        config["intermediate_size"] = fields.count("hidden_dim") or inner
    if (fields.number("vocab_size") or 0) > 0:  # Llama 2's is -1: the tokenizer has it
        config["vocab_size"] = fields.count("vocab_size")
    if window := fields.count("sliding_window"):  # Mistral's own files
        config |= {"model_type": "mistral", "sliding_window": window}
    if fields.flag("use_scaled_rope"):
        factor = fields.number("rope_scaling_factor") or SCALING["factor"]
        config["rope_scaling"] = {**SCALING, "factor": factor}
    return ConfigFields(config, place=fields.place)


def mlp_width(width: int, multiple_of: int, factor: float | None) -> int:
    """How wide Meta's code makes the MLP of a model of ``width``: llama/model.py, FeedForward."""
    inner = int(2 * (4 * width) / 3)
    if factor is not None:
        inner = int(factor * inner)
    return multiple_of * -(-inner // multiple_of)


def _loaded(path: Path) -> Mapping[str, Any]:
    try:
        stored = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            saw=f"{path}, which is no JSON: {error}",
            needed="the arguments of the model, as Meta publishes them",
            do="copy it again; or remove it, and name the layout and the counts",
        ) from error
    return stored if isinstance(stored, dict) else {}
