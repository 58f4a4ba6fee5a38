"""Fault bench: attention layers with one known fault, for the tools that name the fault.

Nothing here imports headwise, so the bench is independent of the tools that it measures.
"""
