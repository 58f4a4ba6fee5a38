"""The same projections are split into another number of heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import AttentionModel
from headwise.layers.positions.distance_bias import alibi_slopes


class NumberOfHeadsCause(Cause):
    """The same projections are split into another number of heads.

    The weights of 8 heads of 64 and of 16 heads of 32 have the same shape. No shape error shows a
    wrong number, and head_dim is not always width / heads (Mistral-Nemo, Gemma, Qwen3).

    Wrong:
        head_dim = width // num_heads

    Right:
        head_dim = config.head_dim

    Repair:
        Take the numbers of heads and kv heads of the config.

    Confused with:
        kv heads tiled instead of repeated: if only the number of kv heads differs.
        split without transpose: both put channels of other heads together.
    """

    name: ClassVar[str] = "number of heads"
    symptom: ClassVar[str] = (
        "Weights load, outputs are wrong, and a test with one head passes: wrong number of heads"
    )
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "scores", "head outputs", "output")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return every number of heads that divides the projections."""
        model, settings = evidence.model, evidence.model.settings
        if not model.replaced.keys() <= {"output"}:
            return  # a replaced stage keeps its number of heads
        widths = {role: model.weights[f"w{role}"].flatten(0, 1).shape[0] for role in "qkv"}
        for heads in range(1, widths["q"] + 1):
            head_dim, rest = divmod(widths["q"], heads)
            kv_heads, other = divmod(widths["k"], head_dim) if not rest else (0, 1)
            if rest or other or not kv_heads or widths["v"] % kv_heads or heads % kv_heads:
                continue
            rotary = settings.rotary
            is_too_wide = rotary and head_dim < rotary.width < model.weights["wq"].shape[1]
            is_odd = rotary and head_dim % 2
            if heads == settings.num_heads or is_odd or is_too_wide:
                continue
            is_usual = math.isclose(settings.scale, model.weights["wq"].shape[1] ** -0.5)
            for scale in {head_dim**-0.5 if is_usual else settings.scale, settings.scale}:
                other_model = _make_model_with_heads(model, heads, kv_heads, scale)
                if other_model is not None:
                    repair = f"num_heads={settings.num_heads}"
                    is_seen = heads == _count_recorded_heads(evidence)
                    yield Variant(other_model, {"heads": heads}, repair, is_step=is_seen)


def _count_recorded_heads(evidence: Evidence) -> int | None:
    """Return the number of heads of recorded queries; None where they were not recorded."""
    recorded = (call.stages["q"].shape[1] for call in evidence.calls if "q" in call.stages)
    return next(recorded, None)


def _make_model_with_heads(
    model: AttentionModel, heads: int, kv_heads: int, scale: float
) -> AttentionModel | None:
    """Return the model with its rows in other heads; None where tensors of heads do not fit.

    The logits of sinks are left out: those of other heads are another cause.
    """
    counts = {"q": heads, "k": kv_heads, "v": kv_heads, "o": heads}
    roles = {f"{kind}{role}": role for kind in "wb" for role in counts if kind + role != "bo"}
    roles |= {f"{role}_norms{bias}": role for role in "qk" for bias in ("", "_bias")}
    weights = {name: x for name, x in model.weights.items() if name != "sink"}
    if weights.keys() - roles.keys() - {"bo"}:
        return None  # the weight of a norm over the channels of a head
    for name in roles.keys() & weights.keys():
        weights[name] = weights[name].flatten(0, 1).unflatten(0, (counts[roles[name]], -1))
    slopes, rotary = model.settings.slopes, model.settings.rotary
    if slopes is not None:
        slopes = alibi_slopes(heads).double()
    if rotary is not None and rotary.width == model.weights["wq"].shape[1]:
        rotary = replace(rotary, width=weights["wq"].shape[1])
    changed = replace(model, weights=weights)
    return changed.with_settings(
        num_heads=heads, num_kv_heads=kv_heads, scale=scale, slopes=slopes, rotary=rotary
    )
