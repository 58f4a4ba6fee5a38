"""Attention over several processes, on torch.distributed: heads, sequence, documents, files.

No other room imports torch.distributed. Nothing here starts a process group: torchrun does, or the
caller.
"""

from __future__ import annotations

from headwise.sharding.counted_bytes import SentBytes, counted_bytes

__all__ = ["SentBytes", "counted_bytes"]
