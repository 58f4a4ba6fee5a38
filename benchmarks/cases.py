"""Every case, and what the median over the six shapes of a group must reach."""

from __future__ import annotations

from benchmarks import drop_in, matrix, native

MAKERS = (*drop_in.MAKERS, *matrix.MAKERS, *native.MAKERS)
MEDIANS = {**drop_in.MEDIANS, **native.MEDIANS}
