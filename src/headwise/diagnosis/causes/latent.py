"""Causes of keys and values from a latent: its norm, factor and shared key, DeepSeek's scale."""

from dataclasses import replace
from typing import Any

import torch

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.causes.norms import vary_eps
from headwise.function.scaling import YarnScaling, yarn_magnitude
from headwise.function.weights import QUERIES, ROTATED_WITH_LATENT


def _latent_norm_missing(evidence: Evidence) -> Variants:
    model, rule = evidence.model, evidence.model.settings.compressed
    if rule is None:
        return
    changed = model.with_settings(latent=replace(rule, normed=not rule.normed))
    if rule.normed:
        plain = changed.with_weights(c_norm=None)
        yield Variant(plain, {"c": "not normed"}, "normalise c before keys and values are made")
    else:
        width = model.heads_and_width("c")[1]
        normed = changed.with_weights(c_norm=torch.ones(width, dtype=torch.float64))
        repair = "use c as it is projected"
        yield Variant(normed, {"c": "normed, without weights"}, repair, is_unexpected=True)


def _latent_norm_eps(evidence: Evidence) -> Variants:
    if (rule := evidence.model.settings.compressed) is not None:
        yield vary_eps(evidence, "latent", rule)


def _latent_factor_missing(evidence: Evidence) -> Variants:
    rule = evidence.model.settings.compressed
    if rule is not None:
        model = evidence.model.with_settings(latent=replace(rule, scaled=not rule.scaled))
        words = "none" if rule.scaled else "sqrt(embed_dim / rank)"
        do = "multiply both latents" if rule.scaled else "leave out the factor of the latents"
        is_more = not rule.scaled
        yield Variant(model, {"factor": words}, do, is_unexpected=is_more)


def _shared_key_width(evidence: Evidence) -> Variants:
    """Yield the layer that reads the first channels of the shared key alone, and of its queries."""
    model, rule = evidence.model, evidence.model.settings.compressed
    if rule is None:
        return
    settings, right = model.settings, model.heads_and_width("k_r")[1]
    for width in range(2, right, 2):
        channels, kept = [*range(width), *range(right, settings.head_dim)], slice(width)
        held = {name: x for name, x in model.weights.items() if name in ROTATED_WITH_LATENT}
        weights = {n: x[:, channels] if n in QUERIES else x[kept] for n, x in held.items()}
        changes: dict[str, Any] = {"latent": replace(rule, shared_width=width)}
        changes |= {"head_dim": (head_dim := len(channels))}
        if settings.rotation is not None:
            changes["rotary"] = replace(settings.rotation, width=width)
        for scale in dict.fromkeys((head_dim**-0.5, settings.factor)):
            changed = model.with_weights(**weights).with_settings(**changes, scale=scale)
            yield Variant(changed, {"width": width}, f"Latent(shared_width={right})")


def _mscale_missing(evidence: Evidence) -> Variants:
    right, usual, scaling = _read_scales(evidence)
    if scaling is None:
        return
    weight = scaling.mscale_all_dim or scaling.mscale or 1.0
    whole = usual * yarn_magnitude(scaling.factor, weight) ** 2
    is_more = right != whole
    for scale in {usual, whole} - {right}:
        model = evidence.model.with_settings(scale=scale)
        repair = f"scale={right:.12g} in place of {scale:.6g}"
        yield Variant(model, {"scale": scale}, repair, is_unexpected=is_more)


def _mscale_of_another_field(evidence: Evidence) -> Variants:
    right, usual, scaling = _read_scales(evidence)
    if scaling is None or right == usual:
        return
    fields = {"mscale": scaling.mscale or 1.0, "1 in place of a field": 1.0}
    for name, weight in fields.items():
        scale = usual * yarn_magnitude(scaling.factor, weight) ** 2
        if scale != right and weight != scaling.mscale_all_dim:
            model = evidence.model.with_settings(scale=scale)
            repair = f"scale={right:.12g}, with mscale_all_dim, in place of {scale:.6g}"
            yield Variant(model, {"scale": scale, "of": name}, repair)


def _read_scales(evidence: Evidence) -> tuple[float, float, YarnScaling | None]:
    """Return the scale, 1/sqrt(head_dim), and the YaRN of a rotation; None without a latent."""
    settings = evidence.model.settings
    rotary, usual = settings.rotation, settings.head_dim**-0.5
    scaling = None if rotary is None or settings.compressed is None else rotary.scaling
    return settings.factor, usual, scaling if isinstance(scaling, YarnScaling) else None
