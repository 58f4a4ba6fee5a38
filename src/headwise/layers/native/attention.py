"""`Attention`: multi-head attention in all its modern forms, as one class to read."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.layers.hooks import shown
from headwise.layers.native import argument_aliases, layout_conversion, option_checks
from headwise.layers.native.base import Projection
from headwise.layers.native.cache import Cache
from headwise.layers.native.call_checks import checked_gate, stored
from headwise.layers.native.head_readings import HeadReadings
from headwise.layers.native.initialization import Source, initialise
from headwise.layers.native.padding import choose_frame
from headwise.layers.native.qk_norm import QKNorm
from headwise.layers.positions import PositionBias, Rotary
from headwise.layouts import registry
from headwise.layouts.layout import Layout
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.arguments import explains


class Attention(HeadReadings):
    """Multi-head attention with free sizes: (batch, length, width) in, one tensor out.

    Args:
        embed_dim: width of ``x``.
        num_heads: query heads. ``num_kv_heads``, those of keys and values, divides it: query head
            h reads kv head h // (num_heads // num_kv_heads).
        head_dim: width of a head's queries and keys; embed_dim / num_heads by default.
        value_dim: width of a head's values; head_dim by default.
        out_dim: width of the output; embed_dim by default.
        source_dim: width of ``source``, for cross attention; embed_dim by default.
        q_bias, k_bias, v_bias, out_bias: whether each projection has a bias.
        rotary: rotates queries and keys by their positions.
        score_bias: adds to the scores by distance, `Alibi` or `T5Bias`.
        qk_norm: normalises queries and keys.
        window: (left, right): how many keys before and after its own place a query sees; None is
            no bound.
        scale: factor of q.k; 1/sqrt(head_dim) by default.
        softcap: scores become softcap * tanh(scores / softcap).
        sink: whether each head has a learned logit that takes weight and gives nothing.
        dropout: probability with which a weight is dropped, in training.
        init: whose initialisation; see `headwise.layers.native.initialization`.

    Raises:
        OptionError: sizes or options that contradict each other, both named.
    """

    @explains(argument_aliases.CONSTRUCTOR, beyond=argument_aliases.beyond_the_sizes)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_dim: int | None = None,
        source_dim: int | None = None,
        q_bias: bool = True,
        k_bias: bool = True,
        v_bias: bool = True,
        out_bias: bool = True,
        rotary: Rotary | None = None,
        score_bias: PositionBias | None = None,
        qk_norm: QKNorm | None = None,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: bool = False,
        dropout: float = 0.0,
        init: Source = "torch-packed",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        option_checks.check_counts(embed_dim=embed_dim, num_heads=num_heads)
        self.head_dim = (
            option_checks.divided(embed_dim, num_heads) if head_dim is None else head_dim
        )
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.out_dim = embed_dim if out_dim is None else out_dim
        self.source_dim = embed_dim if source_dim is None else source_dim
        self.rotary, self.qk_norm, self.window = rotary, qk_norm, window
        self.scale, self.softcap, self.dropout, self.init = scale, softcap, dropout, init
        option_checks.check(self, score_bias, crosses=source_dim is not None, dtype=dtype)
        heads, kv_heads = num_heads, self.num_kv_heads
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = Projection(embed_dim, heads * self.head_dim, q_bias, **place)
        self.k_proj = Projection(self.source_dim, kv_heads * self.head_dim, k_bias, **place)
        self.v_proj = Projection(self.source_dim, kv_heads * self.value_dim, v_bias, **place)
        self.out_proj = Projection(heads * self.value_dim, self.out_dim, out_bias, **place)
        self.q_norm, self.k_norm = (self._norm(n, **place) for n in (heads, kv_heads))
        self.score_bias = score_bias.module(heads, **place) if score_bias else None
        self.sink = nn.Parameter(torch.empty(heads, **place)) if sink else None
        self.identity = uuid4().hex  # what its caches know it by
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The projections as ``init`` says; a sink is 0, norms and a score bias start anew."""
        initialise(self, self.init)
        if self.sink is not None:
            nn.init.zeros_(self.sink)
        for own in (self.q_norm, self.k_norm, self.score_bias):
            if reset := getattr(own, "reset_parameters", None):  # slopes, and None, have none
                reset()

    @explains(argument_aliases.CALL, beyond=argument_aliases.beyond_the_source)
    def forward(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        gate: Float[Tensor, "*batch heads"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch queries out_dim"]:
        """The output for each token of ``x``.

        Args:
            x: what the queries are projected from, and without a source also keys and values.
            source: what keys and values are projected from.
            mask: who may attend. The output of a query that it gives up, by lengths or segments,
                is the bias of the output projection. In eager mode such queries cost nothing where
                ``Mask.lengths(queries=n, keys=n)`` or segments, with bands or none, are the whole
                mask, and score biases are by distance; `explain` tells.
            score_bias: added to the scores.
            gate: a factor of each head's outputs, (heads,) or (batch, heads); none means 1. Its
                gradient at 1 is the head's importance (Michel et al. 2019, arXiv:1905.10650).
            cache: earlier keys and values; those of ``x`` are added to it. Alignments are then
                bottom-right, and lengths count the tokens of this call.
        """
        call = self._call(x, source, mask, score_bias, cache)
        gate = None if gate is None else checked_gate(gate, x, self.num_heads)
        frame = choose_frame(call)
        matrix, v = self._operands(frame, call)
        outputs = matrix.dropped(v, dropout_p=self.dropout) if self.drops else matrix @ v
        outputs = shown(matrix, v, outputs)
        if gate is not None:
            outputs = outputs * frame.gate(gate.to(outputs.dtype))
        return frame.project(outputs.transpose(1, 2).flatten(2), self.out_proj)

    @classmethod
    def from_layout(
        cls,
        state: Mapping[str, Tensor],
        *,
        layout: str | Layout,
        num_heads: int,
        num_kv_heads: int | None = None,
        accept: Iterable[str] = (),
        **options: Any,
    ) -> Attention:
        """A layer that computes what the module with these weights does.

        Sizes, biases and the scale are read from the weights and from the layout. What neither
        holds is an option, as in the constructor: the numbers of ``rotary`` or of a ``softcap``.
        The options may not say another function than the layout.

        Args:
            state: the tensors of one module, by their names within it.
            layout: the one that they are in, or its name; ``headwise layouts`` lists them.
            num_heads: query heads, which no shape tells.
            num_kv_heads: those of keys and values, where no shape tells them either.
            accept: in which fields of `Function` the options may say otherwise, as in `convert`.
            options: see the constructor.

        Raises:
            OptionError: tensors or options that are not those of the layout.
            ShapeError: shapes that do not fit the counts.
        """
        described = registry.layout(layout)
        canonical = layout_conversion.canonical_of(
            state, described, options, heads=num_heads, kv_heads=num_kv_heads
        )
        layer = cls(**layout_conversion.options_of(canonical, described.function, options))
        layout_conversion.require_function_of(described, layer, accept)
        own = layout_conversion.own_layout(layer)
        layer.load_state_dict(own.pack(layout_conversion.in_own_order(canonical, layer)))
        return layer

    def to_layout(self, target: str | Layout, *, accept: Iterable[str] = ()) -> dict[str, Tensor]:
        """The weights in another layout, in memory of their own.

        Whatever reads them computes the function of this layer, given the numbers that the layout
        leaves to a model's config. Nothing of the function is folded into the weights.

        Args:
            target: the wanted layout, or its name.
            accept: in which fields of `Function` the layout may differ, as in `convert`.

        Raises:
            OptionError: the layout says another function than this layer computes, or has no
                place for one of its tensors.
            ShapeError: heads that it cannot hold.
        """
        target = registry.layout(target)
        layout_conversion.require_function_for(target, self, accept)
        canonical = layout_conversion.canonical_state(self, self.state_dict())
        width = {} if self.rotary is None else {"rotary_width": self.rotary.width_in(self.head_dim)}
        return target.pack(canonical, **width)

    def cache(self, *, batch: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for ``length`` tokens of each of ``batch`` sequences.

        With a window shorter than ``length`` any number of tokens may pass, in at most twice the
        slots that the window needs. A step is the full forward pass where no query sees a later
        token: with a causal mask, or a window of (left, 0).
        """
        option_checks.check_counts(batch=batch, length=length)
        left = None if self.window is None else self.window[0]
        evicts = left is not None and left < length
        slots = min(length, 2 * left + 1) if left is not None and evicts else length
        like = stored(self.k_proj, torch.empty(0))
        place: dict[str, Any] = {"device": like.device, "dtype": dtype or like.dtype}
        k, v = (
            torch.zeros(batch, self.num_kv_heads, slots, width, **place)
            for width in (self.head_dim, self.value_dim)
        )
        return Cache(k, v, window=left if evicts else None, owner=self.identity)

    def extra_repr(self) -> str:
        """The sizes, and the options that are no modules."""
        return option_checks.described(self)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Attention:
        """A layer of its own: caches of the original stay the original's, unless copied with it."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[self.identity] = copied, uuid4().hex
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.identity = memo[self.identity]
        return copied

    def _norm(self, heads: int, **place: Any) -> nn.Module | None:
        if self.qk_norm is None:
            return None
        per_head = self.qk_norm.over == "head"
        return self.qk_norm.module(self.head_dim * (1 if per_head else heads), **place)
