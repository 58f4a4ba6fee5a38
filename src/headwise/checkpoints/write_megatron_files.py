"""mp_rank_00/model_optim_rng.pt and so on: the files of Megatron-LM's tensor-parallel processes.

A checkpoint without an iteration is in release/, which latest_checkpointed_iteration.txt names. The
files hold the weights, a checkpoint_version for rows in the order of Megatron core, and the
description that all files of headwise carry. The arguments of the model are not in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headwise.checkpoints import safetensors_file, torch_file
from headwise.checkpoints.safetensors_file import KEY
from headwise.checkpoints.tensor_parallel_files import RANK_FOLDER, TRACKER
from headwise.errors import OptionError
from headwise.layouts.layout import Layout
from headwise.support.atomic_write import write_whole

LAYOUTS = ("megatron", "megatron-gpt", "megatron-gated")
FOLDER, FILE, CHECKPOINT_VERSION = "release", "model_optim_rng.pt", 3.0


def require_megatron_layout(stored: Layout) -> None:
    """Raise OptionError unless weights are in a layout of Megatron core."""
    if stored.name not in LAYOUTS:
        raise OptionError(
            saw=f"weights in the layout {stored.name}, for {RANK_FOLDER}00/{FILE}",
            needed=f"one of {', '.join(LAYOUTS)}",
            do="choose one of them, or write safetensors files, the default",
        )


def replace_with_megatron_files(folder: Path, files: Iterable[str]) -> None:
    """Replace the safetensors files of a folder, one for each process, by those of Megatron-LM."""
    shares = [safetensors_file.read_safetensors_header(folder / name) for name in files]
    for number, share in enumerate(shares):
        content = {
            "model": {name: share.tensor(name) for name in share.headers},
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": 0,
            KEY: share.metadata[KEY],
        }
        rank = folder / FOLDER / f"{RANK_FOLDER}{number:02}"
        rank.mkdir(parents=True)
        torch_file.save_torch_file(rank / FILE, content)
    write_whole(folder / TRACKER, FOLDER)
    for share in shares:
        share.path.unlink()
