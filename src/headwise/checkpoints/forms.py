"""Forms of attention with numbers of their own, as a config states them."""

from headwise.checkpoints.fields import ConfigFields
from headwise.function.differential import usual_init
from headwise.function.spec import ABSENT, DifferentialRule, DisentangledRule, Unset


def read_places(fields: ConfigFields, *, eps: float) -> DisentangledRule | Unset:
    """Return DeBERTa's terms of relative positions; ``eps`` is that of its norms."""
    if not fields.flag("relative_attention") or not (terms := read_place_terms(fields)):
        return ABSENT
    far, span = (int(fields.number(n) or 0) for n in ("max_relative_positions", "position_buckets"))
    far = far if far > 0 else int(fields.required_number("max_position_embeddings"))
    is_first = fields.text("model_type") == "deberta"  # which gives each position its own row
    is_normed = not is_first and "layer_norm" in str(fields.get("norm_rel_ebd"))
    return DisentangledRule(
        span=far if is_first or span < 1 else span,
        max_distance=None if is_first or span < 1 else far,
        terms=terms,
        is_shared=not is_first and fields.flag("share_att_key"),
        eps=eps if is_normed else None,
    )


def read_place_terms(fields: ConfigFields) -> tuple[str, ...]:
    """Return the terms that set the scale, also where there is no table."""
    return tuple(term for term in ("c2p", "p2c") if term in (fields.get("pos_att_type") or ()))


def read_pairs(fields: ConfigFields, layer: int, *, eps: float) -> DifferentialRule | Unset:
    """Return the rule of differential attention of a layer, which DiffLlama has."""
    is_paired = fields.text("model_type") == "diffllama"
    return DifferentialRule(usual_init(layer), eps) if is_paired else ABSENT
