"""What is run on every path: the columns of the table.

Each subject is a module, its inputs at any two lengths, and the same arithmetic written on
`headwise.function.stages`, from which the error budget of its outputs and gradients comes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from headwise import AttentionMatrix, Mask, MultiheadAttention, ScoreBias, upgrade
from headwise.function import stages

BATCH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, EMBED, HIDDEN = 3, 6, 2, 10, 7, 60, 40
DROPOUT = 0.3

Outputs = tuple[Tensor, ...]
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """One column.

    Attributes:
        name: the head of the column.
        what: what was run, in one line.
        build: the module; its forward returns tensors only.
        inputs: for numbers of queries and keys, float32 where float.
        reference: (parameters, *inputs) -> the outputs, in plain torch and in their dtype.
        tiled: whether the tiled kernel computes some of it.
        training: whether it is run in training mode, with dropout.
    """

    name: str
    what: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Outputs]
    reference: Callable[..., Outputs]
    tiled: bool = True
    training: bool = False

    def module(self) -> nn.Module:
        """The module with seeded parameters, none of them zero."""
        torch.manual_seed(1)
        module = self.build().train(self.training)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.dim() == 1 and "norm" not in name:
                    parameter.normal_()
        return module

    def at(self, queries: int, keys: int) -> Outputs:
        """Seeded inputs."""
        torch.manual_seed(2)
        return self.inputs(queries, keys)


# ---- the attention matrix ----------------------------------------------------------------------


class FusedProduct(nn.Module):
    """A @ v with the top-left causal mask, which the fused kernel takes as it is."""

    def matrix(self, q: Tensor, k: Tensor) -> AttentionMatrix:
        return AttentionMatrix(q, k, mask=Mask.causal(align="top-left"))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        return (self.matrix(q, k) @ v,)


class TiledProduct(nn.Module):
    """A @ v with everything that the fused kernel has not."""

    def __init__(self) -> None:
        super().__init__()
        self.sink, self.table = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.ones(HEADS, 9))

    def options(self, lengths: Tensor) -> dict[str, object]:
        return options_of_the_tiled_product(dict(self.named_parameters()), lengths)

    def matrix(self, q: Tensor, k: Tensor, lengths: Tensor) -> AttentionMatrix:
        return AttentionMatrix(q, k, **self.options(lengths))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Outputs:
        return (self.matrix(q, k, lengths) @ v,)


class Reading(nn.Module):
    """A matrix with the bottom-right causal mask, for what is read of it."""

    def matrix(self, q: Tensor, k: Tensor) -> AttentionMatrix:
        return AttentionMatrix(q, k, mask=Mask.causal(align="bottom-right"))


class Statistics(Reading):
    """One pass for the statistics, one for A.mT @ y with y = q."""

    def forward(self, q: Tensor, k: Tensor) -> Outputs:
        matrix = self.matrix(q, k)
        return (*matrix.statistics(), matrix.mT @ q)


class Parts(Reading):
    """Rows, a diagonal, a map and the largest weights."""

    def forward(self, q: Tensor, k: Tensor) -> Outputs:
        matrix = self.matrix(q, k)
        first_rows = torch.arange(3, device=q.device)
        return (
            matrix.rows(first_rows),
            matrix.diagonal(-1),
            matrix.pool(4, 5),
            matrix.topk(3)[0],
        )


class HeadAverage(Reading):
    """The average over heads, which is written down because it was asked for."""

    def forward(self, q: Tensor, k: Tensor) -> Outputs:
        return (self.matrix(q, k).head_average(),)


def options_of_the_tiled_product(parameters: Parameters, lengths: Tensor) -> dict[str, object]:
    """Some queries see nothing: those before the first key, and all of an empty sample."""
    return {
        "mask": Mask.window(20, 3, align="bottom-right") & Mask.lengths(keys=lengths),
        "score_bias": ScoreBias.relative(parameters["table"], align="bottom-right"),
        "softcap": 5.0,
        "sink": parameters["sink"],
    }


def vectors(queries: int, keys: int) -> Outputs:
    """q, k and v."""
    q = torch.randn(BATCH, HEADS, queries, HEAD_DIM)
    k = torch.randn(BATCH, KV_HEADS, keys, HEAD_DIM)
    return q, k, torch.randn(BATCH, KV_HEADS, keys, VALUE_DIM)


def vectors_and_lengths(queries: int, keys: int) -> Outputs:
    return *vectors(queries, keys), torch.tensor([keys, 0, keys // 2])


def fused_reference(_: Parameters, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    return (stages.head_outputs(q, k, v, mask=Mask.causal(align="top-left")),)


def tiled_reference(p: Parameters, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Outputs:
    return (stages.head_outputs(q, k, v, **options_of_the_tiled_product(p, lengths)),)


def statistics_reference(_: Parameters, q: Tensor, k: Tensor) -> Outputs:
    s = stages.scores(q, k, mask=Mask.causal(align="bottom-right"))
    w = s.softmax(-1)
    terms = torch.where(w > 0, w * s.log_softmax(-1).clamp(min=-1e4), 0.0)
    return s.logsumexp(-1), -terms.sum(-1), w.amax(-1), w.sum(2), w.mT @ q


def parts_reference(_: Parameters, q: Tensor, k: Tensor) -> Outputs:
    w = stages.weights(q, k, mask=Mask.causal(align="bottom-right"))
    queries, keys = w.shape[2:]
    in_query_block = block_of(queries, 4).to(w.dtype)
    pooled = (in_query_block / in_query_block.sum(0)).mT @ w @ block_of(keys, 5).to(w.dtype)
    return w[:, :, :3], w.diagonal(-1, 2, 3), pooled, w.topk(3)[0]


def block_of(length: int, blocks: int) -> Tensor:
    """(length, blocks): whether a position is in a block, floor(i * blocks / length)."""
    return (torch.arange(length) * blocks // length)[:, None] == torch.arange(blocks)


def average_reference(_: Parameters, q: Tensor, k: Tensor) -> Outputs:
    return (stages.weights(q, k, mask=Mask.causal(align="bottom-right")).mean(1),)


# ---- the layer ---------------------------------------------------------------------------------


class Layer(nn.Module):
    """The drop-in with one call's options; None is left out of its outputs."""

    def __init__(self, *, need_weights: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.inner = MultiheadAttention(EMBED, HEADS, dropout=dropout, batch_first=True)

    def forward(
        self, x: Tensor, y: Tensor, padding: Tensor, blocked: Tensor | None = None
    ) -> Outputs:
        outputs = self.inner(
            x,
            y,
            y,
            key_padding_mask=padding,
            attn_mask=blocked,
            need_weights=self.need_weights,
        )
        return tuple(t for t in outputs if t is not None)


class Encoder(nn.Module):
    """torch's encoder, upgraded. The hint is given: else torch reads the mask to find it."""

    def __init__(self, *, hint: bool | None = True, upgraded: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(EMBED, HEADS, HIDDEN, dropout=0.0, batch_first=True)
        self.hint, self.inner = hint, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        if upgraded:
            upgrade(self.inner)

    def forward(self, x: Tensor, padding: Tensor, blocked: Tensor) -> Outputs:
        masks = {"mask": blocked, "src_key_padding_mask": padding, "is_causal": self.hint}
        return (self.inner(x, **masks),)


def padded(queries: int, keys: int) -> Outputs:
    """x, y, and True where a key is padding: none, all, and half of each sample's."""
    x, y = torch.randn(BATCH, queries, EMBED), torch.randn(BATCH, keys, EMBED)
    return x, y, torch.arange(keys) >= torch.tensor([keys, 0, keys // 2])[:, None]


def padded_and_causal(queries: int, keys: int) -> Outputs:
    """The same, and True where a key is later than the query, from the last backwards."""
    return *padded(queries, keys), torch.ones(queries, keys).triu(1 + keys - queries).bool()


def float_masks(queries: int, keys: int) -> Outputs:
    """The same masks as floats: -inf where they block."""
    x, y, *masks = padded_and_causal(queries, keys)
    return x, y, *(torch.zeros(m.shape).masked_fill(m, -torch.inf) for m in masks)


def encoder_inputs(queries: int, _: int) -> Outputs:
    """Half of the last sample is padding."""
    x = torch.randn(BATCH, queries, EMBED)
    padding = torch.arange(queries) >= torch.tensor([queries, queries, queries // 2])[:, None]
    return x, padding, torch.ones(queries, queries).triu(1).bool()


def attention_reference(
    p: Parameters, prefix: str, x: Tensor, y: Tensor, masks: tuple[Tensor, ...]
) -> Outputs:
    """Output and average weights, from the weights written down."""
    weights, biases = (p[f"{prefix}in_proj_{name}"].chunk(3) for name in ("weight", "bias"))
    q, k, v = (
        linear(t, w, b).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        for t, w, b in zip((x, y, y), weights, biases, strict=True)
    )
    mask = Mask()
    for blocked, axes in zip(masks, ("batch keys", "queries keys"), strict=False):
        allowed = ~blocked if blocked.dtype == torch.bool else blocked == 0
        mask = mask & Mask.may_attend(allowed, axes=axes)
    w = stages.weights(q, k, mask=mask)
    joined = (w @ v).transpose(1, 2).flatten(2)
    output = linear(joined, p[f"{prefix}out_proj.weight"], p[f"{prefix}out_proj.bias"])
    return output, w.mean(1)


def layer_reference(p: Parameters, x: Tensor, y: Tensor, *masks: Tensor) -> Outputs:
    return attention_reference(p, "inner.", x, y, masks)


def output_reference(p: Parameters, x: Tensor, y: Tensor, *masks: Tensor) -> Outputs:
    return layer_reference(p, x, y, *masks)[:1]


def encoder_reference(p: Parameters, x: Tensor, *masks: Tensor) -> Outputs:
    for index in range(2):
        own = f"inner.layers.{index}."

        def norm(t: Tensor, name: str, own: str = own) -> Tensor:
            return layer_norm(t, (EMBED,), p[f"{own}{name}.weight"], p[f"{own}{name}.bias"])

        def map_of(t: Tensor, name: str, own: str = own) -> Tensor:
            return linear(t, p[f"{own}{name}.weight"], p[f"{own}{name}.bias"])

        x = norm(x + attention_reference(p, f"{own}self_attn.", x, x, masks)[0], "norm1")
        x = norm(x + map_of(map_of(x, "linear1").relu(), "linear2"), "norm2")
    return (x,)


SUBJECTS = (
    Subject(
        "product, fused",
        "`A @ v` with a causal mask, 2 kv_heads for 6 heads, value_dim 7 for head_dim 10.",
        FusedProduct,
        vectors,
        fused_reference,
        tiled=False,
    ),
    Subject(
        "product, tiled",
        "`A @ v` with a window, lengths (a sample of length 0), softcap, sink and relative score "
        "bias, the last two with gradients.",
        TiledProduct,
        vectors_and_lengths,
        tiled_reference,
    ),
    Subject(
        "statistics",
        "`A.statistics()` and `A.mT @ y`, causal, GQA.",
        Statistics,
        lambda queries, keys: vectors(queries, keys)[:2],
        statistics_reference,
    ),
    Subject(
        "parts",
        "`A.rows`, `A.diagonal`, `A.pool` and `A.topk`, causal, GQA.",
        Parts,
        lambda queries, keys: vectors(queries, keys)[:2],
        parts_reference,
    ),
    Subject(
        "head average",
        "`A.head_average()`, causal, GQA.",
        HeadAverage,
        lambda queries, keys: vectors(queries, keys)[:2],
        average_reference,
    ),
    Subject(
        "layer, fused",
        "`MultiheadAttention`, need_weights=False, bool key_padding_mask (one sample is padding).",
        lambda: Layer(need_weights=False),
        padded,
        output_reference,
        tiled=False,
    ),
    Subject(
        "layer, masks",
        "`MultiheadAttention`, need_weights=False, bool key_padding_mask and causal attn_mask.",
        lambda: Layer(need_weights=False),
        padded_and_causal,
        output_reference,
    ),
    Subject(
        "layer, weights",
        "`MultiheadAttention`, need_weights=True, float key_padding_mask and causal attn_mask.",
        lambda: Layer(need_weights=True),
        float_masks,
        layer_reference,
    ),
    Subject(
        "layer, dropout",
        "`MultiheadAttention` in training with dropout 0.3, need_weights=True, bool masks.",
        lambda: Layer(need_weights=True, dropout=DROPOUT),
        padded_and_causal,
        layer_reference,
        training=True,
    ),
    Subject(
        "encoder",
        "`nn.TransformerEncoder` of 2 layers after `upgrade`, with mask, is_causal and "
        "src_key_padding_mask.",
        Encoder,
        encoder_inputs,
        encoder_reference,
    ),
)
