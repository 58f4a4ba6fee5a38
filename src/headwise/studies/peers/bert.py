"""transformers' BertSelfAttention and BertSelfOutput themselves."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.studies.peers.of_transformers import OfTransformers
from headwise.studies.peers.peer import PURPOSE
from headwise.studies.peers.weights import Weights
from headwise.support.extras import require


class Bert(OfTransformers):
    """Separate projections; residual and norm are inside."""

    name = "BERT"

    def _layer(self) -> Any:
        transformers = require("transformers.models.bert.modeling_bert", purpose=PURPOSE)
        config = transformers.BertConfig(
            hidden_size=self.embed_dim,
            num_attention_heads=self.num_heads,
            num_hidden_layers=1,
            attention_probs_dropout_prob=self.p,
            hidden_dropout_prob=self.p,
            attn_implementation=self.implementation,
            vocab_size=1,
            max_position_embeddings=1,
            intermediate_size=1,
        )
        model = transformers.BertModel(config, add_pooling_layer=False)
        return model.encoder.layer[0].attention

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
