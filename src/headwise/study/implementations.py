"""Implementations of multi-head attention, filled with given weights, to compare with each other.

Four are written anew after their source:

Paper           Attention Is All You Need (arXiv:1706.03762), section 3.2.2. It has no biases,
and says of masks only that what is hidden is set to minus infinity.
Tensor2Tensor   the paper's original code: tensorflow/tensor2tensor (Apache-2.0),
tensor2tensor/layers/common_attention.py, multihead_attention.
Annotated       the Annotated Transformer: harvardnlp/annotated-transformer (MIT),
MultiHeadedAttention.
EinopsPage      einops' page of PyTorch examples: arogozhnikov/einops (MIT),
docs/pytorch-examples.html, "Transformer's attention needs more attention".

The others run as they are installed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.layers.native.attention import Attention
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.masks.mask import Mask
from headwise.study.implementation import Implementation, SharedWeights
from headwise.support.optional_imports import require

PURPOSE = "whose attention is compared with"  # of a package, where it is missing
HIDDEN = -1e9
GPT2_LAYERS = 12  # its output projections start narrower the more there are


# ---- written anew ------------------------------------------------------------------------------


class Paper(Implementation):
    """A head's own are ``wq[h]``, ``wk[h]``, ``wv[h]``; ``wo`` takes all heads, side by side."""

    name = "the paper's form"
    biased = False
    mask_values = (0.0, -torch.inf)

    def build(self) -> None:
        """See `Implementation.build`."""
        heads, width = self.num_heads, self.head_dim
        self.wq, self.wk, self.wv = (
            nn.Parameter(torch.zeros(heads, width, self.embed_dim)) for _ in range(3)
        )
        self.wo = nn.Parameter(torch.zeros(heads * width, self.embed_dim))

    def held(self) -> SharedWeights:
        """See `Implementation.held`."""
        return SharedWeights.of(
            (*(w.flatten(0, 1) for w in (self.wq, self.wk, self.wv)), self.wo.mT)
        )

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        """Concat(head_1, ..., head_h) W^O."""
        heads = []
        for wq, wk, wv in zip(self.wq, self.wk, self.wv, strict=True):
            scores = (x @ wq.mT) @ (x @ wk.mT).mT / math.sqrt(self.head_dim)
            weights = (scores if mask is None else scores + mask).softmax(dim=-1)
            heads.append(weights @ (x @ wv.mT))
        return torch.cat(heads, dim=-1) @ self.wo


class Tensor2Tensor(Implementation):
    """The queries are scaled, not the scores; a mask is a large negative number that is added.

    Its models draw each kernel uniformly, with variance 1 / fan_avg. TensorFlow's kernels are
    (in, out), the transpose of torch's.
    """

    name = "tensor2tensor"
    biased = False
    mask_values = (0.0, HIDDEN)

    def build(self) -> None:
        """See `Implementation.build`."""
        self.q, self.k, self.v, self.output_transform = (
            nn.Parameter(nn.init.xavier_uniform_(torch.empty(self.embed_dim, self.embed_dim)))
            for _ in range(4)
        )

    def held(self) -> SharedWeights:
        """See `Implementation.held`."""
        return SharedWeights(self.q.mT, self.k.mT, self.v.mT, self.output_transform.mT)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        """Project, split the heads, attend, combine the heads, project."""
        weights = F.dropout(self.attention_weights(x, mask), self.p, self.training)
        combined = (weights @ self._split_heads(x @ self.v)).transpose(1, 2).flatten(2)
        return combined @ self.output_transform

    def attention_weights(self, x: Tensor, mask: Any = None) -> Tensor:
        """What it stores in ``save_weights_to``, before they are dropped out."""
        q, k = (self._split_heads(x @ kernel) for kernel in (self.q, self.k))
        logits = (q * self.head_dim**-0.5) @ k.mT
        scores: Tensor = logits if mask is None else logits + mask[:, None].to(x.dtype)
        return scores.softmax(dim=-1)

    def _split_heads(self, x: Tensor) -> Tensor:
        result: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return result


class Annotated(Implementation):
    """Hidden scores become a large negative number; the weights are dropped out and kept.

    Its four linear layers are copies of one; its model draws them anew.
    """

    name = "Annotated Transformer"
    projections = ("linears.0", "linears.1", "linears.2", "linears.3")

    def build(self) -> None:
        """See `Implementation.build`."""
        one = nn.Linear(self.embed_dim, self.embed_dim)
        self.linears: Any = nn.ModuleList(copy.deepcopy(one) for _ in range(4))
        self.dropout = nn.Dropout(self.p)

    def start(self) -> None:
        """Xavier uniform for everything that has more than one axis."""
        for linear in self.linears:
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """The weights stay behind as ``attn``."""
        *projections, last = self.linears
        shape = (self.num_heads, self.head_dim)
        q, k, v = (linear(x).unflatten(-1, shape).transpose(1, 2) for linear in projections)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, HIDDEN)
        self.attn = self.dropout(scores.softmax(dim=-1))
        return last((self.attn @ v).transpose(1, 2).flatten(2))

    def attention_weights(self, x: Tensor) -> Any:
        """What the last call left behind."""
        self(x)
        return self.attn


class EinopsPage(Implementation):
    """Heads come first, products are einsum, True in a mask hides; residual and norm are inside.

    The names of its parameters are the page's.
    """

    name = "einops' example"
    projections = ("w_qs", "w_ks", "w_vs", "fc")
    mask_values = (False, True)

    def build(self) -> None:
        """See `Implementation.build`."""
        self.rearrange = require("einops", purpose=PURPOSE).rearrange
        self.w_qs, self.w_ks, self.w_vs, self.fc = (
            nn.Linear(self.embed_dim, self.embed_dim) for _ in range(4)
        )
        for linear in (self.w_qs, self.w_ks, self.w_vs):
            nn.init.normal_(linear.weight, std=math.sqrt(2 / (self.embed_dim + self.head_dim)))
        nn.init.xavier_normal_(self.fc.weight)
        self.dropout, self.layer_norm = nn.Dropout(self.p), nn.LayerNorm(self.embed_dim)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        """Dropped out, before the residual."""
        return self._attend(x, mask)[0]

    def block(self, x: Tensor) -> Any:
        """The norm of the input and what is attended to."""
        return self.layer_norm(self(x) + x)

    def attention_weights(self, x: Tensor) -> Tensor:
        """Its second result."""
        return self._attend(x, None)[1]

    def _attend(self, x: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        split = "batch length (head width) -> head batch length width"
        q, k, v = (
            self.rearrange(linear(x), split, head=self.num_heads)
            for linear in (self.w_qs, self.w_ks, self.w_vs)
        )
        scores = torch.einsum("hbqd,hbkd->hbqk", q, k) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask[None], -torch.inf)
        weights = scores.softmax(dim=-1)
        heads = torch.einsum("hbqk,hbkd->hbqd", weights, v)
        joined = self.rearrange(heads, "head batch length width -> batch length (head width)")
        return self.dropout(self.fc(joined)), weights


# ---- as they are installed ---------------------------------------------------------------------


class TorchLayer(Implementation):
    """torch.nn.MultiheadAttention, called as it is by default: the weights are asked for.

    Attributes:
        layer: the class that computes; another of the same signature may take its place.
        need_weights: torch computes in another way where they are not needed.
    """

    name = "PyTorch's layer"
    mask_values = (False, True)
    layer: ClassVar[type[nn.MultiheadAttention]] = nn.MultiheadAttention
    need_weights = True

    def build(self) -> nn.MultiheadAttention:
        """See `Implementation.build`."""
        return self.layer(self.embed_dim, self.num_heads, dropout=self.p, batch_first=True)

    def held(self) -> SharedWeights:
        """See `Implementation.held`."""
        inner, out = self.inner, self.inner.out_proj
        return SharedWeights.packed(inner.in_proj_weight, inner.in_proj_bias, out.weight, out.bias)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """A mask for each sequence is one for each of its heads there."""
        mask = None if mask is None else mask.repeat_interleave(self.num_heads, dim=0)
        return self.inner(x, x, x, attn_mask=mask, need_weights=self.need_weights)[0]

    def attention_weights(self, x: Tensor) -> Any:
        """As its default gives them."""
        return self.inner(x, x, x)[1]


class XTransformers(Implementation):
    """x-transformers' Attention, with its defaults but for the sizes."""

    name = "x-transformers"
    biased = False
    projections = ("inner.to_q", "inner.to_k", "inner.to_v", "inner.to_out")

    def build(self) -> Any:
        """See `Implementation.build`."""
        layer = require("x_transformers.x_transformers", purpose=PURPOSE).Attention
        return layer(self.embed_dim, heads=self.num_heads, dim_head=self.head_dim, dropout=self.p)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """Its ``attn_mask`` may have one for each sequence and head."""
        return self.inner(x, attn_mask=None if mask is None else mask[:, None])

    def attention_weights(self, x: Tensor) -> Any:
        """Among what it keeps when it is told to."""
        return self.inner(x, return_intermediates=True)[1].post_softmax_attn


class OfTransformers(Implementation):
    """The first layer of a model, so that its weights start as a model's do.

    Args:
        implementation: transformers' ``attn_implementation``, the kernel.
    """

    def __init__(self, *sizes: int, implementation: str = "eager", **options: Any) -> None:
        self.implementation = implementation
        super().__init__(*sizes, **options)

    def spell(self, may_attend: Tensor) -> Any:
        """What transformers hands to its layers, by its own function."""
        masks = require("transformers.masking_utils", purpose=PURPOSE)
        batch, queries, keys = may_attend.shape
        return masks.ALL_MASK_ATTENTION_FUNCTIONS[self.implementation](
            batch_size=batch,
            q_length=queries,
            kv_length=keys,
            mask_function=lambda sequence, _head, query, key: may_attend[sequence, query, key],
            allow_is_causal_skip=False,
            dtype=self.held().q.dtype,
        )[:, 0]

    def attention_weights(self, x: Tensor) -> Any:
        """The second result."""
        return self.inner(x)[1]


class Bert(OfTransformers):
    """BertSelfAttention and BertSelfOutput: separate projections; residual and norm are inside."""

    name = "BERT"
    projections = ("inner.self.query", "inner.self.key", "inner.self.value", "inner.output.dense")

    def build(self) -> Any:
        """See `Implementation.build`."""
        bert = require("transformers.models.bert.modeling_bert", purpose=PURPOSE)
        config = bert.BertConfig(
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
        return bert.BertModel(config, add_pooling_layer=False).encoder.layer[0].attention

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """Through the output projection and its dropout, before the residual."""
        heads = self.inner.self(x, attention_mask=None if mask is None else mask[:, None])[0]
        return self.inner.output.dropout(self.inner.output.dense(heads))

    def block(self, x: Tensor) -> Any:
        """The norm of the input and what is attended to."""
        return self.inner(x)[0]


class GPT2(OfTransformers):
    """GPT2Attention alone: a causal mask is made by the model around it.

    One fused projection; its matrices are stored transposed.
    """

    name = "GPT-2"

    def build(self) -> Any:
        """See `Implementation.build`."""
        gpt2 = require("transformers.models.gpt2.modeling_gpt2", purpose=PURPOSE)
        config = gpt2.GPT2Config(
            n_embd=self.embed_dim,
            n_head=self.num_heads,
            n_layer=GPT2_LAYERS,
            attn_pdrop=self.p,
            resid_pdrop=self.p,
            attn_implementation=self.implementation,
            vocab_size=1,
            n_positions=1,
            n_inner=1,
            bos_token_id=None,
            eos_token_id=None,
        )
        return gpt2.GPT2Model(config).h[0].attn

    def held(self) -> SharedWeights:
        """Conv1D stores (in, out): the transpose of a linear layer."""
        fused, out = self.inner.c_attn, self.inner.c_proj
        return SharedWeights.packed(fused.weight.mT, fused.bias, out.weight.mT, out.bias)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """The projections, the attention between them, and the output's dropout."""
        return self.inner(x, attention_mask=None if mask is None else mask[:, None])[0]


class DropIn(TorchLayer):
    """`headwise.MultiheadAttention`."""

    name = "headwise.MultiheadAttention"
    layer = MultiheadAttention


class Native(Implementation):
    """`headwise.Attention`."""

    name = "headwise.Attention"
    projections = ("inner.q_proj", "inner.k_proj", "inner.v_proj", "inner.out_proj")

    def build(self) -> Attention:
        """See `Implementation.build`."""
        return Attention(self.embed_dim, self.num_heads, dropout=self.p)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """Takes a `Mask`, and refuses a bare tensor."""
        return self.inner(x, mask=mask)

    def spell(self, may_attend: Tensor) -> Mask:
        """Polarity and axes by name."""
        return Mask.may_attend(may_attend, axes="batch queries keys")

    def attention_weights(self, x: Tensor) -> Tensor:
        """Written down on demand."""
        result: Tensor = self.inner.matrix(x).dense()
        return result


# In the order in which they appeared.
PEERS: Mapping[str, type[Implementation]] = {
    "paper": Paper,
    "tensor2tensor": Tensor2Tensor,
    "annotated": Annotated,
    "torch": TorchLayer,
    "einops": EinopsPage,
    "gpt2": GPT2,
    "bert": Bert,
    "x_transformers": XTransformers,
}
IMPLEMENTATIONS: Mapping[str, type[Implementation]] = {**PEERS, "drop_in": DropIn, "native": Native}
WRITTEN_ANEW = (Paper, Tensor2Tensor, Annotated, EinopsPage)
