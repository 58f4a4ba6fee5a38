"""Causes of keys and values from a latent: its norm, factor and shared key, DeepSeek's scale."""

from dataclasses import replace

import torch

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.causes.norms import vary_eps
from headwise.function.scaling import YarnScaling, yarn_magnitude


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
    right = 0 if rule is None else len(model.weights["wr"])
    for width in range(2, right, 2):
        heads, kept = model.settings.head_dim, model.settings.head_dim - right + width
        channels = [*range(width), *range(right, heads)]
        weights = {n: model.weights[n][:, channels] for n in ("wq", "bq") if n in model.weights}
        weights |= {n: model.weights[n][:width] for n in ("wr", "br") if n in model.weights}
        rotary, settings = model.settings.rotation, {"head_dim": kept}
        settings |= {"latent": replace(rule, shared_width=width)}
        settings |= {} if rotary is None else {"rotary": replace(rotary, width=width)}
        for scale in dict.fromkeys((kept**-0.5, model.settings.factor)):
            changed = model.with_weights(**weights).with_settings(**settings, scale=scale)
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
