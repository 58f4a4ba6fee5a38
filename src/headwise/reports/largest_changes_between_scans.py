"""Changes between two scans: the heads and the statistic that changed most, and their colours."""

from __future__ import annotations

from headwise.reports import drawn_statistics
from headwise.reports.png_images import RGB
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.layer_scan import HeadValue
from headwise.scanning.scan_diff import ScanDiff

MOST_CHANGES = 8  # heads that are listed
# The ends and the middle of the diverging scale: ColorBrewer's BrBG, by Cynthia Brewer.
_LOW, _MIDDLE, _HIGH = (1, 102, 94), (245, 245, 245), (140, 81, 10)


def most_changed_heads(diff: ScanDiff) -> list[HeadValue]:
    """Return the heads that changed most over all statistics; none of them is unchanged."""
    return [change for change in diff.top(n=MOST_CHANGES) if change.value > 0]


def diverging_colour(position: float) -> RGB:
    """Return the colour of a position from −1 (teal) over 0 (white) to 1 (brown)."""
    share = min(1.0, abs(position))
    end = _HIGH if position > 0 else _LOW
    red, green, blue = (round(m + (e - m) * share) for m, e in zip(_MIDDLE, end, strict=True))
    return red, green, blue


def most_changed_statistic(diff: ScanDiff) -> str | None:
    """Return the scalar with the largest change beside the span of its scale; None without any."""
    best, most = None, 0.0
    for name in diff.scalars:
        assert isinstance(diff.before, HeadScan)
        scale = drawn_statistics.drawn_statistic(diff.before, name).scale
        change = float(diff[name].abs().nan_to_num().max()) / max(scale.high - scale.low, 1e-12)
        if change > most:
            best, most = name, change
    return best


def change_scale_end(diff: ScanDiff, name: str) -> float:
    """Return the end of the scale of a change: the largest, and at least the statistic's own."""
    assert isinstance(diff.before, HeadScan)
    least = drawn_statistics.drawn_statistic(diff.before, name).least_change_scale_end
    return max([float(change) for change in diff[name].abs().nan_to_num().flatten()] + [least])
