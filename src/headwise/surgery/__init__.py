"""Surgery on heads: take them out, reorder and regroup them, as data that says what stays equal."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.surgery._prune import Pruning as Pruning
    from headwise.surgery._prune import PruningPlan as PruningPlan
    from headwise.surgery._prune import plan_prune as plan_prune
    from headwise.surgery._prune import prune as prune
    from headwise.surgery._regroup import Regrouping as Regrouping
    from headwise.surgery._regroup import RegroupPlan as RegroupPlan
    from headwise.surgery._regroup import plan_regroup as plan_regroup
    from headwise.surgery._regroup import regroup as regroup
    from headwise.surgery.cut import Cut as Cut
    from headwise.surgery.cut import LayerCut as LayerCut
    from headwise.surgery.cut import full_size as full_size
    from headwise.surgery.folders import FolderPlan as FolderPlan
    from headwise.surgery.folders import Written as Written
    from headwise.surgery.folders import check_folder as check_folder
    from headwise.surgery.folders import load as load
    from headwise.surgery.folders import plan_folder as plan_folder
    from headwise.surgery.folders import write as write
    from headwise.surgery.memory import cut_layer as cut_layer
    from headwise.surgery.memory import cut_model as cut_model
    from headwise.surgery.models import ModelHeads as ModelHeads

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "_prune": "Pruning PruningPlan plan_prune prune",
        "_regroup": "Regrouping RegroupPlan plan_regroup regroup",
        "cut": "Cut LayerCut full_size",
        "folders": "FolderPlan Written check_folder load plan_folder write",
        "memory": "cut_layer cut_model",
        "models": "ModelHeads",
    },
)
