"""Configs mutated at random: every field is read as its type, or refused by its name."""

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headwise.checkpoints.config import (
    find_config_contradiction,
    layout_in_layer,
    layout_name,
    merge_counts,
    read_config,
    resolve,
)
from headwise.checkpoints.safetensors import StoredTensor
from headwise.errors import HeadwiseError
from headwise.identify.detection import detect_by_names_and_shapes
from headwise.layouts.registry import layout
from tests.layouts.examples import sizes_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32}
# layout -> what config.json of such a model says of its attention.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "qwen3": {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_scaling": YARN},
    "gemma2": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 256,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
        },
        "vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 12},
    },
    "granite": {"model_type": "granite", "attention_multiplier": 0.25, "rope_theta": 10000},
    "gptj": {"model_type": "gptj", "rotary_dim": 6, "rotary": True},
    "neox": {"model_type": "gpt_neox", "rotary_pct": 0.4, "rotary_emb_base": 10000},
    "falcon-7b": {"model_type": "falcon", "multi_query": True, "alibi": False},
    "mpt": {"model_type": "mpt", "attn_config": {"alibi": True, "clip_qkv": None}},
    "t5": {"model_type": "t5", "relative_attention_num_buckets": 32, "d_kv": 10},
    "gpt2": {"model_type": "gpt2", "scale_attn_weights": True, "n_embd": 40},
    "bert": {"model_type": "bert", "position_embedding_type": "absolute", "hidden_size": 40},
    "cohere": {
        "model_type": "cohere2",
        "sliding_window": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
}
VALUES: tuple[Any, ...] = (
    0, -1, 5, 12.0, 0.5, -0.5, 1e-310, 2**31 - 1, 2**70, 10**400, float("inf"), float("nan"),
    True, False, None, "", "12", "abc", "\ud800", "x" * 100_000,
    [], [1, 2], ["full_attention"], [[[]]], [None], {}, {"a": 1}, {"rope_type": "yarn"},
)  # fmt: skip
ALSO = ("num_attention_heads", "num_key_value_heads", "head_dim", "partial_rotary_factor",
        "rope_parameters", "max_position_embeddings", "is_decoder", "text_config", "clip_qkv",
        "norm_eps", "hidden_size", "layer_types", "no_rope_layers")  # fmt: skip
NUMBER, LONGEST = 300, 1000  # mutations; characters of an error
DETECTED = 50  # of so many mutations one goes through the whole of detect, which takes longer


HEADS = {"num_attention_heads": 12}


class Mutation(NamedTuple):
    name: str
    path: tuple[str, ...]
    value: Any

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(json.dumps(HEADS | CONFIGS[self.name]))
        at = config
        for key in self.path[:-1]:
            at = at[key]
        at[self.path[-1]] = self.value
        return config


def paths_in(fields: dict[str, Any], *, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths_in(value, above=(*above, name))


def mutations() -> list[Mutation]:
    """As many as `NUMBER`, drawn by a fixed seed from all."""
    every = [
        Mutation(name, path, value)
        for name, config in CONFIGS.items()
        for path, value in product((*paths_in(config), *((also,) for also in ALSO)), VALUES)
    ]
    return random.Random(0).sample(every, NUMBER)


def headers_of(name: str) -> dict[str, StoredTensor]:
    """Two modules of a layout, at the places where a model has them, without numbers."""
    described = layout(name)
    role, sizes = next(iter(described.where)), sizes_of(described)
    return {
        described.where[role].format(layer=number) + local: StoredTensor(
            tuple(pattern.shape(sizes)), torch.float32, Path("model.safetensors")
        )
        for number in range(2)
        for local, pattern in described.patterns.items()
    }


HEADERS = {name: headers_of(name) for name in CONFIGS}
SIZES = {name: sizes_of(layout(name)) for name in CONFIGS}


def answered(folder: Path, name: str, *, in_full: bool) -> bool:
    """Ask for all that detect, verify, convert and scan read of a config; False if it is refused.

    Whatever is raised and is no error of the library fails the test.
    """
    try:
        config = read_config(folder)
        known = merge_counts(config, {}, origin=folder)
        layout_name(config)
        for other in CONFIGS:
            find_config_contradiction(config, layout(other).function, {**SIZES[other], **known})
        if in_full:
            detect_by_names_and_shapes(HEADERS[name], config=config, **{"heads": 12, **known})
        for number in range(2):
            described = layout_in_layer(layout(name), config, number)
            resolve(described.function, config, layer=number)
    except HeadwiseError as error:
        if len(str(error)) > LONGEST:
            raise
        return False
    return True


def test_mutated_fields(tmp_path: Path) -> None:
    """Most of the values are of a wrong type for most fields; a part still gives an answer."""
    answers = 0
    for number, mutation in enumerate(mutations()):
        (tmp_path / "config.json").write_text(json.dumps(mutation.config()))
        try:
            answers += answered(tmp_path, mutation.name, in_full=number % DETECTED == 0)
        except Exception as error:
            error.add_note(f"{mutation.path} of {mutation.name} is {str(mutation.value)[:60]}")
            raise
    assert NUMBER / 4 < answers < NUMBER


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_as_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEADS | CONFIGS[name]))
    assert answered(tmp_path, name, in_full=True)
