"""Files of tensor-parallel processes: each holds a share of every tensor, under the same names.

consolidated.00.pth, consolidated.01.pth                       of Meta's code
mp_rank_00/model_optim_rng.pt, mp_rank_01/model_optim_rng.pt   of Megatron-LM

Megatron's folders may lie in iter_0001000/ or release/, which latest_checkpointed_iteration.txt
names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from headwise.checkpoints.source import (
    PART,
    SAFETENSORS,
    TORCH,
    checkpoint_files,
    incomplete_error,
)
from headwise.errors import CheckpointError

RANK_FOLDER, TRACKER = "mp_rank_", "latest_checkpointed_iteration.txt"
_RANK = re.compile(rf"{RANK_FOLDER}(\d+)(_\d+)*")


def find_numbered_files(path: Path) -> dict[int, Path]:
    """Return process -> file; {} unless the files are several, and numbered without a total.

    Such files may also be parts of a model, with different tensors.

    Raises:
        CheckpointError: the path holds no weights, or stages of a pipeline.
    """
    folder = _find_folder_of_rank_folders(path)
    if folder is not None:
        return _find_rank_files(folder)
    files = checkpoint_files(path)
    parts = [PART.fullmatch(file.stem) for file in files]
    numbers = {int(part[2]): file for part, file in zip(parts, files, strict=True) if part}
    has_total = any(part and part[3] is not None for part in parts)
    return {} if len(files) < 2 or len(numbers) < len(files) or has_total else numbers


def order_files(files: Mapping[int, Path]) -> list[Path]:
    """Return the files of processes 0, 1 and so on.

    Raises:
        CheckpointError: a number is missing.
    """
    missing = [number for number in range(len(files)) if number not in files]
    if missing:
        first = files[min(files)]
        raise incomplete_error(
            _processes_folder(first), f"it lacks {_name_for_process(first, missing[0])}"
        )
    return [files[number] for number in range(len(files))]


def require_count(files: Sequence[Path], count: int) -> None:
    """Raise CheckpointError if there are fewer files than processes."""
    if len(files) < count:
        names = [
            _name_for_process(files[0], number) for number in range(len(files), min(count, 99))
        ]
        more = " and more" if len(names) > 3 else ""
        held = f"it holds {len(files)} of {count} shares, and lacks {', '.join(names[:3])}{more}"
        raise incomplete_error(_processes_folder(files[0]), held)


def _find_folder_of_rank_folders(path: Path) -> Path | None:
    """Return the folder that holds mp_rank_00 and so on; None where there is none."""
    if not path.is_dir():
        return None
    tracker = path / TRACKER
    if tracker.is_file():
        text = tracker.read_text("utf-8", "replace").strip()
        name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 10 else "release"
        path = path / name
    is_megatron = path.is_dir() and any(path.glob(f"{RANK_FOLDER}*"))
    return path if is_megatron else None


def _find_rank_files(folder: Path) -> dict[int, Path]:
    files = {}
    for rank in sorted(folder.glob(f"{RANK_FOLDER}*")):
        number = _RANK.fullmatch(rank.name)
        if number is None or number[2] is not None or not rank.is_dir():
            raise CheckpointError(
                saw=f"{rank}",
                needed="folders mp_rank_00, mp_rank_01 and so on, of tensor-parallel processes",
                do="join the stages of a pipeline by Megatron's own tools first",
            )
        weights = [file for file in sorted(rank.iterdir()) if file.suffix in (SAFETENSORS, *TORCH)]
        if len(weights) != 1:
            names = ", ".join(file.name for file in weights) or "no weights"
            raise incomplete_error(folder, f"{rank.name} holds {names}, not one file of weights")
        files[int(number[1])] = weights[0]
    return files


def _processes_folder(file: Path) -> Path:
    """Return the folder of all processes."""
    return file.parent.parent if file.parent.name.startswith(RANK_FOLDER) else file.parent


def _name_for_process(file: Path, number: int) -> str:
    """Return the name for another process: consolidated.03.pth for consolidated.00.pth."""
    name = file.parent.name if file.parent.name.startswith(RANK_FOLDER) else file.name
    last = list(re.finditer(r"\d+", name))[-1]
    return f"{name[: last.start()]}{number:0{len(last[0])}}{name[last.end() :]}"
