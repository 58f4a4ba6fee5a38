"""Surgery on heads: take them out, reorder and regroup them, as data that says what stays equal."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.surgery.cut import Cut as Cut
    from headwise.surgery.cut import LayerCut as LayerCut
    from headwise.surgery.layers import cut_layer as cut_layer
    from headwise.surgery.models import ModelHeads as ModelHeads
    from headwise.surgery.models import cut_model as cut_model

__getattr__, __dir__, __all__ = export_lazily(
    __name__, {"cut": "Cut LayerCut", "layers": "cut_layer", "models": "ModelHeads cut_model"}
)
