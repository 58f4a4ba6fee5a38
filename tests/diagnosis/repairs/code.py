"""Code that is written out and run: a function of lines, beside a layer with the same weights."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headwise import Attention

NAMES = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "out_proj": "o",
    "gate_proj": "g",
}


def name_weights(layer: Attention, language: str) -> dict[str, Any]:
    """Return the weights of a layer by the names that lines use: wq, bq, q_norm, sinks."""
    named: dict[str, Any] = {}
    for name, x in layer.state_dict().items():
        module, _, kind = name.partition(".")
        short = f"{kind[0]}{NAMES[module]}" if module in NAMES else ""
        if module in ("q_norm", "k_norm", "o_norm"):
            short = module if kind == "weight" else f"{module}_bias"
        others = {"sink": "sinks"} | {
            f"score_bias.{stored}": text
            for stored, text in {
                "relative_attention_bias.weight": "table",
                "rel_embeddings.weight": "place_table",
                "norm.weight": "place_norm",
                "norm.bias": "place_norm_bias",
                **{f"{role}_proj.weight": f"wp{role}" for role in "qk"},
                **{f"{role}_proj.bias": f"bp{role}" for role in "qk"},
            }.items()
        }
        short = others.get(name, short or name)
        named[short] = x.detach().numpy() if language == "numpy" else x.detach()
    return named


def define(lines: list[str], names: dict[str, Any], arguments: str) -> Callable[..., Any]:
    """Return the function of these lines, which sets ``output``."""
    body = "\n".join(f"    {line}" for line in lines)
    text = f"def function({arguments}):\n    {take_names(names)}\n{body}\n    return output\n"
    scope: dict[str, Any] = {"math": math, "np": np, "torch": torch, "given": names}
    exec(compile(text, "port", "exec"), scope)
    function: Callable[..., Any] = scope["function"]
    return function


def take_names(names: dict[str, Any]) -> str:
    """Return the line that makes the weights local, so that lines may replace them."""
    return "; ".join(f"{name} = given[{name!r}]" for name in names if name.isidentifier()) or "pass"
