"""Causes in the output gate."""

from __future__ import annotations

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants


def _output_gate_missing(evidence: Evidence) -> Variants:
    if "wg" in evidence.model.weights:
        model = evidence.model.with_weights(wg=None, bg=None).with_settings(output_gate=None)
        kind = evidence.model.settings.output_gate
        repair = f'multiply the head outputs by the sigmoid of gate_proj(x): output_gate="{kind}"'
        yield Variant(model, {"gate": "none"}, repair)
