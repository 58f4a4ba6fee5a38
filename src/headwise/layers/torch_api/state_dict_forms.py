"""Conversion between torch's two forms of the input projection in a state_dict.

Packed is ``in_proj_weight`` (3 * embed_dim, embed_dim): the rows of queries, keys, values in this
order. Separate is ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``, the form of layers with
``kdim`` or ``vdim``. Both have one ``in_proj_bias``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PACKED = "in_proj_weight"
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def match_projection_form(
    layer: torch.nn.MultiheadAttention,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    error_msgs: list[str],
) -> Mapping[str, Any]:
    """Return ``state_dict``, or a copy with this layer's projection in the layer's form.

    Weights in the other form and of other widths are a size mismatch: the function adds a message
    to ``error_msgs``, as torch does for sizes, for both values of ``strict``.
    """
    packed, separate = prefix + PACKED, [prefix + name for name in SEPARATE]
    has_packed, has_separate = packed in state_dict, all(key in state_dict for key in separate)
    if has_packed == has_separate:  # neither form, or both
        return state_dict
    held = layer._parameters
    if has_packed and held.get(PACKED) is None and _has_all(held, *SEPARATE):
        converted = _split_packed_weight(state_dict[packed], held, packed, error_msgs)
    elif has_separate and _has_all(held, PACKED) and held.get(SEPARATE[0]) is None:
        converted = _pack_separate_weights(
            [state_dict[key] for key in separate], held, separate, error_msgs
        )
    else:
        return state_dict
    if converted is None:
        return state_dict
    if local_metadata.get("assign_to_params_buffers", False):
        # Assigned tensors become the parameters, which must not share storage.
        converted = {name: weight.clone() for name, weight in converted.items()}
    rest = {key: x for key, x in state_dict.items() if key not in (packed, *separate)}
    return rest | {prefix + name: weight for name, weight in converted.items()}


def _has_all(parameters: Mapping[str, Tensor | None], *names: str) -> bool:
    return all(parameters.get(name) is not None for name in names)


def _split_packed_weight(
    weight: Tensor, held: Mapping[str, Tensor | None], key: str, error_msgs: list[str]
) -> dict[str, Tensor] | None:
    shapes = [tuple(held[name].shape) for name in SEPARATE]  # type: ignore[union-attr]
    rows = weight.shape[0] // 3
    if weight.shape[0] % 3 or any(shape != (rows, *weight.shape[1:]) for shape in shapes):
        expected = ", ".join(f"{n} {s}" for n, s in zip(SEPARATE, shapes, strict=True))
        error_msgs.append(
            f"size mismatch for {key}: the packed weight {tuple(weight.shape)} in the checkpoint"
            f" holds three of shape {(rows, *weight.shape[1:])}, but this layer has {expected}."
        )
        return None
    return dict(zip(SEPARATE, weight.chunk(3), strict=True))


def _pack_separate_weights(
    weights: list[Tensor],
    held: Mapping[str, Tensor | None],
    keys: list[str],
    error_msgs: list[str],
) -> dict[str, Tensor] | None:
    shape = tuple(held[PACKED].shape)  # type: ignore[union-attr]
    each = (shape[0] // 3, *shape[1:])
    shapes = [tuple(weight.shape) for weight in weights]
    if any(shape != each for shape in shapes):
        listed = ", ".join(f"{key} {shape}" for key, shape in zip(keys, shapes, strict=True))
        error_msgs.append(
            f"size mismatch for {keys[0].removesuffix(SEPARATE[0])}{PACKED}: the checkpoint has"
            f" {listed}, but this layer packs three of shape {each} into {shape}."
        )
        return None
    return {PACKED: torch.cat(weights)}
