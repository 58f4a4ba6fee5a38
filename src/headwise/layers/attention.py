"""Multi-head attention layer with rotary, ALiBi, QK-norm, windows, softcap, sinks and caches.

    q, k, v = q_proj(x), k_proj(source), v_proj(value_source)    in heads; by default all are of x
    q, k    = rotary(q_norm(q)), rotary(k_norm(k))               where the layer has them
    A       = softmax(softcap(scale * q @ k.T) + score_bias)     over keys that the mask allows
    output  = out_proj(gate * (A @ v))                           A is an `AttentionMatrix`

`base` makes the modules of a layer, `packing` chooses the tokens that a call computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from headwise.errors import OptionError
from headwise.function.differential import difference_factor, pair_values, subtract_pairs
from headwise.function.gate import gate_width, open_gates
from headwise.function.norm import change_values
from headwise.function.records import stages_of
from headwise.function.spec import AttentionSpec, require_conflicts_accepted
from headwise.function.stages import scores, split_heads
from headwise.function.temperature import query_factors
from headwise.function.weights import LAMBDAS
from headwise.layers import base, checks, conversion, hooks, latent, packing
from headwise.layers.cache import Cache
from headwise.layers.linear import LayerExplanation, project, projection_line
from headwise.layouts import registry
from headwise.layouts._layout import Layout
from headwise.masks.mask import NO_MASK, Mask, require_mask_type
from headwise.masks.score_bias import NO_BIAS, ScoreBias, require_score_bias_type
from headwise.matrix.operator import AttentionMatrix, with_finite_padding
from headwise.support.arguments import explain_arguments
from headwise.support.tensors import tensors_of_arrays
from headwise.support.text import human_bytes
from headwise.support.tracing import evaluation_mode

_explain_call = explain_arguments(checks.CALL, beyond=checks.advice_on_positional_call_arguments)


def _project(layer: Attention, tokens: packing.Unpacked) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of each head, as they enter the scores and a cache."""
    if layer.latent is not None:
        q, stored = latent.project(layer, tokens)
        return q, stored, stored[..., :0]  # a cache holds no values beside them
    q, k = project(layer.q_proj, tokens.x), project(layer.k_proj, tokens.source)
    v = project(layer.v_proj, tokens.of_values)
    place = None if layer.qk_norm is None else (layer.qk_norm.over, layer.qk_norm.place)
    if place == ("width", "before"):
        q, k = _normalise(layer, q, k)
    heads, kv_heads = layer._head_counts
    q = checks.split_projection("q_proj", q, "heads", heads, layer.head_dim)
    k = checks.split_projection("k_proj", k, "kv_heads", kv_heads, layer.head_dim)
    v = checks.split_projection("v_proj", v, "kv_heads", kv_heads, layer.value_dim)
    if place == ("head", "before"):
        q, k = _normalise(layer, q, k)
    if (bound := layer.clip) is not None:
        q, k = q.clamp(-bound, bound), k.clamp(-bound, bound)
    v = change_values(layer.values, layer.clip, v)
    if layer.rotary is not None:
        if layer.rotary.depends_on_length:
            tokens.reached = tokens.lengths_of_sequences()
        q, k = layer.rotary.rotate_both(q, k, tokens.positions(), length=tokens.reached)
    if place == ("head", "after"):
        q, k = _normalise(layer, q, k)
    if layer.temperature is not None:
        q = q * query_factors(layer.temperature, tokens.positions(), q.dtype)
    return q, k, v


def _product_of_call(
    layer: Attention, tokens: packing.Unpacked, call: packing.CallInputs
) -> latent.Product:
    q, k, v = _project(layer, tokens)
    operands = latent.Operands(q, k, v, None)
    mask, score_bias, sink, part = tokens.mask, call.score_bias, layer.sink, layer.part
    if call.cache is not None:
        keys = call.cache.key_count_after(k.shape[2])
        checks.check_mask_and_bias(call, heads=layer.num_heads, keys=keys)
        if tokens.reached is not None:
            checks.check_kept_frequencies(layer.rotary, call.cache, tokens.reached)
        tokens.cached = call.cache.extend(k, v, lengths=tokens.lengths)
        k, v = tokens.cached.k, tokens.cached.v
        mask = tokens.mask_with_cache(tokens.cached.starts)
    if layer.latent is not None:
        operands = latent.choose_form(layer, q, k, has_cache=call.cache is not None)
        q, k, v, _ = operands
    if part is not None:
        k, v = part.share_kv(k), part.share_kv(v)
        sink = None if sink is None else part.own_share_of_parameter(sink)
        sizes = {"batch": q.shape[0], "queries": q.shape[2], "keys": k.shape[2]}
        mask = part.mask(mask, device=q.device, **sizes)
        score_bias = part.score_bias(score_bias, device=q.device, **sizes)
    if layer.score_bias is not None and (tables := layer.place_tables) is not None:
        projections = layer.q_proj, layer.k_proj
        factor = layer.head_dim**-0.5 if layer.scale is None else layer.scale
        score_bias = score_bias + tables(q, k, of_tokens=projections, scale=factor)
    scale = layer.scale
    if layer.latent is not None and scale is None:  # operands may be wider than head_dim
        scale = layer.head_dim**-0.5
    options = {"scale": scale, "softcap": layer.softcap}
    matrix = AttentionMatrix(q, k, mask=mask, score_bias=score_bias, sink=sink, **options)
    matrix = with_finite_padding(matrix) if tokens.is_zeroed else matrix
    if (rule := layer.differential) is not None:
        factor = difference_factor(rule, *(getattr(layer, name) for name in LAMBDAS))
        return latent.Product(matrix, pair_values(v), partial(subtract_pairs, rule, factor=factor))
    return latent.Product(matrix, v, operands.expand)


def _project_stages(
    layer: Attention, tokens: packing.Unpacked, product: latent.Product
) -> dict[str, Tensor]:
    """Return the stages before the scores."""
    if layer.latent is not None:
        return latent.project_stages(layer, tokens)
    normed = projected = layer.q_proj(tokens.x), layer.k_proj(tokens.source)
    norm = layer.qk_norm
    if norm is not None and (norm.over, norm.place) == ("width", "before"):
        normed = _normalise(layer, *normed)
    counts = layer._head_counts
    (q, k), (normed_q, normed_k) = (
        [split_heads(x, heads=n) for x, n in zip(pair, counts, strict=True)]
        for pair in (projected, normed)
    )
    if norm is not None and (norm.over, norm.place) == ("head", "before"):
        normed_q, normed_k = _normalise(layer, q, k)
    if (bound := layer.clip) is not None:
        normed_q, normed_k = (x.clamp(-bound, bound) for x in (normed_q, normed_k))
    v, rotated = split_heads(layer.v_proj(tokens.of_values), heads=counts[1]), product.matrix
    tensors = (q, k, v, normed_q, normed_k, rotated.q, rotated.k)
    return dict(zip(stages_of(layer.spec), tensors, strict=False))


def _normalise(layer: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    return layer.q_norm(q), layer.k_norm(k)


def _finish_outputs(layer: Attention, outputs: Tensor, x: Tensor) -> Tensor:
    """Return head outputs after their norm and their gate."""
    if layer.output_norm is not None and layer.o_norm is not None:
        if layer.output_norm.over == "width":
            merged = outputs.transpose(1, 2).flatten(2)
            normed = layer.o_norm(merged)
            if layer.output_norm.kind == "layer":  # 0 for a query that attends to nothing
                normed = normed * (merged != 0).any(-1, keepdim=True)
            outputs = split_heads(normed, heads=outputs.shape[1])
        else:
            outputs = layer.o_norm(outputs)
    if layer.output_gate is None or layer.gate_proj is None:
        return outputs
    heads, width = layer._head_counts[0], gate_width(layer.output_gate, layer.value_dim)
    gates = open_gates(project(layer.gate_proj, x), layer.output_gate)
    factors = checks.split_projection("gate_proj", gates, "heads", heads, width)
    return outputs * factors.to(outputs.dtype)


class Attention(base.AttentionBase):
    """Multi-head attention layer: (batch, queries, embed_dim) to (batch, queries, out_dim).

    Args:
        embed_dim: width of ``x``.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of num_heads (the default):
            query head h uses kv head h // (num_heads // num_kv_heads).
        head_dim: width of a head's queries and keys; embed_dim / num_heads by default.
        value_dim: width of a head's values; head_dim by default.
        out_dim: width of the output; embed_dim by default.
        source_dim: width of ``source``, for cross attention; embed_dim by default.
        q_bias: True for a bias in the projection of queries.
        k_bias: True for a bias in the projection of keys; by default, without a latent.
        v_bias: True for a bias in the projection of values; by default, without a latent.
        out_bias: True for a bias in the output projection.
        rotary: rotates queries and keys by their positions.
        score_bias: added to the scores by distance, `Alibi` or `T5Bias`; or by distance, query
            and key, `DebertaBias`.
        qk_norm: normalises queries and keys.
        window: (left, right): the number of keys before and after its position that a query
            may attend to; None for no bound.
        scale: factor of q.k; 1/sqrt(head_dim) by default.
        softcap: scores become softcap * tanh(scores / softcap).
        sink: True for a learned logit of each head in the softmax's denominator, without a
            value.
        output_gate: multiplies the head outputs by the sigmoid of a projection of ``x``: "head"
            for one factor for each head, "channel" for one for each of its channels. "head
            softplus" and "channel softplus" take the softplus in place of the sigmoid.
        gate_bias: True for a bias in the projection of the gates, where there are any.
        temperature: multiplies queries by a factor that grows with their position, a
            `TemperatureRule` of `headwise.function`. Positions are those of the call, or count from
            the start of a sequence; of a packed row, pass ``positions``.
        clip: the largest size of queries and keys, before the rotation, and of projected values.
        values: a norm or a factor of projected values, a `ValueRule` of `headwise.function`.
        output_norm: normalises the head outputs before their gate: ``QKNorm(over="width")`` all
            heads of a token together, ``QKNorm(has_weight=False)`` each head.
        latent: keys and values come from a latent of each token, and a cache holds this: a
            `headwise.function.Latent`. A rotation turns the channels of its shared key.
        latent_bias: True for biases in the projections to latents and to the shared key.
        differential: head outputs are differences of two softmaxes, of head p and of p + heads / 2,
            a `DifferentialRule` of `headwise.function`; "head" 2p and 2p + 1 of the outputs are the
            halves of pair p.
        dropout: probability of dropping each weight in training.
        init: the library whose initialisation is used; see `initialise_projections` in
            `headwise.layers.base`.
        device: the device of the parameters, as in torch.
        dtype: the dtype of the parameters, as in torch.

    Raises:
        OptionError: sizes or options that contradict each other, or lie outside their range.
    """

    @_explain_call
    def forward(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        value_source: Float[Tensor, "batch keys source_dim"] | None = None,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        gate: Float[Tensor, "*batch heads"] | None = None,
        cache: Cache | None = None,
        positions: Shaped[Tensor, "*axes queries"] | None = None,
    ) -> Float[Tensor, "batch queries out_dim"]:
        """Compute attention; return (batch, queries, out_dim).

        Padded queries are skipped in eager mode when you pass
        ``Mask.lengths(queries=n, keys=n)`` or segments, alone or with bands, and every score bias
        is by distance; `explain` shows it. Their output is the bias of the output projection.

        Args:
            x: (batch, queries, embed_dim), the input of queries, and by default of keys and values.
            source: (batch, keys, source_dim), the input of keys and values in cross attention.
            value_source: as ``source``, for values alone: DETR adds places to keys, not to values.
            mask: which keys each query may attend to; combined with the layer's window.
            score_bias: added to the scores, and to the layer's own score bias.
            gate: a factor for each head's outputs, (heads,) or (batch, heads); 1 by default. Its
                gradient at 1 is the head's importance (Michel et al. 2019, arXiv:1905.10650).
            cache: a `Cache` of earlier keys and values; the call adds those of ``x`` in place.
                Alignments are then bottom-right, and lengths count the tokens of this call.
            positions: of the tokens of ``x``, (queries,) or (batch, queries), for the rotation; by
                default they count from 0, or on from the cache. With a `Rotary` of several ``axes``
                also (axes, batch, queries). Masks and score biases by distance count tokens.

        Raises:
            ShapeError, DTypeError, DeviceError: inputs that do not fit the layer or each other.
            MaskError: a mask or a score bias for other sizes, or one that a cache cannot take.
            OptionError: a source missing or not allowed, another layer's or a full cache.
        """
        call = self._prepare_call(x, source, mask, score_bias, cache, gate, positions, value_source)
        tokens = packing.select_packing(call)
        matrix, v, expand = _product_of_call(self, tokens, call)
        outputs = matrix.dropped(v, dropout_p=self.dropout) if self.applies_dropout else matrix @ v
        outputs = expand(hooks.call_hook(matrix, v, outputs))
        outputs = _finish_outputs(self, outputs, tokens.x)
        if call.gate is not None:
            outputs = outputs * tokens.expand_gate(call.gate.to(outputs.dtype))
        merged = outputs.transpose(1, 2).flatten(2)
        output = tokens.project_and_restore_batch(merged, self.out_proj)
        if cache is not None:
            packing.keep_cached_keys(call, cache, tokens)
        return output

    # ---- readings of single heads -------------------------------------------------------------

    @_explain_call
    def matrix(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        value_source: Float[Tensor, "batch keys source_dim"] | None = None,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        positions: Shaped[Tensor, "*axes queries"] | None = None,
    ) -> AttentionMatrix:
        """Return the attention matrix (batch, heads, queries, keys) as an operator.

        Arguments and errors as in ``forward``, here and in the readings below.
        """
        call = self._prepare_call(
            x, source, mask, score_bias, positions=positions, value_source=value_source
        )
        return _product_of_call(self, packing.Unpacked.of(call), call).matrix

    @_explain_call
    def head_outputs(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        value_source: Float[Tensor, "batch keys source_dim"] | None = None,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        positions: Shaped[Tensor, "*axes queries"] | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return weights @ v for each head, after the output gate: the projection's input."""
        call = self._prepare_call(
            x, source, mask, score_bias, positions=positions, value_source=value_source
        )
        tokens = packing.Unpacked.of(call)
        outputs = _product_of_call(self, tokens, call).head_outputs()
        return _finish_outputs(self, outputs, tokens.x)

    @_explain_call
    def stages(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        value_source: Float[Tensor, "batch keys source_dim"] | None = None,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        positions: Shaped[Tensor, "*axes queries"] | None = None,
    ) -> dict[str, Tensor]:
        """Return every stage of a call without dropout; `headwise.function.stages` names them.

        Projections and norms are called as modules. Rotated queries and keys, weights and head
        outputs are those of `matrix`; the output is that of ``forward``.
        """
        call = self._prepare_call(
            x, source, mask, score_bias, positions=positions, value_source=value_source
        )
        tokens = packing.Unpacked.of(call)
        product = _product_of_call(self, tokens, call)
        matrix, before = product.matrix, _project_stages(self, tokens, product)
        q, k = before["q after rotary"], before["k after rotary"]
        options = {"scale": matrix.scale, "softcap": matrix.softcap}
        logits = scores(q, k, mask=matrix.mask, score_bias=matrix.score_bias, **options)
        with evaluation_mode(self):
            given: Any = {"mask": mask, "score_bias": score_bias, "positions": positions}
            output = self(x, source, value_source=value_source, **given)
        outputs = _finish_outputs(self, product.head_outputs(), tokens.x)
        after = {"scores": logits, "weights": matrix.dense(), "head outputs": outputs}
        return before | after | {"output": output}

    @_explain_call
    def contributions(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        value_source: Float[Tensor, "batch keys source_dim"] | None = None,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        positions: Shaped[Tensor, "*axes queries"] | None = None,
    ) -> Float[Tensor, "batch heads queries out_dim"]:
        """Return each head's part of the output; their sum is the output less its bias.

        The output projection is called once for each head, so that adapters, quantisation and
        sharding apply.
        """
        options: Any = {"mask": mask, "score_bias": score_bias, "positions": positions}
        outputs = self.head_outputs(x, source, value_source=value_source, **options)
        bias = self.out_proj(torch.zeros_like(outputs[:1, :, :1]).transpose(1, 2).flatten(2))
        # Fill, do not multiply by 0: an infinite head would make the others NaN.
        here = range(self.num_heads) if self.part is None else self.part.heads
        heads = torch.arange(here.start, here.stop, device=outputs.device)[:, None, None]
        parts = [
            self.out_proj(outputs.masked_fill(heads != head, 0).transpose(1, 2).flatten(2)) - bias
            for head in range(self.num_heads)
        ]
        return torch.stack(parts, dim=1)

    @_explain_call
    def explain(
        self,
        x: Float[Tensor, "batch queries embed_dim"],
        source: Float[Tensor, "batch keys source_dim"] | None = None,
        *,
        value_source: Float[Tensor, "batch keys source_dim"] | None = None,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        positions: Shaped[Tensor, "*axes queries"] | None = None,
        cache: Cache | None = None,
    ) -> LayerExplanation:
        """Return a printable report on a forward pass of this input: tokens, kernels and costs.

        A ``cache`` holds the same tokens afterwards.
        """
        call = self._prepare_call(
            x, source, mask, score_bias, cache, positions=positions, value_source=value_source
        )
        tokens = packing.select_packing(call)
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            matrix, v, _ = _product_of_call(self, tokens, call)
        total, real, keys = (t.shape[0] * t.shape[1] for t in (x, tokens.x, tokens.source))
        line = f"{total:,}, all of the input"
        if isinstance(tokens, packing.Packed):
            line = f"{real:,} of {total:,} are real and packed into one row; padding is skipped"
        if self.applies_dropout:
            line += "; dropout in training allocates queries x keys for A @ v"
        if self.part is not None:
            line += f"; {self.part} of {self.num_heads} here"
        if self.place_tables is not None:
            size = matrix.score_bias.tensors[-1]
            line += f"; DeBERTa's terms are dense, {human_bytes(size.numel() * size.itemsize)}"
        if tokens.reached is not None:
            line += f"; {checks.describe_border(self.rotary, tokens.reached)}"
        counts, form = {"q_proj": real, "k_proj": keys, "v_proj": keys, "out_proj": real}, None
        counts |= {} if self.gate_proj is None else {"gate_proj": real}
        if self.latent is not None:
            names = {n: real if n[0] == "q" else keys for n in base.LATENTS if "proj" in n}
            counts |= {n: count for n, count in names.items() if getattr(self, n) is not None}
            form = latent.describe_form(self, *matrix.shape[2:], has_cache=cache is not None)
            expanded = matrix.shape[3] * len(matrix.k) * (not form.startswith("absorbed"))
            counts |= {"k_proj": expanded, "v_proj": expanded}
        lines = [projection_line(name, getattr(self, name), n, x) for name, n in counts.items()]
        return LayerExplanation(line, tuple(lines), matrix.explain(v), form=form)

    # ---- weights and caches -------------------------------------------------------------------

    @classmethod
    @explain_arguments(base.COUNTS)
    def from_layout(
        cls,
        state: Mapping[str, Tensor | np.ndarray],
        *,
        layout: str | Layout,
        num_heads: int,
        num_kv_heads: int | None = None,
        accept: Iterable[str] = (),
        **options: Any,
    ) -> Attention:
        """Make a layer that computes the same function as a module with these weights.

        Sizes, biases and the scale come from the weights and the layout. Pass the rest as options
        of the constructor: for example ``rotary`` or ``softcap``.

        Args:
            state: the tensors or NumPy arrays of one module, by their names within it.
            layout: the layout of these tensors, or its name; ``headwise layouts`` lists them.
            num_heads: number of query heads, which shapes do not determine.
            num_kv_heads: number of kv heads, where shapes do not determine it.
            accept: the settings of `AttentionSpec` in which the options may differ from the layout,
                as in `convert`.
            options: see the constructor.

        Raises:
            OptionError: tensors or options that contradict the layout.
            ShapeError: shapes that do not fit the numbers of heads.
        """
        source = registry.layout(layout).with_shared_tables(state)
        canonical = conversion.canonical_tensors_of_module(
            tensors_of_arrays(state), source, options, heads=num_heads, kv_heads=num_kv_heads
        )
        layer = cls(
            **conversion.constructor_arguments_from_weights(canonical, source.function, options)
        )
        accept = {accept} if isinstance(accept, str) else {*accept}
        conversion.require_same_function_as_source(source, layer, accept)
        if layer.qk_norm is None and "qk_norm" in accept:
            canonical = {name: x for name, x in canonical.items() if "norm" not in name}
        layer.load_state_dict(conversion.layer_state_dict_from_canonical(canonical, layer))
        return layer

    def to_layout(self, target: str | Layout, *, accept: Iterable[str] = ()) -> dict[str, Tensor]:
        """Return a copy of the weights in another layout.

        A module of that layout computes the function of this layer, if its config has this layer's
        numbers (``rotary``, ``softcap``). Nothing of the function is folded into the weights.

        Args:
            target: the layout to write, or its name; ``headwise layouts`` lists them.
            accept: the settings of `AttentionSpec` in which the layout may differ, as in `convert`.

        Raises:
            OptionError: the layout has another function than this layer, or lacks one of its
                tensors; or the layer computes a part of its heads.
            ShapeError: numbers of heads that the layout cannot hold.
        """
        if self.part is not None:
            raise OptionError(
                saw=f"to_layout of a layer that computes {self.part} of {self.num_heads}",
                needed="the weights of all heads",
                do="load headwise.sharding.gather_state(layer) into a layer of its own first",
            )
        target = registry.layout(target)
        conflicts = self.spec.conflicts(target.function)
        require_conflicts_accepted(conflicts, accept, between=f"this layer and {target.name}")
        canonical = conversion.canonical_state(self, self.state_dict())
        target = target.with_shared_tables(canonical)
        if self.rotary is None:
            return target.pack(canonical)
        return target.pack(canonical, rotary_width=self.rotary.rotated_width(self.head_dim))

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
        """Name the way to load tensors of another layout, where strict loading finds them."""
        if strict:
            error_msgs += conversion.advise_foreign_tensors(self, state_dict, prefix)
        messages = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *messages)

    def cache(self, *, batch: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        """Make an empty cache for ``length`` tokens of each of ``batch`` sequences.

        Where keys and values come from a latent, it holds this and the shared key of each token.

        A layer whose window is shorter than ``length`` keeps only the tokens that its window
        needs: any number of tokens may pass. Steps with a cache equal one full forward pass where
        no query attends to later tokens: with a causal mask, or a window of (left, 0).

        Raises:
            OptionError: a batch or length below 1.
        """
        base.check_positive_whole_numbers(batch=batch, length=length)
        left = None if self.window is None else self.window[0]
        evicts = left is not None and left < length
        slots = min(length, 2 * left + 1) if left is not None and evicts else length
        like = checks.projection_parameter(self.k_proj, torch.empty(0))
        options: dict[str, Any] = {"device": like.device, "dtype": dtype or like.dtype}
        kv_heads, widths = self._head_counts[1], (self.head_dim, self.value_dim)
        if self.latent is not None:
            kv_heads, widths = 1, (self.latent.shared_width + self.latent.rank, 0)
        k, v = (torch.zeros(batch, kv_heads, slots, width, **options) for width in widths)
        return Cache(k, v, window=left if evicts else None, owner=self.identity)

    @property
    def spec(self) -> AttentionSpec:
        """The function of the layer, without that of its weights."""
        return conversion.spec_of_layer(self)

    # ---- steps of a call ----------------------------------------------------------------------

    def _prepare_call(
        self,
        x: Tensor,
        source: Tensor | None,
        mask: Mask | None,
        score_bias: ScoreBias | None,
        cache: Cache | None = None,
        gate: Tensor | None = None,
        positions: Tensor | None = None,
        value_source: Tensor | None = None,
    ) -> packing.CallInputs:
        checks.check_tokens("x", x, self.embed_dim, checks.X_AXES, self.q_proj)
        if source is not None or self.source_dim != self.embed_dim:
            checks.check_source(self, x, source)
        if value_source is not None:
            checks.check_value_source(self, x if source is None else source, value_source, cache)
        mask = NO_MASK if mask is None else require_mask_type(mask, "mask=")
        bias = NO_BIAS if score_bias is None else require_score_bias_type(score_bias, "score_bias=")
        if self.window is not None:
            mask = mask & Mask.window(*self.window)
        if self.score_bias is not None and self.place_tables is None:
            bias = bias + self.score_bias(align=None)
        if cache is not None:
            checks.check_cache_owner(cache, self.identity, crosses=source is not None)
            mask, bias = mask.aligned("bottom-right"), bias.aligned("bottom-right")
        if gate is not None:
            checks.check_gate(gate, x, self.num_heads)
        places = checks.read_positions(self, x, positions, cache)
        call = packing.CallInputs(
            *(x, x if source is None else source, mask, bias, cache, gate, places),
            is_packable=self.score_bias is None or self.place_tables is None,
            value_source=value_source,
        )
        return call if self.part is None else call.prepare_tensors_for_part(self.part)
