"""Attention over several processes, on torch.distributed: heads and sequence.

No other room imports torch.distributed. Nothing here starts a process group: torchrun does, or the
caller.
"""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.sharding.collectives import clip_gradients as clip_gradients
    from headwise.sharding.heads import Heads as Heads
    from headwise.sharding.heads import gather_state as gather_state
    from headwise.sharding.heads import heads_plan as heads_plan
    from headwise.sharding.heads import load_state as load_state
    from headwise.sharding.scan import head_statistics as head_statistics
    from headwise.sharding.scan import scan_sharded as scan_sharded
    from headwise.sharding.sequence._attend import SequencePlan as SequencePlan
    from headwise.sharding.sequence._attend import attend as attend
    from headwise.sharding.sequence._attend import explain_attend as explain_attend
    from headwise.sharding.sequence.layout import SequenceLayout as SequenceLayout
    from headwise.sharding.sequence.matrix import SequenceMatrix as SequenceMatrix
    from headwise.sharding.sequence.matrix import (
        TransposedSequenceMatrix as TransposedSequenceMatrix,
    )

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "collectives": "clip_gradients",
        "heads": "Heads gather_state heads_plan load_state",
        "scan": "head_statistics scan_sharded",
        "sequence._attend": "SequencePlan attend explain_attend",
        "sequence.layout": "SequenceLayout",
        "sequence.matrix": "SequenceMatrix TransposedSequenceMatrix",
    },
)
