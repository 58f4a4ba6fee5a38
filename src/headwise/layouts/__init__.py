"""Weight layouts as data: descriptions, a catalogue, and lossless conversion in memory."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.layouts.drawing import draw as draw
    from headwise.layouts.plan import ConversionStep as ConversionStep
    from headwise.layouts.plan import plan_conversion as plan_conversion
    from headwise.layouts.registry import layout as layout
    from headwise.layouts.registry import register as register

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {"drawing": "draw", "plan": "ConversionStep plan_conversion", "registry": "layout register"},
)
