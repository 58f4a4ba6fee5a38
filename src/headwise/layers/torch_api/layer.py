"""Drop-in for torch.nn.MultiheadAttention and its function, with the same output on every path.

Signature, parameters and conventions are torch's. docs/contract.md lists the differences:

* The output does not depend on need_weights, on the grad mode, or on whether query, key and value
  are the same object.
* A query that may attend to nothing has zero head outputs.
* Returned weights are those before dropout.
* The layer calls ``out_proj`` as a module.

A call is checked once, by `checks.check_ranks` and `checks.check_call`; what follows is arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.function.spec import AttentionSpec
from headwise.layers import hooks, linear
from headwise.layers.base import HeadPart
from headwise.layers.conversion import advise_wrapped_tensors
from headwise.layers.linear import LayerExplanation
from headwise.layers.torch_api import checks
from headwise.layers.torch_api.checks import Call
from headwise.masks.bound import zero_padding
from headwise.masks.mask import Mask
from headwise.masks.polarity import warn_of_polarity
from headwise.masks.score_bias import ScoreBias, cast_bias
from headwise.matrix.operator import AttentionMatrix, describe_average
from headwise.support.arguments import explain_arguments, renamed_arguments, require_tensors
from headwise.support.tracing import may_read_values

PACKED = "in_proj_weight"
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


RENAMED = renamed_arguments(
    embed_dim="d_model hidden_size dim",
    num_heads="nhead n_heads heads num_attention_heads",
    dropout="dropout_p attention_dropout",
)


class MultiheadAttention(torch.nn.MultiheadAttention):
    """A drop-in for `torch.nn.MultiheadAttention`: see torch's documentation for its arguments.

    Masks follow torch's convention: True in a bool mask means may **not** attend; a float mask is
    added to the scores (-inf masks, finfo.min does not). ``is_causal`` is only a hint about
    ``attn_mask`` and never changes the output. Every query may attend to the slots of
    ``add_bias_kv`` and ``add_zero_attn``.

    The layer warns (`PolarityWarning`, in eager mode on the CPU) of masks that may have the reverse
    polarity, once for each sign: a ``key_padding_mask`` that hides all keys of a sequence, or the
    first keys of every sequence, as Hugging Face's ``attention_mask`` (1 = real) does; an
    ``attn_mask`` that hides everything, or each query's own key and all before it; and a float mask
    of 0 and 1, which hides nothing.

    torch's encoder layers do not call this layer in eval under no_grad: their fused path reads its
    weights. ``headwise.upgrade(model)`` switches that path off.

    TorchScript (``torch.jit.script``) is not supported; use torch.compile or torch.export.

    Raises:
        HeadwiseError: and, in the same class, the type that torch's layer raises for the same
            input (`headwise.layers.torch_api.checks`).
    """

    # Class attributes, since `upgrade` does not call __init__.
    _warned: frozenset[str] = frozenset()  # the signs of the reverse polarity that were found
    part: HeadPart | None = None  # the heads that this module computes, if not all

    @property
    def spec(self) -> AttentionSpec:
        """The function of the layer, without that of its weights."""
        sizes = {"num_heads": self.num_heads, "num_kv_heads": self.num_heads}
        return AttentionSpec(**sizes, head_dim=self.head_dim)

    @explain_arguments(RENAMED)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.require_divisible_embed_dim(embed_dim, num_heads)
        options = (dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first)
        super().__init__(embed_dim, num_heads, *options, device, dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, shaped like ``query``, and the weights or None.

        Args:
            query: (queries, batch, embed_dim), or (batch, queries, embed_dim) with
                ``batch_first``, or (queries, embed_dim).
            key: as ``query``, with keys for queries, of width ``kdim``.
            value: as ``key``, of width ``vdim``.
            key_padding_mask: (batch, keys), bool (True = hidden) or float.
            need_weights: True to return the weights, before dropout.
            attn_mask: (queries, keys) or (batch*heads, queries, keys), bool or float.
            average_attn_weights: True for weights (batch, queries, keys), the mean over heads;
                False for (batch, heads, queries, keys). Unbatched inputs have no batch axis.
            is_causal: a hint that ``attn_mask`` is the causal mask.

        Raises:
            HeadwiseError: with the type and first line of torch's own error.
        """
        masks = (key_padding_mask, attn_mask, is_causal)
        call = self._read_call((query, key, value, *masks, need_weights, average_attn_weights))
        if call is None:
            if self.part is not None:
                checks.raise_nested_error(f"a layer with {self.part} of {self.num_heads}")
            # torch computes nested tensors, with its own conditions and messages.
            returned = (need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(query, key, value, key_padding_mask, *returned)
        heads, weights = attend_before_out_proj(call)
        if self.part is not None and weights is not None:
            weights = self.part.weights_of_all_heads(weights, average=average_attn_weights)
        if key_padding_mask is not None or attn_mask is not None:
            self._warn_of_polarity(key_padding_mask, attn_mask)
        return linear.project(self.out_proj, heads), weights

    def explain(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> LayerExplanation:
        """Return a printable report on a forward pass of this input: tokens, kernels and costs.

        Arguments and errors are those of ``forward``. The keys include the slots of
        ``add_bias_kv`` and ``add_zero_attn``.

        Raises:
            OptionError: nested tensors, which torch's code computes.
        """
        masks = (key_padding_mask, attn_mask, is_causal)
        call = self._read_call((query, key, value, *masks, need_weights, average_attn_weights))
        if call is None:
            checks.raise_nested_error("explain")
        return explain_forward(call, self.out_proj)

    def _read_call(self, arguments: checks.Arguments) -> checks.Call | None:
        """Return a call; None for nested tensors."""
        query, key, value, _, attn_mask, is_causal, *_ = arguments
        require_tensors(query=query, key=key, value=value)
        checks.require_mask_for_hint(is_causal=is_causal, attn_mask=attn_mask)
        if query.is_nested or key.is_nested or value.is_nested:
            return None
        weights: tuple[Tensor | None, ...] = (self.in_proj_weight,)
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        call = checks.Call(
            *arguments,
            dropout_p=self.dropout if self.training else 0.0,
            batch_first=self.batch_first,
            embed_dim=self.embed_dim,
            width=self.embed_dim,
            num_heads=self.num_heads,
            weights=weights,
            bias=self.in_proj_bias,
            bias_k=self.bias_k,
            bias_v=self.bias_v,
            add_zero_attn=self.add_zero_attn,
        )
        return call if self.part is None else take_part(call, self.part)

    def _warn_of_polarity(self, padding: Tensor | None, attn_mask: Tensor | None) -> None:
        # A graph that reads `_warned` would be compiled again after a warning.
        if torch.compiler.is_compiling():
            return
        # Frames up to the layer's caller: this one, forward, and two of Module.__call__.
        signs = warn_of_polarity(padding, attn_mask, self._warned, stacklevel=5)
        if signs != self._warned:
            self._warned = signs

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the input projection from either form, packed or separate, if the widths fit."""
        state_dict = match_projection_form(self, state_dict, prefix, local_metadata, error_msgs)
        messages = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *messages)
        if strict and missing_keys and not prefix:
            advice = advise_wrapped_tensors(state_dict)
            is_foreign = {"in_proj_weight", *SEPARATE}.isdisjoint(state_dict)
            if not advice and unexpected_keys and is_foreign:
                name = "torch-packed" if self._qkv_same_embed_dim else "torch-separate"
                advice = [
                    "these tensors are in another layout: headwise.convert(state, LAYOUT, "
                    f"{name!r}, heads={self.num_heads}); headwise.detect(state) names LAYOUT"
                ]
            error_msgs += advice


# ---- the forward pass --------------------------------------------------------------------------


def attend_before_out_proj(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the input of the output projection, and the weights before dropout or None.

    Shapes:
        returns: like query; weights (batch, queries, keys) or (batch, heads, queries, keys).
    """
    matrix, v = build_matrix_and_values(call)
    dropout_p, weights = call.dropout_p, None
    if call.need_weights and call.average and dropout_p == 0:
        # Equal to ``matrix @ v`` within the error budget; in inference one pass computes both.
        outputs, weights = matrix.outputs_and_average(v)
    else:
        outputs = matrix @ v if dropout_p == 0 else matrix.dropped(v, dropout_p=dropout_p)
    outputs = hooks.call_hook(matrix, v, outputs)
    if call.need_weights and weights is None:
        weights = matrix.head_average() if call.average else matrix.dense(limit=None)
    shape = (*call.query.shape[:-1], call.width)
    if call.query.dim() == 2:
        weights = None if weights is None else weights.squeeze(0)
    elif not call.batch_first:
        return outputs.permute(2, 0, 1, 3).reshape(shape), weights
    return outputs.transpose(1, 2).reshape(shape), weights


def build_matrix_and_values(call: Call) -> tuple[AttentionMatrix, Tensor]:
    """Return the attention matrix of a call, and its values (batch, heads, keys, head_dim)."""
    batched = checks.check_ranks(call)
    if not batched:
        query, key, value, padding, *_ = call
        first = query.unsqueeze(0)
        second = first if key is query else key.unsqueeze(0)
        third = second if value is key else value.unsqueeze(0)
        padding = None if padding is None else padding.unsqueeze(0)
        call = call._replace(
            query=first, key=second, value=third, padding=padding, batch_first=True
        )
    checks.check_call(call, batched=batched)
    q, k, v = _project_heads(call)
    slots = int(call.bias_k is not None) + int(call.add_zero_attn)
    mask, score_bias = None, None
    if call.padding is not None or call.attn_mask is not None:
        mask, score_bias = convert_masks(
            call.padding,
            call.attn_mask,
            num_heads=call.num_heads,
            slots=slots,
            hinted=call.is_causal,
            dtype=q.dtype,
        )
    if call.padding is not None:
        # A hidden key may hold NaN, as the input of a padded token may.
        hidden = call.padding if call.padding.dtype == torch.bool else call.padding == -torch.inf
        k, v = zero_padding(k, ~hidden), zero_padding(v, ~hidden)
    if slots:
        k = _append_slots(k, k, "bias_k", call)
        v = _append_slots(v, k, "bias_v", call)
    return AttentionMatrix(q, k, mask=mask, score_bias=score_bias), v


# ---- projections -----------------------------------------------------------------------------

# The name of a product, its input, weight and bias, and the number of projections it packs.
Product = tuple[str, Tensor, Tensor, Tensor | None, int]


def _input_products(call: Call) -> list[Product]:
    """Return the products of the input projection, in the order of queries, keys, values.

    A packed weight takes one product in self-attention, two where key is value, else three.
    """
    query, key, value, *_ = call
    weights, bias, width = call.weights, call.bias, call.width
    if len(weights) == 1:
        (weight,) = weights
        assert weight is not None
        if key is value and query is key:
            return [("in_proj q, k, v", query, weight, bias, 3)]
        if key is value:
            sizes = [width, 2 * width]
            w_q, w_kv = weight.split(sizes)
            b_q, b_kv = (None, None) if bias is None else bias.split(sizes)
            return [("in_proj q", query, w_q, b_q, 1), ("in_proj k, v", key, w_kv, b_kv, 2)]
        weights, names = weight.chunk(3), ("in_proj q", "in_proj k", "in_proj v")
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    biases = (None, None, None) if bias is None else bias.chunk(3)
    columns = (names, (query, key, value), weights, biases, (1, 1, 1))
    return list(zip(*columns, strict=True))  # type: ignore[arg-type]


def _project_heads(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, projected or static: (batch, heads, length, head_dim)."""
    heads, head_dim = call.num_heads, call.width // call.num_heads
    batch, length = (0, 1) if call.batch_first else (1, 0)
    parts: list[Tensor] = []
    products = _input_products(call)
    for _, x, weight, bias, count in products:
        projected = linear.apply_linear(x, weight, bias)
        first, second, _ = projected.shape
        projected = projected.view(first, second, count, heads, head_dim)
        if torch.is_grad_enabled():
            # Axes are moved after the split: gradients are then stacked as the product lies.
            parts += [part.permute(batch, 2, length, 3) for part in projected.unbind(2)]
        else:
            parts += projected.permute(batch, 3, 2, length, 4).unbind(2)
    q, k, v = parts
    if call.static_k is not None:
        k = call.static_k.view(q.shape[0], heads, -1, head_dim)
    if call.static_v is not None:
        v = call.static_v.view(q.shape[0], heads, -1, head_dim)
    if len(products) > 1 or k is not parts[1] or v is not parts[2]:
        k = checks.cast_under_autocast_or_raise("keys", k, q)
        v = checks.cast_under_autocast_or_raise("values", v, q)
    return q, k, v


def _append_slots(x: Tensor, k: Tensor, name: str, call: Call) -> Tensor:
    batch, heads, _, head_dim = k.shape
    rows, slot = [x], getattr(call, name)
    if slot is not None:
        if torch.promote_types(slot.dtype, k.dtype) == k.dtype:
            slot = slot.to(k.dtype)  # as torch.cat does
        slot = checks.cast_under_autocast_or_raise(name, slot, k)
        rows.append(slot.view(1, heads, 1, head_dim).expand(batch, heads, 1, head_dim))
    if call.add_zero_attn:
        rows.append(k.new_zeros(batch, heads, 1, head_dim))
    return torch.cat(rows, dim=2)


def explain_forward(call: Call, out_proj: nn.Module) -> LayerExplanation:
    """Return the report on `attend_before_out_proj` and the output projection for a call."""
    matrix, v = build_matrix_and_values(call)
    queries = call.query.shape[:-1].numel()
    tokens = f"{queries:,}, all of the input"
    if call.padding is not None:
        tokens += "; torch's key_padding_mask hides keys, and padded queries are still computed"
    if call.dropout_p > 0:
        tokens += "; dropout in training allocates queries x keys for A @ v"
    lines = [
        linear.product_line(name, "product", x.shape[:-1].numel(), (x.shape[-1], len(weight)), x)
        for name, x, weight, *_ in _input_products(call)
    ]
    lines.append(linear.projection_line("out_proj", out_proj, queries, call.query))
    returned = "all heads, in queries x keys memory; need_weights=False saves it"
    if not call.need_weights:
        returned = "not returned"
    elif call.average:
        returned = describe_average(matrix, v, dropout_p=call.dropout_p)
    return LayerExplanation(tokens, tuple(lines), matrix.explain(v), returned)


# ---- masks -------------------------------------------------------------------------------------
# True in torch's bool mask means may not attend. A float mask is added to the scores: -inf masks,
# finfo.min does not. ``key_padding_mask`` stays (batch, keys), never expanded to queries x keys.

# Reading a (256, 256) mask takes 0.06 ms; for smaller masks the causal kernel saves less than that
# (docs/log.md).
CAUSAL_PAYS_FROM = 256
CAUSAL_BLOCK = 256


def convert_masks(
    padding: Tensor | None,
    attn_mask: Tensor | None,
    *,
    num_heads: int,
    slots: int,
    hinted: bool,
    dtype: torch.dtype,
) -> tuple[Mask | None, ScoreBias | None]:
    """Return torch's two masks as one `Mask` and one `ScoreBias`, None for an absent one.

    ``slots`` are keys appended by bias_k and add_zero_attn, open to every query; ``hinted`` is the
    call's ``is_causal``: a hint to test ``attn_mask``, never a mask; ``dtype`` that of the queries.
    """
    mask: Mask | None = None
    score_bias: ScoreBias | None = None
    if attn_mask is not None:
        if not slots and is_causal(attn_mask, hinted=hinted):
            mask = Mask.causal()
        else:
            axes = "queries keys"
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (-1, num_heads))
                axes = "batch heads queries keys"
            mask, score_bias = _convert_mask(attn_mask, axes, slots, dtype)
    if padding is not None:
        padding_mask, padding_bias = _convert_mask(padding, "batch keys", slots, dtype)
        if padding_mask is not None:
            mask = padding_mask if mask is None else mask & padding_mask
        if padding_bias is not None:
            score_bias = padding_bias if score_bias is None else score_bias + padding_bias
    return mask, score_bias


def _convert_mask(
    mask: Tensor, axes: str, slots: int, dtype: torch.dtype
) -> tuple[Mask | None, ScoreBias | None]:
    if slots:
        mask = F.pad(mask, (0, slots))  # False and 0 both mean may attend
    if mask.dtype == torch.bool:
        return Mask.may_attend(~mask, axes=axes), None
    return None, ScoreBias.dense(cast_bias(mask, dtype), axes=axes)


def is_causal(mask: Tensor, *, hinted: bool) -> bool:
    """True if a 2-D mask hides exactly the later keys, so that the causal kernel can be used.

    The test reads every entry, block by block, and stops at the first difference. It runs only for
    square masks that are long enough to profit. On an accelerator, where reading a value waits for
    the device, it runs only with ``hinted``.
    """
    # First, since a size compared while compiling becomes a condition of the graph.
    if not may_read_values(mask):
        return False
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.shape[0] < CAUSAL_PAYS_FROM:
        return False
    if mask.requires_grad or not (mask.device.type == "cpu" or hinted):
        return False
    for first in range(0, mask.shape[0], CAUSAL_BLOCK):
        stop = min(first + CAUSAL_BLOCK, mask.shape[0])
        earlier, diagonal, later = mask[first:stop].tensor_split((first, stop), dim=1)
        if mask.dtype == torch.bool:
            causal = torch.ones_like(diagonal).triu(1)
            fits = not earlier.any() and bool(later.all())
        else:
            causal = torch.full_like(diagonal, -torch.inf).triu(1)
            fits = not earlier.count_nonzero() and (
                later.numel() == 0 or bool(later.amax() == -torch.inf)
            )
        if not fits or not torch.equal(diagonal, causal):
            return False
    return True


# ---- a part of the heads ---------------------------------------------------------------------


def take_part(call: Call, part: HeadPart) -> Call:
    """Return a call for a part of the heads: inputs, parameters and masks of these alone.

    Raises:
        HeadwiseError: an ``attn_mask`` that is not for all heads.
    """
    given = {"query": call.query}
    for name, mask in (("key_padding_mask", call.padding), ("attn_mask", call.attn_mask)):
        if isinstance(mask, Tensor) and mask.is_floating_point():
            given[name] = mask
    if call.key is not call.query:
        given["key"] = call.key
    if call.value is not call.key:
        given["value"] = call.value
    inputs = part.check_inputs_and_sum_gradients(given)
    query, padding = inputs["query"], inputs.get("key_padding_mask", call.padding)
    key, mask = inputs.get("key", query), inputs.get("attn_mask", call.attn_mask)
    if isinstance(mask, Tensor) and mask.dim() == 3:
        batched = query.dim() == 3
        axis = 1 if batched and call.batch_first else 0  # of the length
        batch, heads = query.shape[1 - axis] if batched else 1, part.num_heads
        if mask.shape[0] != batch * heads:
            shape = (batch * heads, query.shape[axis], key.shape[axis])
            checks.refuse_attn_mask_shape(mask, shape, batch, heads, batched=batched)
        mask = part.cut_channels(mask.unflatten(0, (batch, heads)), dim=1).flatten(0, 1)
    value = inputs.get("value", key)
    call = call._replace(query=query, key=key, value=value, padding=padding, attn_mask=mask)
    return _take_parameters(call, part)


def _take_parameters(call: Call, part: HeadPart) -> Call:
    width = call.embed_dim

    def share(parameter: Tensor | None, dim: int) -> Tensor | None:
        if parameter is None:
            return None
        weight = part.own_share_of_parameter(parameter)
        return weight if weight.shape[dim] != width else part.cut_channels(weight, dim=dim)

    def packed(parameter: Tensor) -> Tensor:
        thirds = part.own_share_of_parameter(parameter).unflatten(0, (3, width))
        return part.cut_channels(thirds, dim=1)

    weights: tuple[Tensor | None, ...]
    if len(call.weights) > 1:
        weights = tuple(share(weight, 0) for weight in call.weights)
    else:
        assert call.weights[0] is not None
        weights = packed(call.weights[0]).unbind(0)
    return call._replace(
        width=width // part.num_heads * len(part.heads),
        num_heads=len(part.heads),
        weights=weights,
        bias=None if call.bias is None else packed(call.bias).flatten(),
        bias_k=share(call.bias_k, 2),
        bias_v=share(call.bias_v, 2),
    )


# ---- the function ----------------------------------------------------------------------------


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `torch.nn.functional.multi_head_attention_forward` with the layer's contract.

    Arguments are those of torch. Inputs are (length, batch, width), or (length, width).
    ``static_k`` and ``static_v``, (batch*heads, keys, head_dim), replace the projected keys and
    values; masks then have their length.

    Raises:
        HeadwiseError: with the type and first line of torch's own error, as in
            `MultiheadAttention`.
    """
    require_tensors(query=query, key=key, value=value)
    checks.require_mask_for_hint(is_causal=is_causal, attn_mask=attn_mask)
    checks.require_divisible_embed_dim(embed_dim_to_check, num_heads)
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if use_separate_proj_weight else (in_proj_weight,)
    masks = (key_padding_mask, attn_mask, is_causal)
    given = (query, key, value, *masks, need_weights, average_attn_weights)
    dropout, width = dropout_p if training else 0.0, embed_dim_to_check
    rest: tuple[Any, ...] = (in_proj_bias, bias_k, bias_v, add_zero_attn, static_k, static_v)
    call = Call(*given, dropout, False, width, width, num_heads, weights, *rest)
    heads, attention = attend_before_out_proj(call)
    warn_of_polarity(key_padding_mask, attn_mask, stacklevel=2)
    return F.linear(heads, out_proj_weight, out_proj_bias), attention


# ---- the two forms of the input projection -----------------------------------------------------


def match_projection_form(
    layer: torch.nn.MultiheadAttention,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    error_msgs: list[str],
) -> Mapping[str, Any]:
    """Return ``state_dict``, or a copy with this layer's projection in the layer's form.

    Weights in the other form and of other widths are a size mismatch: the function adds a message
    to ``error_msgs``, as torch does for sizes, for both values of ``strict``.
    """
    packed, separate = prefix + PACKED, [prefix + name for name in SEPARATE]
    forms = packed in state_dict, all(key in state_dict for key in separate)
    held = {name: x for name, x in layer._parameters.items() if x is not None}
    here = PACKED in held, held.keys() >= set(SEPARATE)
    converted: dict[str, Tensor] | None = None
    if (forms, here) == ((True, False), (False, True)):
        converted = _split_packed_weight(state_dict[packed], held, packed, error_msgs)
    elif (forms, here) == ((False, True), (True, False)):
        converted = _pack_separate_weights(state_dict, held[PACKED], prefix, error_msgs)
    if converted is None:
        return state_dict
    if local_metadata.get("assign_to_params_buffers", False):
        # Assigned tensors become the parameters, which must not share storage.
        converted = {name: weight.clone() for name, weight in converted.items()}
    rest = {key: x for key, x in state_dict.items() if key not in (packed, *separate)}
    return rest | {prefix + name: weight for name, weight in converted.items()}


def _split_packed_weight(
    weight: Tensor, held: Mapping[str, Tensor], key: str, error_msgs: list[str]
) -> dict[str, Tensor] | None:
    shapes = {name: tuple(held[name].shape) for name in SEPARATE}
    each = (weight.shape[0] // 3, *weight.shape[1:])
    if weight.shape[0] % 3 or any(shape != each for shape in shapes.values()):
        expected = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        error_msgs.append(
            f"size mismatch for {key}: the packed weight {tuple(weight.shape)} in the checkpoint"
            f" holds three of shape {each}, but this layer has {expected}."
        )
        return None
    return dict(zip(SEPARATE, weight.chunk(3), strict=True))


def _pack_separate_weights(
    state_dict: Mapping[str, Tensor], held: Tensor, prefix: str, error_msgs: list[str]
) -> dict[str, Tensor] | None:
    weights = {prefix + name: state_dict[prefix + name] for name in SEPARATE}
    each = (held.shape[0] // 3, *held.shape[1:])
    if any(weight.shape != each for weight in weights.values()):
        listed = ", ".join(f"{key} {tuple(weight.shape)}" for key, weight in weights.items())
        error_msgs.append(
            f"size mismatch for {prefix}{PACKED}: the checkpoint has {listed}, but this layer packs"
            f" three of shape {each} into {tuple(held.shape)}."
        )
        return None
    return {PACKED: torch.cat(list(weights.values()))}
