"""Python frames of the library that one eager call enters: the length of the call path.

The call of `compare` finds that the first of two layers has another scale, and prints the cause.

python -m benchmarks.frames        counts, limits and files
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import headwise

SOURCE = str(Path(headwise.__file__).parent)
SHAPE, HEADS = (2, 10, 48), 6
LIMITS = {"native": 40, "drop-in": 35, "drop-in, need_weights": 130, "compare": 27_500}


def calls() -> dict[str, Callable[[], object]]:
    """Return the calls that are counted, by the names in `LIMITS`."""
    torch.manual_seed(0)
    x = torch.randn(SHAPE)
    native = headwise.Attention(SHAPE[-1], HEADS)
    drop_in = headwise.MultiheadAttention(SHAPE[-1], HEADS, batch_first=True)
    other = headwise.Attention(SHAPE[-1], HEADS, scale=0.5)
    other.load_state_dict(native.state_dict())
    return {
        "native": lambda: native(x),
        "drop-in": lambda: drop_in(x, x, x, need_weights=False),
        "drop-in, need_weights": lambda: drop_in(x, x, x),
        "compare": lambda: str(headwise.compare(other, native, x)),
    }


@torch.no_grad()
def count_frames(call: Callable[[], object]) -> Counter[str]:
    """Return the frames that a call enters after a first one, by file and function."""
    call()
    frames: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE):
            frames[f"{code.co_filename[len(SOURCE) + 1 :]}:{code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return frames


if __name__ == "__main__":
    for name, call in calls().items():
        frames = count_frames(call)
        files = {frame.partition(":")[0] for frame in frames}
        print(f"{name}: {frames.total()} frames, at most {LIMITS[name]}, in {len(files)} files")
        for frame, times in frames.items():
            print(f"  {times:3} {frame}")
