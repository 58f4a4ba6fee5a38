"""Attention layers: the native one, the drop-in for torch's, and position encodings."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.layers.cache import Cache as Cache
    from headwise.layers.distance import Alibi as Alibi
    from headwise.layers.distance import DebertaBias as DebertaBias
    from headwise.layers.distance import PositionBias as PositionBias
    from headwise.layers.distance import T5Bias as T5Bias
    from headwise.layers.distance import alibi_slopes as alibi_slopes
    from headwise.layers.norm import QKNorm as QKNorm
    from headwise.layers.torch_api._upgrade import Upgrade as Upgrade
    from headwise.layers.torch_api._upgrade import UpgradeChange as UpgradeChange
    from headwise.layers.torch_api.layer import (
        multi_head_attention_forward as multi_head_attention_forward,
    )

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "cache": "Cache",
        "distance": "Alibi DebertaBias PositionBias T5Bias alibi_slopes",
        "norm": "QKNorm",
        "torch_api._upgrade": "Upgrade UpgradeChange",
        "torch_api.layer": "multi_head_attention_forward",
    },
)
