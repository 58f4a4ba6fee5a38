"""Base of `Attention`: its attributes, and the steps from a call to an attention matrix."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.function.rotary import Rotary
from headwise.function.stages import split_heads
from headwise.layers import checks
from headwise.layers.cache import Cache
from headwise.layers.norm import QKNorm
from headwise.layers.packing import CallInputs, Unpacked
from headwise.layers.part import HeadPart
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.checks import require_mask_or_none, require_score_bias_or_none
from headwise.matrix.operator import AttentionMatrix


class AttentionBase(nn.Module):
    """Attributes of a layer, described in `Attention`, and the steps of a call."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    out_dim: int
    source_dim: int
    rotary: Rotary | None
    qk_norm: QKNorm | None
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    dropout: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    score_bias: nn.Module | None
    sink: Tensor | None
    identity: str  # recorded as the owner of each cache
    part: HeadPart | None = None  # the heads that this module computes, if not all

    @property
    def applies_dropout(self) -> bool:
        """True if the next forward pass applies dropout."""
        return self.training and self.dropout > 0

    def _prepare_call(
        self,
        x: Tensor,
        source: Tensor | None,
        mask: Mask | None,
        score_bias: ScoreBias | None,
        cache: Cache | None = None,
        gate: Tensor | None = None,
    ) -> CallInputs:
        """Check the arguments of a call, and add the window and the score bias of the layer."""
        checks.check_tokens("x", x, self.embed_dim, checks.X_AXES, self.q_proj)
        if source is not None:
            checks.check_source(x, source, self.source_dim, self.k_proj)
            for name in checks.POSITIONAL_OPTIONS:
                if getattr(self, name) is not None:
                    checks.refuse_in_cross_attention(name, getattr(self, name), "a source")
        elif self.source_dim != self.embed_dim:
            checks.refuse_missing_source(self.source_dim, self.embed_dim)
        if cache is not None:
            checks.check_cache_owner(cache, self.identity, crosses=source is not None)
        mask, score_bias = require_mask_or_none(mask), require_score_bias_or_none(score_bias)
        if self.window is not None:
            mask = mask & Mask.window(*self.window)
        if self.score_bias is not None:
            score_bias = score_bias + self.score_bias(align=None)
        if cache is not None:
            mask, score_bias = mask.aligned("bottom-right"), score_bias.aligned("bottom-right")
        if gate is not None:
            checks.check_gate(gate, x, self.num_heads)
        call = CallInputs(x, x if source is None else source, mask, score_bias, cache, gate)
        return call if self.part is None else call.prepare_tensors_for_part(self.part)

    def _matrix_and_values(
        self, tokens: Unpacked, call: CallInputs
    ) -> tuple[AttentionMatrix, Tensor]:
        """Project, split into heads, normalise, rotate and cache; return the matrix and values."""
        q, k, v = self.q_proj(tokens.x), self.k_proj(tokens.source), self.v_proj(tokens.source)
        norm = None if self.qk_norm is None else (self.qk_norm.over, self.qk_norm.place)
        if norm == ("width", "before"):
            q, k = self._normalise_queries_and_keys(q, k)
        q, k, v = self._split_heads(q, k, v)
        if norm == ("head", "before"):
            q, k = self._normalise_queries_and_keys(q, k)
        if self.rotary is not None:
            q, k = self.rotary.rotate_both(q, k, tokens.positions())
        if norm == ("head", "after"):
            q, k = self._normalise_queries_and_keys(q, k)
        mask = tokens.mask
        if call.cache is not None:
            keys = call.cache.key_count_after(k.shape[2])
            checks.check_mask_and_bias(call, heads=self.num_heads, keys=keys)
            tokens.cached = call.cache.extend(k, v, lengths=tokens.lengths)
            k, v = tokens.cached.k, tokens.cached.v
            mask = tokens.mask_with_cache(tokens.cached.starts)
        score_bias, sink, part = call.score_bias, self.sink, self.part
        if part is not None:
            k, v = part.share_kv(k), part.share_kv(v)
            sink = None if sink is None else part.own_share_of_parameter(sink)
            sizes = {"batch": q.shape[0], "queries": q.shape[2], "keys": k.shape[2]}
            mask = part.mask(mask, device=q.device, **sizes)
            score_bias = part.score_bias(score_bias, device=q.device, **sizes)
        options = {"scale": self.scale, "softcap": self.softcap}
        return AttentionMatrix(q, k, mask=mask, score_bias=score_bias, sink=sink, **options), v

    def _split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split projections into heads."""
        heads, kv_heads = self._head_counts
        checks.check_projection_output_width("q_proj", q, "heads", heads, self.head_dim)
        checks.check_projection_output_width("k_proj", k, "kv_heads", kv_heads, self.head_dim)
        checks.check_projection_output_width("v_proj", v, "kv_heads", kv_heads, self.value_dim)
        q, k = split_heads(q, heads=heads), split_heads(k, heads=kv_heads)
        return q, k, split_heads(v, heads=kv_heads)

    @property
    def _head_counts(self) -> tuple[int, int]:
        """The numbers of query heads and kv heads that this module computes."""
        if self.part is None:
            return self.num_heads, self.num_kv_heads
        return len(self.part.heads), len(self.part.kv_heads)

    def _normalise_queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)
