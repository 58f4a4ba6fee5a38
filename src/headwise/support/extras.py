"""Imports of optional packages at the time of use."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from typing import Any

from headwise.errors import MissingExtraError


def require_package(module: str, *, purpose: str, pip: str = "'headwise[demo]'") -> Any:
    """Import a module of an optional package without its warnings, and return the module.

    Args:
        module: the full name. Name a module that its package loads lazily, to silence its warnings:
            transformers imports other installed packages, which may log many.
        purpose: the use of the package in headwise, for the message.
        pip: the argument of pip install, for a package outside the extra demo.

    Raises:
        MissingExtraError: the package is not installed.
        ImportError: the package is installed, but the module or one of its imports is missing.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # not for our callers
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        is_imported = sys.modules.get(package) is not None
        if is_imported or (error.name or "").partition(".")[0] != package:
            raise  # a part of the package or an import of it is missing
        package = package.replace("_", "-")
        raise MissingExtraError(
            saw=f"{package} is not installed",
            needed=f"{package}, {purpose}",
            do=f"pip install {pip}",
        ) from error
    finally:
        logging.disable(before)
