"""The native layer: every modern form of multi-head attention in one class."""
