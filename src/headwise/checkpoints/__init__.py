"""Files of weights: checked reading, streamed conversion and atomic writing."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.checkpoints.loading import load_attention as load_attention

__getattr__, __dir__, __all__ = export_lazily(__name__, {"loading": "load_attention"})
