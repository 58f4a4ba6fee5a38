"""Implementations that are run as they are installed, those of headwise among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from headwise.layers.native.attention import Attention
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.masks.mask import Mask
from headwise.studies.peers.peer import PURPOSE, Peer, Weights
from headwise.studies.peers.written_anew import Annotated, EinopsPage, Paper, Tensor2Tensor
from headwise.support.extras import require

LAYERS = 12  # those of GPT-2: its output projections start narrower the more there are


class TorchLayer(Peer):
    """torch.nn.MultiheadAttention, called as it is by default: the weights are asked for.

    Attributes:
        layer: the class that computes; another of the same signature may take its place.
        need_weights: torch computes in another way where they are not needed.
    """

    name = "PyTorch's layer"
    layer: ClassVar[type[nn.MultiheadAttention]] = nn.MultiheadAttention
    need_weights = True

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        self.inner = self.layer(embed_dim, num_heads, dropout=dropout, batch_first=True)

    def held(self) -> Weights:
        """The packed matrix holds the rows of the queries, the keys, the values."""
        inner, out = self.inner, self.inner.out_proj
        return Weights.packed(inner.in_proj_weight, inner.in_proj_bias, out.weight, out.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A mask for each sequence is one for each of its heads there."""
        if mask is not None:
            mask = mask.repeat_interleave(self.num_heads, dim=0)
        out: Tensor = self.inner(x, x, x, attn_mask=mask, need_weights=self.need_weights)[0]
        return out

    def spell(self, may_attend: Tensor) -> Tensor:
        """True may not be attended."""
        return ~may_attend

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """As its default gives them."""
        weights: Tensor = self.inner(x, x, x)[1]
        return weights


class XTransformers(Peer):
    """x-transformers' Attention, with its defaults but for the sizes."""

    name = "x-transformers"
    biased = False

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        layer = require("x_transformers.x_transformers", purpose=PURPOSE).Attention
        self.inner = layer(embed_dim, heads=num_heads, dim_head=self.head_dim, dropout=dropout)

    def held(self) -> Weights:
        """Those of the linear layers."""
        inner = self.inner
        return Weights.of_linears(inner.to_q, inner.to_k, inner.to_v, inner.to_out)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Its ``attn_mask`` may have one for each sequence and head."""
        out: Tensor = self.inner(x, attn_mask=None if mask is None else mask[:, None])
        return out

    def spell(self, may_attend: Tensor) -> Tensor:
        """True may be attended."""
        return may_attend

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """Among what it keeps when it is told to."""
        weights: Tensor = self.inner(x, return_intermediates=True)[1].post_softmax_attn
        return weights


class OfTransformers(Peer):
    """The first layer of a model, so that its weights start as a model's do.

    Args:
        implementation: transformers' ``attn_implementation``, the kernel.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        implementation: str = "eager",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        self.implementation = implementation
        self.inner = self._layer()

    def _layer(self) -> Any:
        """The attention of a model of these sizes, in which all else is as small as it can be."""
        raise NotImplementedError

    def spell(self, may_attend: Bool[Tensor, "batch queries keys"]) -> Tensor:
        """What transformers hands to its layers, by its own function."""
        masks = require("transformers.masking_utils", purpose=PURPOSE)
        batch, queries, keys = may_attend.shape

        def allowed(sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return may_attend[sequence, query, key]

        mask: Tensor = masks.ALL_MASK_ATTENTION_FUNCTIONS[self.implementation](
            batch_size=batch,
            q_length=queries,
            kv_length=keys,
            mask_function=allowed,
            allow_is_causal_skip=False,
            dtype=self._dtype,
        )
        return mask[:, 0]

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """The second result."""
        weights: Tensor | None = self.inner(x)[1]
        return weights

    @property
    def _dtype(self) -> torch.dtype:
        return self.held().q.dtype


class Bert(OfTransformers):
    """BertSelfAttention and BertSelfOutput: separate projections; residual and norm are inside."""

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


class GPT2(OfTransformers):
    """GPT2Attention alone: a causal mask is made by the model around it.

    One fused projection; its matrices are stored transposed.
    """

    name = "GPT-2"

    def _layer(self) -> Any:
        transformers = require("transformers.models.gpt2.modeling_gpt2", purpose=PURPOSE)
        config = transformers.GPT2Config(
            n_embd=self.embed_dim,
            n_head=self.num_heads,
            n_layer=LAYERS,
            attn_pdrop=self.p,
            resid_pdrop=self.p,
            attn_implementation=self.implementation,
            vocab_size=1,
            n_positions=1,
            n_inner=1,
            bos_token_id=None,
            eos_token_id=None,
        )
        return transformers.GPT2Model(config).h[0].attn

    def held(self) -> Weights:
        """Conv1D stores (in, out): the transpose of a linear layer."""
        fused, out = self.inner.c_attn, self.inner.c_proj
        q, k, v = fused.weight.mT.chunk(3)
        return Weights(q, k, v, out.weight.mT, (*fused.bias.chunk(3), out.bias))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The projections, the attention between them, and the output's dropout."""
        out: Tensor = self.inner(x, attention_mask=None if mask is None else mask[:, None])[0]
        return out


class DropIn(TorchLayer):
    """`headwise.MultiheadAttention`."""

    name = "headwise.MultiheadAttention"
    layer = MultiheadAttention


class Native(Peer):
    """`headwise.Attention`."""

    name = "headwise.Attention"

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        self.inner = Attention(embed_dim, num_heads, dropout=dropout)

    def held(self) -> Weights:
        """Those of the projections."""
        inner = self.inner
        return Weights.of_linears(inner.q_proj, inner.k_proj, inner.v_proj, inner.out_proj)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        """Takes a `Mask`, and refuses a bare tensor."""
        out: Tensor = self.inner(x, mask=mask)
        return out

    def spell(self, may_attend: Tensor) -> Mask:
        """Polarity and axes by name."""
        return Mask.may_attend(may_attend, axes="batch queries keys")

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """Written down on demand."""
        return self.inner.matrix(x).dense()


# In the order in which they appeared.
PEERS: Mapping[str, type[Peer]] = {
    "paper": Paper,
    "tensor2tensor": Tensor2Tensor,
    "annotated": Annotated,
    "torch": TorchLayer,
    "einops": EinopsPage,
    "gpt2": GPT2,
    "bert": Bert,
    "x_transformers": XTransformers,
}
IMPLEMENTATIONS: Mapping[str, type[Peer]] = {**PEERS, "drop_in": DropIn, "native": Native}
