"""The two forms of the input projection in a state_dict: packed, and one weight each.

Packed is ``in_proj_weight`` (3 * embed_dim, embed_dim): the rows of queries, keys, values in this
order. Separate is ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``, which is what a layer
with other ``kdim`` or ``vdim`` holds. Both have one ``in_proj_bias``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PACKED = "in_proj_weight"
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def as_held_by(
    layer: torch.nn.MultiheadAttention,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    error_msgs: list[str],
) -> Mapping[str, Any]:
    """``state_dict``, or a copy with this layer's weights in the form that the layer holds.

    Weights that exist, but in the other form and for other widths, are a size mismatch: an entry
    of ``error_msgs``, as torch has it for sizes, whether ``strict`` or not.
    """
    packed, separate = prefix + PACKED, [prefix + name for name in SEPARATE]
    has_packed, has_separate = packed in state_dict, all(key in state_dict for key in separate)
    if has_packed == has_separate:  # neither, or both: nothing to tell apart
        return state_dict
    own = layer._parameters
    if has_packed and own.get(PACKED) is None and _holds(own, *SEPARATE):
        converted = _split(state_dict[packed], own, packed, error_msgs)
    elif has_separate and _holds(own, PACKED) and own.get(SEPARATE[0]) is None:
        converted = _pack([state_dict[key] for key in separate], own, separate, error_msgs)
    else:
        return state_dict
    if converted is None:
        return state_dict
    if local_metadata.get("assign_to_params_buffers", False):
        # What is assigned becomes the parameter: it must not share another one's storage.
        converted = {name: weight.clone() for name, weight in converted.items()}
    rest = {key: x for key, x in state_dict.items() if key not in (packed, *separate)}
    return rest | {prefix + name: weight for name, weight in converted.items()}


def _holds(own: Mapping[str, Tensor | None], *names: str) -> bool:
    return all(own.get(name) is not None for name in names)


def _split(
    weight: Tensor, own: Mapping[str, Tensor | None], key: str, error_msgs: list[str]
) -> dict[str, Tensor] | None:
    shapes = [tuple(own[name].shape) for name in SEPARATE]  # type: ignore[union-attr]
    rows = weight.shape[0] // 3
    if weight.shape[0] % 3 or any(shape != (rows, *weight.shape[1:]) for shape in shapes):
        wanted = ", ".join(f"{n} {s}" for n, s in zip(SEPARATE, shapes, strict=True))
        error_msgs.append(
            f"size mismatch for {key}: the packed weight {tuple(weight.shape)} in the checkpoint"
            f" holds three of shape {(rows, *weight.shape[1:])}, but this layer has {wanted}."
        )
        return None
    return dict(zip(SEPARATE, weight.chunk(3), strict=True))


def _pack(
    weights: list[Tensor],
    own: Mapping[str, Tensor | None],
    keys: list[str],
    error_msgs: list[str],
) -> dict[str, Tensor] | None:
    shape = tuple(own[PACKED].shape)  # type: ignore[union-attr]
    each = (shape[0] // 3, *shape[1:])
    found = [tuple(weight.shape) for weight in weights]
    if any(shape != each for shape in found):
        listed = ", ".join(f"{key} {shape}" for key, shape in zip(keys, found, strict=True))
        error_msgs.append(
            f"size mismatch for {keys[0].removesuffix(SEPARATE[0])}{PACKED}: the checkpoint has"
            f" {listed}, but this layer packs three of shape {each} into {shape}."
        )
        return None
    return {PACKED: torch.cat(weights)}
