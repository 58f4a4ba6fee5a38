"""Scans: statistics of every head of a model, from its own forward pass."""
