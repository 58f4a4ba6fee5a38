"""What the layer and its functional form share: project, attend, put the heads side by side.

Queries, keys and values are strided views of their projection, never copies. Head outputs and
weights are read from one `AttentionMatrix`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.kernels.linear import project
from headwise.layers.hooks import shown
from headwise.layers.torch_api import checks
from headwise.layers.torch_api.reading import read_masks
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix import AttentionMatrix


class Parameters(NamedTuple):
    """The parameters before the output projection, in torch's names and both of its forms."""

    embed_dim: int
    num_heads: int
    separate: bool
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool


class Ask(NamedTuple):
    """What a call asks for beside the inputs."""

    padding: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool
    need_weights: bool
    average: bool
    dropout_p: float
    static_k: Tensor | None = None
    static_v: Tensor | None = None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Parameters,
    ask: Ask,
    *,
    batch_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """The heads side by side, ready for the output projection, and the weights where asked for.

    Shapes:
        query: (batch, queries, embed_dim) with ``batch_first``, (queries, batch, embed_dim)
            without; key and value likewise. Unbatched: (queries, embed_dim).
        returns: like query; weights (batch, queries, keys) or (batch, heads, queries, keys).
    """
    batched = checks.require_ranks(query, key, value, ask.padding, ask.attn_mask)
    if not batched:
        batch_first = True
        same = (query is key, key is value)
        query = query.unsqueeze(0)
        key = query if same[0] else key.unsqueeze(0)
        value = key if same[1] else value.unsqueeze(0)
    packed = not parameters.separate
    width = parameters.embed_dim
    checks.require_inputs(
        query, key, value, embed_dim=width, packed=packed, batch_first=batch_first
    )
    q, k, v = _split(query, key, value, parameters, ask, batch_first=batch_first)
    mask, score_bias, k, v = _masks_and_slots(q, k, v, parameters, ask, batched=batched)
    outputs, weights = _outputs(q, k, v, mask, score_bias, ask)
    if batch_first:
        outputs = outputs.transpose(1, 2).reshape(query.shape)
    else:
        outputs = outputs.permute(2, 0, 1, 3).reshape(query.shape)
    if not batched:
        outputs = outputs.squeeze(0)
        weights = None if weights is None else weights.squeeze(0)
    return outputs, weights


# ---- projections -----------------------------------------------------------------------------


def _split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Parameters,
    ask: Ask,
    *,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as (batch, heads, length, head_dim), static ones as given."""
    heads, head_dim = parameters.num_heads, parameters.embed_dim // parameters.num_heads
    project_all = _projected_packed if not parameters.separate else _projected_separately
    checks.require_bias(parameters.in_proj_bias, parameters.embed_dim)
    q, k, v = (
        _heads_of(x, heads, head_dim, batch_first)
        for x in project_all(query, key, value, parameters)
    )
    batch = q.shape[0]
    if ask.static_k is not None:
        checks.require_static("static_k", ask.static_k, batch, heads, head_dim)
        k = ask.static_k.unflatten(0, (batch, heads))
    if ask.static_v is not None:
        checks.require_static("static_v", ask.static_v, batch, heads, head_dim)
        v = ask.static_v.unflatten(0, (batch, heads))
    checks.require_same_length(k, v)
    return q, checks.settled("keys", k, q), checks.settled("values", v, q)


def _projected_packed(
    query: Tensor, key: Tensor, value: Tensor, parameters: Parameters
) -> tuple[Tensor, ...]:
    """As few products as the identities allow: one for self-attention, two where key is value."""
    embed_dim, bias = parameters.embed_dim, parameters.in_proj_bias
    weight = checks.require_present("in_proj_weight", parameters.in_proj_weight, separate=False)
    checks.require_weight("query", query, weight, 3 * embed_dim, packed=True)
    if key is value and query is key:
        return project(query, weight, bias).chunk(3, dim=-1)
    checks.require_weight("key", key, weight, 3 * embed_dim, packed=True)
    if key is value:
        sizes = [embed_dim, 2 * embed_dim]
        w_q, w_kv = weight.split(sizes)
        b_q, b_kv = (None, None) if bias is None else bias.split(sizes)
        return project(query, w_q, b_q), *project(key, w_kv, b_kv).chunk(2, dim=-1)
    checks.require_weight("value", value, weight, 3 * embed_dim, packed=True)
    w_q, w_k, w_v = weight.chunk(3)
    b_q, b_k, b_v = (None, None, None) if bias is None else bias.chunk(3)
    return project(query, w_q, b_q), project(key, w_k, b_k), project(value, w_v, b_v)


def _projected_separately(
    query: Tensor, key: Tensor, value: Tensor, parameters: Parameters
) -> tuple[Tensor, ...]:
    embed_dim, bias = parameters.embed_dim, parameters.in_proj_bias
    w_q = checks.require_present("q_proj_weight", parameters.q_proj_weight, separate=True)
    w_k = checks.require_present("k_proj_weight", parameters.k_proj_weight, separate=True)
    w_v = checks.require_present("v_proj_weight", parameters.v_proj_weight, separate=True)
    checks.require_weight("query", query, w_q, embed_dim, packed=False)
    checks.require_weight("key", key, w_k, embed_dim, packed=False)
    checks.require_weight("value", value, w_v, embed_dim, packed=False)
    b_q, b_k, b_v = (None, None, None) if bias is None else bias.chunk(3)
    return project(query, w_q, b_q), project(key, w_k, b_k), project(value, w_v, b_v)


def _heads_of(x: Tensor, heads: int, head_dim: int, batch_first: bool) -> Tensor:
    """(batch, heads, length, head_dim), a view of a projection (its first axes, width)."""
    x = x.view(x.shape[0], x.shape[1], heads, head_dim)
    return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)


# ---- masks and appended keys -----------------------------------------------------------------


def _masks_and_slots(
    q: Tensor, k: Tensor, v: Tensor, parameters: Parameters, ask: Ask, *, batched: bool
) -> tuple[Mask | None, ScoreBias | None, Tensor, Tensor]:
    """The masks at these sizes; keys and values with the slots of bias_k and add_zero_attn.

    Every query may attend to a slot, whatever the masks say.
    """
    mask, score_bias = None, None
    has_bias = parameters.bias_k is not None or parameters.bias_v is not None
    slots = int(has_bias) + int(parameters.add_zero_attn)
    if ask.padding is not None or ask.attn_mask is not None:
        padding = ask.padding if batched or ask.padding is None else ask.padding.unsqueeze(0)
        checks.require_masks(padding, ask.attn_mask, q, k, batched=batched)
        mask, score_bias = read_masks(
            padding,
            ask.attn_mask,
            num_heads=parameters.num_heads,
            slots=slots,
            hinted=ask.is_causal,
            dtype=q.dtype,
        )
    if slots:
        k, v = _with_slots(k, v, parameters, ask)
    return mask, score_bias, k, v


def _with_slots(k: Tensor, v: Tensor, parameters: Parameters, ask: Ask) -> tuple[Tensor, Tensor]:
    checks.require_both_slots(parameters.bias_k, parameters.bias_v, ask.static_k, ask.static_v)
    keys, values = [k], [v]
    batch, heads, _, head_dim = k.shape
    if parameters.bias_k is not None and parameters.bias_v is not None:
        for rows, slot, name in (
            (keys, parameters.bias_k, "bias_k"),
            (values, parameters.bias_v, "bias_v"),
        ):
            if torch.promote_types(slot.dtype, k.dtype) == k.dtype:
                slot = slot.to(k.dtype)  # as torch.cat does
            slot = checks.settled(name, slot, k)
            rows.append(slot.view(1, heads, 1, head_dim).expand(batch, heads, 1, head_dim))
    if parameters.add_zero_attn:
        for rows in (keys, values):
            rows.append(k.new_zeros(batch, heads, 1, head_dim))
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


# ---- attention -------------------------------------------------------------------------------


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, score_bias: ScoreBias | None, ask: Ask
) -> tuple[Tensor, Tensor | None]:
    """Head outputs (batch, heads, queries, head_dim), and the weights before dropout."""
    matrix = AttentionMatrix(q, k, mask=mask, score_bias=score_bias)
    if ask.need_weights and ask.average and ask.dropout_p == 0:
        # Equal to ``matrix @ v`` within the error budget; in inference one pass serves both.
        outputs, average = matrix.outputs_and_average(v)
        return shown(matrix, v, outputs), average
    checks.require_probability(ask.dropout_p)
    outputs = matrix @ v if ask.dropout_p == 0 else matrix.dropped(v, dropout_p=ask.dropout_p)
    outputs = shown(matrix, v, outputs)
    if not ask.need_weights:
        return outputs, None
    return outputs, matrix.head_average() if ask.average else matrix.dense(limit=None)
