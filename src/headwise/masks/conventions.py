"""Conversion of masks in other functions' conventions to True = may attend."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.clauses.dense import with_matrix_axes
from headwise.support.arguments import require_tensors
from headwise.support.tracing import may_check_values


def require_bool(tensor: Tensor, where: str) -> None:
    """Raise MaskError unless the dtype is bool: an integer mask may mean either polarity."""
    require_tensors(allowed=tensor)
    if tensor.dtype != torch.bool:
        raise MaskError(
            saw=f"{where} with a tensor of dtype {tensor.dtype}",
            needed="bool: True = may attend. An integer mask may mean either polarity",
            do="t.bool() if nonzero means may attend, t == 0 if nonzero means blocked; "
            "a float that is added to the scores is a ScoreBias",
        )


def to_allowed_matrix(mask: Tensor, num_heads: int | None, *, true_attends: bool) -> Tensor:
    """Return another library's mask as bools with named axes, True = may attend.

    The shape is (batch, heads, queries, keys), or broadcasts to it.
    """
    allowed = to_allowed_entries(mask, true_attends=true_attends)
    if allowed.dim() == 2:
        return with_matrix_axes(allowed, "queries keys")
    if allowed.dim() == 4 and true_attends:
        return allowed
    if allowed.dim() == 3 and not true_attends and num_heads and allowed.shape[0] % num_heads == 0:
        by_head: Tensor = allowed.unflatten(0, (-1, num_heads))
        return by_head
    shapes = "(queries, keys) or (batch, heads, queries, keys)"
    if not true_attends:
        shapes = "(queries, keys), or (batch*heads, queries, keys) together with num_heads"
    raise MaskError(
        saw=f"a mask of shape {tuple(mask.shape)}"
        + (f" and num_heads={num_heads}" if num_heads else ""),
        needed=f"{shapes}; a 3-D mask may also mean (batch, queries, keys) "
        "or (heads, queries, keys)",
        do='name the axes: Mask.may_attend(allowed, axes="batch queries keys")',
    )


def to_allowed_entries(mask: Tensor, *, true_attends: bool) -> Tensor:
    """Return a bool mask of either polarity, or a float one of 0 and -inf, as True = may attend."""
    require_tensors(mask=mask)
    if mask.dtype == torch.bool:
        return mask if true_attends else ~mask
    if not mask.is_floating_point():
        nonzero, zero = ("may attend", "blocked") if true_attends else ("blocked", "may attend")
        raise MaskError(
            saw=f"a mask of dtype {mask.dtype}",
            needed=f"bool, where True = {nonzero} in this convention, or float, 0 or -inf. "
            "An integer mask may mean either polarity",
            do=f"t.bool() if nonzero means {nonzero}, t == 0 if nonzero means {zero}",
        )
    allowed = mask == 0
    if may_check_values(mask) and not bool((allowed | (mask == -torch.inf)).all()):
        raise MaskError(
            saw=f"a float mask with values other than 0 and -inf (dtype {mask.dtype}, e.g. "
            f"{float(mask[~allowed & (mask != -torch.inf)].flatten()[0]):g})",
            needed="only 0 (may attend) and -inf (blocked): a float mask is added to the scores",
            do="pass it as a score bias, ScoreBias.dense(t, axes=...); finfo.min does not block",
        )
    return allowed
