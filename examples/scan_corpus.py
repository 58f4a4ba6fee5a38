"""Scan a corpus over processes: each takes the next text as soon as it is free.

    torchrun --nproc-per-node=2 examples/scan_corpus.py [FOLDER]

FOLDER gets a file for each text and the merged scan. Interrupt the run, or kill a process of it:
the same command resumes, with any number of processes, and ends in the same bytes.
"""

import sys

import torch.distributed as dist

import headwise
from headwise.models import text as demo_text
from headwise.models import tiny
from headwise.sharding import scan_documents

STATISTICS = ["entropy", "previous_token", "induction"]


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model = tiny.load()
    paragraphs = demo_text.read_opening_paragraphs()
    documents = [(f"paragraph {n}", tiny.encode(text)[None]) for n, text in enumerate(paragraphs)]

    merged = scan_documents(
        lambda ids: headwise.scan(model, ids, statistics=STATISTICS),
        documents,
        folder,
        made_with={"weights": model.state_dict(), "statistics": STATISTICS},
    )

    if dist.get_rank() == 0:
        print(f"{merged.sequences} texts, {merged.tokens:,} tokens, {dist.get_world_size()} ranks")
        for layer, _, head, share in merged.top("previous_token", 3):
            print(f"{layer}, head {head}: {100 * share:.0f} % on the token before")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "headwise-corpus")
