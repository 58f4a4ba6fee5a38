"""Drop-in for torch.nn.MultiheadAttention with the same output on every path.

Signature, parameters and conventions are torch's. docs/contract.md lists the differences:

* The output does not depend on need_weights, on the grad mode, or on whether query, key and value
  are the same object.
* A query that may attend to nothing has zero head outputs.
* Returned weights are those before dropout.
* The layer calls ``out_proj`` as a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.function.spec import AttentionSpec
from headwise.layers.conversion import advise_wrapped_tensors
from headwise.layers.linear import LayerExplanation
from headwise.layers.part import HeadPart
from headwise.layers.torch_api import checks
from headwise.layers.torch_api.forward import attend_before_out_proj, explain_forward, take_part
from headwise.masks.polarity import warn_of_polarity
from headwise.support.arguments import explain_arguments, renamed_arguments, require_tensors

PACKED = "in_proj_weight"
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


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
        return self.out_proj(heads), weights

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
            error_msgs += advise_wrapped_tensors(state_dict)
