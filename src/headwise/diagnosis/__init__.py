"""Detection of the layout of weights, and comparison of two sets of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.diagnosis.inputs import ComparisonInputs as ComparisonInputs
    from headwise.diagnosis.naming import ModuleMoves as ModuleMoves
    from headwise.diagnosis.results.attention import FoundCause as FoundCause
    from headwise.diagnosis.results.attention import FunctionComparison as FunctionComparison
    from headwise.diagnosis.results.attention import GradientGap as GradientGap
    from headwise.diagnosis.results.attention import PartedStage as PartedStage
    from headwise.diagnosis.results.attention import StageGaps as StageGaps
    from headwise.diagnosis.results.detection import Detection as Detection
    from headwise.diagnosis.results.diagnosis import Diagnosis as Diagnosis
    from headwise.diagnosis.results.diagnosis import Verdict as Verdict
    from headwise.diagnosis.results.model import LayerComparison as LayerComparison
    from headwise.diagnosis.results.model import ModelComparison as ModelComparison
    from headwise.diagnosis.simulation.stages import Inputs as Inputs
    from headwise.diagnosis.subjects.recording import record_activations as record_activations

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "ComparisonInputs": "inputs",
        "Detection": "results.detection",
        "Diagnosis": "results.diagnosis",
        "FoundCause": "results.attention",
        "FunctionComparison": "results.attention",
        "GradientGap": "results.attention",
        "Inputs": "simulation.stages",
        "LayerComparison": "results.model",
        "ModelComparison": "results.model",
        "ModuleMoves": "naming",
        "PartedStage": "results.attention",
        "StageGaps": "results.attention",
        "Verdict": "results.diagnosis",
        "record_activations": "subjects.recording",
    },
)
