"""Subjects of a comparison: layers, functions and recordings in one form."""
