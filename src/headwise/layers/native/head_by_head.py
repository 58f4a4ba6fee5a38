"""What a layer tells of its heads: the matrix, head outputs, contributions, an explanation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.layers.native import torch_words
from headwise.layers.native.explain import LayerExplanation, explain
from headwise.layers.native.frames import Call, Whole, choose_frame
from headwise.layers.native.parts import Parts
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix import AttentionMatrix
from headwise.support.arguments import explains


class HeadByHead(Parts):
    """The readings of a layer that has ``_call`` and ``_operands``; arguments as in forward."""

    if TYPE_CHECKING:

        def _call(
            self,
            x: Tensor,
            source: Tensor | None,
            mask: Mask | None,
            score_bias: ScoreBias | None,
        ) -> Call: ...
        def _operands(self, frame: Whole, call: Call) -> tuple[AttentionMatrix, Tensor]: ...

    @explains(torch_words.CALL, beyond=torch_words.beyond_the_source)
    def matrix(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> AttentionMatrix:
        """The attention matrix, (batch, heads, queries, keys), never written down."""
        return self._matrix_and_values(x, source, mask, score_bias)[0]

    @explains(torch_words.CALL, beyond=torch_words.beyond_the_source)
    def head_outputs(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """What each head reads, before the output projection."""
        matrix, v = self._matrix_and_values(x, source, mask, score_bias)
        return matrix @ v

    @explains(torch_words.CALL, beyond=torch_words.beyond_the_source)
    def contributions(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> Float[Tensor, "batch heads queries out_dim"]:
        """Each head's part of the output: their sum is the output less its bias.

        The output projection is called once for each head, so that it is whatever it has become:
        adapted, quantised, sharded.
        """
        outputs = self.head_outputs(x, source, mask=mask, score_bias=score_bias)
        bias = self.out_proj(torch.zeros_like(outputs[:1, :, :1]).transpose(1, 2).flatten(2))
        # Filled, not multiplied: an infinite head must not make the others NaN.
        heads = torch.arange(self.num_heads, device=outputs.device)[:, None, None]
        parts = [
            self.out_proj(outputs.masked_fill(heads != head, 0).transpose(1, 2).flatten(2)) - bias
            for head in range(self.num_heads)
        ]
        return torch.stack(parts, dim=1)

    @explains(torch_words.CALL, beyond=torch_words.beyond_the_source)
    def explain(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> LayerExplanation:
        """What a forward pass of this input computes, by which kernel, and why; print it."""
        call = self._call(x, source, mask, score_bias)
        frame = choose_frame(call)
        matrix, v = self._operands(frame, call)
        return explain(self, call, frame, matrix.explain(v))

    def _matrix_and_values(
        self,
        x: Tensor,
        source: Tensor | None,
        mask: Mask | None,
        score_bias: ScoreBias | None,
    ) -> tuple[AttentionMatrix, Tensor]:
        call = self._call(x, source, mask, score_bias)
        return self._operands(Whole(call.x, call.source, call.mask), call)
