"""Folders with a model whose classes are code beside the weights."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.huggingface.stored import stored

CODE = """
import pathlib
import transformers
from transformers.models.llama import modeling_llama

pathlib.Path({marker!r}).touch()

class OwnConfig(transformers.LlamaConfig):
    model_type = {kind!r}

class OwnAttention(modeling_llama.LlamaAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.scaling = self.scaling * config.sharpness

class OwnModel(transformers.LlamaModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            layer.self_attn = OwnAttention(config, number)

class OwnForCausalLM(transformers.LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
"""
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 26,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "initializer_range": 0.3,
}
AUTO_MAP = {
    "AutoConfig": "own.OwnConfig",
    "AutoModel": "own.OwnModel",
    "AutoModelForCausalLM": "own.OwnForCausalLM",
}


def change_json(path: Path, **changes: Any) -> None:
    """Change fields of a file; None removes one."""
    values = json.loads(path.read_text("utf-8")) | changes
    values = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps(values), "utf-8")


def own_folder(
    folder: Path, kind: str = "llama", *, sharpness: float = 1.0, prefix: str = ""
) -> Path:
    """A model whose scores are ``sharpness`` times those of Llama.

    The file ``ran`` beside the folder shows that the code ran. ``prefix`` is that of the names in
    ``auto_map``, such as "owner/name--".
    """
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    stored(folder, model)
    marker = str(folder.with_name("ran"))
    (folder / "own.py").write_text(CODE.format(kind=kind, marker=marker), "utf-8")
    change_json(
        folder / "config.json",
        model_type=kind,
        sharpness=sharpness,
        architectures=["OwnForCausalLM"],
        auto_map={name: f"{prefix}{code}" for name, code in AUTO_MAP.items()},
    )
    return folder
