"""Implementations of multi-head attention that the study compares under the same weights.

Four are rewritten from their source:

Paper           Attention Is All You Need (arXiv:1706.03762), section 3.2.2. The paper has
no biases, and sets hidden scores to minus infinity.
Tensor2Tensor   the paper's original code: tensorflow/tensor2tensor (Apache-2.0),
tensor2tensor/layers/common_attention.py, multihead_attention.
Annotated       the Annotated Transformer: harvardnlp/annotated-transformer (MIT),
MultiHeadedAttention.
EinopsPage      einops' page of PyTorch examples: arogozhnikov/einops (MIT),
docs/pytorch-examples.html, "Transformer's attention needs more attention".

The others run from their installed packages.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.errors import OptionError
from headwise.function.stages import split_heads
from headwise.layers.attention import Attention
from headwise.layers.base import check_positive_whole_numbers, initialise_as_einops_page
from headwise.layers.checks import check_tokens
from headwise.layers.hooks import call_hook
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.masks.mask import Mask
from headwise.matrix.checks import check_probability
from headwise.matrix.operator import AttentionMatrix
from headwise.support.lazy import require_package


@dataclass(frozen=True, eq=False)
class SharedWeights:
    """Separate projections, each used as in `torch.nn.Linear`: ``x @ matrix.mT + bias``.

    Head h has the rows from h * head_dim of ``q`` and ``k``, the rows from h * value_dim of ``v``,
    and the same columns of ``out``. An `Implementation` takes square matrices only. ``biases`` are
    those of ``q``, ``k``, ``v`` and ``out``.
    """

    q: Float[Tensor, "heads_head_dim embed_dim"]
    k: Float[Tensor, "heads_head_dim source_dim"]
    v: Float[Tensor, "heads_value_dim values_source_dim"]
    out: Float[Tensor, "out_dim heads_value_dim"]
    biases: tuple[Float[Tensor, " _"], ...] | None = None

    @classmethod
    def of_matrices(
        cls, matrices: Iterable[Tensor], biases: Iterable[Tensor] = ()
    ) -> SharedWeights:
        """Make the weights from four matrices, and four biases or none."""
        q, k, v, out = matrices
        return cls(q, k, v, out, tuple(biases) or None)

    @classmethod
    def of_linears(cls, *linears: Any) -> SharedWeights:
        biases = (x.bias for x in linears if x.bias is not None)
        return cls.of_matrices((x.weight for x in linears), biases)

    @classmethod
    def of_torch_layer(cls, layer: nn.MultiheadAttention) -> SharedWeights:
        out = layer.out_proj
        return cls.from_packed(layer.in_proj_weight, layer.in_proj_bias, out.weight, out.bias)

    @classmethod
    def from_packed(
        cls, weight: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor
    ) -> SharedWeights:
        """Split packed weights: rows of q, of k, then of v."""
        return cls.of_matrices((*weight.chunk(3), out), (*bias.chunk(3), out_bias))

    @classmethod
    def random(cls, embed_dim: int, *, biased: bool = False) -> SharedWeights:
        """Draw normal weights that keep the variance of the input; biases have std 1/2."""
        matrices = [torch.randn(embed_dim, embed_dim) / math.sqrt(embed_dim) for _ in range(4)]
        biases = [torch.randn(embed_dim) / 2 for _ in range(4 if biased else 0)]
        return cls.of_matrices(matrices, biases)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        biases = self.biases or (None,) * 4
        q, k, v = (F.linear(x, w, b) for w, b in zip(self.matrices[:3], biases[:3], strict=True))
        return q, k, v

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.out

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The matrices, then the biases if there are any."""
        return (*self.matrices, *(self.biases or ()))


class Implementation(nn.Module):
    """Multi-head self-attention as another library or paper implements it."""

    name: ClassVar[str]  # shown to people
    biased: ClassVar[bool] = True  # the projections have biases
    projections: ClassVar[tuple[str, ...]] = ()  # names of the linear layers of q, k, v, output
    mask_values: ClassVar[tuple[Any, Any]] = (True, False)  # of an attended, and of a hidden key

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.p = embed_dim, num_heads, dropout
        self.head_dim = embed_dim // num_heads
        self.inner: Any = self.build()

    def build(self) -> Any:
        """Make the library's layer; a rewritten implementation makes its parameters here."""
        raise NotImplementedError

    def as_shared_weights(self) -> SharedWeights:
        """Return the parameters as views: writing to them changes the layer."""
        return SharedWeights.of_linears(*map(self.get_submodule, self.projections))

    @torch.no_grad()
    def load_weights(self, weights: SharedWeights) -> Implementation:
        """Copy these weights into the layer; without biases, the layer's biases become 0."""
        stored, zero = self.as_shared_weights(), torch.zeros(())
        if weights.biases is not None and stored.biases is None:
            raise OptionError(
                saw=f"biases for {self.name}",
                needed="weights without biases: its projections have none",
                do="pass SharedWeights(q, k, v, out)",
            )
        for parameter, value in zip(stored.tensors, (*weights.tensors, *[zero] * 4), strict=False):
            parameter.copy_(value)
        return self

    def initialize(self) -> None:
        """Draw the weights as the model around the layer does, if that model draws them again."""

    def forward(
        self, x: Float[Tensor, "batch length embed_dim"], mask: Any = None
    ) -> Float[Tensor, "batch length embed_dim"]:
        """Compute the attention alone, before any residual or norm.

        ``mask`` has this implementation's values; a tensor has the axes (batch, queries, keys).
        """
        raise NotImplementedError

    def convert_mask(self, may_attend: Bool[Tensor, "batch queries keys"]) -> Any:
        """Convert a mask in which True may be attended to the values of this implementation."""
        return torch.where(may_attend, *self.mask_values)

    def compute_block(self, x: Float[Tensor, "batch length embed_dim"]) -> Any:
        """Compute the whole published class, with its residual and norm if it has any."""
        return self(x)

    def returned_attention_weights(self, x: Float[Tensor, "batch length embed_dim"]) -> Any:
        """Return the attention weights with the implementation's axes, or None if it has none."""


PURPOSE = "whose attention is compared with"  # follows a package's name in an error
HIDDEN = -1e9
GPT2_LAYERS = 12  # the initial std of its output projections falls with this number


class Paper(Implementation):
    """The paper's form: head h has ``wq[h]``, ``wk[h]``, ``wv[h]``; ``wo`` takes all heads."""

    name = "the paper's form"
    biased = False
    mask_values = (0.0, -torch.inf)

    def build(self) -> None:
        heads, width = self.num_heads, self.head_dim
        self.wq, self.wk, self.wv = (
            nn.Parameter(torch.zeros(heads, width, self.embed_dim)) for _ in range(3)
        )
        self.wo = nn.Parameter(torch.zeros(heads * width, self.embed_dim))

    def as_shared_weights(self) -> SharedWeights:
        return SharedWeights.of_matrices(
            (*(w.flatten(0, 1) for w in (self.wq, self.wk, self.wv)), self.wo.mT)
        )

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        heads = []
        for wq, wk, wv in zip(self.wq, self.wk, self.wv, strict=True):
            scores = (x @ wq.mT) @ (x @ wk.mT).mT / math.sqrt(self.head_dim)
            weights = (scores if mask is None else scores + mask).softmax(dim=-1)
            heads.append(weights @ (x @ wv.mT))
        return torch.cat(heads, dim=-1) @ self.wo


class Tensor2Tensor(Implementation):
    """tensor2tensor's attention: scaled queries, and a mask that is added to the scores.

    Each kernel is uniform with variance 1 / fan_avg, and (in, out), the transpose of torch's.
    """

    name = "tensor2tensor"
    biased = False
    mask_values = (0.0, HIDDEN)

    def build(self) -> None:
        self.q, self.k, self.v, self.output_transform = (
            nn.Parameter(nn.init.xavier_uniform_(torch.empty(self.embed_dim, self.embed_dim)))
            for _ in range(4)
        )

    def as_shared_weights(self) -> SharedWeights:
        return SharedWeights(self.q.mT, self.k.mT, self.v.mT, self.output_transform.mT)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        weights = F.dropout(self.returned_attention_weights(x, mask), self.p, self.training)
        combined = (weights @ self._split_heads(x @ self.v)).transpose(1, 2).flatten(2)
        return combined @ self.output_transform

    def returned_attention_weights(self, x: Tensor, mask: Any = None) -> Tensor:
        """Return the weights before dropout, as tensor2tensor's ``save_weights_to`` stores them."""
        q, k = (self._split_heads(x @ kernel) for kernel in (self.q, self.k))
        logits = (q * self.head_dim**-0.5) @ k.mT
        scores: Tensor = logits if mask is None else logits + mask[:, None].to(x.dtype)
        return scores.softmax(dim=-1)

    def _split_heads(self, x: Tensor) -> Tensor:
        result: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return result


class Annotated(Implementation):
    """The Annotated Transformer's attention: hidden scores become a large negative number.

    The four linear layers start as copies of one layer; the model around them draws new weights.
    """

    name = "Annotated Transformer"
    projections = ("linears.0", "linears.1", "linears.2", "linears.3")

    def build(self) -> None:
        linear = nn.Linear(self.embed_dim, self.embed_dim)
        self.linears: Any = nn.ModuleList(copy.deepcopy(linear) for _ in range(4))
        self.dropout = nn.Dropout(self.p)

    def initialize(self) -> None:
        """Draw every matrix from Xavier's uniform distribution, as the model does."""
        for linear in self.linears:
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """Compute the output, and store the weights after dropout in ``attn``."""
        *projections, last = self.linears
        shape = (self.num_heads, self.head_dim)
        q, k, v = (linear(x).unflatten(-1, shape).transpose(1, 2) for linear in projections)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, HIDDEN)
        self.attn = self.dropout(scores.softmax(dim=-1))
        return last((self.attn @ v).transpose(1, 2).flatten(2))

    def returned_attention_weights(self, x: Tensor) -> Any:
        self(x)
        return self.attn


class EinopsPage(Implementation):
    """The example of einops' page: heads are the first axis, True in a mask hides the key.

    The block includes its residual and norm. Parameter names are those of the page.
    """

    name = "einops' example"
    projections = ("w_qs", "w_ks", "w_vs", "fc")
    mask_values = (False, True)

    def build(self) -> None:
        self.rearrange = require_package("einops", purpose=PURPOSE).rearrange
        self.w_qs, self.w_ks, self.w_vs, self.fc = (
            nn.Linear(self.embed_dim, self.embed_dim) for _ in range(4)
        )
        for linear in (self.w_qs, self.w_ks, self.w_vs):
            nn.init.normal_(linear.weight, std=math.sqrt(2 / (self.embed_dim + self.head_dim)))
        nn.init.xavier_normal_(self.fc.weight)
        self.dropout, self.layer_norm = nn.Dropout(self.p), nn.LayerNorm(self.embed_dim)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        """Compute the attention with dropout, before the residual."""
        return self._attend(x, mask)[0]

    def compute_block(self, x: Tensor) -> Any:
        return self.layer_norm(self(x) + x)

    def returned_attention_weights(self, x: Tensor) -> Tensor:
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


class TorchLayer(Implementation):
    """torch.nn.MultiheadAttention, called with its default ``need_weights=True``.

    torch has another path for False. `DropIn` replaces ``layer``, the class that computes.
    """

    name = "PyTorch's layer"
    mask_values = (False, True)
    layer: ClassVar[type[nn.MultiheadAttention]] = nn.MultiheadAttention
    need_weights = True

    def build(self) -> nn.MultiheadAttention:
        return self.layer(self.embed_dim, self.num_heads, dropout=self.p, batch_first=True)

    def as_shared_weights(self) -> SharedWeights:
        return SharedWeights.of_torch_layer(self.inner)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """Repeat the mask of each sequence for every head, and call the layer."""
        mask = None if mask is None else mask.repeat_interleave(self.num_heads, dim=0)
        return self.inner(x, x, x, attn_mask=mask, need_weights=self.need_weights)[0]

    def returned_attention_weights(self, x: Tensor) -> Any:
        return self.inner(x, x, x)[1]


class XTransformers(Implementation):
    """x-transformers' Attention with default options."""

    name = "x-transformers"
    biased = False
    projections = ("inner.to_q", "inner.to_k", "inner.to_v", "inner.to_out")

    def build(self) -> Any:
        layer = require_package("x_transformers.x_transformers", purpose=PURPOSE).Attention
        return layer(self.embed_dim, heads=self.num_heads, dim_head=self.head_dim, dropout=self.p)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        return self.inner(x, attn_mask=None if mask is None else mask[:, None])

    def returned_attention_weights(self, x: Tensor) -> Any:
        return self.inner(x, return_intermediates=True)[1].post_softmax_attn


class OfTransformers(Implementation):
    """The first attention layer of a transformers model, with the model's initial weights.

    ``implementation`` is transformers' ``attn_implementation``, the kernel.
    """

    def __init__(self, *sizes: int, implementation: str = "eager", **options: Any) -> None:
        self.implementation = implementation
        super().__init__(*sizes, **options)

    def convert_mask(self, may_attend: Tensor) -> Any:
        masks = require_package("transformers.masking_utils", purpose=PURPOSE)
        batch, queries, keys = may_attend.shape
        return masks.ALL_MASK_ATTENTION_FUNCTIONS[self.implementation](
            batch_size=batch,
            q_length=queries,
            kv_length=keys,
            mask_function=lambda sequence, _head, query, key: may_attend[sequence, query, key],
            allow_is_causal_skip=False,
            dtype=self.as_shared_weights().q.dtype,
        )[:, 0]

    def returned_attention_weights(self, x: Tensor) -> Any:
        return self.inner(x)[1]


class Bert(OfTransformers):
    """BertSelfAttention and BertSelfOutput, which include the residual and norm."""

    name = "BERT"
    projections = ("inner.self.query", "inner.self.key", "inner.self.value", "inner.output.dense")

    def build(self) -> Any:
        bert = require_package("transformers.models.bert.modeling_bert", purpose=PURPOSE)
        config = bert.BertConfig(
            hidden_size=self.embed_dim,
            num_attention_heads=self.num_heads,
            num_hidden_layers=1,
            attn_implementation=self.implementation,
            **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), self.p),
            **dict.fromkeys(("vocab_size", "max_position_embeddings", "intermediate_size"), 1),
        )
        return bert.BertModel(config, add_pooling_layer=False).encoder.layer[0].attention

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """Compute the attention through the output dropout, before the residual."""
        heads = self.inner.self(x, attention_mask=None if mask is None else mask[:, None])[0]
        return self.inner.output.dropout(self.inner.output.dense(heads))

    def compute_block(self, x: Tensor) -> Any:
        return self.inner(x)[0]


class GPT2(OfTransformers):
    """GPT2Attention: one fused projection, with transposed matrices.

    GPT-2's model makes the causal mask, so the layer alone has none in eager mode.
    """

    name = "GPT-2"

    def build(self) -> Any:
        gpt2 = require_package("transformers.models.gpt2.modeling_gpt2", purpose=PURPOSE)
        config = gpt2.GPT2Config(
            n_embd=self.embed_dim,
            n_head=self.num_heads,
            n_layer=GPT2_LAYERS,
            attn_implementation=self.implementation,
            **dict.fromkeys(("attn_pdrop", "resid_pdrop"), self.p),
            **dict.fromkeys(("vocab_size", "n_positions", "n_inner"), 1),
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
        )
        return gpt2.GPT2Model(config).h[0].attn

    def as_shared_weights(self) -> SharedWeights:
        fused, out = self.inner.c_attn, self.inner.c_proj
        return SharedWeights.from_packed(fused.weight.mT, fused.bias, out.weight.mT, out.bias)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        return self.inner(x, attention_mask=None if mask is None else mask[:, None])[0]


class DropIn(TorchLayer):
    """`headwise.MultiheadAttention`."""

    name = "headwise.MultiheadAttention"
    layer = MultiheadAttention


class HeadwiseAttention(Implementation):
    """`headwise.Attention`."""

    name = "headwise.Attention"
    projections = ("inner.q_proj", "inner.k_proj", "inner.v_proj", "inner.out_proj")

    def build(self) -> Attention:
        return Attention(self.embed_dim, self.num_heads, dropout=self.p)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        """Call the layer with a `Mask`; the layer rejects a tensor."""
        return self.inner(x, mask=mask)

    def convert_mask(self, may_attend: Tensor) -> Mask:
        return Mask.may_attend(may_attend, axes="batch queries keys")

    def returned_attention_weights(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner.matrix(x).dense()
        return result


# In order of publication.
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
IMPLEMENTATIONS: Mapping[str, type[Implementation]] = {
    **PEERS,
    "drop_in": DropIn,
    "native": HeadwiseAttention,
}
REWRITTEN = (Paper, Tensor2Tensor, Annotated, EinopsPage)


class EinopsPostNormBlock(nn.Module):
    """Attention block of einops' page, with its residual of the queries, and layer norm.

    The page's state_dict loads here. Queries, keys and values have three separate inputs;
    `headwise.Attention` has one source for keys and values.

    The page's n_head, d_model, d_k and d_v are ``num_heads``, ``embed_dim``, ``head_dim`` and
    ``value_dim``. In its boolean mask of (batch, queries, keys), True hides a key:

        mask = Mask.may_attend(~einops_mask, axes="batch queries keys")

    The page's returned weights are ``block.matrix(q, k).dense().transpose(0, 1)``. A query that
    may attend to nothing has zero head outputs here, and NaN on the page.

    ``dropout`` acts on the output in training, before the residual; weights are not dropped.

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
        """Return the layer norm of ``q`` plus the attention's output."""
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
        queries = self._project_heads("q", q, self.w_qs)
        return AttentionMatrix(queries, self._project_heads("k", k, self.w_ks), mask=mask)

    def _project_heads(self, name: str, x: Tensor, projection: nn.Linear) -> Tensor:
        axes = ("batch", "queries" if name == "q" else "keys", "embed_dim")
        check_tokens(name, x, self.embed_dim, axes, projection)
        return split_heads(projection(x), heads=self.num_heads)
