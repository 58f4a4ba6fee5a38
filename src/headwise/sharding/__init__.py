"""Attention over several processes, on torch.distributed: heads, sequence, documents, files.

No other room imports torch.distributed. Nothing here starts a process group: torchrun does, or the
caller.
"""

from __future__ import annotations

from headwise.sharding.heads.gradient_clipping import clip_gradients
from headwise.sharding.heads.parallel_style import Heads, heads_plan
from headwise.sharding.heads.state_dicts import gather_state, load_state
from headwise.sharding.processes.document_scan import scan_documents
from headwise.sharding.processes.sharded_scan import scan_sharded
from headwise.sharding.processes.watch_other_ranks import watch_ranks
from headwise.sharding.sequence.attend import attend, explain_attend
from headwise.sharding.sequence.head_statistics import head_statistics
from headwise.sharding.sequence.sequence_layout import SequenceLayout
from headwise.sharding.sequence.sequence_matrix import SequenceMatrix
from headwise.sharding.sequence.sequence_plan import SequencePlan

__all__ = [
    "Heads",
    "SequenceLayout",
    "SequenceMatrix",
    "SequencePlan",
    "attend",
    "clip_gradients",
    "explain_attend",
    "gather_state",
    "head_statistics",
    "heads_plan",
    "load_state",
    "scan_documents",
    "scan_sharded",
    "watch_ranks",
]
