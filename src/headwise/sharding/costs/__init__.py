"""Computed costs of attention over many GPUs: memory, operations, bytes on the wire and time."""
