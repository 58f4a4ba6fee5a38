"""Scores of `headwise.compare` on the fault bench."""
