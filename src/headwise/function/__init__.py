"""Definition of an attention function: settings, weights, stages, rounding and formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.function.scaling import LinearScaling as LinearScaling
    from headwise.function.scaling import Llama3Scaling as Llama3Scaling
    from headwise.function.scaling import NTKScaling as NTKScaling
    from headwise.function.scaling import Scaling as Scaling
    from headwise.function.scaling import YarnScaling as YarnScaling
    from headwise.function.spec import AttentionSpec as AttentionSpec

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "AttentionSpec": "spec",
        "LinearScaling": "scaling",
        "Llama3Scaling": "scaling",
        "NTKScaling": "scaling",
        "Scaling": "scaling",
        "YarnScaling": "scaling",
    },
)
