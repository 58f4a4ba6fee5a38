"""Causes of a difference, one a file."""
