"""Detection of the layout of weights, and comparison of two sets of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.diagnosis.comparison import FoundCause as FoundCause
    from headwise.diagnosis.comparison import FunctionComparison as FunctionComparison
    from headwise.diagnosis.comparison import GradientGap as GradientGap
    from headwise.diagnosis.comparison import LayerComparison as LayerComparison
    from headwise.diagnosis.comparison import ModelComparison as ModelComparison
    from headwise.diagnosis.comparison import PartedStage as PartedStage
    from headwise.diagnosis.comparison import StageGaps as StageGaps
    from headwise.diagnosis.detection import Detection as Detection
    from headwise.diagnosis.probes import ComparisonInputs as ComparisonInputs
    from headwise.diagnosis.results import Diagnosis as Diagnosis
    from headwise.diagnosis.results import ModuleMoves as ModuleMoves
    from headwise.diagnosis.results import Verdict as Verdict
    from headwise.diagnosis.simulation.stages import Inputs as Inputs
    from headwise.diagnosis.subjects.recording import record_activations as record_activations

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "ComparisonInputs": "probes",
        "Detection": "detection",
        "Diagnosis": "results",
        "FoundCause": "comparison",
        "FunctionComparison": "comparison",
        "GradientGap": "comparison",
        "Inputs": "simulation.stages",
        "LayerComparison": "comparison",
        "ModelComparison": "comparison",
        "ModuleMoves": "results",
        "PartedStage": "comparison",
        "StageGaps": "comparison",
        "Verdict": "results",
        "record_activations": "subjects.recording",
    },
)
