"""Readings of a layer, head by head: the matrix, head outputs, contributions, an explanation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.attention_matrix import AttentionMatrix
from headwise.layers.explanation import LayerExplanation, products
from headwise.layers.native import argument_aliases
from headwise.layers.native.base import AttentionBase
from headwise.layers.native.padding import Packed, Unpacked, choose_frame
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.arguments import explains


class HeadReadings(AttentionBase):
    """What a layer computes for each head; arguments as in its forward pass."""

    @explains(argument_aliases.CALL, beyond=argument_aliases.beyond_the_source)
    def matrix(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> AttentionMatrix:
        """The attention matrix, (batch, heads, queries, keys), never written down."""
        call = self._call(x, source, mask, score_bias)
        return self._operands(Unpacked.of(call), call)[0]

    @explains(argument_aliases.CALL, beyond=argument_aliases.beyond_the_source)
    def head_outputs(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """What each head reads, before the output projection."""
        call = self._call(x, source, mask, score_bias)
        matrix, v = self._operands(Unpacked.of(call), call)
        return matrix @ v

    @explains(argument_aliases.CALL, beyond=argument_aliases.beyond_the_source)
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

    @explains(argument_aliases.CALL, beyond=argument_aliases.beyond_the_source)
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
        given, real, keys = (t.shape[0] * t.shape[1] for t in (x, frame.x, frame.source))
        tokens = f"{given:,}, as they were given"
        if isinstance(frame, Packed):
            tokens = f"{real:,} of {given:,} are real, and packed into one row: only they cost"
        if self.drops:
            tokens += "; while training, dropout writes the weights of A @ v down"
        counts = {"q_proj": real, "k_proj": keys, "v_proj": keys, "out_proj": real}
        return LayerExplanation(tokens, products(self, counts), matrix.explain(v))
