"""Scan a corpus by parts on an engine for distributed work: dask.distributed, here on this machine.

    pip install 'headwise[huggingface]' distributed
    python examples/scan_corpus.py [FOLDER]

A model with random weights and its documents are made in FOLDER. Two workers scan four parts of the
documents, and one of the workers is killed. dask starts the worker again, its part resumes, and the
merged scan has the bytes of one process.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from distributed import Client, LocalCluster
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.scanning import merge_parts, scan_part

PARTS = 4
STATISTICS = ["entropy", "previous_token", "induction"]


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 48, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)


def make_documents() -> list[tuple[str, torch.Tensor]]:
    """Random tokens; a list of text files would do for a folder with a tokenizer."""
    generator = torch.Generator().manual_seed(0)
    lengths = range(100, 900, 50)
    return [(f"{n} tokens", torch.randint(128, (1, n), generator=generator)) for n in lengths]


def run_part(model: str, out: str, part: int) -> int:
    torch.set_num_threads(1)  # the bytes depend on the number of threads
    files = scan_part(model, make_documents(), out, part=(part, PARTS), statistics=STATISTICS)
    return len(files)


def main(folder: Path) -> None:
    model, out, alone = (str(folder / name) for name in ("model", "scans", "alone"))
    make_model(Path(model))
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        parts = range(1, PARTS + 1)
        futures = client.map(run_part, [model] * PARTS, [out] * PARTS, parts, pure=False)
        while not list(Path(out).glob("parts/[0-9]*")):
            time.sleep(0.01)
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        done = client.gather(futures)
    merged = merge_parts(out)
    print(f"{sum(done)} texts in {PARTS} parts, {merged.tokens:,} tokens, one worker killed")

    torch.set_num_threads(1)
    scan_part(model, make_documents(), alone, statistics=STATISTICS)
    merge_parts(alone)
    scans = [Path(place, "scan.safetensors").read_bytes() for place in (out, alone)]
    print(f"the bytes of one process: {'the same' if scans[0] == scans[1] else 'others'}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
