"""Detection of the layout of weights, and comparison of two sets of weights."""

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
    from headwise.diagnosis.simulation.model import Inputs as Inputs
    from headwise.diagnosis.subjects.recording import record_activations as record_activations

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "comparison": "FoundCause FunctionComparison GradientGap LayerComparison ModelComparison "
        "PartedStage StageGaps",
        "detection": "Detection",
        "probes": "ComparisonInputs",
        "results": "Diagnosis ModuleMoves Verdict",
        "simulation.model": "Inputs",
        "subjects.recording": "record_activations",
    },
)
