"""Files of weights: checked reading, streamed conversion and atomic writing."""

from headwise.checkpoints.attention_loading import load_attention

__all__ = ["load_attention"]
