"""Comparison of two attentions as functions and in whole models: the causes of a difference."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.diagnosis.probes import ComparisonInputs as ComparisonInputs
    from headwise.diagnosis.simulation.model import Inputs as Inputs
    from headwise.diagnosis.subjects.recording import record_activations as record_activations
    from headwise.identify.comparison import FoundCause as FoundCause
    from headwise.identify.comparison import FunctionComparison as FunctionComparison
    from headwise.identify.comparison import GradientGap as GradientGap
    from headwise.identify.comparison import LayerComparison as LayerComparison
    from headwise.identify.comparison import ModelComparison as ModelComparison
    from headwise.identify.comparison import PartedStage as PartedStage
    from headwise.identify.comparison import StageGaps as StageGaps

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "probes": "ComparisonInputs",
        "simulation.model": "Inputs",
        "subjects.recording": "record_activations",
        "headwise.identify.comparison": "FoundCause FunctionComparison GradientGap "
        "LayerComparison ModelComparison PartedStage StageGaps",
    },
    moved=dict.fromkeys(("Detection", "Diagnosis", "ModuleMoves", "Verdict"), "headwise.identify"),
)
