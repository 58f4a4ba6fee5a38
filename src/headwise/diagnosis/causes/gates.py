"""Causes in the output gate: it is missing, of another function, or merged in another order."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.simulation.model import ForcedStage
from headwise.function import stages
from headwise.function.records import output_gates


def _output_gate_missing(evidence: Evidence) -> Variants:
    if "wg" in evidence.model.weights:
        model = evidence.model.with_weights(wg=None, bg=None).with_settings(output_gate=None)
        kind = evidence.model.settings.output_gate
        repair = f'multiply the head outputs by the sigmoid of gate_proj(x): output_gate="{kind}"'
        yield Variant(model, {"gate": "none"}, repair)


def _gate_without_sigmoid(evidence: Evidence) -> Variants:
    if "wg" in evidence.model.weights:
        model = evidence.replace_stages(("head outputs",), _multiply_by_projection)
        yield Variant(model, {"gate": "linear"}, "multiply by torch.sigmoid(gate_proj(x))")


def _multiply_by_projection(forced: ForcedStage) -> Tensor:
    """Return head outputs times the projection of their gate, without its sigmoid."""
    weight, bias = forced.model.weights.get("wg"), forced.model.weights.get("bg")
    if weight is None:  # another change left the gate out
        return forced.usual_result()
    bare = forced.model.with_weights(wg=None, bg=None)
    gates = stages.project_heads(forced.call.inputs.x, weight, bias)
    return replace(forced, model=bare).usual_result() * gates


def _gate_merged(evidence: Evidence) -> Variants:
    if "wg" not in evidence.model.weights:
        return
    for done, change in (("merged", _view_merged_heads), ("split", _view_split_heads)):
        model = evidence.replace_stages(("head outputs",), _gate_heads, change)
        repair = (
            f"transpose heads and length of the gate where it is {done}, as of the head outputs"
        )
        yield Variant(model, {"gate": done}, repair)


def _view_merged_heads(x: Tensor) -> Tensor:
    """Return (batch, heads, length, d) whose memory is viewed as (batch, length, heads, d)."""
    return x.reshape(x.transpose(1, 2).shape).transpose(1, 2)


def _view_split_heads(x: Tensor) -> Tensor:
    """Return (batch, heads, length, d) as a view of the memory of (batch, length, heads, d)."""
    return x.transpose(1, 2).reshape(x.shape)


def _gate_heads(change: Callable[[Tensor], Tensor], forced: ForcedStage) -> Tensor:
    if (gates := output_gates(forced.given)) is None:  # with another cause, which leaves it out
        return forced.usual_result()
    bare = replace(forced, model=forced.model.with_weights(wg=None, bg=None)).usual_result()
    return bare * change(gates)
