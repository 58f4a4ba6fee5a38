"""Float masks of other libraries, split into a mask and a score bias.

transformers, and much code that calls torch's operator, hides a key by adding the lowest number
that the dtype has. `ScoreBias` adds that number like any other; this module turns it into
a hidden key.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.tracing import may_check_values


def split_additive_mask(added: Float[Tensor, "..."], *, axes: str) -> tuple[Mask, ScoreBias]:
    """Return the keys that a float mask hides, and the bias that it adds to the others.

    Hidden are entries at or below half of the lowest number of the mask's dtype. A query without a
    visible key gets zeros; with a plain addition it would get the mean of all values. Such queries
    are padding.

    Raises:
        MaskError: a tensor that is no float, or axes that do not fit.
    """
    score_bias = ScoreBias.dense(added, axes=axes)
    # `<=` keeps NaN out of the hidden entries, so the checks of values raise for it.
    hidden = added <= torch.finfo(added.dtype).min / 2
    if torch.compiler.is_compiling():
        # One tensor, which the fused kernel takes at any size.
        return Mask(), ScoreBias.dense(added.masked_fill(hidden, -torch.inf), axes=axes)
    mask = Mask.may_attend(~hidden, axes=axes)
    if may_check_values(added):  # return an empty mask or bias where one suffices
        if not bool(hidden.any()):
            return Mask(), score_bias
        if not added.requires_grad and not bool(added.masked_fill(hidden, 0).any()):
            return mask, ScoreBias()
    return mask, score_bias
