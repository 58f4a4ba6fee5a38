"""Attention block of einops' page "Transformer's attention needs more attention".

The page (arogozhnikov/einops, docs/pytorch-examples.html) shows attention, dropout of the output,
the residual of its queries, and layer norm. Queries, keys and values have three separate inputs;
`headwise.Attention` has one source for keys and values.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.function.stages import split_heads
from headwise.layers.checks import check_tokens
from headwise.layers.hooks import call_hook
from headwise.layers.initial import initialise_as_einops_page
from headwise.layers.options import check_positive_whole_numbers
from headwise.masks.mask import Mask
from headwise.matrix.checks import check_probability
from headwise.matrix.operator import AttentionMatrix


class EinopsPostNormBlock(nn.Module):
    """The page's block with the page's parameter names: its state_dict loads here.

    The page's n_head, d_model, d_k and d_v are ``num_heads``, ``embed_dim``, ``head_dim`` and
    ``value_dim``. In its boolean mask of (batch, queries, keys), True hides a key:

        mask = Mask.may_attend(~einops_mask, axes="batch queries keys")

    The page's returned weights are ``block.matrix(q, k).dense().transpose(0, 1)``. A query that
    may attend to nothing has zero head outputs here, and NaN on the page.

    Args:
        embed_dim: width of the three inputs and of the output.
        num_heads: number of heads.
        head_dim: width of a head's queries and keys.
        value_dim: width of a head's values.
        dropout: probability of dropping each number of the output in training, before the
            residual. Weights are not dropped.

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
        check_positive_whole_numbers(
            embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim, value_dim=value_dim
        )
        check_probability(dropout)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.w_qs, self.w_ks, self.w_vs = (
            nn.Linear(embed_dim, num_heads * width, device=device, dtype=dtype)
            for width in (head_dim, head_dim, value_dim)
        )
        self.fc = nn.Linear(num_heads * value_dim, embed_dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(embed_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projections as the page does, and the layer norm to the identity."""
        projections = (self.w_qs, self.w_ks, self.w_vs, self.fc)
        initialise_as_einops_page(*projections, head_dim=self.head_dim, value_dim=self.value_dim)
        self.layer_norm.reset_parameters()

    def forward(
        self,
        q: Float[Tensor, "batch queries embed_dim"],
        k: Float[Tensor, "batch keys embed_dim"],
        v: Float[Tensor, "batch keys embed_dim"],
        *,
        mask: Mask | None = None,
    ) -> Float[Tensor, "batch queries embed_dim"]:
        """Return the layer norm of ``q`` plus the attention's output.

        Raises:
            ShapeError, DTypeError, DeviceError: inputs that do not fit the block.
            MaskError: a mask for other sizes.
        """
        matrix, values = self.matrix(q, k, mask=mask), self._project_heads("v", v, self.w_vs)
        outputs = call_hook(matrix, values, matrix @ values)
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
        """Return the attention matrix (batch, heads, queries, keys) as an operator."""
        queries, keys = (
            self._project_heads("q", q, self.w_qs),
            self._project_heads("k", k, self.w_ks),
        )
        return AttentionMatrix(queries, keys, mask=mask)

    def _project_heads(self, name: str, x: Tensor, projection: nn.Linear) -> Tensor:
        """Project (batch, length, embed_dim) to (batch, heads, length, width of a head)."""
        axes = ("batch", "queries" if name == "q" else "keys", "embed_dim")
        check_tokens(name, x, self.embed_dim, axes, projection)
        return split_heads(projection(x), heads=self.num_heads)
