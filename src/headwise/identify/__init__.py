"""Detection of the layout of weights, and comparison of two sets of weights."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.identify.detection import Detection as Detection
    from headwise.identify.results import Diagnosis as Diagnosis
    from headwise.identify.results import ModuleMoves as ModuleMoves
    from headwise.identify.results import Verdict as Verdict

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "detection": "Detection",
        "results": "Diagnosis ModuleMoves Verdict",
    },
)
