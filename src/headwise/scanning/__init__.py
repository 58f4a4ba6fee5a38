"""Scans: statistics of every head of a model, from its own forward pass."""

from typing import TYPE_CHECKING

from headwise.support.lazy import export_lazily

if TYPE_CHECKING:
    from headwise.scanning.diff import HeadChange as HeadChange
    from headwise.scanning.diff import ScanDiff as ScanDiff
    from headwise.scanning.layer import HeadValue as HeadValue
    from headwise.scanning.layer import LayerValue as LayerValue
    from headwise.scanning.layer import ScannedText as ScannedText
    from headwise.scanning.layer import SimilarHead as SimilarHead
    from headwise.scanning.layer import StandoutHead as StandoutHead
    from headwise.scanning.links import Link as Link
    from headwise.scanning.parts import find_parts as find_parts
    from headwise.scanning.parts import merge_parts as merge_parts
    from headwise.scanning.parts import scan_part as scan_part
    from headwise.scanning.plan import plan_scan as plan_scan
    from headwise.scanning.result import HeadScan as HeadScan
    from headwise.scanning.source import open_model as open_model
    from headwise.scanning.source import read_texts as read_texts
    from headwise.scanning.statistics.maps import Map as Map
    from headwise.scanning.statistics.maps import TopKeysOfEveryQuery as TopKeysOfEveryQuery
    from headwise.scanning.statistics.statistic import Definition as Definition
    from headwise.scanning.statistics.statistic import RowMean as RowMean
    from headwise.scanning.workers import scan_in_processes as scan_in_processes
    from headwise.scanning.written import WrittenText as WrittenText

__getattr__, __dir__, __all__ = export_lazily(
    __name__,
    {
        "diff": "HeadChange ScanDiff",
        "layer": "HeadValue LayerValue ScannedText SimilarHead StandoutHead",
        "links": "Link",
        "parts": "find_parts merge_parts scan_part",
        "plan": "plan_scan",
        "result": "HeadScan",
        "source": "open_model read_texts",
        "statistics.maps": "Map TopKeysOfEveryQuery",
        "statistics.statistic": "Definition RowMean",
        "workers": "scan_in_processes",
        "written": "WrittenText",
    },
)
