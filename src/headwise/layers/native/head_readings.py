"""Per-head results of a layer: attention matrix, head outputs, contributions, explanation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.attention_matrix import AttentionMatrix
from headwise.layers.explanation import LayerExplanation, projection_lines
from headwise.layers.native import foreign_argument_advice
from headwise.layers.native.base import AttentionBase
from headwise.layers.native.pack_or_left_pad_tokens import Packed, Unpacked, select_packing
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.explain_wrong_arguments import explain_arguments


class HeadReadings(AttentionBase):
    """Methods for the results of single heads; arguments and errors as in the forward pass.

    A layer with a `HeadPart` computes the matrix and the head outputs of its own heads.
    """

    @explain_arguments(
        foreign_argument_advice.CALL,
        beyond=foreign_argument_advice.advice_on_positional_call_arguments,
    )
    def matrix(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> AttentionMatrix:
        """Return the attention matrix (batch, heads, queries, keys) as an operator.

        Raises:
            ShapeError, DTypeError, DeviceError: ``x`` or ``source`` does not fit the layer.
            MaskError: ``mask`` is no `Mask`, or does not fit the sizes of the call.
        """
        call = self._prepare_call(x, source, mask, score_bias)
        return self._matrix_and_values(Unpacked.of(call), call)[0]

    @explain_arguments(
        foreign_argument_advice.CALL,
        beyond=foreign_argument_advice.advice_on_positional_call_arguments,
    )
    def head_outputs(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return weights @ v for each head, the input of the output projection.

        Raises:
            ShapeError, DTypeError, DeviceError: ``x`` or ``source`` does not fit the layer.
            MaskError: ``mask`` is no `Mask`, or does not fit the sizes of the call.
        """
        call = self._prepare_call(x, source, mask, score_bias)
        matrix, v = self._matrix_and_values(Unpacked.of(call), call)
        return matrix @ v

    @explain_arguments(
        foreign_argument_advice.CALL,
        beyond=foreign_argument_advice.advice_on_positional_call_arguments,
    )
    def contributions(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> Float[Tensor, "batch heads queries out_dim"]:
        """Return each head's part of the output; their sum is the output less its bias.

        The output projection is called once for each head, so that adapters, quantisation and
        sharding apply.

        Raises:
            ShapeError, DTypeError, DeviceError: ``x`` or ``source`` does not fit the layer.
            MaskError: ``mask`` is no `Mask`, or does not fit the sizes of the call.
        """
        outputs = self.head_outputs(x, source, mask=mask, score_bias=score_bias)
        bias = self.out_proj(torch.zeros_like(outputs[:1, :, :1]).transpose(1, 2).flatten(2))
        # Fill, do not multiply by 0: an infinite head would make the others NaN.
        here = range(self.num_heads) if self.part is None else self.part.heads
        heads = torch.arange(here.start, here.stop, device=outputs.device)[:, None, None]
        parts = [
            self.out_proj(outputs.masked_fill(heads != head, 0).transpose(1, 2).flatten(2)) - bias
            for head in range(self.num_heads)
        ]
        return torch.stack(parts, dim=1)

    @explain_arguments(
        foreign_argument_advice.CALL,
        beyond=foreign_argument_advice.advice_on_positional_call_arguments,
    )
    def explain(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
    ) -> LayerExplanation:
        """Return a printable report on a forward pass of this input: tokens, kernels and costs."""
        call = self._prepare_call(x, source, mask, score_bias)
        tokens = select_packing(call)
        matrix, v = self._matrix_and_values(tokens, call)
        total, real, keys = (t.shape[0] * t.shape[1] for t in (x, tokens.x, tokens.source))
        line = f"{total:,}, all of the input"
        if isinstance(tokens, Packed):
            line = f"{real:,} of {total:,} are real and packed into one row; padding is skipped"
        if self.applies_dropout:
            line += "; dropout in training allocates queries x keys for A @ v"
        if self.part is not None:
            line += f"; {self.part} of {self.num_heads} here"
        counts = {"q_proj": real, "k_proj": keys, "v_proj": keys, "out_proj": real}
        return LayerExplanation(line, projection_lines(self, counts), matrix.explain(v))
