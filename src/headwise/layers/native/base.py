"""Base of `Attention`: its attributes, and the steps from a call to an attention matrix."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.attention_matrix import AttentionMatrix
from headwise.kernels.linear import project
from headwise.layers.native import call_checks
from headwise.layers.native.cache import Cache
from headwise.layers.native.padding import CallInputs, Unpacked, hides_keys
from headwise.layers.native.qk_norm import QKNorm
from headwise.layers.positions.rotary import Rotary
from headwise.masks.mask import Mask
from headwise.masks.operand_checks import require_mask, require_score_bias
from headwise.masks.score_bias import ScoreBias
from headwise.reference import split_heads


class Projection(nn.Linear):
    """`torch.nn.Linear`, with oneDNN's matrix product where that is faster."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """Project (..., in_features) to (..., out_features)."""
        return project(input, self.weight, self.bias)


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
    q_proj: Projection
    k_proj: Projection
    v_proj: Projection
    out_proj: Projection
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    score_bias: nn.Module | None
    sink: Tensor | None
    identity: str  # recorded as the owner of each cache

    @property
    def drops(self) -> bool:
        """True if the next forward pass applies dropout."""
        return self.training and self.dropout > 0

    def _call(
        self,
        x: Tensor,
        source: Tensor | None,
        mask: Mask | None,
        score_bias: ScoreBias | None,
        cache: Cache | None = None,
    ) -> CallInputs:
        """Check the arguments of a call, and add the window and the score bias of the layer."""
        call_checks.check_tokens("x", x, self.embed_dim, call_checks.X_AXES, self.q_proj)
        if source is not None:
            call_checks.check_source(x, source, self.source_dim, self.k_proj)
            for name in call_checks.POSITIONAL_OPTIONS:
                if getattr(self, name) is not None:
                    call_checks.refuse_in_cross_attention(name, getattr(self, name), "a source")
        elif self.source_dim != self.embed_dim:
            call_checks.refuse_missing_source(self.source_dim, self.embed_dim)
        if cache is not None:
            call_checks.check_cache(cache, self.identity, crosses=source is not None)
        mask, score_bias = require_mask(mask), require_score_bias(score_bias)
        if self.window is not None:
            mask = mask & Mask.window(*self.window)
        if self.score_bias is not None:
            score_bias = score_bias + self.score_bias(align=None)
        if cache is not None:
            mask, score_bias = mask.aligned("bottom-right"), score_bias.aligned("bottom-right")
        return CallInputs(x, x if source is None else source, mask, score_bias, cache)

    def _matrix_and_values(
        self, tokens: Unpacked, call: CallInputs
    ) -> tuple[AttentionMatrix, Tensor]:
        """Project, split into heads, normalise, rotate and cache; return the matrix and values."""
        q, k, v = self.q_proj(tokens.x), self.k_proj(tokens.source), self.v_proj(tokens.source)
        norm = None if self.qk_norm is None else (self.qk_norm.over, self.qk_norm.place)
        if norm == ("width", "before"):
            q, k = self._normed(q, k)
        q, v = split_heads(q, heads=self.num_heads), split_heads(v, heads=self.num_kv_heads)
        k = split_heads(k, heads=self.num_kv_heads)
        if norm == ("head", "before"):
            q, k = self._normed(q, k)
        if self.rotary is not None:
            q, k = self.rotary.rotate_both(q, k, tokens.positions())
        if norm == ("head", "after"):
            q, k = self._normed(q, k)
        mask = tokens.mask
        if call.cache is not None:
            keys = call.cache.keys_with(k.shape[2])
            call_checks.check_mask_and_bias(call, heads=self.num_heads, keys=keys)
            k, v, starts = call.cache.append(k, v, lengths=tokens.lengths)
            call.cache.needs_mask |= hides_keys(call)
            mask = tokens.mask_with_cache(starts)
        matrix = AttentionMatrix(
            q,
            k,
            mask=mask,
            score_bias=call.score_bias,
            scale=self.scale,
            softcap=self.softcap,
            sink=self.sink,
        )
        return matrix, v

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)
