"""Reasons why tensors hold no attention layer of a known layout, from their names and dtypes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from headwise.layouts.modules import find_modules, find_unlisted_tensors_of_module
from headwise.layouts.registry import layouts_by_name
from headwise.layouts.steps import TensorHeader

UNQUANTISED = "take the checkpoint that was quantised, in bfloat16 or float32"


class Obstacle(NamedTuple):
    """A reason, and what to do about it."""

    reason: str
    do: str


# A pattern of tensor names -> the reason and the advice; the first that a name fits is given.
QUANTISED = {
    r"\.g_idx$": Obstacle("its weights are quantised by GPTQ", UNQUANTISED),
    r"\.qzeros$": Obstacle("its weights are quantised by AWQ or GPTQ", UNQUANTISED),
    r"\.(absmax|quant_map|SCB|quant_state\.bitsandbytes__\w+)$": Obstacle(
        "its weights are quantised by bitsandbytes",
        f"load it with transformers, and save model.dequantize(); or {UNQUANTISED}",
    ),
    r"\.(weight_scale(_inv)?|scale_weight)$": Obstacle(
        "its weights are 8-bit or 4-bit numbers with scales beside them", UNQUANTISED
    ),
}
OTHERS = {
    r"lora_(A|B|embedding)": Obstacle(
        "it holds the adapters of peft, without the weights that they change",
        "PeftModel.from_pretrained(model, path).merge_and_unload().save_pretrained(folder)",
    ),
    r"\.(kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj)\.": Obstacle(
        "its attention is latent: keys and values come from one narrow projection",
        "headwise scan runs such a model; its weights have no layout",
    ),
    r"\.(pos_key_proj|pos_query_proj|pos_proj|pos_q_proj|linear_pos|pos_bias_u|r_net|r_w_bias"
    r"|distance_embedding|relative_position_bias_table)\b": Obstacle(
        "its attention has relative positions in its scores, with weights that no layout has",
        "headwise scan runs such a model; its weights have no layout",
    ),
}


def find_obstacle(headers: Mapping[str, TensorHeader]) -> Obstacle | None:
    """Return the reason why no layout fits tensors, or None where none is known."""
    known = find_quantisation(headers) or _find_by_name(headers, OTHERS)
    if known is not None:
        return known
    unlisted = min(_unlisted_tensors(headers), key=lambda pair: len(pair[1]), default=None)
    if unlisted is None:
        return None
    layout, names = unlisted
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    reason = f"its names would be those of {layout}, but for `{names[0]}`{more}"
    return Obstacle(reason, "leave these tensors out if they are no part of attention")


def find_quantisation(names: Collection[str]) -> Obstacle | None:
    """Return the quantisation that names of tensors show, or None."""
    if any(
        f"{name}.scales" in names and f"{name}.biases" in names
        for name in (n.removesuffix(".weight") for n in names if n.endswith(".weight"))
    ):
        do = f"mlx_lm.convert --dequantize, or {UNQUANTISED}"
        return Obstacle("its weights are quantised by MLX", do)
    return _find_by_name(names, QUANTISED)


def _find_by_name(names: Collection[str], patterns: Mapping[str, Obstacle]) -> Obstacle | None:
    for pattern, obstacle in patterns.items():
        if name := next((name for name in names if re.search(pattern, name)), None):
            return obstacle._replace(reason=f"{obstacle.reason}, as `{name}` shows")
    return None


def _unlisted_tensors(headers: Mapping[str, TensorHeader]) -> Iterator[tuple[str, list[str]]]:
    """Yield each layout with a whole module, and the tensors in its modules that it lacks."""
    for layout in layouts_by_name().values():
        modules = find_modules(layout, headers)
        if any(layout.required <= {*module.tensors.values()} for module in modules):
            names = [n for m in modules for n in find_unlisted_tensors_of_module(m, layout)]
            if names:
                yield layout.name, names
