"""Attention layers: the native one, the drop-in for torch's, and position encodings."""
