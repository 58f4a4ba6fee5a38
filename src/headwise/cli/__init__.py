"""The command line.

A command imports what is heavy inside its own body, so that ``headwise --help`` loads no torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headwise import __version__
from headwise.cli.convert import convert
from headwise.cli.demo import demo
from headwise.cli.detect import detect
from headwise.cli.layouts import layouts
from headwise.cli.scan.command import scan
from headwise.cli.study import study
from headwise.cli.verify import verify
from headwise.errors import HeadwiseError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(study)
app.command()(scan)
app.command()(convert)
app.command()(verify)
app.command()(detect)
app.add_typer(layouts, name="layouts")


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
    """Run the command line. A `HeadwiseError` becomes its message and exit status 1."""
    try:
        app()
    except HeadwiseError as error:
        typer.echo(f"headwise: {error}", err=True)
        raise SystemExit(1) from None
