"""Writing a file so that a reader never meets half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from headwise.errors import OptionError


def require_writable(path: Path) -> Path:
    """Make the folders on the way to ``path``, and return it as an absolute path.

    Raises:
        OptionError: ``path`` is a folder, or nothing can be written where it should stand.
    """
    path = path.absolute()
    if "\0" in str(path):
        raise OptionError(
            saw=f"the name {str(path)[:80]!r}, with a character that no name has",
            needed="the name of a file to write",
            do="leave it out",
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
            saw=f"{path.parent}, which is a file or lies below one",
            needed="a folder to write into",
            do="name a file in another folder",
        ) from error
    except OSError as error:
        raise _refused(path, error) from error
    return path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write beside ``path`` and rename; folders on the way are made. Returns the absolute path.

    Raises:
        OptionError: as `require_writable`, or there is no room; what was there before stays.
    """
    path = require_writable(path)
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:  # a name that is too long
        raise _refused(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)  # a temporary file is readable by its owner alone
        os.replace(beside, path)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        Path(beside).unlink(missing_ok=True)  # it is still there only if something failed
    return path


def _refused(path: Path, error: OSError) -> OptionError:
    return OptionError(
        saw=f"{path.parent}, where nothing can be written ({error.strerror or error})",
        needed="a folder to write into",
        do="name a file in another folder",
    )
