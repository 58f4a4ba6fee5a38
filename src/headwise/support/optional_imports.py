"""Packages that only some rooms need, imported when they are needed."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from typing import Any

from headwise.errors import MissingExtraError


def require(module: str, *, purpose: str, pip: str = "'headwise[demo]'") -> Any:
    """A module of a package that headwise does not depend on.

    Args:
        module: its full name. What a package loads on demand is named itself, since the import is
            quiet: transformers loads whatever else is installed, and that may complain at length.
        purpose: what the package does here, for the message.
        pip: what to install, for a package that is not in the extra demo.

    Raises:
        MissingExtraError: the package is not installed.
        ImportError: the package is installed, but not the module, or not what it needs.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of theirs, no concern of ours
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        is_there = sys.modules.get(package) is not None
        if is_there or (error.name or "").partition(".")[0] != package:
            raise  # something within it is missing, or something that it needs
        package = package.replace("_", "-")
        raise MissingExtraError(
            saw=f"{package} is not installed",
            needed=f"{package}, {purpose}",
            do=f"pip install {pip}",
        ) from error
    finally:
        logging.disable(before)
