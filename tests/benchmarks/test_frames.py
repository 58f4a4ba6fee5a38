"""The call path stays short: Python frames that one eager call enters."""

import pytest

from benchmarks.frames import LIMITS, calls, count_frames


@pytest.mark.parametrize("name", LIMITS)
def test_frames_of_one_call(name: str) -> None:
    frames = count_frames(calls()[name])
    assert 10 < frames.total() <= LIMITS[name], frames
