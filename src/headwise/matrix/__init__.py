"""The attention matrix as an operator that is never written down."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.matrix.kernels.dispatch import Explanation as Explanation
    from headwise.matrix.operator import Statistics as Statistics
    from headwise.matrix.operator import TransposedMatrix as TransposedMatrix

__getattr__, __dir__, __all__ = export_lazily(
    __name__, {"kernels.dispatch": "Explanation", "operator": "Statistics TransposedMatrix"}
)
