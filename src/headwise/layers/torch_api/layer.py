"""`MultiheadAttention`: torch's layer, with one meaning on every path.

torch's signature, parameters and conventions, and nothing more. What is different from torch's
layer is stated in docs/contract.md, and comes down to this: the output does not depend on whether
weights are asked for, on the grad mode, or on whether query, key and value are the same object; a
query that may attend to nothing gives zeros; returned weights are those before dropout; and
``out_proj`` is really called.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError, PolarityWarning
from headwise.layers.explanation import LayerExplanation
from headwise.layers.torch_api import state_dict_forms, torch_checks
from headwise.layers.torch_api.shared_forward import CallOptions, attend, explain
from headwise.layers.torch_api.torch_masks import hidden_sequences
from headwise.support.arguments import require_tensors
from headwise.support.tracing import may_check_values


class MultiheadAttention(torch.nn.MultiheadAttention):
    """A drop-in for `torch.nn.MultiheadAttention`: see torch's documentation for its arguments.

    Masks keep torch's convention: a bool mask says True = may **not** attend, a float mask is
    added to the scores (its -inf masks, its finfo.min does not). ``is_causal`` is a hint beside
    ``attn_mask`` and never changes the output. Slots of ``add_bias_kv`` and ``add_zero_attn`` may
    always be attended.

    A ``key_padding_mask`` that hides a whole sequence beside one that it does not hide gets one
    `PolarityWarning` for each layer, in eager mode on the CPU: Hugging Face's ``attention_mask``
    (1 = real) given in its place does that.

    Placed by hand inside torch's encoder layers it is not called in eval under no_grad, since their
    fused path reads its weights: ``headwise.upgrade(model)`` switches that path off.

    Not supported: TorchScript (``torch.jit.script``); use torch.compile or torch.export.

    Raises:
        HeadwiseError: and, for the same input, what torch's layer raises (`drop_in.refusals`).
    """

    _has_warned = False  # of the class, so that a layer made before has it too

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
        torch_checks.require_sizes(embed_dim, num_heads)
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )

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
        """The output, shaped like ``query``, and the weights where they are asked for.

        Inputs are (length, batch, width), or (batch, length, width) with ``batch_first``, or
        (length, width). ``key_padding_mask`` is (batch, keys); ``attn_mask`` (queries, keys) or
        (batch*heads, queries, keys). Weights are (batch, queries, keys), the average over heads,
        or (batch, heads, queries, keys) with ``average_attn_weights=False``; without the batch
        axis for unbatched inputs.
        """
        require_tensors(query=query, key=key, value=value)
        torch_checks.require_mask_for_hint(is_causal=is_causal, attn_mask=attn_mask)
        if query.is_nested or key.is_nested or value.is_nested:
            # torch's own path for nested tensors, with its own conditions and messages.
            return super().forward(
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        dropout_p = self.dropout if self.training else 0.0
        masks = (key_padding_mask, attn_mask, is_causal)
        wanted = (need_weights, average_attn_weights)
        options = CallOptions(*masks, *wanted, dropout_p, self.batch_first)
        heads, weights = attend(query, key, value, self, options)
        if key_padding_mask is not None:
            self._warn_of_hidden_sequences(key_padding_mask)
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
        """What a forward pass of this input computes, by which kernel, and why; print it.

        Arguments as in ``forward``, and refused as there. Keys count the slots of ``add_bias_kv``
        and ``add_zero_attn``.

        Raises:
            OptionError: nested tensors, which torch's own code computes.
        """
        require_tensors(query=query, key=key, value=value)
        torch_checks.require_mask_for_hint(is_causal=is_causal, attn_mask=attn_mask)
        if query.is_nested or key.is_nested or value.is_nested:
            raise OptionError(
                saw="explain of nested tensors",
                needed="tensors with one length: nested ones are computed by torch's own code",
                do="explain(x.to_padded_tensor(0.0), ..., key_padding_mask=...)",
            )
        dropout_p = self.dropout if self.training else 0.0
        masks = (key_padding_mask, attn_mask, is_causal)
        wanted = (need_weights, average_attn_weights)
        options = CallOptions(*masks, *wanted, dropout_p, self.batch_first)
        return explain(query, key, value, self, options)

    def _warn_of_hidden_sequences(self, padding: Tensor) -> None:
        """Warn, once in the life of the layer, of padding that may have the reverse polarity."""
        if not may_check_values(padding) or self._has_warned:
            return
        if hidden := hidden_sequences(padding):
            self._has_warned = True
            message = f"""\
key_padding_mask of shape {tuple(padding.shape)} hides every key of sequence {hidden[0]}, \
but not of every sequence
  needed: True (or -inf) where a key is hidden; attention_mask of Hugging Face is the reverse
  do:     key_padding_mask=attention_mask == 0. If sequence {hidden[0]} is empty, all is well"""
            # The caller of the layer: this frame, forward, and torch's two of Module.__call__.
            warnings.warn(message, PolarityWarning, stacklevel=5)

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
        """Either form of the input projection loads, packed or separate, where the widths allow."""
        state_dict = state_dict_forms.as_held_by(
            self, state_dict, prefix, local_metadata, error_msgs
        )
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
