"""Model arguments of Meta's code and nanoGPT, translated into the fields of a config.json.

Meta's params.json lies beside consolidated.00.pth. nanoGPT's ckpt.pt holds model_args beside the
tensors; llama2.c stores Meta's arguments there.
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
    """Layout and config of a model that is stored with its arguments.

    Attributes:
        layout: the name of the layout.
        layers: the number of layers.
        config: the fields of config.json.
        removal: the way to read the weights without the arguments, for messages.
    """

    layout: str
    layers: int
    config: ConfigFields
    removal: str


def read_model_args(source: CheckpointSource) -> ModelArgs | None:
    """Return the arguments that are stored with a checkpoint; None where there are none.

    Raises:
        CheckpointError: params.json beside consolidated.00.pth is no JSON.
        OptionError: an argument has the wrong type.
    """
    first = source.shards[0]
    if first.model_args:
        code = f"torch.save(torch.load({first.path.name!r}, weights_only=True)['model'], NEW)"
        origin, removal = f"model_args in {first.path}", f"save them alone: {code}"
        return _translate_model_args(ConfigFields(first.model_args, origin=origin), removal)
    params = source.folder / PARAMS
    if first.path.name.startswith("consolidated") and params.is_file():
        fields = ConfigFields(_read_params(params), origin=str(params))
        return _translate_model_args(fields, f"remove {params}")
    return None


def _translate_model_args(fields: ConfigFields, removal: str) -> ModelArgs | None:
    layers, heads = (fields.count(name) for name in ("n_layers", "n_heads"))
    if layers is not None and heads is not None:
        return ModelArgs("llama-meta", layers, _meta_config(fields, layers, heads), removal)
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
    return ModelArgs("nanogpt", layers, ConfigFields(config, origin=fields.origin), removal)


def _meta_config(fields: ConfigFields, layers: int, heads: int) -> ConfigFields:
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
    if (fields.number("vocab_size") or 0) > 0:  # -1 in Llama 2: the tokenizer sets it
        config["vocab_size"] = fields.count("vocab_size")
    if window := fields.count("sliding_window"):  # Mistral's own files
        config |= {"model_type": "mistral", "sliding_window": window}
    if fields.flag("use_scaled_rope"):
        factor = fields.number("rope_scaling_factor") or SCALING["factor"]
        config["rope_scaling"] = {**SCALING, "factor": factor}
    return ConfigFields(config, origin=fields.origin)


def mlp_width(width: int, multiple_of: int, factor: float | None) -> int:
    """Return the MLP width of Meta's code for an embed_dim: llama/model.py, FeedForward."""
    inner = int(2 * (4 * width) / 3)
    if factor is not None:
        inner = int(factor * inner)
    return multiple_of * -(-inner // multiple_of)


def _read_params(path: Path) -> Mapping[str, Any]:
    try:
        stored = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            saw=f"{path} is no JSON: {error}",
            needed="the arguments of the model, in Meta's format",
            do="copy the file again; or remove it, and name the layout and the counts",
        ) from error
    return stored if isinstance(stored, dict) else {}
