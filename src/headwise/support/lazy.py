"""Imports on first use: names of rooms, optional packages, functions that draw results.

Packages that measure therefore do not import packages that draw.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import MappingProxyType
from typing import Any, Literal

from headwise.errors import MissingExtraError, join_error_lines

# The modules of layers in 0.1.0, and before 0.2.0. A pickle of a whole layer names its module.
OLD_LAYERS = frozenset(("headwise.layer", "headwise.drop_in", "headwise.layers.native"))


def export_lazily(
    room: str, names: Mapping[str, str], moved: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package: module -> its public names.

    Names that ``moved`` to another room are found there for one version, with a warning. Type
    checkers and the reference read the others below ``if TYPE_CHECKING``; a test compares the two.
    """
    homes = {name: module for module, words in names.items() for name in words.split()}

    def load(name: str) -> Any:
        if name in moved:
            words = f"{room}.{name} is {moved[name]}.{name} now; the old name goes in headwise 0.4"
            warnings.warn(words, DeprecationWarning, stacklevel=2)
            return getattr(import_module(moved[name]), name)
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        home = homes[name]
        value = getattr(import_module(home if "headwise." in home else f"{room}.{home}"), name)
        setattr(sys.modules[room], name, value)  # later accesses skip this function
        return value

    return load, lambda: sorted(homes), sorted(homes)


class OldLayers(MetaPathFinder):
    """Finder of no module, which refuses those of `OLD_LAYERS` by name."""

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> None:
        """Raise ModuleNotFoundError for a module of `OLD_LAYERS`."""
        if fullname not in OLD_LAYERS:
            return
        raise ModuleNotFoundError(
            join_error_lines(
                f"{fullname} is a module of an earlier headwise, named by a pickle of a layer",
                "the weights of the layer, which load in every version",
                "where that version is installed: torch.save(layer.state_dict(), path); here:"
                " layer.load_state_dict(torch.load(path))",
            ),
            name=fullname,
        )


Form = Literal["text", "html", "page", "figure", "widget", "standouts", "changes"]

# (class, form) -> the function that draws a result of this class
DRAWN_BY: dict[tuple[str, Form], str] = {
    ("HeadScan", "text"): "headwise.reports.terminal.scan_text",
    ("HeadScan", "html"): "headwise.reports.page.render_in_frame",
    ("HeadScan", "page"): "headwise.reports.page.render_scan",
    ("HeadScan", "figure"): "headwise.reports.figures.plot_scan",
    ("HeadScan", "widget"): "headwise.reports.notebook.view_scan",
    ("HeadScan", "standouts"): "headwise.reports.report.standout_heads",
    ("ScanDiff", "text"): "headwise.reports.terminal.diff_text",
    ("ScanDiff", "html"): "headwise.reports.notebook.diff_html",
    ("ScanDiff", "page"): "headwise.reports.page.render_diff",
    ("ScanDiff", "changes"): "headwise.reports.report.largest_changes",
    ("ScanDiff", "figure"): "headwise.reports.figures.plot_diff",
    ("Diagnosis", "html"): "headwise.reports.diagnosis.render_in_frame",
    ("Mask", "html"): "headwise.reports.notebook.mask_html",
    ("AttentionMatrix", "html"): "headwise.reports.notebook.matrix_html",
    ("Layout", "html"): "headwise.reports.notebook.layout_html",
}


class ShownInNotebook:
    """Base of results: a notebook shows their HTML."""

    def _repr_html_(self) -> str:
        html: str = render_form(self, "html")
        return html


class Displayed(ShownInNotebook):
    """Base of results: ``print`` shows their text, and a notebook their HTML."""

    def __str__(self) -> str:
        text: str = render_form(self, "text")
        return text


def render_form(result: object, form: Form, **options: Any) -> Any:
    """Return a result in one of its rich forms, with the options of the function that draws it.

    Raises:
        KeyError: the table has no such form of its class.
    """
    module, _, name = DRAWN_BY[type(result).__name__, form].rpartition(".")
    return getattr(import_module(module), name)(result, **options)


@contextmanager
def silence_imports() -> Iterator[None]:
    """Silence logging and deprecation warnings of other packages: they are not for our callers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logging.disable(before)


def require_package(module: str, *, purpose: str, pip: str = "'headwise[demo]'") -> Any:
    """Import a module of an optional package without its warnings, and return the module.

    Name a module that its package loads lazily, to silence its warnings: transformers imports other
    installed packages, which may log many. ``purpose`` is the use of the package in headwise, and
    ``pip`` the argument of pip install.

    Raises:
        MissingExtraError: the package is not installed.
        ImportError: the package is installed, but the module or one of its imports is missing.
    """
    try:
        with silence_imports():
            return import_module(module)
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
