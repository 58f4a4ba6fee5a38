"""Attention computed stage by stage in float64, in which any stage can be replaced."""
