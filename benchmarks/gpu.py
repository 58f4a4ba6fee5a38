"""The contract and the figures on a CUDA card: ``make gpu``. Without one: what it would do.

Times are bfloat16, causal, one sequence of 16 heads of 128, the median of several runs, over the
fastest fused backend of torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headwise import Attention, AttentionMatrix, Mask
from headwise.matrix.kernels import tiles
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.statistic import compute_summaries

LENGTHS = (8192, 16384, 32768, 65536)
HEADS, WIDTH, ROUNDS = 16, 128, 10
TILES = (1, 4, 16, 32, 64, 128)  # times the tile of a CPU
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
TEN = "logsumexp entropy maximum first_token previous_token distance within_64 most_received "
TEN += "participation map"
TESTS = ("tests/contract/on_device.py", "tests/contract/accelerator.py")


def plan() -> list[str]:
    """Return what a run does, a line each."""
    lengths = ", ".join(f"{length:,}" for length in LENGTHS)
    return [
        f"run {' and '.join(TESTS)} on the card",
        f"time A @ v, Attention, A.statistics() and ten statistics in bfloat16 at {lengths} "
        f"tokens, {HEADS} heads of {WIDTH}, against {', '.join(BACKENDS)}",
        f"time A.statistics() with tiles of {', '.join(map(str, TILES))} times "
        f"{tiles.TILE_ELEMENTS:,} elements: the fastest is `tiles.CUDA_TILES`, now "
        f"{tiles.CUDA_TILES}",
        "write build/gpu-NAME.md, NAME being the card's",
    ]


def run_tests() -> None:
    """Run the tests of the contract on the card."""
    environment = os.environ | {"HEADWISE_DEVICE": "cuda"}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", TESTS[0]]
    subprocess.run(command, check=True, env=environment)
    command = [*command[:-1], TESTS[1], "-k", "on_cuda"]
    subprocess.run(command, check=True, env=environment)


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median wall time of a call, with the card's work done."""
    work()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def works(length: int, device: str) -> dict[str, Callable[[], object]]:
    """Return what is timed at one length."""
    shape = (1, HEADS, length, WIDTH)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    matrix = AttentionMatrix(q, k, mask=Mask.causal())
    call = CapturedCall.for_self_attention(matrix, values=v)
    ten = catalogue.find_standard_statistics(TEN.split())
    layer = Attention(HEADS * WIDTH, HEADS, device=device, dtype=torch.bfloat16)
    x = torch.randn(1, length, HEADS * WIDTH, device=device, dtype=torch.bfloat16)
    return {
        "A @ v": lambda: matrix @ v,
        "Attention, with its projections": lambda: layer(x, mask=Mask.causal()),
        "A.statistics()": matrix.statistics,
        "ten statistics": lambda: compute_summaries(call, ten),
        **{name: partial(_fused, backend, q, k, v) for name, backend in BACKENDS.items()},
    }


def _fused(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def measure(lengths: tuple[int, ...] = LENGTHS, device: str = "cuda") -> Iterator[str]:
    """Yield the rows of the table: milliseconds, and the ratio to the fastest backend."""
    for length in lengths:
        found: dict[str, float | None] = {}
        for name, work in works(length, device).items():
            try:
                found[name] = seconds(work)
            except RuntimeError as error:  # a backend that this card lacks, or memory
                print(f"{name} at {length:,}: {str(error)[:200]}", file=sys.stderr)
                found[name] = None
        fastest = min((t for n in BACKENDS if (t := found[n])), default=None)
        for name, taken in found.items():
            ratio = f"{taken / fastest:.2f}" if taken and fastest else "–"
            ms = f"{1e3 * taken:.2f}" if taken else "did not run"
            yield f"| {name} | {length:,} | {ms} | {ratio} |"


def measure_tiles(length: int = LENGTHS[1], device: str = "cuda") -> Iterator[str]:
    """Yield the time of statistics by the size of a tile."""
    for times in TILES:
        with mock.patch.object(tiles, "CUDA_TILES", times):
            taken = seconds(works(length, device)["A.statistics()"], 3)
        yield f"| A.statistics(), tiles of {times} | {length:,} | {1e3 * taken:.2f} | |"


def main() -> None:
    """Run on the card, or print what a run does."""
    if not torch.cuda.is_available():
        print("No CUDA card here. On one, `make gpu` would:")
        print("\n".join(f"- {line}" for line in plan()))
        return
    run_tests()
    name = torch.cuda.get_device_name()
    head = [f"# {name}, torch {torch.__version__}, bfloat16, causal", ""]
    head += ["| what | tokens | ms | over the fastest backend |", "| --- | --- | --- | --- |"]
    with torch.no_grad():
        rows = [*measure(), *measure_tiles()]
    path = Path("build") / f"gpu-{name.replace(' ', '-')}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([*head, *rows]) + "\n", "utf-8")
    print(path.read_text("utf-8"))


if __name__ == "__main__":
    main()
