"""A run over documents, as a program: it can be killed in the middle.

    python -m tests.scanning.documents OUT [STOP]

At document STOP it says so and waits to be killed.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.corpus import scan_corpus
from headwise.scanning.result import HeadScan
from tests.scanning.scans import HEAD_DIM, HEADS, head_scan, layer_scan

COUNT = 5
MADE_WITH = {"weights": {"layer": torch.arange(6.0)}, "statistics": ["entropy", "map"]}


def documents(count: int = COUNT) -> list[tuple[str, Tensor]]:
    """Texts of different lengths."""
    torch.manual_seed(0)
    return [
        (f"chapter {index}/ü.txt", torch.randn(2, 1, HEADS, 7 + index, HEAD_DIM))
        for index in range(count)
    ]


def scan_one(inputs: Tensor) -> HeadScan:
    """One layer that attends within the inputs."""
    q, k = inputs
    return head_scan(layer_scan([AttentionMatrix(q, k)]), notes=(f"{q.shape[2]} tokens",))


if __name__ == "__main__":
    torch.set_num_threads(1)
    stop = int(sys.argv[2]) if len(sys.argv) > 2 else COUNT

    def scan_or_wait(inputs: Tensor) -> HeadScan:
        if inputs.shape[3] == 7 + stop:
            print("waiting", flush=True)
            time.sleep(600)
        return scan_one(inputs)

    scan_corpus(scan_or_wait, documents(), sys.argv[1], made_with=MADE_WITH)
