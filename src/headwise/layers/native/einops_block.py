"""The attention block of einops' page, as a thin layer over the attention matrix.

"Transformer's attention needs more attention" (arogozhnikov/einops, docs/pytorch-examples.html)
shows a whole block: attention, dropout of the output, the residual of its queries, layer norm.
Queries, keys and values each have an input of their own, which `headwise.Attention`, with one
source for keys and values, does not take.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.attention_matrix import AttentionMatrix
from headwise.layers.hooks import shown
from headwise.layers.native.base import Projection
from headwise.layers.native.call_checks import check_tokens
from headwise.layers.native.initialization import einops
from headwise.layers.native.option_checks import check_counts
from headwise.masks.mask import Mask
from headwise.masks.operand_checks import check_probability
from headwise.reference import split_heads


class EinopsAttention(nn.Module):
    """The page's block, under its own names: its state_dict loads, and its output is the same.

    The source's n_head, d_model, d_k and d_v are ``num_heads``, ``embed_dim``, ``head_dim`` and
    ``value_dim``. Its boolean mask of (batch, queries, keys) hides what is True:

        mask = Mask.may_attend(~theirs, axes="batch queries keys")

    The weights that it returns, heads first, are ``block.matrix(q, k).dense().transpose(0, 1)``.
    A query that may attend to nothing has zero head outputs; there they are NaN.

    Args:
        embed_dim: width of the three inputs and of the output.
        num_heads: how many heads.
        head_dim: width of a head's queries and keys.
        value_dim: width of a head's values.
        dropout: probability with which a number of the output is dropped, in training, before the
            residual. No weight is dropped.

    Raises:
        OptionError: a size below 1, or a probability outside 0 to 1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int,
        value_dim: int,
        dropout: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(
            embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim, value_dim=value_dim
        )
        check_probability(dropout)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.w_qs, self.w_ks, self.w_vs = (
            Projection(embed_dim, num_heads * width, device=device, dtype=dtype)
            for width in (head_dim, head_dim, value_dim)
        )
        self.fc = Projection(num_heads * value_dim, embed_dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(embed_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The projections as the source draws them; the layer norm changes nothing."""
        projections = (self.w_qs, self.w_ks, self.w_vs, self.fc)
        einops(*projections, head_dim=self.head_dim, value_dim=self.value_dim)
        self.layer_norm.reset_parameters()

    def forward(
        self,
        q: Float[Tensor, "batch queries embed_dim"],
        k: Float[Tensor, "batch keys embed_dim"],
        v: Float[Tensor, "batch keys embed_dim"],
        *,
        mask: Mask | None = None,
    ) -> Float[Tensor, "batch queries embed_dim"]:
        """The normed sum of ``q`` and what is attended to; inputs before their projections.

        Raises:
            ShapeError, DTypeError, DeviceError, MaskError: what does not fit together.
        """
        matrix, values = self.matrix(q, k, mask=mask), self._heads("v", v, self.w_vs)
        outputs = shown(matrix, values, matrix @ values)
        attended = self.dropout(self.fc(outputs.transpose(1, 2).flatten(2)))
        normed: Tensor = self.layer_norm(attended + q)
        return normed

    def matrix(
        self,
        q: Float[Tensor, "batch queries embed_dim"],
        k: Float[Tensor, "batch keys embed_dim"],
        *,
        mask: Mask | None = None,
    ) -> AttentionMatrix:
        """The attention matrix, (batch, heads, queries, keys), never written down."""
        queries, keys = self._heads("q", q, self.w_qs), self._heads("k", k, self.w_ks)
        return AttentionMatrix(queries, keys, mask=mask)

    def _heads(self, name: str, x: Tensor, projection: Projection) -> Tensor:
        """(batch, length, embed_dim) to (batch, heads, length, width of a head)."""
        axes = ("batch", "queries" if name == "q" else "keys", "embed_dim")
        check_tokens(name, x, self.embed_dim, axes, projection)
        return split_heads(projection(x), heads=self.num_heads)
