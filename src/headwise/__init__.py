"""Multi-head attention that you can run, verify, convert and see, head by head, at any length.

``import headwise`` does not import torch; the first access to one of its names does.
"""

import sys
from typing import TYPE_CHECKING

from headwise.support.lazy import OldLayers, export_lazily

if TYPE_CHECKING:
    from headwise.diagnosis._compare import compare as compare
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.function.rotary import Rotary as Rotary
    from headwise.huggingface import register_huggingface as register_huggingface
    from headwise.identify._verify import verify as verify
    from headwise.identify.detection import detect as detect
    from headwise.layers.attention import Attention as Attention
    from headwise.layers.torch_api._upgrade import upgrade as upgrade
    from headwise.layers.torch_api.layer import MultiheadAttention as MultiheadAttention
    from headwise.layouts._layout import Layout as Layout
    from headwise.layouts.plan import convert as convert
    from headwise.masks.mask import Mask as Mask
    from headwise.masks.score_bias import ScoreBias as ScoreBias
    from headwise.matrix.operator import AttentionMatrix as AttentionMatrix
    from headwise.scanning._scan import scan as scan

__version__ = "0.3.0.dev0"

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "diagnosis._compare": "compare",
        "identify._verify": "verify",
        "identify.detection": "detect",
        "errors": "HeadwiseError",
        "function.rotary": "Rotary",
        "huggingface": "register_huggingface",
        "layers.attention": "Attention",
        "layers.torch_api._upgrade": "upgrade",
        "layers.torch_api.layer": "MultiheadAttention",
        "layouts._layout": "Layout",
        "layouts.plan": "convert",
        "masks.mask": "Mask",
        "masks.score_bias": "ScoreBias",
        "matrix.operator": "AttentionMatrix",
        "scanning._scan": "scan",
    },
)

sys.meta_path.append(OldLayers())  # the last: asked about what no other finder found
