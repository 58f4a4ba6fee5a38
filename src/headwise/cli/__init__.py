"""The command line.

A command imports what is heavy inside its own body, so that ``headwise --help`` loads no torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headwise import __version__
from headwise.cli import output
from headwise.cli.convert import convert
from headwise.cli.demo import demo
from headwise.cli.detect import detect
from headwise.cli.layouts import layouts
from headwise.cli.scan.command import scan
from headwise.cli.study import study
from headwise.cli.verify import verify

# rich_markup_mode=None: help is plain, since rich's panels take as long to load as all else here.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
told = output.told
app.command(epilog=told(yes="done", no="a layer of the trained encoder is not the same"))(demo)
app.command(
    epilog=told(yes="every claim is borne out", no="one is not", undecided="none could be asked")
)(study)
app.command(epilog=told(yes="done"))(scan)
app.command(epilog=told(yes="written", undecided="the layout of the source stays open"))(convert)
app.command(
    epilog=told(yes="the same", no="not the same", undecided="the layout of one stays open")
)(verify)
app.command(epilog=told(yes="one layout", no="none", undecided="several may be meant"))(detect)
app.add_typer(layouts, name="layouts", epilog=told(yes="done"))


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"headwise {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _headwise(
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
    with output.PrintedErrors():
        app()
