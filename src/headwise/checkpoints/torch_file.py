"""Reader of files from torch.save. No code in them runs: torch unpickles weights only."""

import errno
import os
import pickle
import pickletools
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.safetensors import KEY, METADATA, NAMES, StoredTensor, TensorFile
from headwise.errors import CheckpointError
from headwise.support.files import is_utf8

# Errors of torch.load at damaged bytes.
LOAD_ERRORS = (
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

COMPILED = "_orig_mod."  # name prefix that torch.compile adds
_CALLS = ("GLOBAL", "INST", "STACK_GLOBAL")  # pickle opcodes; torch's errors name only the first
# texts in torch's errors for a pickle that calls a function, and for a TorchScript program
_CODE = re.compile(r"\bGLOBAL ([\w.]+)|unrecognized function|create new object|TorchScript")


def read_torch_file(path: Path) -> TensorFile:
    """Open a file; torch's format from before 2020 is read into memory.

    A tensor keeps its strides, and may be a view of another. Lazy conjugation and negation, which
    torch stores as flags, are resolved.

    Raises:
        CheckpointError: the file is damaged, needs code to run, or holds more than tensors.
        OSError: the file cannot be opened.
    """
    state, metadata, model_args = _split_content(_load_pickle(path))
    if not isinstance(state, Mapping) or not state:
        empty = "an empty dict" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise _no_state_dict_error(path, empty)
    for name, value in state.items():
        # names and tensors that safetensors can store
        is_name = isinstance(name, str) and name != METADATA and is_utf8(name)
        if not is_name or not _is_storable_tensor(value):
            part = name if isinstance(value, Mapping) and isinstance(name, str) else None
            kind = type(value).__name__
            if isinstance(value, Tensor):
                kind = f"{value.dtype} tensor in {value.layout} on {value.device}"
            raise _no_state_dict_error(path, f"{name!r}, a {kind}", part=part)
    headers = {name: StoredTensor(tuple(x.shape), x.dtype, path) for name, x in state.items()}
    return TensorFile(
        path,
        headers,
        metadata,
        lambda n: state[n].detach().resolve_conj().resolve_neg(),
        model_args,
    )


def save_torch_file(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _split_content(content: Any) -> tuple[Any, dict[str, str], Mapping[str, Any]]:
    """Return the weights of a file, headwise's description of them, and nanoGPT's model_args.

    A file of Megatron-LM has nested parts, whose names are joined by dots as in a state_dict; extra
    states that are None are left out. Other content is returned unchanged.
    """
    state = content.get("model") if isinstance(content, Mapping) else None
    if isinstance(state, Mapping) and "checkpoint_version" in content:
        text = content.get(KEY)
        return dict(_flatten_state(state)), {KEY: text} if isinstance(text, str) else {}, {}
    if isinstance(state, Mapping) and isinstance(content.get("model_args"), Mapping):
        named = {str(name).removeprefix(COMPILED): x for name, x in state.items()}
        return named, {}, content["model_args"]
    return content, {}, {}


def _flatten_state(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flatten_state(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def unreadable_error(path: Path, message: str) -> CheckpointError:
    """Return the error for a file that torch rejects with this message; raise it ``from None``.

    torch's own text is left out: it recommends ``weights_only=False``, which runs the file's code.
    """
    if (code := _CODE.search(message)) or _pickle_calls_functions(path):
        content = f"code ({code[1]})" if code and code[1] else "code"
        return CheckpointError(
            saw=f"{path} holds {content} and was not read: headwise runs no code from a file",
            needed="a file that holds tensors only",
            do="ask the author of the file for safetensors, or for the state_dict alone",
        )
    return CheckpointError(
        saw=f"{path} cannot be read: it is damaged, or in a format that holds more than tensors",
        needed="a complete file from torch.save(model.state_dict(), ...)",
        do="copy the file again; or ask its author for safetensors",
    )


def _pickle_calls_functions(path: Path) -> bool:
    """True if a plain pickle calls a function; its opcodes are read, and none is executed."""
    try:
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                return False
            file.seek(0)
            return any(operation.name in _CALLS for operation, _, _ in pickletools.genops(file))
    except (OSError, ValueError, OverflowError):
        return False


def _load_pickle(path: Path) -> Any:
    with path.open("rb") as file:  # raises the OSError of a missing file, in place of torch
        is_zip = file.read(4) == b"PK\3\4"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.serialization.safe_globals([Namespace]):  # of Megatron's arguments
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except LOAD_ERRORS as error:
        raise unreadable_error(path, str(error)) from None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise unreadable_error(path, "") from None  # a file that is cut off is too short to map


def _is_storable_tensor(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
        and value.dtype in NAMES
    )


def _no_state_dict_error(path: Path, saw: str, *, part: str | None = None) -> CheckpointError:
    state = "model.state_dict()" if part is None else f"torch.load(...)[{part!r:.60}]"
    return CheckpointError(
        saw=f"{path} holds {saw}",
        needed="a state_dict: dense tensors by name, and nothing else",
        do=f"save the state_dict alone: torch.save({state}, ...)",
    )
