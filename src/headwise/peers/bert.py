"""transformers' BertSelfAttention and BertSelfOutput themselves."""

from __future__ import annotations

from torch import Tensor

from headwise.extras import require
from headwise.peers.hf_masks import mask_for
from headwise.peers.peer import PURPOSE, Peer
from headwise.peers.weights import Weights


class Bert(Peer):
    """The first layer of a model, so that its weights start as a model's do.

    Args:
        implementation: transformers' ``attn_implementation``, the kernel.
    """

    name = "BERT"
    real = True
    biased = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        implementation: str = "eager",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        transformers = require("transformers.models.bert.modeling_bert", purpose=PURPOSE)
        config = transformers.BertConfig(
            hidden_size=embed_dim,
            num_attention_heads=num_heads,
            num_hidden_layers=1,
            attention_probs_dropout_prob=dropout,
            hidden_dropout_prob=dropout,
            attn_implementation=implementation,
            # What is not looked at is as small as it can be.
            vocab_size=1,
            max_position_embeddings=1,
            intermediate_size=1,
        )
        model = transformers.BertModel(config, add_pooling_layer=False)
        self.inner = model.encoder.layer[0].attention
        self.implementation = implementation

    def held(self) -> Weights:
        """Those of the linear layers."""
        own, out = self.inner.self, self.inner.output.dense
        return Weights.of_linears(own.query, own.key, own.value, out)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Through the output projection and its dropout, before the residual."""
        heads = self.inner.self(x, attention_mask=None if mask is None else mask[:, None])[0]
        out: Tensor = self.inner.output.dropout(self.inner.output.dense(heads))
        return out

    def block(self, x: Tensor) -> Tensor:
        """The norm of the input and what is attended to."""
        normed: Tensor = self.inner(x)[0]
        return normed

    def spell(self, may_attend: Tensor) -> Tensor:
        """By transformers' own function."""
        return mask_for(self.implementation, may_attend, dtype=self.inner.self.query.weight.dtype)

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """The second result of the whole."""
        weights: Tensor | None = self.inner(x)[1]
        return weights
