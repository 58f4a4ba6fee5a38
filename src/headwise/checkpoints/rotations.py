"""Rotations that a config states: their scaling, and the axes of several positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwise.checkpoints.fields import ConfigFields, is_number
from headwise.errors import OptionError
from headwise.function.rotary import Order, PlaneOrder, axes_of_sections
from headwise.function.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
)
from headwise.support.text import describe_value

# The order of the sections of a rotation, and those of a class whose config states none.
_SECTIONS: tuple[tuple[Order, tuple[int, ...], str], ...] = (
    (
        "blocks",
        (16, 24, 24),
        "paddleocr_vl_text qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text",
    ),
    ("blocks", (8, 12, 12), "glm4v_moe_text glm4v_text glm_image_text glm_ocr_text"),
    (
        "in turn",
        (24, 20, 20),
        "cohere_compass_text cosmos3_edge_text qwen3_omni_moe_talker_text qwen3_omni_moe_text "
        "qwen3_vl_moe_text qwen3_vl_text",
    ),
    ("in turn", (11, 11, 10), "qwen3_5_moe_text qwen3_5_text qwen4_exp_text"),
    ("rows first", (22, 22, 20), "ernie4_5_vl_moe_text"),
)
_ORDERS = {kind: (order, usual) for order, usual, kinds in _SECTIONS for kind in kinds.split()}
Axes = tuple[int, ...] | None
# Vision towers that turn by row and column.
PLANES: dict[str, PlaneOrder] = {
    "dinov3_vit": "halves",
    "eomt_dinov3": "halves",
    "pixtral": "alternating",
}


def read_axes(rotary: ConfigFields, fields: ConfigFields, width: int | None) -> Axes:
    """Return the axes by which pairs turn; each class of transformers has one order of them.

    The order "in turn" takes what fits into the width, as its classes do.
    """
    name, needed = "mrope_section", "a list of whole numbers"
    sections = rotary.read(name, needed, lambda x: isinstance(x, list) and all(map(_is_count, x)))
    of_flag: Order = "in turn" if rotary.flag("mrope_interleaved") else "blocks"
    order, usual = _ORDERS.get(fields.text("model_type") or "", (of_flag, ()))
    if width is None or not any(sections or usual):
        return None
    axes = axes_of_sections(sections or usual, order=order)
    if order == "in turn":
        axes = (*axes, *(0,) * (width // 2))[: width // 2]
    if len(axes) != width // 2:
        if not sections:
            return None
        raise rotary.field_error(
            name, f"numbers whose sum is {width // 2}, half of the {width} channels that turn"
        )
    return axes


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def rotary_scaling_kind(rotary: ConfigFields) -> str | None:
    """Return the name of the scaling in a rotary section; None for the usual frequencies."""
    kind = rotary.text("rope_type" if "rope_type" in rotary else "type")
    return None if kind in (None, "", "default", "mrope") else kind


def _read_original_length(rotary: ConfigFields, fields: ConfigFields) -> int:
    name = "max_position_embeddings"
    count = rotary.count(f"original_{name}") or fields.count(name)
    return count or int(fields.required_number(name))


def _read_factors(rotary: ConfigFields, name: str) -> tuple[float, ...]:
    factors = rotary.read(name, "a list of numbers", lambda x: isinstance(x, list | tuple))
    if not factors or not all(map(is_number, factors)):
        raise rotary.field_error(name, "a list of numbers, one of each pair")
    return tuple(map(float, factors))


def _read_long_scaling(rotary: ConfigFields, fields: ConfigFields) -> LongScaling:
    name = "original_max_position_embeddings"  # Phi-3 has it beside the rotation
    original = rotary.count(name) or fields.count(name) or _read_original_length(rotary, fields)
    longest = fields.count("max_position_embeddings") or original
    return LongScaling(
        _read_factors(rotary, "short_factor"),
        _read_factors(rotary, "long_factor"),
        original,
        factor=rotary.number("factor") or longest / original,
        attention_factor=rotary.number("attention_factor"),
    )


_SCALINGS: dict[str, Callable[[ConfigFields, ConfigFields], Scaling]] = {
    "longrope": _read_long_scaling,
    "dynamic": lambda rotary, fields: DynamicScaling(
        rotary.required_number("factor"), int(fields.required_number("max_position_embeddings"))
    ),
    "proportional": lambda rotary, _: ProportionalScaling(
        rotary.number("partial_rotary_factor") or 1.0, rotary.number("factor") or 1.0
    ),
    "linear": lambda rotary, _: LinearScaling(rotary.required_number("factor")),
    "llama3": lambda rotary, fields: Llama3Scaling(
        factor=rotary.required_number("factor"),
        low_freq_factor=rotary.required_number("low_freq_factor"),
        high_freq_factor=rotary.required_number("high_freq_factor"),
        original_length=_read_original_length(rotary, fields),
    ),
    "yarn": lambda rotary, fields: YarnScaling(
        factor=rotary.required_number("factor"),
        original_length=_read_original_length(rotary, fields),
        beta_fast=rotary.number("beta_fast") or 32.0,
        beta_slow=rotary.number("beta_slow") or 1.0,
        attention_factor=rotary.number("attention_factor"),
        mscale=rotary.number("mscale"),
        mscale_all_dim=rotary.number("mscale_all_dim"),
        truncate=rotary.flag("truncate", default=True),
    ),
}


def read_scaling(rotary: ConfigFields, fields: ConfigFields) -> Scaling | None:
    """Return the scaling of a rotary section, None for the usual frequencies.

    Raises:
        OptionError: a scaling that `Rotary` does not have.
    """
    if (kind := rotary_scaling_kind(rotary)) is None:
        return None
    if kind not in _SCALINGS:
        raise OptionError(
            saw=f"the rotary scaling {describe_value(kind)} in the config",
            needed=f"default, {', '.join(_SCALINGS)}",
            do="pass rotary=Rotary(...) with the same frequencies",
        )
    return _SCALINGS[kind](rotary, fields)
