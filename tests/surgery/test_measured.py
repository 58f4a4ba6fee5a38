"""What prunings and regroupings report alike: the sign of a change, and its interval."""

from __future__ import annotations

import pytest

from headwise.surgery import prune
from tests.surgery import small


def test_a_change_is_after_less_before() -> None:
    result = prune(small.tiny(), small.ids(8, 12), held_out=small.ids(9, 12, seed=1), keep=0.6)
    difference = result.after - result.before
    mean, low, high = result.change
    assert mean == pytest.approx(float(difference.mean()), rel=1e-12)
    assert mean != 0
    assert float(difference.min()) <= low <= mean <= high <= float(difference.max())
    assert result.values()["change"] == {"mean": mean, "low": low, "high": high}
    assert f"{mean:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}" in str(result)
