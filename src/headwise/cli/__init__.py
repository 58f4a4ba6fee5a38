"""Command line of headwise.

Commands import heavy modules inside their functions, so that ``headwise --help`` loads no torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headwise import __version__
from headwise.cli.compare import compare
from headwise.cli.convert import convert
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
app.command(
    epilog=exit_status_help(yes="done", no="a layer of the trained encoder is not the same")
)(demo)
app.command(
    epilog=exit_status_help(
        yes="every claim is borne out", no="one is not", undecided="none could be asked"
    )
)(study)
app.command(epilog=exit_status_help(yes="done", no="a text was not scanned, or parts are missing"))(
    scan
)
app.command(
    epilog=exit_status_help(yes="written", undecided="the layout of the source stays open")
)(convert)
app.command(
    epilog=exit_status_help(
        yes="the same", no="not the same", undecided="the layout of one stays open"
    )
)(verify)
app.command(
    epilog=exit_status_help(
        yes="the same function", no="different", undecided="the inputs could not show a difference"
    )
)(compare)
app.command(epilog=exit_status_help(yes="one layout", no="none", undecided="several may be meant"))(
    detect
)
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
