"""A file that torch.save wrote. Nothing in it is executed: torch unpickles weights only."""

from __future__ import annotations

import errno
import pickle
import pickletools
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.safetensors_file import METADATA, NAMES, StoredTensor, TensorFile, is_utf8
from headwise.errors import CheckpointError

# What torch's reader raises at bytes that are none of its own.
_BROKEN = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

COMPILED = "_orig_mod."
# torch's words for a pickle that calls something, by its name, and for a file that is a program.
_CALLS = ("GLOBAL", "INST", "STACK_GLOBAL")  # torch's reader knows the first alone
_CODE = re.compile(r"\bGLOBAL ([\w.]+)|unrecognized function|create new object|TorchScript")


def read(path: Path) -> TensorFile:
    """Open a file; one in torch's format of before 2020 is read into memory.

    A tensor is as it was saved, which may be a view of another. A file may say that its numbers are
    to be conjugated or negated: that is done here.

    Raises:
        CheckpointError: it is damaged, needs code to be executed, or holds more than tensors.
        OSError: it cannot be opened.
    """
    found, model_args = _state_of(_loaded(path))
    if not isinstance(found, Mapping) or not found:
        raise _no_state(path, f"a {type(found).__name__}")
    for name, value in found.items():
        # what safetensors calls a tensor by, and what it holds
        is_name = isinstance(name, str) and name != METADATA and is_utf8(name)
        if not is_name or not _is_plain(value):
            part = name if isinstance(value, Mapping) and isinstance(name, str) else None
            raise _no_state(path, f"{name!r}, a {_kind(value)}", part=part)
    headers = {name: StoredTensor(tuple(x.shape), x.dtype, path) for name, x in found.items()}
    return TensorFile(
        path, headers, {}, lambda n: found[n].detach().resolve_conj().resolve_neg(), model_args
    )


def _state_of(found: Any) -> tuple[Any, Mapping[str, Any]]:
    """The tensors and the model_args of what nanoGPT saves; all of another file, and nothing.

    A model that torch.compile made has its prefix before every name.
    """
    if not isinstance(found, Mapping):
        return found, {}
    state, model_args = found.get("model"), found.get("model_args")
    if not isinstance(state, Mapping) or not isinstance(model_args, Mapping):
        return found, {}
    return {str(name).removeprefix(COMPILED): x for name, x in state.items()}, model_args


def unread(path: Path, words: str) -> CheckpointError:
    """Return the error for a file that torch refuses with these words.

    torch's own text is left out, also as a cause: it recommends ``weights_only=False``, which runs
    the code in the file. So raise it ``from None``.
    """
    if (code := _CODE.search(words)) or _calls(path):
        held = f"code ({code[1]})" if code and code[1] else "code"
        return CheckpointError(
            saw=f"{path} holds {held} and was not read: headwise runs no code out of a file",
            needed="a file of tensors alone",
            do="ask the author of the file for safetensors, or for the state_dict alone",
        )
    return CheckpointError(
        saw=f"{path} cannot be read: it is damaged, or in a format that is not for tensors alone",
        needed="a whole file, as torch.save(model.state_dict(), ...) writes it",
        do="copy the file again; or ask its author for safetensors",
    )


def _calls(path: Path) -> bool:
    """Whether a plain pickle calls anything; its operations are read, and none is executed."""
    try:
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                return False
            file.seek(0)
            return any(operation.name in _CALLS for operation, _, _ in pickletools.genops(file))
    except (OSError, ValueError, OverflowError):
        return False


def _loaded(path: Path) -> Any:
    with path.open("rb") as file:  # whether it is there is not torch's to say
        is_zip = file.read(4) == b"PK\3\4"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except _BROKEN as error:
        raise unread(path, str(error)) from None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise unread(path, "") from None  # a file that is cut off ends before what is to be mapped


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor as safetensors has them."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
        and value.dtype in NAMES
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} tensor in {value.layout} on {value.device}"
    return type(value).__name__


def _no_state(path: Path, saw: str, *, part: str | None = None) -> CheckpointError:
    """``part`` is the key of what may be the state_dict, where there is one."""
    own = "['model']" if part is None else f"[{part!r:.60}]"
    return CheckpointError(
        saw=f"{path}, which holds {saw}",
        needed="a state_dict: names and dense tensors, and nothing else",
        do=f"save the part that is one by itself: torch.save(torch.load(...){own}, ...)",
    )
