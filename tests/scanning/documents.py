"""A part of a corpus, as a program: it can be killed in the middle.

    python -m tests.scanning.documents OUT PART COUNT STOP

At document STOP it says so and waits to be killed.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise import Attention
from headwise.scanning.parts import scan_part

COUNT = 5
SHORTEST = 7  # tokens of the first document
STATISTICS = ["entropy", "map"]


class Model(nn.Module):
    """One layer of attention, which calls a function with the length of each document."""

    def __init__(self, begins: Callable[[int], object] = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.begins = Attention(36, 6, num_kv_heads=2, head_dim=10), begins

    def forward(self, x: Tensor) -> Tensor:
        self.begins(x.shape[1])
        return self.layer(x)


def documents(count: int = COUNT) -> list[tuple[str, Tensor]]:
    """Texts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [
        (f"chapter {n}/ü.txt", torch.randn(1, SHORTEST + n, 36, generator=generator))
        for n in range(count)
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, number, parts, stop = Path(sys.argv[1]), *map(int, sys.argv[2:])

    def wait_at(length: int) -> None:
        if length == SHORTEST + stop:
            print("waiting", flush=True)
            time.sleep(600)

    scan_part(Model(wait_at), documents(), out, part=(number, parts), statistics=STATISTICS)
