"""Command line of headwise.

Commands import heavy modules inside their functions, so that ``headwise --help`` loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from headwise import __version__
from headwise.cli.compare import compare
from headwise.cli.convert import convert
from headwise.cli.cut import prune, regroup
from headwise.cli.demo import demo
from headwise.cli.detect import detect
from headwise.cli.layouts import layouts
from headwise.cli.output import PrintedErrors, exit_status_help
from headwise.cli.scan import scan
from headwise.cli.study import study
from headwise.cli.verify import verify

# rich_markup_mode=None: plain help, since loading rich's panels would double the start-up time.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Each command, with what its exit statuses 0, 1 and 3 mean.
_COMMANDS: tuple[tuple[Callable[..., None], str, str, str], ...] = (
    (demo, "done", "a layer of the trained encoder is not the same", ""),
    (study, "every claim is borne out", "one is not", "none could be asked"),
    (scan, "done", "a text was not scanned, or parts are missing", ""),
    (prune, "written", "", ""),
    (regroup, "written", "", ""),
    (convert, "written", "", "the layout of the source stays open"),
    (verify, "the same", "not the same", "the layout of one stays open"),
    (compare, "the same function", "different", "the inputs could not show a difference"),
    (detect, "one layout", "none", "several may be meant"),
)
for _command, _yes, _no, _undecided in _COMMANDS:
    app.command(epilog=exit_status_help(yes=_yes, no=_no, undecided=_undecided))(_command)
app.add_typer(layouts, name="layouts", epilog=exit_status_help(yes="done"))


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"headwise {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root_command(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Multi-head attention that you can run, verify, convert and see, head by head."""


def main() -> None:
    """Run the command line; every error has its exit status (`headwise.cli.output`)."""
    with PrintedErrors():
        app()
