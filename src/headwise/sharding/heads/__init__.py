"""Heads over ranks: each process computes some heads of every attention layer."""

from __future__ import annotations
