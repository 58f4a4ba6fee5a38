"""Repairs as lines of code, in the reader's own numbers."""
