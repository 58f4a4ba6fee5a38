"""Files of weights: checked reading, streamed conversion, and writing that is whole or absent."""

from headwise.checkpoints.attention_loading import load_attention

__all__ = ["load_attention"]
