"""One attention call of a running model."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from headwise.matrix import AttentionMatrix


@dataclass(eq=False)
class LayerCall:
    """What a layer computes, and what is known around it.

    Attributes:
        layer: its name in the model; "(2)" where the same module runs again in one pass, and
            "(call 2)" where one run of it attends once more for the same tokens.
        module: the module that ran; None outside of any.
        matrix: the attention matrix.
        values: what is attended to.
        outputs: the head outputs, before any output projection.
        is_cross: whether keys come from elsewhere than queries.
        own_key: the key that stands where query 0 stands; None in cross attention, and where it is
            not known.
        dropped: how many keys before the first one a cache has dropped.
        version: of the outputs when they were shown: it counts changes in place.
        block: the name of the outermost block that is running; "" outside of any.
        tokens: of the keys, where an embedding was seen to look them up.
        out_proj: each head's part of the output projection, known once that was called.
        residual: the state that the layer's block was given. Known for the first attention of a
            block, if the state was not changed since.
    """

    layer: str
    module: nn.Module | None
    matrix: AttentionMatrix
    values: Float[Tensor, "batch kv_heads keys value_dim"]
    outputs: Float[Tensor, "batch heads queries value_dim"]
    is_cross: bool
    own_key: int | None = None
    dropped: int = 0
    version: int = -1
    block: str = ""
    tokens: Tensor | None = None
    out_proj: Tensor | None = None
    residual: Tensor | None = None
