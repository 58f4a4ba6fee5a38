"""A float mask of other libraries, taken apart: who may be attended, and what is added.

transformers, and much code that calls torch's operator, hides a key by adding the lowest number
that the dtype has. In a `ScoreBias` that is a number like any other; here, where such a mask comes
in, it is read as it was meant.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.tracing import may_check_values


def taken_apart(added: Float[Tensor, "..."], *, axes: str) -> tuple[Mask, ScoreBias]:
    """What a float mask hides, and what it adds to the scores of the rest.

    Hidden is what is at or below half of the lowest number of the mask's dtype. A query from which
    all keys are hidden so attends to nothing and gets zeros; where the lowest number is only
    added, it gets the mean of all values. Such queries are padding.

    Raises:
        MaskError: a tensor that is no float, or axes that do not fit.
    """
    score_bias = ScoreBias.dense(added, axes=axes)
    # Not `>` for what is shown: NaN must stay NaN, and be refused where values are checked.
    hidden = added <= torch.finfo(added.dtype).min / 2
    if torch.compiler.is_compiling():
        # One tensor, which the fused kernel takes at any size.
        return Mask(), ScoreBias.dense(added.masked_fill(hidden, -torch.inf), axes=axes)
    mask = Mask.may_attend(~hidden, axes=axes)
    if may_check_values(added):  # and so here, where one of both says nothing
        if not bool(hidden.any()):
            return Mask(), score_bias
        if not added.requires_grad and not bool(added.masked_fill(hidden, 0).any()):
            return mask, ScoreBias()
    return mask, score_bias
