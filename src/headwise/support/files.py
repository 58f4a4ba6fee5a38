"""Atomic writing of files, of which readers see all or nothing, and JSON that is not trusted."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headwise.errors import OptionError


def make_parent_and_require_writable(path: Path) -> Path:
    """Make the parent folders of ``path``, and return it as an absolute path.

    Raises:
        OptionError: ``path`` is a folder, or its parent folder cannot be written.
    """
    path = path.absolute()
    if "\0" in str(path):
        raise OptionError(
            saw=f"the name {str(path)[:80]!r}, with a null character",
            needed="the name of a file to write",
            do="leave the null character out",
        )
    try:
        if path.is_dir():
            raise OptionError(
                saw=f"{path}, which is a folder",
                needed="the name of a file to write",
                do="name a file in it",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (FileExistsError, NotADirectoryError) as error:
        raise OptionError(
            saw=f"{path.parent}, which is a file or is below a file",
            needed="a folder to write into",
            do="name a file in another folder",
        ) from error
    except OSError as error:
        raise _unwritable_folder_error(path, error) from error
    return path


def write_whole(path: Path, content: str | bytes, *, mark: str = "") -> Path:
    """Write a temporary file beside ``path`` and rename it; return the absolute path.

    Parent folders are made. ``mark`` is a part of the temporary file's name.

    Raises:
        OptionError: as `make_parent_and_require_writable`, or the disk is full; an existing file
            stays unchanged.
    """
    path = make_parent_and_require_writable(path)
    prefix = f".{path.name}.{mark}." if mark else f".{path.name}."
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".part")
    except OSError as error:  # a name that is too long
        raise _unwritable_folder_error(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)  # a temporary file is readable by its owner alone
        os.replace(beside, path)
    except OSError as error:
        raise _unwritable_folder_error(path, error) from error
    finally:
        Path(beside).unlink(missing_ok=True)  # it still exists only after an error
    return path


def _unwritable_folder_error(path: Path, error: OSError) -> OptionError:
    return OptionError(
        saw=f"{path.parent}, where nothing can be written ({error.strerror or error})",
        needed="a folder to write into",
        do="name a file in another folder",
    )


def parse_json_object(text: str | bytes, *, unique: bool = True) -> dict[str, Any]:
    """Return the JSON object in a text; without ``unique``, the last of several fields of one name.

    Raises:
        ValueError: the rest of a sentence about the text: "is no JSON: ..." or "holds a list".
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_require_unique_names if unique else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}")
    return value


def _require_unique_names(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the name {name!r} occurs twice")
        values[name] = value
    return values


def is_utf8(text: str) -> bool:
    """True if a text has no lone surrogate, which JSON can write and UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
