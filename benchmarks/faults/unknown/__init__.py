"""Faults of twelve mechanisms that are in no catalogue of causes."""

from benchmarks.faults.unknown.mechanisms import MECHANISMS

__all__ = ["MECHANISMS"]
