"""Dropout that is left on: recorded zeros of the weights, or zeros that outputs show.

The weights of a few tokens are the only unknowns of an output, which is linear in them: where they
are fewer than the channels, each one is read, and is either zero or the right one times a factor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, RecordedCall
from headwise.function.stages import repeat_kv_heads

ROUND, NEAR = 3, 1e-5  # digits of usual rates, and how near one is read


@dataclass(frozen=True)
class _Dropped:
    """Entries of the weights or the output of one call that were kept, and their factor."""

    kept: Tensor
    factor: float


def _dropout_left_on(evidence: Evidence) -> Variants:
    read = _compare_weights
    if evidence.shows_outputs_alone:
        most, read = count_readable_tokens(evidence.model), _read_outputs
        if any(call.key_positions.shape[1] > most for call in evidence.calls):
            return
    dropped = {call.key: each for call in evidence.calls if (each := read(evidence.model, call))}
    if len(dropped) < len(evidence.calls):
        return
    model, rates = evidence.model, dict[str, float]()
    for part, (stage, name) in enumerate((("weights", "p"), ("output", "p of the output"))):
        of_calls = {key: each[part] for key, each in dropped.items()}
        rate = _rate(each.factor for each in of_calls.values())
        kept = {key: each.kept for key, each in of_calls.items()}
        model = model.with_stage_function(stage, partial(_drop, kept, 1 / (1 - rate)))
        rates |= {name: rate} if rate else {}
    drops_output = not all(bool(each[1].kept.all()) for each in dropped.values())
    if drops_output and [*rates] == ["p"]:  # without a bias, which would tell the factors apart
        rates = {"p of both": rates["p"]}
    if rates:
        yield Variant(model, rates, "call eval(), or pass dropout_p=0.0 outside of training")


def _compare_weights(model: AttentionModel, call: RecordedCall) -> tuple[_Dropped, _Dropped] | None:
    actual, usual = call.stages.get("weights"), model.predict_stage("weights", call)
    if actual is None or actual.shape != usual.shape:
        return None
    kept = actual != 0
    ratios = (actual / usual)[kept & (usual > 0)]
    return _Dropped(kept, float(ratios.median())), _Dropped(torch.ones(1).bool(), 1.0)


def count_readable_tokens(model: AttentionModel) -> int:
    """Return the largest number of tokens whose weights an output shows, each one."""
    heads, out_dim = model.sizes["heads"], model.sizes["out_dim"]
    return (out_dim - 1) // (2 * heads)  # half the channels may be dropped too


def _read_outputs(model: AttentionModel, call: RecordedCall) -> tuple[_Dropped, _Dropped] | None:
    """Return what the output of a call was made of; None where it does not show that."""
    (wo, bias), output = model.projection("o"), call.stages["output"]
    bare = RecordedCall(call.inputs, {})
    forced = model.prepare_stage("output", bare)
    if forced.result.shape != output.shape or not output.isfinite().all() or not output.any():
        return None
    keys = bare.key_positions.shape[1]
    weights = model.predict_stage("weights", bare)
    values = repeat_kv_heads(forced.of_all_calls("v"), heads=len(wo))
    parts = torch.einsum("bhqj,bhjd,hde->bqehj", weights, values, wo).flatten(3)
    kept_output = output != 0
    # Dropout of the output alone multiplies the bias too.
    has_bias = bias is not None and bool(bias.any())
    if bias is not None and has_bias:
        parts = torch.cat([parts, bias[:, None].expand(*parts.shape[:3], 1)], 3)
    sizes = torch.linalg.lstsq(parts * kept_output[..., None], output[..., None], driver="gelsd")
    read = sizes.solution[..., 0]
    of_output = float(read[..., -1].median()) if has_bias else 1.0
    read = read[..., : len(wo) * keys].unflatten(2, (len(wo), keys)).transpose(1, 2)
    kept = read > float(read.max()) / 2
    factor = float(read[kept].median()) / of_output
    if not has_bias and not kept_output.all() and (kept | (weights == 0)).all():
        factor, of_output = 1.0, factor
    return _Dropped(kept, factor), _Dropped(kept_output, of_output)


def _rate(factors: Iterable[float]) -> float:
    """Return the share that is dropped where the others are multiplied by these; 0 for none."""
    rate = 1 - 1 / float(torch.tensor([*factors]).double().median())
    usual = round(rate, ROUND)
    rate = usual if abs(rate - usual) < NEAR else rate
    return rate if 0 < rate < 1 else 0.0


def _drop(kept: Mapping[object, Tensor], factor: float, forced: ForcedStage) -> Tensor:
    usual, left = forced.usual_result(), kept.get(forced.call.key)
    if left is None or left.shape != usual.shape:
        return usual
    return torch.where(left, factor * usual, 0.0)
